"""docs/deploy.md: every command in it is there, with the names, files and settings that it uses."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import yaml

from config.deployment import load
from config.names import FSX_CLAIM, NODE_ROLE_LABEL
from k8s.pod import WORKER_CONTAINER

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/deploy.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
BLOCKS = re.findall(r"^```console\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = [line.removeprefix("$ ") for block in BLOCKS for line in block.splitlines() if line.startswith("$ ")]
# What text speaks of in `code` counts as well.
CODE = BLOCKS + re.findall(r"`([^`\n]+)`", TEXT)
STACKS = {"Network", "Storage", "Image", "Cluster", "Observability"}
P5 = load(ROOT / "deployments/p5-2node.yaml")


def found(pattern: str) -> set[str]:
    return {match for code in CODE for match in re.findall(pattern, code)}


def test_there_are_commands_in_every_section_that_does_something():
    assert len(COMMANDS) > 30
    assert all(line.startswith("$ ") or "<<YAML" in block for block in BLOCKS for line in block.splitlines() if line)


@pytest.mark.parametrize("target", sorted(found(r"(?<![\w-])make ([a-z]+)")))
def test_every_make_target_exists(target):
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), f"make {target}"


@pytest.mark.parametrize("module", sorted(found(r"python -m ([\w.]+)") | found(r"python, -m, ([\w.]+)")))
def test_every_module_that_is_run_exists(module):
    assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize(
    "path",
    sorted(
        found(
            r"(?<![\w/.-])((?:config|stacks|k8s|training|drills|tests|deployments|docs)/[\w./-]*\w|requirements\.txt)"
        )
    ),
)
def test_every_file_of_the_repository_exists(path):
    assert (ROOT / path).exists()


def test_every_context_key_is_one_that_cdk_json_or_app_py_reads():
    keys = found(r"(?:-c|--context) (\w+)=")
    assert keys == {"deployment"}
    assert 'try_get_context("deployment")' in (ROOT / "app.py").read_text()


def test_cdk_is_called_with_commands_and_stacks_that_it_knows():
    known = {"bootstrap", "deploy", "destroy", "diff", "synth"}
    calls = [shlex.split(command)[2:] for command in COMMANDS if command.startswith("npx cdk ")]
    calls += [call.split()[2:] for call in re.findall(r"`(npx cdk [a-z][^`\n]+)`", TEXT)]
    assert calls
    for name, *arguments in calls:
        assert name in known
        for argument in arguments:
            assert argument in STACKS or argument.startswith(("--", "aws://")), argument


def test_every_program_is_one_of_those_that_the_text_asks_for():
    programs = {shlex.split(command)[0] for command in COMMANDS}
    assert programs == {"aws", "kubectl", "make", "npx", ".venv/bin/python", "$EDITOR"}


def test_the_settings_that_the_text_names_exist():
    schema = (ROOT / "deployments/schema.json").read_text()
    for name in ("endpoint_public_cidrs", "ami_release_version", "retain_data", "alarm_email", "started", "egress"):
        assert name in TEXT
        assert f'"{name}"' in schema, name
    for path in found(r"`?((?:cluster|job|storage|observability|network|capacity|checkpoint)\.[a-z_]+)(?![\w.(/])"):
        assert path.endswith(".py") or f'"{path.split(".")[1]}"' in schema, path


def test_names_of_stacks_files_and_objects_are_those_of_the_shipped_deployment():
    assert found(r"p5-2node-(\w+)") == {name.lower() for name in STACKS}
    assert found(r"dist/p5-2node/(\S+\.yaml)") == {f"0001-{P5.job.name}.k8s.yaml"}
    assert found(r"/runs/([\w-]+)/") == {P5.train.run_name}
    assert found(r"kubectl -n ([\w-]+)") == {P5.job.namespace} | {"kube-system"}
    assert found(r"kubectl -n training exec POD -c (\S+)") == {WORKER_CONTAINER}
    assert found(r"kubectl get nodes -L (\S+)") == {NODE_ROLE_LABEL}


def test_the_data_job_is_valid_and_mounts_the_claim_and_writes_where_training_reads():
    (document,) = re.findall(r"<<YAML\n(.*?)^YAML$", TEXT, re.MULTILINE | re.DOTALL)
    job = yaml.safe_load(document)
    pod = job["spec"]["template"]["spec"]
    assert job["metadata"]["namespace"] == P5.job.namespace
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == FSX_CLAIM
    command = pod["containers"][0]["command"]
    assert command[command.index("--out") + 1] == P5.train.data.path
    source = (ROOT / "training/prepare_data.py").read_text()
    assert all(f'"{flag}"' in source for flag in command if flag.startswith("--"))


def test_quotas_are_those_of_the_nodes_that_the_deployment_asks_for():
    assert P5.job.instance is not None
    vcpus = P5.job.instance.vcpu_count
    assert f"{vcpus} for each p5.48xlarge: {vcpus * P5.job.pod_count}; {vcpus * (P5.job.pod_count + 1)}" in TEXT
    assert f"8 GPUs and {P5.job.instance.efa_count} EFA devices" in TEXT


def test_it_says_at_its_top_that_nothing_ran_on_aws():
    assert "Nothing here has run on AWS" in TEXT.split("##")[0]

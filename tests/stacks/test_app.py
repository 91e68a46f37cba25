"""The real command line: cdk as pinned in package.json, and app.py as cdk starts it."""

import filecmp
import json
import subprocess
import sys
from pathlib import Path

import aws_cdk as cdk
import pytest
import yaml

from app import MAX_RESOURCES, MAX_TEMPLATE_KIB, build
from config.deployment import load

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cdk_command():
    command = ROOT / "node_modules/.bin/cdk"
    if not command.exists():
        pytest.fail("the cdk command line is missing: run `npm ci`")
    return str(command)


def start_synth(command, output, environment):
    arguments = ["synth", "--quiet", "--app", f"{sys.executable} app.py", "--output", str(output)]
    return subprocess.Popen(
        [command, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def files(directory):
    return sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())


def test_two_real_synths_without_network_or_credentials_are_byte_identical(cdk_command, offline_environment, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for synth in [start_synth(cdk_command, output, offline_environment) for output in (first, second)]:
        said, _ = synth.communicate(timeout=240)
        assert synth.returncode == 0, said
    assert {f"{name}.template.json" for name in ("Network", "Storage", "Image", "Cluster", "Observability")} <= {
        path.name for path in files(first)
    }
    assert files(first) == files(second)
    assert [path for path in files(first) if not filecmp.cmp(first / path, second / path, shallow=False)] == []


def test_all_deployments_come_out_of_one_process_as_the_cdk_command_line_writes_them(
    cdk_command, offline_environment, tmp_path
):
    """`make synth DEPLOYMENT=all`."""
    everything = subprocess.run(
        [sys.executable, "app.py", "--all", str(tmp_path / "all")],
        cwd=ROOT,
        env=offline_environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert everything.returncode == 0, everything.stderr
    with_cluster = [path.stem for path in (ROOT / "deployments").glob("*.yaml") if load(path).cluster is not None]
    assert {path.name for path in (tmp_path / "all").iterdir()} == set(with_cluster)
    assert everything.stdout.count(" of 500 resources, ") == 5 * len(with_cluster)
    one = start_synth(cdk_command, tmp_path / "one", offline_environment)
    said, _ = one.communicate(timeout=240)
    assert one.returncode == 0, said
    templates = sorted((tmp_path / "one").glob("*.template.json"))
    assert len(templates) == 5
    for template in templates:
        assert template.read_text() == (tmp_path / "all/p5-2node" / template.name).read_text()


def test_assembly_needs_no_lookup_and_no_account(templates):
    for template in templates.values():
        text = json.dumps(template.to_json())
        assert "dummy-value-for" not in text
        assert "Fn::GetAZs" not in text


def test_templates_stay_below_half_of_cloudformations_limits_with_everything_on(synthesize):
    settings = {
        "network": {"egress": "none", "mirror_registry": "123456789012.dkr.ecr.us-west-2.amazonaws.com/mirror"},
        "addons": {"kueue": True},
        "observability": {"alarm_email": "ops@example.com", "monthly_budget_usd": 1},
    }
    for name, template in synthesize(cluster=settings, job={"node_count": 32, "spare_count": 2}).items():
        content = template.to_json()
        assert len(content["Resources"]) < MAX_RESOURCES / 2, name
        assert len(json.dumps(content)) < MAX_TEMPLATE_KIB * 1024 / 2, name
        assert len(content.get("Outputs", {})) < 100, name


def test_synth_says_how_much_of_the_limits_is_used(offline_environment, tmp_path):
    done = run_app(offline_environment | {"CDK_OUTDIR": str(tmp_path)}, "p5-2node")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if " of 500 resources, " in line]
    assert {line.split(":")[0] for line in lines} == {
        f"p5-2node-{name}" for name in ("network", "storage", "image", "cluster", "observability")
    }


def run_app(environment, deployment):
    context = json.dumps({"deployment": deployment})
    return subprocess.run(
        [sys.executable, "app.py"],
        cwd=ROOT,
        env=environment | {"CDK_CONTEXT_JSON": context},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def deployment_file(tmp_path):
    def write(old, new):
        text = (ROOT / "deployments/p5-2node.yaml").read_text()
        assert old in text
        path = tmp_path / "changed.yaml"
        path.write_text(text.replace(old, new))
        return path

    return write


def test_a_bad_deployment_is_one_line_and_exit_code_2(offline_environment, deployment_file):
    path = deployment_file("capacity_gib: 4800", "capacity_gib: 3600")
    done = run_app(offline_environment, str(path))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert line.startswith(f"error: {path}: cluster.storage.capacity_gib: ")
    assert "3600" in line


def test_a_deployment_without_a_cluster_says_so(deployment_with):
    deployment = load(ROOT / "deployments/local.yaml")
    with pytest.raises(ValueError, match="deployment local has no cluster section") as caught:
        build(cdk.App(), deployment)
    assert "\n" not in str(caught.value)


def test_everything_that_is_wrong_with_a_deployment_is_said_at_once(offline_environment, tmp_path):
    """A wrong field, two that contradict each other, and two sections that do: pydantic alone says them one by one."""
    document = yaml.safe_load((ROOT / "deployments/p5-2node.yaml").read_text())
    document["cluster"]["storage"] = {"capacity_gib": 3600, "backup_retention_days": 7}
    document["cluster"]["availability_zone"] = "us-east-1a"
    document["cluster"]["capacity"] = {"kind": "spot", "reservation_id": "cr-0123456789abcdef0"}
    document["train"]["data"]["path"] = "/data"
    path = tmp_path / "2_nodes.yaml"
    path.write_text(yaml.safe_dump(document))
    done = run_app(offline_environment, str(path))
    assert done.returncode == 2
    lines = [line.partition(f"{path}: ")[2] for line in done.stderr.splitlines() if str(path) in line]
    assert {line.partition(": ")[0] for line in lines} == {
        "cluster.storage.capacity_gib",
        "cluster.storage.backup_retention_days",
        "cluster.availability_zone",
        "cluster.capacity.reservation_id",
        "train.data.path",
        "name",
    }

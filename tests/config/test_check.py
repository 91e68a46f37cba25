"""`python -m config.check`: every mistake of a deployment file at once, with field, value, rule, fix and source."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from config import check as command
from config.check import check

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "deployments").glob("*.yaml"))


@pytest.fixture
def document():
    return yaml.safe_load((ROOT / "deployments/p5-2node.yaml").read_text())


def spoiled(document, **changes):
    """The document with values at dotted paths replaced; "-" removes one."""
    result = copy.deepcopy(document)
    for path, value in changes.items():
        *parents, key = path.split(".")
        here = result
        for parent in parents:
            here = here[parent]
        if value == "-":
            del here[key]
        else:
            here[key] = value
    return result


@pytest.mark.parametrize("file", SHIPPED, ids=lambda path: path.stem)
def test_nothing_is_wrong_with_a_shipped_deployment(file):
    assert check(yaml.safe_load(file.read_text()), file.stem) == []


# id -> (changes, path of the finding, part of rule or fix)
MISTAKES = {
    "a zone of another region": (
        {"cluster.availability_zone": "us-east-1a"},
        "cluster.availability_zone",
        "no zone of region us-west-2",
    ),
    "a region that is none": ({"cluster.region": "us-west-9"}, "cluster.region", "unknown region"),
    "a reservation id that is none": (
        {"cluster.capacity": {"kind": "odcr", "reservation_id": "r-0123456789"}},
        "cluster.capacity.reservation_id",
        "hexadecimal",
    ),
    "a capacity block without id": (
        {"cluster.capacity": {"kind": "capacity_block"}},
        "cluster.capacity.reservation_id",
        "is needed",
    ),
    "spot with a reservation": (
        {"cluster.capacity": {"kind": "spot", "reservation_id": "cr-0123456789abcdef0"}},
        "cluster.capacity.reservation_id",
        "spot instances never run in a reservation",
    ),
    "a mis-cased key (eksctl 8320)": (
        {"cluster.capacity": {"kind": "odcr", "reservationId": "cr-0123456789abcdef0"}},
        "cluster.capacity.reservationId",
        "unknown key",
    ),
    "a capacity that FSx does not offer": (
        {"cluster.storage.capacity_gib": 3600},
        "cluster.storage.capacity_gib",
        "choose 4800",
    ),
    "a throughput that FSx does not offer": (
        {"cluster.storage.throughput_mb_per_tib": 300},
        "cluster.storage.throughput_mb_per_tib",
        "125, 250, 500",
    ),
    "metadata iops that FSx does not offer": (
        {"cluster.storage.metadata_iops": 1501},
        "cluster.storage.metadata_iops",
        "choose 3000",
    ),
    "efa with too small a capacity": (
        {"cluster.storage.efa": True},
        "cluster.storage.capacity_gib",
        "multiples of 9600",
    ),
    "backups of a linked file system": (
        {"cluster.storage.backup_retention_days": 7},
        "cluster.storage.backup_retention_days",
        "set it to 0",
    ),
    "a network too small to be a vpc": ({"cluster.vpc_cidr": "10.0.0.0/24"}, "cluster.vpc_cidr", "from /16 to /20"),
    "more nodes than the subnet has addresses": (
        {"cluster.vpc_cidr": "10.0.0.0/20", "job.node_count": 64, "train.global_batch_size": 512},
        "job.node_count",
        "widen cluster.vpc_cidr",
    ),
    "an instance type that is not in the table": (
        {"job.instance_type": "p9.48xlarge"},
        "job.instance_type",
        "p5.48xlarge",
    ),
    "no node at all": ({"job.node_count": 0}, "job.node_count", "greater than 0"),
    "fewer spares than none": ({"job.spare_count": -1}, "job.spare_count", "greater than or equal to 0"),
    "the same zone twice": (
        {"cluster.second_availability_zone": "us-west-2a"},
        "cluster.second_availability_zone",
        "choose another",
    ),
    "a mirror without need": (
        {"cluster.network": {"mirror_registry": "123456789012.dkr.ecr.us-west-2.amazonaws.com"}},
        "cluster.network",
        "set both or neither",
    ),
    "the api server open to everyone": (
        {"cluster.endpoint_public_cidrs": ["0.0.0.0/0"]},
        "cluster.endpoint_public_cidrs",
        "list your own networks",
    ),
    "a batch that does not divide": (
        {"train.global_batch_size": 100},
        "train.global_batch_size",
        "choose a multiple of 16",
    ),
    "a network that no cluster fits in": ({"cluster.vpc_cidr": "10.0.0.0/28"}, "cluster.vpc_cidr", "from /16 to /20"),
    "a network address that is none": ({"cluster.vpc_cidr": "10.0.0.1/16"}, "cluster.vpc_cidr", "no IPv4 network"),
    "a zone that is none": (
        {"cluster.availability_zone": "us-west-2"},
        "cluster.availability_zone",
        "choose one such as us-west-2a",
    ),
    "on demand with a reservation": (
        {"cluster.capacity": {"kind": "on_demand", "reservation_id": "cr-0123456789abcdef0"}},
        "cluster.capacity.reservation_id",
        "set kind to odcr or capacity_block",
    ),
    "a kind of capacity that is none": ({"cluster.capacity": {"kind": "reserved"}}, "cluster.capacity", "on_demand"),
    "a section that is none": ({"cluster.storage": 4800}, "cluster.storage", "a section with settings"),
    "no way out and no mirror": (
        {"cluster.network": {"egress": "none"}},
        "cluster.network",
        "set both or neither",
    ),
    "a budget that tells nobody": (
        {"cluster.observability": {"monthly_budget_usd": 5}},
        "cluster.observability.monthly_budget_usd",
        "without alarm_email",
    ),
    "prometheus without the exporter that it reads": (
        {"cluster.observability": {"metrics": "prometheus"}, "cluster.addons": {"dcgm_exporter": False}},
        "cluster.observability.metrics",
        "set addons.dcgm_exporter to true",
    ),
    "a file system given beside one to be built": (
        {
            "job.storage": {
                "file_system_id": "fs-0123456789abcdef0",
                "dns_name": "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com",
                "mount_name": "abcd",
                "capacity_gib": 1200,
            }
        },
        "job.storage",
        "remove it",
    ),
    "an image by tag": ({"job.image": "trainer:latest"}, "job.image", "pinned by digest"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_finding_with_its_field_value_rule_fix_and_source(document, mistake):
    changes, path, words = MISTAKES[mistake]
    findings = check(spoiled(document, **changes), "p5-2node")
    about = [finding for finding in findings if finding.path.startswith(path)]
    assert about, findings
    assert words in f"{about[0].rule}; {about[0].fix}"
    for finding in findings:
        assert finding.value
        assert finding.fix
        assert finding.source


def test_a_name_that_no_stack_can_begin_with_is_a_finding_where_there_is_a_cluster(document):
    (finding,) = check(document, "2_nodes")
    assert (finding.path, finding.value, finding.fix) == ("name", '"2_nodes"', "rename the file")
    del document["cluster"]
    assert "name" not in {finding.path for finding in check(document, "2_nodes")}


def test_a_long_value_is_cut(document):
    (finding,) = check(spoiled(document, **{"cluster.region": "x" * 5000}), "p5-2node")
    assert len(finding.value) == 120


def test_all_mistakes_of_all_kinds_come_together(document):
    several = spoiled(
        document,
        **{
            "cluster.region": "us-west-9",  # a field
            "cluster.capacity": {"kind": "capacity_block"},  # a section's member
            "cluster.storage.efa": True,  # two fields of a section
            "cluster.vpc_cidr": "10.0.0.0/24",
            "job.image": "trainer:latest",
            "job.nodecount": 2,  # unknown
            "train.global_batch_size": 100,  # across sections
            "train.data.path": "/data",
        },
    )
    found = {finding.path for finding in check(several, "p5-2node")}
    assert {
        "cluster.region",
        "cluster.capacity.reservation_id",
        "cluster.storage.capacity_gib",
        "cluster.vpc_cidr",
        "job.image",
        "job.nodecount",
        "train.global_batch_size",
        "train.data.path",
    } <= found


def test_a_mistake_that_only_follows_from_another_is_not_reported(document):
    findings = check(spoiled(document, **{"job.node_count": 0}), "p5-2node")
    assert [finding.path for finding in findings] == ["job.node_count"]


def test_an_empty_file_is_findings_and_no_crash():
    assert {finding.path for finding in check({}, "empty")} >= {"job", "train"}


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "config.check", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_says_what_is_wrong_and_ends_with_1(document, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(spoiled(document, **{"cluster.storage.capacity_gib": 3600})))
    done = run(file)
    assert done.returncode == 1
    first, rule, fix, source, last = done.stdout.splitlines()
    assert first == "cluster.storage.capacity_gib: 3600"
    assert rule.strip().startswith("rule: FSx offers 1200, 2400")
    assert fix.strip() == "fix:  choose 4800"
    assert source.strip().startswith("see:  https://docs.aws.amazon.com/fsx/")
    assert last == f"{file}: 1 to mend"


def test_the_command_has_a_form_for_machines(document, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(spoiled(document, **{"job.image": "trainer:latest"})))
    done = run("--json", file)
    assert done.returncode == 1
    (finding,) = json.loads(done.stdout)
    assert set(finding) == {"path", "value", "rule", "fix", "source"}
    assert finding["path"] == "job.image"
    assert finding["value"] == '"trainer:latest"'


def test_the_command_ends_with_0_where_nothing_is_wrong_and_with_2_where_nothing_can_be_read(tmp_path):
    assert run(ROOT / "deployments/p5-2node.yaml").returncode == 0
    missing = run(tmp_path / "none.yaml")
    assert missing.returncode == 2
    assert missing.stderr.startswith(f"error: {tmp_path / 'none.yaml'}: cannot be read")


def test_templates_of_any_making_can_be_checked(tmp_path, capsys):
    bad = {"Resources": {"Fs": {"Type": "AWS::FSx::FileSystem", "Properties": {"FileSystemType": "LUSTRE"}}}}
    file = tmp_path / "Mine.template.json"
    file.write_text(json.dumps(bad))
    assert command.main(["--template", "--json", str(file)]) == 1
    assert "Mine/Fs.LustreConfiguration.DeploymentType" in {one["path"] for one in json.loads(capsys.readouterr().out)}
    file.write_text("{}")
    assert command.main(["--template", str(file)]) == 2
    assert "no CloudFormation template; it has no Resources" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", '{"Resources": []}', '{"Resources": {"A": 3}}', "\xff"])
def test_what_is_no_template_ends_with_2_and_one_line(tmp_path, capsys, text):
    file = tmp_path / "x.json"
    file.write_bytes(text.encode("latin-1"))
    assert command.main(["--template", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {file}: ")
    assert said.count("\n") == 1


def test_the_check_starts_no_cdk_and_no_torch():
    code = "import sys, config.check; print(sorted({'aws_cdk', 'cdk8s', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

"""cfn-lint, the real command, over every shipped deployment in its region and every switch in every region.

And once CDK's own validator, which the real synth leaves out for its time.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from app import build
from config.cluster import EKS_IMAGE_ACCOUNTS, REGIONS_WITHOUT_BUDGETS
from config.deployment import load

SHIPPED = {
    path.stem: deployment
    for path in sorted((Path(__file__).parents[2] / "deployments").glob("*.yaml"))
    if (deployment := load(path)).cluster is not None
}
SWITCHES = {
    "cloudwatch, no way out, EFA storage, capacity block": {
        "network": {"egress": "none", "mirror_registry": "123456789012.dkr.ecr.us-west-2.amazonaws.com/mirror"},
        "addons": {"kueue": True},
        "observability": {"alarm_email": "ops@example.com", "monthly_budget_usd": 100_000},
        "storage": {"efa": True, "capacity_gib": 9600, "metadata_iops": 12_000, "retain_data": False},
        "capacity": {"kind": "capacity_block", "reservation_id": "cr-0123456789abcdef0"},
    },
    "prometheus, backups, public endpoint, reservation": {
        "observability": {"metrics": "prometheus"},
        "storage": {"data_repository": False, "backup_retention_days": 7},
        "capacity": {"kind": "odcr", "reservation_id": "cr-0123456789abcdef0", "placement_group": "ours"},
        "endpoint_public_cidrs": ["198.51.100.0/24"],
    },
}
# Rule -> why it is passed over.
IGNORED = {
    "W3010": "the zone is named on purpose: reservation, file system and EFA traffic live in it",
    "W3005": "CDK writes a DependsOn beside a reference that implies it; both say the same",
}
# Beside those, where the region is not the deployment's own.
IGNORED_ELSEWHERE = {"E3628": "p5 is not sold in every region; whether a deployment's is, the test above asks"}


def findings(templates, regions, ignored):
    command = [str(Path(sys.executable).with_name("cfn-lint")), "--format", "json", "--regions", *regions]
    command += ["--ignore-checks", *ignored, "--template", *map(str, templates)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [f"{finding['Rule']['Id']} {finding['Message'][:200]}" for finding in json.loads(done.stdout or "[]")]
    assert bool(found) == bool(done.returncode), done.stderr
    return found


@pytest.fixture
def templates_of(new_app, tmp_path):
    def write(deployment, *, validation=False):
        app = new_app(tmp_path, validation=validation)
        build(app, deployment)
        app.synth()
        templates = sorted(tmp_path.glob("*.template.json"))
        assert len(templates) == 5
        return templates

    return write


@pytest.mark.parametrize("name", SHIPPED)
def test_cfn_lint_has_nothing_to_say_of_a_shipped_deployment(name, templates_of):
    deployment = SHIPPED[name]
    assert deployment.cluster is not None
    assert findings(templates_of(deployment), [deployment.cluster.region], IGNORED) == []


@pytest.mark.parametrize("name", SWITCHES)
def test_every_resource_and_property_exists_in_every_region_that_a_deployment_may_name(
    name, templates_of, deployment_with
):
    templates = templates_of(deployment_with(cluster=SWITCHES[name]))
    budget = SWITCHES[name]["observability"].get("monthly_budget_usd")
    regions = [region for region in EKS_IMAGE_ACCOUNTS if not (budget and region in REGIONS_WITHOUT_BUDGETS)]
    assert findings(templates, regions, IGNORED | IGNORED_ELSEWHERE) == []


def test_cfn_lint_finds_a_type_that_its_region_does_not_sell(templates_of, deployment_with):
    found = findings(templates_of(deployment_with()), ["eu-west-3"], IGNORED)
    assert [finding for finding in found if "E3628 'p5.48xlarge'" in finding]


def test_cdks_own_validator_finds_nothing_either(templates_of, deployment_with, tmp_path):
    templates_of(
        deployment_with(cluster=SWITCHES["prometheus, backups, public endpoint, reservation"]), validation=True
    )
    reports = json.loads((tmp_path / "validation-report.json").read_text())["pluginReports"]
    (report,) = [report for report in reports if report["pluginName"] == "CloudFormation Validate"]
    assert [violation for violation in report["violations"] if violation.get("severity") != "informational"] == []

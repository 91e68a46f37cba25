"""cdk-nag's AwsSolutions over the stacks: no finding that is not acknowledged here, with its reason, and none stale."""

import json
from fnmatch import fnmatchcase
from pathlib import Path

import aws_cdk as cdk
import cdk_nag
import pytest

from app import build
from config.deployment import load

# (construct, rule) -> reason; both are patterns of fnmatch, in which [ is written [[].
ACKNOWLEDGED = {
    ("Storage/Bucket/Resource", "AwsSolutions-S1"): (
        "Access logs would need a second bucket that is kept as long. CloudTrail's data events tell the same, where an "
        "account wants it told."
    ),
    ("Image/Project/Resource", "AwsSolutions-CB4"): (
        "CodeBuild encrypts with AWS's own S3 key; the build keeps no artifact but the image, which is in ECR."
    ),
    ("Image/Project/Role/DefaultPolicy/Resource", "AwsSolutions-IAM5[[]Action::s3:*]"): (
        "CDK's grant to read one asset: wildcards of reading actions, on that one object."
    ),
    ("Image/Project/Role/DefaultPolicy/Resource", "AwsSolutions-IAM5[[]Resource::arn:aws:*"): (
        "Log streams and report groups of this project, whose names begin with the project's."
    ),
    ("Image/Project/Role/DefaultPolicy/Resource", "AwsSolutions-IAM5[[]Resource::[*]]"): (
        "ecr:GetAuthorizationToken, which knows no resource."
    ),
    ("Cluster/Addons/FsxCsiDriverRole/Resource", "AwsSolutions-IAM5[[]Resource::[*]]"): (
        "fsx:DescribeFileSystems alone: it reads, and the driver calls it before it knows an id."
    ),
    ("Cluster/Cluster/Role/Resource", "AwsSolutions-IAM4[[]*AmazonEKSClusterPolicy]"): (
        "What EKS prescribes for its control plane; AWS extends it with every Kubernetes version."
    ),
    ("Cluster/NodeRole/Resource", "AwsSolutions-IAM4[[]*"): (
        "What EKS prescribes for nodes: join, pull images, be reached through Session Manager. No rights of add-ons."
    ),
    ("Cluster/NetworkAddons/VpcCniRole/Resource", "AwsSolutions-IAM4[[]*AmazonEKS_CNI_Policy]"): (
        "What the VPC CNI prescribes; on its own Pod Identity role, not on the node."
    ),
    ("Cluster/Addons/CloudWatchRole/Resource", "AwsSolutions-IAM4[[]*CloudWatchAgentServerPolicy]"): (
        "What the CloudWatch agent prescribes; on its own Pod Identity role."
    ),
    ("Cluster/Cluster/KubectlProvider/*", "AwsSolutions-IAM4[[]*"): (
        "aws-cdk-lib's own Lambda functions: write logs, live in the VPC, pull charts from ECR."
    ),
    ("Cluster/Cluster/KubectlProvider/*", "AwsSolutions-IAM5[[]*"): (
        "aws-cdk-lib's own framework: any version of the one function that it calls."
    ),
    ("Cluster/Cluster/KubectlProvider/*", "AwsSolutions-L1"): (
        "aws-cdk-lib chooses the runtime of its own functions; a newer library brings a newer one."
    ),
}

SWITCHES = {
    "everything on, no way out": {
        "network": {
            "egress": "none",
            "mirror_registry": "123456789012.dkr.ecr.us-west-2.amazonaws.com/mirror",
        },
        "addons": {"kueue": True},
        "observability": {"alarm_email": "ops@example.com", "monthly_budget_usd": 100_000},
        "storage": {"efa": True, "capacity_gib": 9600, "metadata_iops": 12_000, "retain_data": False},
        "capacity": {"kind": "capacity_block", "reservation_id": "cr-0123456789abcdef0"},
    },
    "prometheus, with backups": {
        "observability": {"metrics": "prometheus"},
        "storage": {"data_repository": False, "backup_retention_days": 7},
        "capacity": {"kind": "odcr", "reservation_id": "cr-0123456789abcdef0"},
    },
    "everything off, open to one network": {
        "addons": {"dcgm_exporter": False},
        "observability": {"metrics": "none"},
        "storage": {"data_repository": False, "retain_data": False},
        "capacity": {"kind": "spot"},
        "endpoint_public_cidrs": ["198.51.100.0/24"],
    },
}


SHIPPED = {
    deployment.name: deployment
    for deployment in map(load, sorted((Path(__file__).parents[2] / "deployments").glob("*.yaml")))
    if deployment.cluster is not None
}


@pytest.fixture(scope="module")
def findings(deployment_with, tmp_path_factory, new_app):
    """findings(name of a deployment or of a switch) -> {(construct, rule)}, each synthesized once."""
    done: dict[str, set[tuple[str, str]]] = {}

    def find(name):
        if name not in done:
            out = tmp_path_factory.mktemp("nag")
            app = new_app(out)
            build(app, SHIPPED.get(name) or deployment_with(cluster=SWITCHES[name]))
            cdk.Validations.of(app).add_plugins(cdk_nag.AwsSolutionsChecks(app))
            with pytest.raises(RuntimeError, match="ValidationFailed"):
                app.synth()
            (report,) = [
                report
                for report in json.loads((out / "validation-report.json").read_text())["pluginReports"]
                if report["pluginName"] == "AwsSolutions"
            ]
            done[name] = {
                (construct["constructPath"], violation["ruleName"])
                for violation in report["violations"]
                for construct in violation["violatingConstructs"]
            }
        return done[name]

    return find


def covers(acknowledged, finding):
    return all(fnmatchcase(value, pattern) for value, pattern in zip(finding, acknowledged, strict=True))


@pytest.mark.parametrize("name", [*SHIPPED, *SWITCHES])
def test_every_finding_is_acknowledged(findings, name):
    assert [f for f in sorted(findings(name)) if not any(covers(known, f) for known in ACKNOWLEDGED)] == []


def test_every_acknowledgement_still_has_a_finding(findings):
    found = set.union(*(findings(name) for name in [*SHIPPED, *SWITCHES]))
    assert [known for known in ACKNOWLEDGED if not any(covers(known, f) for f in found)] == []

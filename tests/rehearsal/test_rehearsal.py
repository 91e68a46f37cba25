"""The life of a deployment, with the real CDK command line against a local moto server: what AWS would receive.

bootstrap -> deploy -> deploy again -> diff -> destroy, refused -> data given up, moved into a reservation -> moved into
a Capacity Block -> destroy. The templates are those of app.py, unaltered. What moto can't do, and so is not shown:

- EKS (cluster, node groups, add-ons, access entries), FSx, CodeBuild and placement groups: stand-ins that only have a
  name, or nothing. What the templates ask of them is asserted in tests/stacks.
- Custom resources (Helm charts, Kubernetes objects, emptying the bucket): no Lambda function runs.
- CloudFormation's order, waiting and rollback, and its refusal of what a service would refuse. moto's CloudFormation
  understands no change set that exports something: deployments go the direct way (--method direct), diffs compare
  templates.
- Termination protection, egress rules that are resources of their own, and the end of route tables, NAT gateways and
  endpoints: moto lacks them in CloudFormation; moto_with_stand_ins.py has them, by AWS's documentation, and mends what
  moto misreads (tags of keys and parameters, a repository's generated name, parameters of an update).
- EC2's default egress rule, which CloudFormation removes from a group that has one of its own, stays here.
- Managed policies of roles, bucket policies, public access blocks, scan on push, alarms, topic policies: skipped by
  moto. Keys, buckets and functions are not updated.
- IAM: nothing is refused. Quotas, capacity, and time: there is none.
"""

import base64
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest
import yaml

from app import build
from config.deployment import DeploymentConfig
from config.instances import INSTANCE_TYPES

# A test's first fixture runs for a minute where nothing else does, and for several on a busy machine.
pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]

STACKS = [f"p5-2node-{name}" for name in ("network", "storage", "image", "cluster", "observability")]
RESERVATION, BLOCK = "cr-0123456789abcdef0", "cr-0fedcba9876543210"
DIRECT = ("--all", "--method", "direct", "--require-approval", "never", "--app")


def synthesize(output: Path, **cluster: dict) -> None:
    """The shipped deployment with these sections of its cluster changed, as app.py would make it.

    In this process, which loads jsii and CDK once: by the command line each synth would take ten seconds more.
    """
    document = yaml.safe_load((ROOT / "deployments/p5-2node.yaml").read_text())
    for section, values in cluster.items():
        document["cluster"][section] = values if "kind" in values else document["cluster"][section] | values
    context = json.loads((ROOT / "cdk.json").read_text())["context"] | {
        # As app.py and the command line have it: else every resource would differ in its metadata.
        "aws:cdk:disable-creation-stack-traces": True,
        "aws:cdk:enable-path-metadata": True,
        "aws:cdk:enable-asset-metadata": True,
    }
    app = cdk.App(context=context, analytics_reporting=False, outdir=str(output))
    # The stacks' names come from the deployment's: these are the same stacks, changed.
    build(app, DeploymentConfig.model_validate({"name": "p5-2node", **document}))
    app.synth()


@pytest.fixture(scope="module")
def assemblies(aws_cdk, tmp_path_factory):
    """The deployment as shipped, then without protection of its data in a reservation, then in a Capacity Block."""
    folder = tmp_path_factory.mktemp("assemblies")
    shipped, reserved, block = (folder / name for name in ("shipped", "reserved", "block"))
    synth = aws_cdk.start("synth", "--quiet", "--app", f"{sys.executable} app.py", "--output", str(shipped))
    try:
        given_up = {"retain_data": False}
        synthesize(reserved, storage=given_up, capacity={"kind": "odcr", "reservation_id": RESERVATION})
        synthesize(block, storage=given_up, capacity={"kind": "capacity_block", "reservation_id": BLOCK})
        said, _ = synth.communicate(timeout=240)
        assert synth.returncode == 0, said
        yield {"shipped": str(shipped), "reserved": str(reserved), "block": str(block)}
    finally:
        if synth.poll() is None:
            synth.kill()
            synth.wait()
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def deployed(aws_cdk, assemblies) -> str:
    """Bootstrapped and deployed for the first time."""
    aws_cdk("bootstrap", "aws://123456789012/us-west-2", "--app", "")
    return aws_cdk("deploy", *DIRECT, assemblies["shipped"])


@pytest.fixture(scope="module")
def resources(deployed, client):
    """resources(stack) -> physical ids by logical id, as CloudFormation lists them after the first deployment."""

    def find(stack: str) -> dict[str, str]:
        pages = client("cloudformation").get_paginator("list_stack_resources").paginate(StackName=stack)
        return {
            entry["LogicalResourceId"]: entry["PhysicalResourceId"]
            for page in pages
            for entry in page["StackResourceSummaries"]
        }

    return find


@pytest.fixture(scope="module")
def groups(resources) -> dict[str, str]:
    """Ids of the security groups by their construct's name."""
    found = resources("p5-2node-network")
    return {
        name: next(
            value for key, value in found.items() if key.startswith(f"{name}SecurityGroup") and value[:3] == "sg-"
        )
        for name in ("Efa", "Fsx", "LustreClient")
    }


def gpu_template(client) -> dict[str, Any]:
    """The newest version of the GPU nodes' launch template."""
    ec2 = client("ec2")
    found = []
    for template in ec2.describe_launch_templates()["LaunchTemplates"]:
        (version,) = ec2.describe_launch_template_versions(
            LaunchTemplateId=template["LaunchTemplateId"], Versions=["$Latest"]
        )["LaunchTemplateVersions"]
        if version["LaunchTemplateData"]["InstanceType"] == "p5.48xlarge":
            found.append(version)
    (version,) = found
    return version


@pytest.fixture(scope="module")
def first_template(deployed, client):
    """The GPU nodes' launch template of the first deployment."""
    return gpu_template(client)


def test_bootstrap_makes_the_bucket_the_roles_and_the_version_that_every_deployment_asks_for(deployed, client):
    buckets = [bucket["Name"] for bucket in client("s3").list_buckets()["Buckets"]]
    assert "cdk-hnb659fds-assets-123456789012-us-west-2" in buckets
    roles = [role["RoleName"] for role in client("iam").list_roles(MaxItems=1000)["Roles"]]
    for role in ("deploy", "cfn-exec", "file-publishing"):
        assert f"cdk-hnb659fds-{role}-role-123456789012-us-west-2" in roles
    version = client("ssm").get_parameter(Name="/cdk-bootstrap/hnb659fds/version")["Parameter"]["Value"]
    assert int(version) >= 6


def test_every_stack_is_deployed_in_the_order_in_which_one_needs_the_other(deployed, client):
    done = [line.split("(")[1].split(")")[0] for line in deployed.splitlines() if line.strip().startswith("✅")]
    assert sorted(done) == sorted(STACKS)
    assert done.index("p5-2node-network") < done.index("p5-2node-storage") < done.index("p5-2node-cluster")
    assert done.index("p5-2node-cluster") < done.index("p5-2node-observability")
    stacks = client("cloudformation").describe_stacks()["Stacks"]
    assert {
        stack["StackName"]: stack["StackStatus"] for stack in stacks if stack["StackName"] in STACKS
    } == dict.fromkeys(STACKS, "CREATE_COMPLETE")


def test_ec2_receives_33_interfaces_of_a_p5_with_card_device_type_and_groups(first_template, groups):
    interfaces = first_template["LaunchTemplateData"]["NetworkInterfaces"]
    assert len(interfaces) == 33
    assert [(i["NetworkCardIndex"], i["DeviceIndex"], i["InterfaceType"]) for i in interfaces] == [
        (0, 0, "interface"),
        (0, 1, "efa-only"),
        *((card, 0, "efa-only") for card in range(1, 32)),
    ]
    # The first is EKS's own group, which the stand-in for the cluster names.
    expected = ["sg-0c1a57e4000000000", groups["Efa"], groups["LustreClient"]]
    assert all(interface["Groups"] == expected for interface in interfaces)
    assert not any(interface.keys() & {"SubnetId", "AssociatePublicIpAddress"} for interface in interfaces)


def test_ec2_receives_the_rest_of_the_launch_template(first_template):
    data = first_template["LaunchTemplateData"]
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    (root,) = data["BlockDeviceMappings"]
    assert root["Ebs"]["Encrypted"] is True
    assert f"maxPods: {INSTANCE_TYPES['p5.48xlarge'].max_pods}" in base64.b64decode(data["UserData"]).decode()
    assert data["Placement"]["GroupName"].startswith("p5-2node-cluster-")
    assert not data.keys() & {"InstanceMarketOptions", "CapacityReservationSpecification", "SecurityGroupIds"}


def rules(client, group: str) -> set[tuple]:
    """(direction, protocol, from port, to port, other group or range) of a security group."""
    answer = client("ec2").describe_security_group_rules(Filters=[{"Name": "group-id", "Values": [group]}])
    return {
        (
            "out" if rule["IsEgress"] else "in",
            rule["IpProtocol"],
            rule.get("FromPort"),
            rule.get("ToPort"),
            rule.get("ReferencedGroupInfo", {}).get("GroupId") or rule.get("CidrIpv4"),
        )
        for rule in answer["SecurityGroupRules"]
    }


def everything(found: set[tuple]) -> set[tuple]:
    """Rules for all protocols, without ports: EC2 and moto say None or -1 for "all"."""
    return {(direction, other) for direction, protocol, _, _, other in found if protocol == "-1"}


def test_the_efa_group_lets_all_traffic_in_from_itself_and_out_to_itself(groups, client):
    efa = groups["Efa"]
    # The rule to 0.0.0.0/0 does not cover EFA: without the one to itself NCCL hangs.
    assert everything(rules(client, efa)) == {("in", efa), ("out", efa), ("out", "0.0.0.0/0")}


def test_lustre_is_open_both_ways_between_the_file_servers_and_the_nodes_and_nothing_else_is(groups, client):
    fsx, nodes = groups["Fsx"], groups["LustreClient"]
    ports = [(988, 988), (1018, 1023)]
    default = ("out", "-1", -1, -1, "0.0.0.0/0")  # EC2's own; CloudFormation takes it away, moto leaves it
    assert rules(client, fsx) - {default} == {
        (direction, "tcp", low, high, peer)
        for direction in ("in", "out")
        for low, high in ports
        for peer in (fsx, nodes)
    }
    found = rules(client, nodes)
    assert {rule for rule in found if rule[0] == "in"} == {("in", "tcp", low, high, fsx) for low, high in ports}
    assert everything(found) == {("out", "0.0.0.0/0")}


def test_the_gpu_subnet_is_one_private_and_half_of_the_vpc(resources, client):
    found = resources("p5-2node-network")
    (subnet,) = client("ec2").describe_subnets(
        SubnetIds=[value for key, value in found.items() if key.startswith("GpuSubnet") and value.startswith("subnet-")]
    )["Subnets"]
    assert (subnet["AvailabilityZone"], subnet["CidrBlock"]) == ("us-west-2a", "10.0.128.0/17")
    assert subnet["MapPublicIpOnLaunch"] is False


def test_storage_makes_an_encrypted_bucket_and_keys_that_rotate(resources, client):
    found = resources("p5-2node-storage")
    bucket = next(value for key, value in found.items() if key.startswith("Bucket") and "Policy" not in key)
    s3 = client("s3")
    (rule,) = s3.get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"]["Rules"]
    assert rule["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"
    kms = client("kms")
    keys = [resources(f"p5-2node-{stack}") for stack in ("storage", "cluster", "observability")]
    ids = [value for stack in keys for key, value in stack.items() if key.startswith(("Key", "SecretsKey", "TopicKey"))]
    assert len(ids) == 3
    assert all(kms.get_key_rotation_status(KeyId=key)["KeyRotationEnabled"] for key in ids)


def test_roles_trust_the_one_service_that_they_are_for(resources, client):
    iam = client("iam")
    names = {
        key: value for key, value in resources("p5-2node-cluster").items() if value.startswith("p5-2node-cluster-")
    }

    def trust(role: str) -> tuple[Any, Any]:
        (name,) = [value for key, value in names.items() if key.startswith(role)]
        (statement,) = iam.get_role(RoleName=name)["Role"]["AssumeRolePolicyDocument"]["Statement"]
        return statement["Principal"], statement["Action"]

    assert trust("NodeRole") == ({"Service": "ec2.amazonaws.com"}, "sts:AssumeRole")
    assert trust("AdminRole3") == ({"AWS": "arn:aws:iam::123456789012:root"}, "sts:AssumeRole")
    for addon in ("NetworkAddonsVpcCniRole", "AddonsFsxCsiDriverRole"):
        assert trust(addon) == ({"Service": "pods.eks.amazonaws.com"}, ["sts:AssumeRole", "sts:TagSession"])


def test_the_repositorys_tags_do_not_move(resources, client):
    name = next(value for key, value in resources("p5-2node-image").items() if key.startswith("Repository"))
    (repository,) = client("ecr").describe_repositories(repositoryNames=[name])["repositories"]
    assert repository["imageTagMutability"] == "IMMUTABLE"


@pytest.fixture(scope="module")
def redeployed(aws_cdk, assemblies, first_template, client) -> tuple[str, dict]:
    """Deployed a second time, with nothing changed: what it said, and the stacks' states afterwards."""
    said = aws_cdk("deploy", *DIRECT, assemblies["shipped"])
    stacks = client("cloudformation").describe_stacks()["Stacks"]
    return said, {stack["StackName"]: stack["StackStatus"] for stack in stacks}


def test_a_second_deployment_changes_nothing(redeployed, first_template, client):
    said, states = redeployed
    assert said.count("(no changes)") == len(STACKS), said
    assert {states[stack] for stack in STACKS} == {"CREATE_COMPLETE"}
    assert first_template["VersionNumber"] == 1


def test_diff_is_empty_after_a_deployment_and_is_not_when_something_changed(aws_cdk, assemblies, redeployed):
    said = aws_cdk("diff", "--fail", "--method", "template", "--app", assemblies["shipped"])
    assert "Number of stacks with differences: 0" in said
    changed = aws_cdk("diff", "--fail", "--method", "template", "--app", assemblies["reserved"], code=1)
    assert "Added: .CapacityReservationSpecification" in changed
    assert "Removed: .Placement" in changed


@pytest.fixture(scope="module")
def refused(aws_cdk, assemblies, redeployed, client) -> tuple[str, set[str]]:
    """A destroy while the data is retained: what it said, and what is still there."""
    said = aws_cdk("destroy", "--all", "--force", "--app", assemblies["shipped"], code=1)
    return said, {stack["StackName"] for stack in client("cloudformation").describe_stacks()["Stacks"]}


def test_destroy_is_refused_while_data_is_retained(refused, client):
    said, left = refused
    assert "cannot be deleted while TerminationProtection is enabled" in said
    assert {"p5-2node-storage", "p5-2node-image", "p5-2node-network"} <= left


@pytest.fixture(scope="module")
def reserved(aws_cdk, assemblies, refused, client) -> dict:
    """Data given up and nodes moved into a reservation: the launch template."""
    aws_cdk("deploy", *DIRECT, assemblies["reserved"])
    return gpu_template(client)


def test_moving_into_a_reservation_is_a_new_version_of_the_same_launch_template(reserved, first_template):
    data = reserved["LaunchTemplateData"]
    assert reserved["LaunchTemplateId"] == first_template["LaunchTemplateId"]
    assert reserved["VersionNumber"] == 2
    assert data["CapacityReservationSpecification"] == {
        "CapacityReservationTarget": {"CapacityReservationId": RESERVATION}
    }
    assert not data.keys() & {"InstanceMarketOptions", "Placement"}
    assert data["NetworkInterfaces"] == first_template["LaunchTemplateData"]["NetworkInterfaces"]


@pytest.fixture(scope="module")
def blocked(aws_cdk, assemblies, reserved, client) -> dict:
    """Moved on into a Capacity Block: the launch template."""
    aws_cdk("deploy", *DIRECT, assemblies["block"])
    return gpu_template(client)


def test_moving_into_a_capacity_block_asks_for_its_market_and_its_reservation(blocked, first_template):
    data = blocked["LaunchTemplateData"]
    assert blocked["LaunchTemplateId"] == first_template["LaunchTemplateId"]
    assert blocked["VersionNumber"] == 3
    assert data["InstanceMarketOptions"]["MarketType"] == "capacity-block"
    assert data["CapacityReservationSpecification"] == {"CapacityReservationTarget": {"CapacityReservationId": BLOCK}}
    assert "Placement" not in data
    assert data["InstanceType"] == "p5.48xlarge"


def test_destroy_leaves_nothing_once_the_data_is_given_up(aws_cdk, assemblies, blocked, client):
    aws_cdk("destroy", "--all", "--force", "--app", assemblies["block"])
    left = {stack["StackName"] for stack in client("cloudformation").describe_stacks()["Stacks"]}
    assert left == {"CDKToolkit"}
    assert client("ec2").describe_launch_templates()["LaunchTemplates"] == []
    repositories = [r["repositoryName"] for r in client("ecr").describe_repositories()["repositories"]]
    assert repositories == ["cdk-hnb659fds-container-assets-123456789012-us-west-2"]
    assert "10.0.0.0/16" not in [vpc["CidrBlock"] for vpc in client("ec2").describe_vpcs()["Vpcs"]]
    buckets = [bucket["Name"] for bucket in client("s3").list_buckets()["Buckets"]]
    assert buckets == ["cdk-hnb659fds-assets-123456789012-us-west-2"]
    roles = [role["RoleName"] for role in client("iam").list_roles(MaxItems=1000)["Roles"]]
    assert not [role for role in roles if role.startswith("p5-2node-")]

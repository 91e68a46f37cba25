"""What both node groups' launch templates and their instances share: root volume, metadata service, IAM role."""

from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from constructs import Construct

ROOT_DEVICE = "/dev/xvda"  # of Amazon Linux 2023


def node_role(scope: Construct, id_: str) -> iam.Role:
    """What a node itself may do; the CNI's rights are on its own Pod Identity role instead."""
    policies = ("AmazonEKSWorkerNodePolicy", "AmazonEC2ContainerRegistryPullOnly", "AmazonSSMManagedInstanceCore")
    return iam.Role(
        scope,
        id_,
        assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),  # pyright: ignore[reportArgumentType]
        managed_policies=[iam.ManagedPolicy.from_aws_managed_policy_name(name) for name in policies],
    )


def metadata_options() -> ec2.CfnLaunchTemplate.MetadataOptionsProperty:
    """IMDSv2 only. Two hops: what EKS's own templates set, for pods that ask for their region."""
    return ec2.CfnLaunchTemplate.MetadataOptionsProperty(
        http_endpoint="enabled", http_tokens="required", http_put_response_hop_limit=2
    )


def encrypted_root(device: str, size_gib: int) -> ec2.CfnLaunchTemplate.BlockDeviceMappingProperty:
    """The root volume; a node group with a launch template takes no diskSize of its own."""
    return ec2.CfnLaunchTemplate.BlockDeviceMappingProperty(
        device_name=device,
        ebs=ec2.CfnLaunchTemplate.EbsProperty(
            volume_size=size_gib, volume_type="gp3", encrypted=True, delete_on_termination=True
        ),
    )

"""The CPU nodes for controllers, CoreDNS and the rendezvous."""

from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_iam as iam
from constructs import Construct

from config import names
from config.cluster import SYSTEM_ROOT_GIB, ClusterConfig
from stacks.network import NetworkStack
from stacks.nodes import ROOT_DEVICE, encrypted_root, metadata_options


class SystemNodegroup(Construct):
    """A managed node group in both private subnets, without taints: whatever tolerates nothing lands here."""

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        config: ClusterConfig,
        cluster: eks.ICluster,
        network: NetworkStack,
        node_role: iam.Role,
    ) -> None:
        super().__init__(scope, id_)
        template = self._launch_template(config, cluster, network)
        count = config.system_nodes.node_count
        self.nodegroup = eks.CfnNodegroup(
            self,
            "Nodegroup",
            cluster_name=cluster.cluster_name,
            node_role=node_role.role_arn,
            subnets=[subnet.subnet_id for subnet in network.private_subnets],
            ami_type="AL2023_x86_64_STANDARD",
            version=config.kubernetes_version,
            launch_template=eks.CfnNodegroup.LaunchTemplateSpecificationProperty(
                id=template.ref, version=template.attr_latest_version_number
            ),
            scaling_config=eks.CfnNodegroup.ScalingConfigProperty(min_size=count, desired_size=count, max_size=count),
            update_config=eks.CfnNodegroup.UpdateConfigProperty(max_unavailable=1),
            labels={names.NODE_ROLE_LABEL: names.NODE_ROLE_SYSTEM},
            node_repair_config=eks.CfnNodegroup.NodeRepairConfigProperty(enabled=True),
        )

    def _launch_template(
        self, config: ClusterConfig, cluster: eks.ICluster, network: NetworkStack
    ) -> ec2.CfnLaunchTemplate:
        return ec2.CfnLaunchTemplate(
            self,
            "LaunchTemplate",
            launch_template_data=ec2.CfnLaunchTemplate.LaunchTemplateDataProperty(
                instance_type=config.system_nodes.instance_type,
                # With groups in the template EKS does not add its own. Data is prepared on these nodes, hence Lustre.
                security_group_ids=[
                    cluster.cluster_security_group_id,
                    network.lustre_client_security_group.security_group_id,
                ],
                metadata_options=metadata_options(),
                block_device_mappings=[encrypted_root(ROOT_DEVICE, SYSTEM_ROOT_GIB)],
            ),
        )

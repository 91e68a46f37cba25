"""The GPU nodes: one launch template with every EFA interface, one managed node group in one subnet."""

from dataclasses import dataclass

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_iam as iam
from constructs import Construct

from config import names
from config.cluster import (
    Capacity,
    CapacityBlock,
    ClusterConfig,
    OnDemand,
    OnDemandCapacityReservation,
    Spot,
)
from config.instances import InstanceType
from config.job import JobConfig
from stacks.network import NetworkStack
from stacks.node_repair import node_repair
from stacks.nodes import ROOT_DEVICE, encrypted_root, metadata_options

# Merged by EKS with its own part, which names the cluster (EKS user guide, launch-templates). RAID0 joins the NVMe
# disks and puts containerd, kubelet and emptyDir volumes on them: the local checkpoint tier. Their content outlives
# a reboot, not a replaced instance. The AMI would assume more pods than the CNI has addresses (config/instances.py).
_USER_DATA = """\
MIME-Version: 1.0
Content-Type: multipart/mixed; boundary="//"

--//
Content-Type: application/node.eks.aws

apiVersion: node.eks.aws/v1alpha1
kind: NodeConfig
spec:
  instance:
    localStorage:
      strategy: RAID0
  kubelet:
    config:
      maxPods: {max_pods}

--//--
"""


@dataclass(frozen=True)
class _Purchase:
    """Everything that follows from the kind of capacity.

    One node at a time is updated; MINIMAL takes the old node away first, since a reservation has no room for a
    surge (terraform-provider-aws #41442).
    """

    capacity_type: str
    update_strategy: str
    started: bool = True
    own_placement_group: bool = False
    placement_group: str | None = None
    reservation_id: str | None = None
    market_type: str | None = None


def _purchase(capacity: Capacity) -> _Purchase:
    match capacity:
        case OnDemand():
            return _Purchase("ON_DEMAND", "DEFAULT", own_placement_group=True)
        case Spot():
            return _Purchase("SPOT", "DEFAULT")
        case OnDemandCapacityReservation():
            # A group other than the reservation's own gives InsufficientInstanceCapacity (terraform-aws-eks #3730).
            return _Purchase(
                "ON_DEMAND",
                "MINIMAL",
                placement_group=capacity.placement_group,
                reservation_id=capacity.reservation_id,
            )
        case CapacityBlock():
            # Placed in an UltraCluster by EC2 already: no group (EKS user guide, capacity-blocks-mng).
            return _Purchase(
                "CAPACITY_BLOCK",
                "MINIMAL",
                started=capacity.started,
                reservation_id=capacity.reservation_id,
                market_type="capacity-block",
            )


class GpuNodegroup(Construct):
    """As many nodes as the job has pods, spares included.

    L1 resources: the L2 node group refuses p5 with the NVIDIA AMI and knows neither update strategy nor capacity
    block, and the L2 launch template has no network interfaces (aws-cdk-lib 2.275; aws-cdk #31347).
    """

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        config: ClusterConfig,
        job: JobConfig,
        cluster: eks.ICluster,
        network: NetworkStack,
        node_role: iam.Role,
    ) -> None:
        super().__init__(scope, id_)
        assert job.instance is not None, "DeploymentConfig asks for it where there is a cluster"
        self._config = config
        self._instance = job.instance
        self._purchase = _purchase(config.capacity)
        groups = [
            cluster.cluster_security_group_id,
            network.efa_security_group.security_group_id,
            network.lustre_client_security_group.security_group_id,
        ]
        template = self._launch_template(groups)
        self.nodegroup = self._nodegroup(job, cluster, network, node_role, template)

    def _launch_template(self, security_groups: list[str]) -> ec2.CfnLaunchTemplate:
        """No subnet, instance profile or group of its own at the top level: each makes EKS refuse the template."""
        name = f"{cdk.Stack.of(self).stack_name}/gpu"
        tags = [cdk.CfnTag(key="Name", value=name)]
        return ec2.CfnLaunchTemplate(
            self,
            "LaunchTemplate",
            launch_template_data=ec2.CfnLaunchTemplate.LaunchTemplateDataProperty(
                # Here and not in the node group, which a capacity block demands; in both, EKS refuses it.
                instance_type=self._instance.name,
                network_interfaces=network_interfaces(self._instance, security_groups),
                block_device_mappings=[encrypted_root(ROOT_DEVICE, self._config.root_volume_gib)],
                metadata_options=metadata_options(),
                user_data=cdk.Fn.base64(_USER_DATA.format(max_pods=self._instance.max_pods)),
                placement=self._placement(),
                capacity_reservation_specification=self._reservation(),
                instance_market_options=self._market(),
                tag_specifications=[
                    ec2.CfnLaunchTemplate.TagSpecificationProperty(resource_type=kind, tags=tags)
                    for kind in ("instance", "volume")
                ],
            ),
        )

    def _placement(self) -> ec2.CfnLaunchTemplate.PlacementProperty | None:
        if self._purchase.own_placement_group:
            group = ec2.CfnPlacementGroup(self, "PlacementGroup", strategy="cluster")
            return ec2.CfnLaunchTemplate.PlacementProperty(group_name=group.ref)
        if self._purchase.placement_group is not None:
            return ec2.CfnLaunchTemplate.PlacementProperty(group_name=self._purchase.placement_group)
        return None

    def _reservation(self) -> ec2.CfnLaunchTemplate.CapacityReservationSpecificationProperty | None:
        if self._purchase.reservation_id is None:
            return None
        # The target alone: EC2 takes a preference or a target, not both.
        return ec2.CfnLaunchTemplate.CapacityReservationSpecificationProperty(
            capacity_reservation_target=ec2.CfnLaunchTemplate.CapacityReservationTargetProperty(
                capacity_reservation_id=self._purchase.reservation_id
            )
        )

    def _market(self) -> ec2.CfnLaunchTemplate.InstanceMarketOptionsProperty | None:
        if self._purchase.market_type is None:
            return None
        return ec2.CfnLaunchTemplate.InstanceMarketOptionsProperty(market_type=self._purchase.market_type)

    def _nodegroup(
        self,
        job: JobConfig,
        cluster: eks.ICluster,
        network: NetworkStack,
        node_role: iam.Role,
        template: ec2.CfnLaunchTemplate,
    ) -> eks.CfnNodegroup:
        # A block's group may fall to 0: EKS schedules that itself, 40 minutes before the block ends.
        count = job.pod_count
        minimum = 0 if self._purchase.market_type is not None else count
        return eks.CfnNodegroup(
            self,
            "Nodegroup",
            cluster_name=cluster.cluster_name,
            node_role=node_role.role_arn,
            # One: EFA does not cross subnets, and a second zone means failed launches (containers-roadmap #2204).
            subnets=[network.gpu_subnet.subnet_id],
            ami_type="AL2023_x86_64_NVIDIA",
            version=self._config.kubernetes_version if self._config.ami_release_version is None else None,
            release_version=self._config.ami_release_version,
            capacity_type=self._purchase.capacity_type,
            launch_template=eks.CfnNodegroup.LaunchTemplateSpecificationProperty(
                # The newest version, by reference: a number written here would silently ignore every later edit.
                id=template.ref,
                version=template.attr_latest_version_number,
            ),
            scaling_config=eks.CfnNodegroup.ScalingConfigProperty(
                min_size=minimum, desired_size=count if self._purchase.started else 0, max_size=count
            ),
            update_config=eks.CfnNodegroup.UpdateConfigProperty(
                max_unavailable=1, update_strategy=self._purchase.update_strategy
            ),
            labels=_labels(self._instance),
            taints=[eks.CfnNodegroup.TaintProperty(key=names.GPU_TAINT_KEY, value="true", effect="NO_SCHEDULE")],
            node_repair_config=node_repair(job),
        )


def network_interfaces(
    instance: InstanceType, security_groups: list[str]
) -> list[ec2.CfnLaunchTemplate.NetworkInterfaceProperty]:
    """Every interface of the instance type's layout, all with the same security groups.

    With interfaces in the template EKS does not add its cluster group: without it no node joins. And an EFA interface
    that lacks the EFA group reaches nobody (eksctl #3465).
    """
    return [
        ec2.CfnLaunchTemplate.NetworkInterfaceProperty(
            network_card_index=interface.network_card_index,
            device_index=interface.device_index,
            interface_type=interface.interface_type,
            groups=security_groups,
            delete_on_termination=True,
        )
        for interface in instance.network_interfaces
    ]


def _labels(instance: InstanceType) -> dict[str, str]:
    labels = {names.NODE_ROLE_LABEL: names.NODE_ROLE_GPU, names.GPU_PRESENT_LABEL: "true"}
    return labels | ({names.EFA_PRESENT_LABEL: "true"} if instance.efa_count else {})

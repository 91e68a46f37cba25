"""What EKS refuses in the split between a managed node group and its launch template, and in how nodes are bought."""

import re
from collections.abc import Callable, Iterator

from config.finding import Finding
from config.rules.node_group import NodeGroup
from config.rules.shapes import LATE
from config.rules.template import is_literal, reference

_LAUNCH_TEMPLATES = "https://docs.aws.amazon.com/eks/latest/userguide/launch-templates.html"
_CAPACITY_BLOCKS = "https://docs.aws.amazon.com/eks/latest/userguide/capacity-blocks-mng.html"
_NODE_GROUP = "https://docs.aws.amazon.com/AWSCloudFormation/latest/UserGuide/aws-resource-eks-nodegroup.html"
_BOTH_TYPES = "https://github.com/terraform-aws-modules/terraform-aws-eks/issues/1386"
_PLACEMENT = "https://github.com/terraform-aws-modules/terraform-aws-eks/pull/3730"
_EMPTY_TARGET = "https://github.com/eksctl-io/eksctl/issues/8320"
_MINIMAL = "https://github.com/hashicorp/terraform-provider-aws/issues/41442"
_AL2023_ONLY = "https://github.com/awslabs/awsome-distributed-ai/issues/519"
_MAX_PODS = "https://github.com/awslabs/amazon-eks-ami/issues/1392"

_GPU_AMI = "AL2023_x86_64_NVIDIA"
_RESERVATION_ID = re.compile(r"cr-[0-9a-f]{8,17}")
_CAPACITY_TYPES = ("ON_DEMAND", "SPOT", "CAPACITY_BLOCK")

# Fields of the launch template that make EKS refuse the node group, and where their meaning goes instead.
_FORBIDDEN_IN_TEMPLATE = {
    "IamInstanceProfile": "remove it; set NodeRole of the node group",
    "InstanceInitiatedShutdownBehavior": "remove it; EKS ends instances itself",
    "HibernationOptions": "remove it; EKS ends instances itself",
}
# Fields of the node group that EKS refuses beside a launch template.
_FORBIDDEN_IN_GROUP = {
    "DiskSize": "remove it; size the root volume in BlockDeviceMappings of the launch template",
    "RemoteAccess": "remove it; set KeyName and the security groups in the launch template",
}


def instance_type_in_one_place(group: NodeGroup) -> Iterator[Finding]:
    """In both, the API answers InvalidParameterException; in none, EKS silently takes t3.medium."""
    in_group, in_template = group.group.properties.get("InstanceTypes"), group.data.get("InstanceType")
    if in_group and in_template and LATE not in (*in_group, in_template):
        yield Finding(
            group.in_group("InstanceTypes"),
            f"{in_group}, and {in_template} in the launch template",
            "the instance type stands in the launch template or in the node group, not in both",
            "remove InstanceTypes of the node group (a Capacity Block wants it in the launch template)",
            _BOTH_TYPES,
        )
    if not in_group and not in_template:
        yield Finding(
            group.in_group("InstanceTypes"),
            "none",
            "without a type in the launch template or in the node group EKS takes t3.medium",
            "set InstanceType in the launch template",
            _NODE_GROUP,
        )


def forbidden_fields(group: NodeGroup) -> Iterator[Finding]:
    """The two tables above, and a subnet in an interface."""
    if group.launch_template is None:
        return
    for field, fix in _FORBIDDEN_IN_TEMPLATE.items():
        if field in group.data:
            yield Finding(
                group.in_template(field),
                str(group.data[field]),
                f"a managed node group's launch template has no {field}",
                fix,
                _LAUNCH_TEMPLATES,
            )
    for field, fix in _FORBIDDEN_IN_GROUP.items():
        if field in group.group.properties:
            yield Finding(
                group.in_group(field),
                str(group.group.properties[field]),
                f"a node group with a launch template has no {field}",
                fix,
                _LAUNCH_TEMPLATES,
            )
    for number, interface in enumerate(group.interfaces):
        if "SubnetId" in interface:
            yield Finding(
                group.in_template(f"NetworkInterfaces[{number}].SubnetId"),
                str(interface["SubnetId"]),
                "a managed node group's launch template names no subnet",
                "remove SubnetId; set Subnets of the node group",
                _LAUNCH_TEMPLATES,
            )


def custom_image(group: NodeGroup) -> Iterator[Finding]:
    """With an AMI of your own EKS neither chooses one nor merges user data."""
    if "ImageId" not in group.data:
        return
    for field in ("AmiType", "ReleaseVersion", "Version"):
        if field in group.group.properties:
            yield Finding(
                group.in_group(field),
                str(group.group.properties[field]),
                "with ImageId in the launch template the node group names no AMI type, release or version",
                f"remove {field}, or ImageId so that EKS chooses the AMI",
                _LAUNCH_TEMPLATES,
            )


def version_by_reference(group: NodeGroup) -> Iterator[Finding]:
    """A number written down silently ignores every later change of the launch template."""
    version = group.group.properties.get("LaunchTemplate", {}).get("Version")
    if group.launch_template is not None and is_literal(version):
        yield Finding(
            group.in_group("LaunchTemplate.Version"),
            str(version),
            "a fixed version ignores every later change of the launch template",
            "write GetAtt LatestVersionNumber of the launch template",
            _LAUNCH_TEMPLATES,
        )


def capacity_type(group: NodeGroup) -> Iterator[Finding]:
    """A closed set."""
    kind = group.group.properties.get("CapacityType", "ON_DEMAND")
    if kind not in _CAPACITY_TYPES and is_literal(kind):
        yield Finding(
            group.in_group("CapacityType"),
            str(kind),
            f"EKS knows {', '.join(_CAPACITY_TYPES)}",
            "choose one of them",
            _NODE_GROUP,
        )


def capacity_block_is_complete(group: NodeGroup) -> Iterator[Finding]:
    """Market type, reservation, instance type and capacity type go together: any of them missing, EKS refuses."""
    if not group.is_capacity_block:
        return
    needed = {
        group.in_template("InstanceMarketOptions.MarketType"): (
            group.data.get("InstanceMarketOptions", {}).get("MarketType"),
            "capacity-block",
        ),
        group.in_group("CapacityType"): (group.group.properties.get("CapacityType"), "CAPACITY_BLOCK"),
    }
    for path, (value, wanted) in needed.items():
        if value != wanted and is_literal(value):
            yield Finding(
                path, str(value), f"a Capacity Block needs {wanted} here", f"set it to {wanted}", _CAPACITY_BLOCKS
            )
    specification = group.data.get("CapacityReservationSpecification", {})
    if not specification.get("CapacityReservationTarget", {}).get("CapacityReservationId"):
        yield Finding(
            group.in_template("CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId"),
            "none",
            "a Capacity Block is launched into by its reservation id",
            "set the block's id, cr-...",
            _CAPACITY_BLOCKS,
        )
    if not group.data.get("InstanceType"):
        yield Finding(
            group.in_template("InstanceType"),
            "none",
            "a Capacity Block's instance type stands in the launch template",
            "set InstanceType there and remove InstanceTypes of the node group",
            _CAPACITY_BLOCKS,
        )


def no_placement_group_with_block(group: NodeGroup) -> Iterator[Finding]:
    """A block is placed in one UltraCluster already; with a group EC2 finds too few instances."""
    named = group.placement.get("GroupName") or group.placement.get("GroupId")
    if group.is_capacity_block and named:
        yield Finding(
            group.in_template("Placement"),
            named,
            "a Capacity Block takes no placement group: its UltraCluster is one",
            "remove Placement",
            _PLACEMENT,
        )


def no_new_placement_group_with_reservation(group: NodeGroup) -> Iterator[Finding]:
    """Only the group that the reservation was created in fits, and this deployment can't have made that one."""
    made_here = group.templates.target(group.placement.get("GroupName"), "AWS::EC2::PlacementGroup")
    if group.reservation and made_here is not None and not group.is_capacity_block:
        yield Finding(
            group.in_template("Placement.GroupName"),
            made_here.key,
            "an ODCR is used with the placement group that it was created in, or with none",
            "remove Placement, or name the reservation's own group (cluster.capacity.placement_group)",
            _PLACEMENT,
        )


def reservation_target(group: NodeGroup) -> Iterator[Finding]:
    """An empty or doubtful target launches outside the reservation, at the full price, or not at all."""
    specification = group.data.get("CapacityReservationSpecification")
    if specification is None or LATE in specification.get("CapacityReservationTarget", {}).values():
        return
    path = group.in_template("CapacityReservationSpecification")
    target = group.reservation
    if specification.get("CapacityReservationPreference") and target:
        yield Finding(
            path, "preference and target", "EC2 takes a preference or a target", "remove the preference", _EMPTY_TARGET
        )
    named = [key for key in ("CapacityReservationId", "CapacityReservationResourceGroupArn") if target.get(key)]
    if "CapacityReservationTarget" in specification and len(named) != 1:
        yield Finding(
            f"{path}.CapacityReservationTarget",
            str(target),
            "a target names one reservation id or one resource group",
            "set CapacityReservationId",
            _EMPTY_TARGET,
        )
    id_ = target.get("CapacityReservationId")
    if id_ and is_literal(id_) and not _RESERVATION_ID.fullmatch(str(id_)):
        yield Finding(
            f"{path}.CapacityReservationTarget.CapacityReservationId",
            str(id_),
            "a reservation id is cr- and 8 to 17 hexadecimal digits",
            "copy it from `aws ec2 describe-capacity-reservations`",
            _EMPTY_TARGET,
        )


def spot_without_reservation(group: NodeGroup) -> Iterator[Finding]:
    """Spot capacity is never taken from a reservation."""
    if group.group.properties.get("CapacityType") == "SPOT" and group.reservation:
        yield Finding(
            group.in_group("CapacityType"),
            "SPOT",
            "spot instances never run in a reservation, which is paid for all the same",
            "set ON_DEMAND for an ODCR, CAPACITY_BLOCK for a block",
            _NODE_GROUP,
        )


def minimal_update_in_reservation(group: NodeGroup) -> Iterator[Finding]:
    """DEFAULT launches the new node first, and a full reservation has no room for it."""
    strategy = group.group.properties.get("UpdateConfig", {}).get("UpdateStrategy")
    if (group.reservation or group.is_capacity_block) and strategy != "MINIMAL" and is_literal(strategy):
        yield Finding(
            group.in_group("UpdateConfig.UpdateStrategy"),
            str(strategy),
            "in a full reservation an update must end an old node before it launches a new one",
            "set MINIMAL, with MaxUnavailable 1",
            _MINIMAL,
        )


def metadata_service(group: NodeGroup) -> Iterator[Finding]:
    """IMDSv2, with a second hop for pods."""
    options = group.data.get("MetadataOptions", {})
    if group.launch_template is None:
        return
    for field, wanted in (("HttpTokens", "required"), ("HttpPutResponseHopLimit", 2)):
        if options.get(field) != wanted and is_literal(options.get(field)):
            yield Finding(
                group.in_template(f"MetadataOptions.{field}"),
                str(options.get(field)),
                "nodes speak IMDSv2 only, and pods are one hop away",
                f"set {wanted}",
                _LAUNCH_TEMPLATES,
            )


def gpu_ami(group: NodeGroup) -> Iterator[Finding]:
    """AL2 ended with Kubernetes 1.33 and fails with more than four GPUs' EFA; the standard AMI has no driver."""
    ami = group.group.properties.get("AmiType")
    if group.instance is not None and "ImageId" not in group.data and ami != _GPU_AMI and is_literal(ami):
        yield Finding(
            group.in_group("AmiType"),
            str(ami),
            f"{group.instance.name} needs Amazon Linux 2023 with the NVIDIA driver",
            f"set {_GPU_AMI} (lower-case x86)",
            _AL2023_ONLY,
        )


def max_pods(group: NodeGroup) -> Iterator[Finding]:
    """The kubelet's own default is more than the VPC CNI can give addresses to on card 0."""
    if group.instance is None:
        return
    text = group.data.get("UserData", "")
    found = re.search(r"maxPods:\s*(\d+)", text)
    if found is None and (reference(text) != (None, None) or re.search(r"maxPods:\s*\$\{", text)):
        return  # known only at deploy
    value = int(found[1]) if found else None
    if value is None or value > group.instance.max_pods:
        yield Finding(
            group.in_template("UserData"),
            f"maxPods {value}",
            f"the interfaces of {group.instance.name} that EFA leaves free have addresses for "
            f"{group.instance.max_pods} pods",
            f"set maxPods to {group.instance.max_pods} in NodeConfig",
            _MAX_PODS,
        )


def node_role_is_given(group: NodeGroup) -> Iterator[Finding]:
    """EKS makes the instance profile from it."""
    if not group.group.properties.get("NodeRole"):
        yield Finding(group.in_group("NodeRole"), "none", "a node group has a role", "set NodeRole", _NODE_GROUP)


def groups_at_one_level(group: NodeGroup) -> Iterator[Finding]:
    """Groups of an interface and groups of the template exclude each other."""
    given = [item for field in ("SecurityGroupIds", "SecurityGroups") for item in group.data.get(field, [])]
    if group.interfaces and given and LATE not in given:
        yield Finding(
            group.in_template("SecurityGroupIds"),
            ", ".join(given),
            "with NetworkInterfaces, security groups stand in each interface and not at the template's level",
            "move them to NetworkInterfaces[].Groups",
            _LAUNCH_TEMPLATES,
        )


def cluster_group_on_primary(group: NodeGroup) -> Iterator[Finding]:
    """With groups of our own EKS does not add the cluster's: the node boots and never joins."""
    if not group.interfaces_are_known:
        return
    primary = next(
        (nic for nic in group.interfaces if not nic.get("NetworkCardIndex") and not nic.get("DeviceIndex")), {}
    )
    groups = primary.get("Groups", []) if group.interfaces else group.data.get("SecurityGroupIds", [])
    given = bool(group.interfaces) or bool(groups)
    if any(group.templates.is_unknown(item) for item in groups):
        return
    if given and not any(reference(item)[1] == "ClusterSecurityGroupId" for item in groups):
        yield Finding(
            group.in_template("NetworkInterfaces" if group.interfaces else "SecurityGroupIds"),
            ", ".join(map(str, groups)) or "no groups",
            "with groups in the launch template EKS does not add the cluster's security group, and no node joins",
            "add GetAtt ClusterSecurityGroupId of the cluster to the primary interface",
            _LAUNCH_TEMPLATES,
        )


RULES: tuple[Callable[[NodeGroup], Iterator[Finding]], ...] = (
    instance_type_in_one_place,
    forbidden_fields,
    custom_image,
    version_by_reference,
    capacity_type,
    capacity_block_is_complete,
    no_placement_group_with_block,
    no_new_placement_group_with_reservation,
    reservation_target,
    spot_without_reservation,
    minimal_update_in_reservation,
    metadata_service,
    gpu_ami,
    max_pods,
    node_role_is_given,
    groups_at_one_level,
    cluster_group_on_primary,
)

"""Subnets and security groups of GPU nodes: what launches, and then hangs in NCCL or never joins."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from config.finding import Finding
from config.rules.node_group import EFA_TYPES, NodeGroup
from config.rules.template import Resource, Templates, reference

_SELF_EGRESS = "https://github.com/awslabs/awsome-distributed-ai/issues/546"
_GROUPS_ON_NICS = "https://github.com/eksctl-io/eksctl/issues/3465"
_CLUSTER_TAG = "https://github.com/eksctl-io/eksctl/pull/8556"
_ONE_ZONE = "https://github.com/aws/containers-roadmap/issues/2204"
_PRIVATE = "https://github.com/terraform-aws-modules/terraform-aws-eks/issues/3533"

_ALL_PORTS = (0, 65_535)


@dataclass(frozen=True)
class Permission:
    """One rule of a security group towards another group: which ports, and whether every protocol."""

    peer: str
    ports: tuple[int, int]
    everything: bool


def permissions(templates: Templates, group: str, direction: str) -> list[Permission]:
    """Rules of the security group (by key) towards groups; `direction` is Ingress or Egress.

    Both ways to write one: within the group, and as a resource of its own. CDK writes the former only for ranges, and
    drops an egress rule to a group, with a warning, while the group allows all outbound traffic.
    """
    resource = templates.target(f"${{{group}}}", "AWS::EC2::SecurityGroup")
    rules = list(resource.properties.get(f"SecurityGroup{direction}", [])) if resource else []
    rules += [
        rule.properties
        for rule in templates.of_type(f"AWS::EC2::SecurityGroup{direction}")
        if reference(rule.properties.get("GroupId"))[0] == group
    ]
    peer_field = "SourceSecurityGroupId" if direction == "Ingress" else "DestinationSecurityGroupId"
    return [_permission(rule, peer) for rule in rules if (peer := reference(rule.get(peer_field))[0])]


def _permission(rule: dict[str, Any], peer: str) -> Permission:
    everything = rule.get("IpProtocol") == "-1"
    low, high = rule.get("FromPort", 0), rule.get("ToPort", 65_535)
    # Ports that are known only at deploy may be any: no finding about them.
    known = isinstance(low, int) and isinstance(high, int)
    return Permission(peer, (low, high) if known and not everything else _ALL_PORTS, everything)


def open_to_itself(templates: Templates, group: str) -> bool:
    """Whether all traffic may go from and to the group itself."""
    return all(
        any(rule.everything and rule.peer == group for rule in permissions(templates, group, direction))
        for direction in ("Ingress", "Egress")
    )


def efa_security_group(group: NodeGroup) -> Iterator[Finding]:
    """Every EFA interface needs a group with all traffic from and to itself: 0.0.0.0/0 does not cover EFA."""
    for index, interface in enumerate(group.interfaces):
        if interface.get("InterfaceType") not in EFA_TYPES:
            continue
        keys = [key for item in interface.get("Groups", []) if (key := reference(item)[0])]
        unknown = any(group.templates.is_unknown(item) for item in interface.get("Groups", []))
        if unknown or any(open_to_itself(group.templates, key) for key in keys):
            continue
        known = [key for key in keys if key in group.templates.resources]
        where = group.in_template(f"NetworkInterfaces[{index}].Groups")
        yield Finding(
            where,
            ", ".join(known) or "no security group of this deployment",
            "EFA needs a group on the interface with all traffic in from itself and out to itself; "
            "egress to 0.0.0.0/0 does not cover it, and NCCL hangs",
            "attach the EFA security group, and give it SecurityGroupIngress and SecurityGroupEgress with IpProtocol "
            "-1 to itself (CDK drops the latter silently: write CfnSecurityGroupEgress)",
            _SELF_EGRESS if known else _GROUPS_ON_NICS,
        )
        return  # the others have the same groups; one line says it


def no_cluster_tag_on_efa_group(group: NodeGroup) -> Iterator[Finding]:
    """The load balancer controller wants exactly one tagged group on an interface: the cluster's."""
    keys = {reference(item)[0] for interface in group.interfaces for item in interface.get("Groups", [])}
    for key in sorted(key for key in keys if key):
        resource = group.templates.resources.get(key)
        if resource is None or resource.type != "AWS::EC2::SecurityGroup":
            continue
        for tag in resource.properties.get("Tags", []):
            if tag.get("Key", "").startswith("kubernetes.io/cluster/"):
                yield Finding(
                    resource.at("Tags"),
                    tag["Key"],
                    "only the cluster's own group may carry this tag: the load balancer controller wants exactly one",
                    "remove the tag",
                    _CLUSTER_TAG,
                )


def one_subnet(group: NodeGroup) -> Iterator[Finding]:
    """EFA does not cross subnets, and a reservation is in one zone."""
    subnets = group.group.properties.get("Subnets", [])
    if (group.has_efa or group.is_capacity_block) and len(subnets) != 1:
        yield Finding(
            group.in_group("Subnets"),
            f"{len(subnets)} subnets",
            "nodes with EFA, or from a reservation, live in exactly one subnet of one zone",
            "name the GPU subnet alone",
            _ONE_ZONE,
        )


def private_subnet(group: NodeGroup) -> Iterator[Finding]:
    """With several interfaces a node gets no public address: in a public subnet it reaches nothing."""
    if len(group.interfaces) < 2:
        return
    for subnet in group.group.properties.get("Subnets", []):
        found = group.templates.target(subnet, "AWS::EC2::Subnet")
        if found is not None and _is_public(group.templates, found):
            yield Finding(
                group.in_group("Subnets"),
                found.key,
                "nodes with several interfaces get no public address and never join from a public subnet",
                "use a private subnet with a NAT gateway or endpoints",
                _PRIVATE,
            )


def _is_public(templates: Templates, subnet: Resource) -> bool:
    tables = {
        reference(link.properties.get("RouteTableId"))[0]
        for link in templates.of_type("AWS::EC2::SubnetRouteTableAssociation")
        if reference(link.properties.get("SubnetId"))[0] == subnet.key
    }
    for route in templates.of_type("AWS::EC2::Route"):
        gateway = templates.target(route.properties.get("GatewayId"), "AWS::EC2::InternetGateway")
        if gateway is not None and reference(route.properties.get("RouteTableId"))[0] in tables:
            return True
    return subnet.properties.get("MapPublicIpOnLaunch") is True


RULES: tuple[Callable[[NodeGroup], Iterator[Finding]], ...] = (
    efa_security_group,
    no_cluster_tag_on_efa_group,
    one_subnet,
    private_subnet,
)

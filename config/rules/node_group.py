"""A managed node group together with its launch template, as the rules look at them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from config.instances import INSTANCE_TYPES, InstanceType
from config.rules.shapes import LATE, SHAPES, Shaper, is_late
from config.rules.template import Resource, Templates

EFA_TYPES = ("efa", "efa-only")
_ELSEWHERE = Shaper().shaped(LATE, SHAPES["AWS::EC2::LaunchTemplate"]["LaunchTemplateData"], "")


@dataclass(frozen=True)
class NodeGroup:
    """One AWS::EKS::Nodegroup, with its launch template where that stands in these templates."""

    templates: Templates
    group: Resource
    launch_template: Resource | None

    @property
    def data(self) -> dict[str, Any]:
        """LaunchTemplateData; LATE throughout where the launch template is somebody else's, empty without one."""
        if self.launch_template is not None:
            return self.launch_template.properties.get("LaunchTemplateData", {})
        return _ELSEWHERE if self.group.properties.get("LaunchTemplate") else {}

    @property
    def interfaces(self) -> list[dict[str, Any]]:
        """Network interfaces of the launch template."""
        return self.data.get("NetworkInterfaces", [])

    @property
    def interfaces_are_known(self) -> bool:
        """Whether it is known at synth how many interfaces there are, where they sit and of what type they are."""
        fields = ("NetworkCardIndex", "DeviceIndex", "InterfaceType")
        return not any(is_late(interface.get(field)) for interface in self.interfaces for field in fields)

    @property
    def instance_type(self) -> str | None:
        """Name of its one instance type, wherever it stands."""
        named = self.data.get("InstanceType") or next(iter(self.group.properties.get("InstanceTypes", [])), None)
        return named if isinstance(named, str) else None

    @property
    def instance(self) -> InstanceType | None:
        """Its row of the table of accelerated types; None for any other type."""
        return INSTANCE_TYPES.get(self.instance_type or "")

    @property
    def has_efa(self) -> bool:
        """Whether any interface speaks EFA."""
        return any(interface.get("InterfaceType") in EFA_TYPES for interface in self.interfaces)

    @property
    def is_capacity_block(self) -> bool:
        """Whether either side says that it is bought as a Capacity Block."""
        market = self.data.get("InstanceMarketOptions", {}).get("MarketType")
        return self.group.properties.get("CapacityType") == "CAPACITY_BLOCK" or market == "capacity-block"

    @property
    def reservation(self) -> dict[str, Any]:
        """CapacityReservationTarget; empty without one, or where it is not known whether there is one."""
        return _known(self.data.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {}))

    @property
    def placement(self) -> dict[str, Any]:
        """Placement, likewise."""
        return _known(self.data.get("Placement", {}))

    def in_group(self, path: str) -> str:
        """Path of a property of the group, for a finding."""
        return self.group.at(path)

    def in_template(self, path: str) -> str:
        """Path of a field of LaunchTemplateData, for a finding."""
        key = self.group.key if self.launch_template is None else self.launch_template.key
        return f"{key}.LaunchTemplateData.{path}"


def node_groups(templates: Templates) -> Iterator[NodeGroup]:
    """Every managed node group, joined with its launch template."""
    for group in templates.of_type("AWS::EKS::Nodegroup"):
        specification = group.properties.get("LaunchTemplate", {})
        named = specification.get("Id") or specification.get("Name")
        yield NodeGroup(templates, group, templates.target(named, "AWS::EC2::LaunchTemplate"))


def _known(section: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value != LATE}

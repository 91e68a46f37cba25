"""Synthesized CloudFormation templates as plain dictionaries, with the references in and between them resolved."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_NO_VALUE = {"Ref": "AWS::NoValue"}
# Properties that are lists, and in others' templates one reference to a parameter that holds a list.
_LISTS = ("Groups", "InstanceTypes", "SecurityGroupIds", "SubnetIds", "Subnets")
_REFERENCE = re.compile(r"\$\{(?P<key>[^:}]+)(?::(?P<attribute>[^}]+))?\}")


@dataclass(frozen=True)
class Resource:
    """One resource; references in its properties read `${Stack/LogicalId}` or `${Stack/LogicalId:Attribute}`."""

    key: str
    type: str
    properties: dict[str, Any]
    depends_on: frozenset[str] = field(default_factory=frozenset)

    def at(self, path: str) -> str:
        """Path of one of its properties, for a finding."""
        return f"{self.key}.{path}"


class Templates:
    """All templates of one deployment by stack name; a template alone is the case of one.

    Conditions are not evaluated: of an Fn::If the first branch that has a value is looked at.
    """

    def __init__(self, templates: Mapping[str, Mapping[str, Any]]) -> None:
        self._exports: dict[str, Any] = {}
        for stack, template in templates.items():
            for output in template.get("Outputs", {}).values():
                if "Export" in output and isinstance(output["Export"]["Name"], str):
                    self._exports[output["Export"]["Name"]] = (stack, output["Value"])
        self.resources: dict[str, Resource] = {}
        for stack, template in templates.items():
            for logical_id, resource in template.get("Resources", {}).items():
                depends_on = resource.get("DependsOn", [])
                key = f"{stack}/{logical_id}"
                self.resources[key] = Resource(
                    key=key,
                    type=resource["Type"],
                    properties=self._resolve(stack, resource.get("Properties", {})),
                    depends_on=frozenset(
                        f"{stack}/{other}" for other in ([depends_on] if isinstance(depends_on, str) else depends_on)
                    ),
                )

    def of_type(self, kind: str) -> list[Resource]:
        """Every resource of a CloudFormation type."""
        return [resource for resource in self.resources.values() if resource.type == kind]

    def target(self, value: Any) -> Resource | None:
        """The resource that a resolved reference leads to; None for anything else."""
        key, _ = reference(value)
        return None if key is None else self.resources.get(key)

    def zone(self, subnet: Any) -> str:
        """A subnet's zone where it is known, else the subnet itself."""
        found = self.target(subnet)
        return str(found.properties.get("AvailabilityZone", subnet)) if found else str(subnet)

    def is_unknown(self, value: Any) -> bool:
        """Whether the value comes from outside these templates: a parameter, or another stack's export."""
        key, _ = reference(value)
        return isinstance(value, dict) or (key is not None and key not in self.resources)

    def _resolve(self, stack: str, value: Any) -> Any:
        match value:
            case {"Fn::If": [_, *branches]}:
                return self._resolve(stack, next((branch for branch in branches if branch != _NO_VALUE), None))
            case {"Ref": str(logical_id)} if len(value) == 1:
                return f"${{{stack}/{logical_id}}}"
            case {"Fn::GetAtt": [str(logical_id), str(attribute)]}:
                return f"${{{stack}/{logical_id}:{attribute}}}"
            case {"Fn::GetAtt": str(dotted)}:
                logical_id, _, attribute = dotted.partition(".")
                return f"${{{stack}/{logical_id}:{attribute}}}"
            case {"Fn::ImportValue": str(name)} if name in self._exports:
                return self._resolve(*self._exports[name])
            case dict():
                given = {key: self._resolve(stack, item) for key, item in value.items() if item != _NO_VALUE}
                return {k: [v] if k in _LISTS and not isinstance(v, list) else v for k, v in given.items()}
            case list():
                return [self._resolve(stack, item) for item in value]
            case _:
                return value


def reference(value: Any) -> tuple[str | None, str | None]:
    """(resource key, attribute) of a resolved reference; the attribute is None for a Ref, both for anything else."""
    found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return (found["key"], found["attribute"]) if found else (None, None)


def is_literal(value: Any) -> bool:
    """Whether the value is known at synth."""
    return not isinstance(value, dict) and reference(value) == (None, None)


def number(value: Any) -> Any:
    """An integer that is written as text, as one; CloudFormation takes both. Anything else as it is."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value

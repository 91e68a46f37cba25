"""Synthesized CloudFormation templates as plain dictionaries, with the references in and between them resolved."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from config.finding import Finding
from config.rules.shapes import SHAPES, Shaper, is_late

_NO_VALUE = {"Ref": "AWS::NoValue"}
_REFERENCE = re.compile(r"\$\{(?P<key>[^:}]+)(?::(?P<attribute>[^}]+))?\}")
# Of Fn::Sub; ${!text} stays text.
_SUBSTITUTE = re.compile(r"\$\{([^!}][^}]*)\}")


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

    Conditions are not evaluated: of an Fn::If the first branch that has a value is looked at. `findings` are about
    properties that a rule reads and whose shape is wrong (config/rules/shapes.py).
    """

    def __init__(self, templates: Mapping[str, Mapping[str, Any]]) -> None:
        self._exports = {name: export for stack, one in templates.items() for name, export in _exports(stack, one)}
        self.resources: dict[str, Resource] = {}
        shaper = Shaper()
        for stack, template in templates.items():
            for logical_id, resource in template.get("Resources", {}).items():
                key = f"{stack}/{logical_id}"
                properties = self._resolve(stack, resource.get("Properties", {}))
                self.resources[key] = Resource(
                    key=key,
                    type=resource["Type"],
                    properties=shaper.shaped(properties, SHAPES.get(resource["Type"], {}), key),
                    depends_on=frozenset(f"{stack}/{other}" for other in _names(resource.get("DependsOn"))),
                )
        self.findings: list[Finding] = shaper.findings

    def of_type(self, kind: str) -> list[Resource]:
        """Every resource of a CloudFormation type."""
        return [resource for resource in self.resources.values() if resource.type == kind]

    def target(self, value: Any, kind: str) -> Resource | None:
        """The resource of that type that a resolved reference leads to; None for anything else."""
        key, _ = reference(value)
        found = None if key is None else self.resources.get(key)
        return found if found is not None and found.type == kind else None

    def zone(self, subnet: str) -> str | None:
        """A subnet's zone where it is known."""
        found = self.target(subnet, "AWS::EC2::Subnet")
        zone = found.properties.get("AvailabilityZone") if found else None
        return zone if is_literal(zone) else None

    def is_unknown(self, value: Any) -> bool:
        """Whether the value comes from outside these templates: a parameter, or another stack's export."""
        return is_late(value) and reference(value)[0] not in self.resources

    def _resolve(self, stack: str, value: Any, importing: frozenset[str] = frozenset()) -> Any:
        """References as text, functions of literals as their result; what stays a function is known only at deploy."""

        def inner(item: Any) -> Any:
            return self._resolve(stack, item, importing)

        match value:
            case {"Ref": "AWS::NoValue"}:
                return _NO_VALUE
            case {"Fn::If": [_, first, second]}:
                return inner(second if first == _NO_VALUE else first)
            case {"Ref": str(logical_id)} if len(value) == 1:
                return f"${{{stack}/{logical_id}}}"
            case {"Fn::GetAtt": [str(logical_id), str(attribute)]}:
                return f"${{{stack}/{logical_id}:{attribute}}}"
            case {"Fn::GetAtt": str(dotted)}:
                return _attribute(stack, dotted)
            case {"Fn::Sub": str(text)}:
                return _SUBSTITUTE.sub(lambda found: _attribute(stack, found[1]), text)
            case {"Fn::Join": [str(separator), list(parts)]}:
                texts = inner(parts)
                return separator.join(texts) if all(isinstance(text, str) for text in texts) else value
            case {"Fn::Base64": text}:
                return inner(text)
            case {"Fn::ImportValue": str(name)} if name in self._exports and name not in importing:
                exporter, exported = self._exports[name]
                return self._resolve(exporter, exported, importing | {name})
            case dict():
                given = {key: inner(item) for key, item in value.items()}
                return {key: item for key, item in given.items() if item != _NO_VALUE}
            case list():
                return [item for item in map(inner, value) if item != _NO_VALUE]
            case _:
                return value


def _exports(stack: str, template: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, Any]]]:
    """(name, (stack, value)) of every output that other stacks may import."""
    outputs = template.get("Outputs")
    for output in outputs.values() if isinstance(outputs, dict) else ():
        match output:
            case {"Export": {"Name": str(name)}, "Value": value}:
                yield name, (stack, value)


def _names(depends_on: Any) -> list[str]:
    """One logical id or several."""
    return [name for name in (depends_on if isinstance(depends_on, list) else [depends_on]) if isinstance(name, str)]


def _attribute(stack: str, dotted: str) -> str:
    logical_id, dot, attribute = dotted.partition(".")
    return f"${{{stack}/{logical_id}{':' if dot else ''}{attribute}}}"


def reference(value: Any) -> tuple[str | None, str | None]:
    """(resource key, attribute) of a resolved reference; the attribute is None for a Ref, both for anything else."""
    found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return (found["key"], found["attribute"]) if found else (None, None)


def is_literal(value: Any) -> bool:
    """Whether the value is known at synth."""
    return not is_late(value)

"""One reviewed outline per stack of p5-2node: what is built, by name and type. To accept a change:

UPDATE_SNAPSHOTS=1 python -m pytest tests/stacks/test_outlines.py
"""

import itertools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

OUTLINES = Path(__file__).parent / "outlines"
STACKS = ("network", "storage", "image", "cluster", "observability")
# Long texts and what repeats another test's subject: policies are cdk-nag's, charts' values the add-on tests'.
_LEFT_OUT = {
    "AssumeRolePolicyDocument",
    "Code",
    "ConfigurationBlob",
    "Data",
    "Description",
    "KeyPolicy",
    "Manifest",
    "PolicyDocument",
    "Source",
    "Tags",
    "TagSpecifications",
    "UserData",
    "Values",
}
_PLUMBING = ("AWS::CDK::Metadata", "AWS::Lambda::", "AWS::IAM::Policy")


def outline(template: dict[str, Any]) -> dict[str, Any]:
    """Logical id and type of every resource, whether it outlives its stack, and its shorter settings."""
    return {
        f"{name} ({resource['Type']})": _fate(resource) | _short(resource.get("Properties", {}))
        for name, resource in sorted(template["Resources"].items())
        if not resource["Type"].startswith(_PLUMBING)
    }


def _fate(resource: dict[str, Any]) -> dict[str, Any]:
    policy = {"DeletionPolicy": resource.get("DeletionPolicy", "Delete")}
    return {} if policy == {"DeletionPolicy": "Delete"} else policy


def _interfaces(value: list[dict[str, Any]]) -> list[str]:
    """Neighbours of the same kind on one line, and the security groups once where they are all the same."""
    lines = []
    for (device, kind), same in itertools.groupby(value, key=lambda nic: (nic["DeviceIndex"], nic["InterfaceType"])):
        cards = [nic["NetworkCardIndex"] for nic in same]
        assert cards == list(range(cards[0], cards[-1] + 1))
        lines.append(f"cards {cards[0]}-{cards[-1]}, device {device}, {kind}")
    groups = sorted({" + ".join(map(_short, nic["Groups"])) for nic in value})
    return [*lines, *(f"{'each' if len(groups) == 1 else 'some'} in {group}" for group in groups)]


def _short(value: Any) -> Any:
    """References as one word, repeated entries counted, hashes of assets left out."""
    if isinstance(value, dict):
        if len(value) == 1:
            (key, inner), *_ = value.items()
            if key == "Ref":
                return f"ref {inner}"
            if key == "Fn::GetAtt":
                return f"ref {'.'.join(inner) if isinstance(inner, list) else inner}"
            if key == "Fn::ImportValue":
                return f"import {_short(inner)}"
            if key == "Fn::Join":
                return "".join(part if isinstance(part, str) else f"<{_short(part)}>" for part in inner[1])
        return {
            key: _interfaces(inner) if key == "NetworkInterfaces" else _short(inner)
            for key, inner in value.items()
            if key not in _LEFT_OUT
        }
    if isinstance(value, list):
        shortened = [_short(item) for item in value]
        return shortened if len(shortened) <= 4 else [*shortened[:3], f"and {len(shortened) - 3} more"]
    return re.sub(r"[0-9a-f]{64}", "HASH", value) if isinstance(value, str) else value


@pytest.mark.parametrize("stack", STACKS)
def test_the_stack_looks_as_reviewed(templates, stack):
    file = OUTLINES / f"{stack}.yaml"
    text = yaml.safe_dump(outline(templates[stack].to_json()), sort_keys=False, width=120)
    if os.environ.get("UPDATE_SNAPSHOTS"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert file.exists(), f"no {file.name} yet; run with UPDATE_SNAPSHOTS=1 and review it"
    assert yaml.safe_load(file.read_text()) == yaml.safe_load(text)

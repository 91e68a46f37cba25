"""One reviewed outline per stack of p5-2node: what is built, by name and type. To accept a change:

UPDATE_SNAPSHOTS=1 python -m pytest tests/stacks/test_outlines.py
"""

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
    """Logical id and type of every resource, with its shorter settings."""
    return {
        f"{name} ({resource['Type']})": _short(resource.get("Properties", {}))
        for name, resource in sorted(template["Resources"].items())
        if not resource["Type"].startswith(_PLUMBING)
    }


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
        return {key: _short(inner) for key, inner in value.items() if key not in _LEFT_OUT}
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

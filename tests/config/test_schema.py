"""The editors' schema: up to date, and of one mind with the real parser."""

import json

import jsonschema
import pytest
import yaml

from config.schema import SCHEMA_FILE, deployment_schema

DEPLOYMENTS = sorted(SCHEMA_FILE.parent.glob("*.yaml"))


def test_the_schema_in_the_repository_is_the_present_one():
    assert json.loads(SCHEMA_FILE.read_text()) == deployment_schema(), "run `python -m config.schema`"


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.stem)
def test_every_shipped_deployment_names_the_schema_and_obeys_it(path):
    assert path.read_text().startswith("# yaml-language-server: $schema=schema.json\n")
    jsonschema.validate(yaml.safe_load(path.read_text()), deployment_schema())


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("train", {"typo": 1}),
        ("train", {"model": "llama-9"}),
        ("train", {"total_steps": 0}),
        ("job", {"node_count": "two"}),
    ],
)
def test_the_schema_refuses_what_the_parser_refuses(section, changes):
    document = yaml.safe_load(DEPLOYMENTS[0].read_text())
    document[section] |= changes
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, deployment_schema())

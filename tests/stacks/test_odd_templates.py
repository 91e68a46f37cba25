"""Templates that nobody would write on purpose: `config.check --template` answers with findings, never a traceback."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config import check as command
from config.template_rules import template_findings
from tests.stacks.template_defects import BLOCK, Deployment


@pytest.fixture(scope="module")
def real(synthesize):
    """The p5-2node deployment's templates, from a Capacity Block, so that the rules about reservations see one too."""
    return Deployment(synthesize(cluster={"capacity": BLOCK})).templates


def places(node, path=()):
    """Every place below `node`, as a path of keys and indexes."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        yield (*path, key)
        yield from places(child, (*path, key))


def put(templates, path, value):
    """Replace what is at the path; an earlier replacement may have taken the place away."""
    here = templates
    for key in path[:-1]:
        try:
            here = here[key]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(here, dict) or (isinstance(here, list) and path[-1] < len(here)):
        here[path[-1]] = copy.deepcopy(value)


NAMES = st.sampled_from(["GpuSubnet8C21C310", "FileSystem", "NodeRoleB5643E21", "Nowhere", "AWS::Region", ""])
SCALARS = st.sampled_from([None, True, 0, -1, 3, 2.5, 1e300, "", "32", "-1", "true", "${x}", "efa-only", "\ud800", "a"])
FUNCTIONS = st.one_of(
    NAMES.map(lambda name: {"Ref": name}),
    NAMES.map(lambda name: {"Fn::GetAtt": [name, "Arn"]}),
    NAMES.map(lambda name: {"Fn::GetAtt": f"{name}.Arn"}),
    NAMES.map(lambda name: {"Fn::Sub": f"x-${{{name}}}-${{!y}}"}),
    SCALARS.map(lambda value: {"Fn::Join": ["", [value, {"Ref": "Nowhere"}]]}),
    st.builds(lambda one, two: {"Fn::If": ["IsProd", one, two]}, SCALARS, SCALARS),
    st.builds(lambda value: {"Fn::If": ["IsProd", {"Ref": "AWS::NoValue"}, value]}, SCALARS),
    st.just({"Fn::If": ["IsProd", {"Ref": "AWS::NoValue"}, {"Ref": "AWS::NoValue"}]}),
    st.sampled_from(
        ["Fn::If", "Fn::Join", "Fn::GetAtt", "Fn::Sub", "Fn::Select", "Fn::ImportValue", "Ref", "Fn::Base64"]
    ).flatmap(lambda name: st.one_of(SCALARS, st.lists(SCALARS, max_size=2)).map(lambda value: {name: value})),
)
ODD = st.one_of(
    SCALARS,
    FUNCTIONS,
    st.lists(st.one_of(SCALARS, FUNCTIONS), max_size=2),
    st.dictionaries(st.sampled_from(["a", "Key", "Ref"]), st.one_of(SCALARS, FUNCTIONS), max_size=2),
)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_stands_in_the_place_of_a_part_of_a_template_no_rule_fails_on_it(real, data):
    resources = [
        ("templates", name, "Resources", id_, "Properties")
        for name in real
        for id_, one in real[name]["Resources"].items()
    ]
    templates = {"templates": copy.deepcopy(real)}
    for _ in range(data.draw(st.integers(1, 3), label="changes")):
        whole = data.draw(st.sampled_from(resources), label="resource")
        below = [whole, *places_below(templates, whole)]
        put(templates, data.draw(st.sampled_from(below), label="place"), data.draw(ODD, label="value"))
    for finding in template_findings(templates["templates"]):
        assert all(isinstance(text, str) for text in vars(finding).values()), finding
        assert all((finding.path, finding.rule, finding.fix, finding.source)), finding


def places_below(templates, path):
    here = templates
    for key in path:
        here = here.get(key, {}) if isinstance(here, dict) else {}
    return list(places(here, path))


@pytest.mark.parametrize(
    "late",
    [
        {"Ref": "Parameter"},
        {"Fn::If": ["IsProd", {"Ref": "A"}, {"Ref": "B"}]},
        {"Fn::FindInMap": ["Map", {"Ref": "AWS::Region"}, "Value"]},
        {"Fn::Join": ["-", [{"Ref": "A"}, "x"]]},
        {"Fn::Sub": "${A}-x"},
        {"Fn::Select": [0, {"Ref": "A"}]},
        {"Fn::Transform": {"Name": "Macro"}},
    ],
    ids=lambda late: next(iter(late)),
)
def test_a_value_that_is_known_only_at_deploy_is_no_finding(real, late):
    """But where the rule is about what a property leads to, or that it is there at all."""
    named = {"AmiType", "CapacityType", "UpdateConfig", "NodeRepairConfig", "InstanceTypes", "LaunchTemplate"}
    for kind, fields in {
        "AWS::EKS::Nodegroup": named,
        "AWS::EC2::LaunchTemplate": {"LaunchTemplateData"},
        "AWS::FSx::FileSystem": {"StorageCapacity", "FileSystemTypeVersion", "LustreConfiguration", "SubnetIds"},
        "AWS::EKS::Cluster": {"AccessConfig", "ResourcesVpcConfig"},
        "AWS::IAM::Role": {"AssumeRolePolicyDocument", "ManagedPolicyArns"},
        "AWS::EKS::Addon": {"AddonVersion"},
        "Custom::AWSCDK-EKS-HelmChart": {"Values", "Version"},
    }.items():
        for field in fields:
            templates = copy.deepcopy(real)
            for template in templates.values():
                for resource in template["Resources"].values():
                    if resource["Type"] == kind and field in resource["Properties"]:
                        resource["Properties"][field] = late
            assert template_findings(templates) == [], (kind, field)


def test_parts_of_a_launch_template_that_are_known_only_at_deploy_are_no_finding(real):
    (data,) = [
        one["Properties"]["LaunchTemplateData"]
        for one in real["cluster"]["Resources"].values()
        if one["Type"] == "AWS::EC2::LaunchTemplate" and "NetworkInterfaces" in one["Properties"]["LaunchTemplateData"]
    ]
    changed = copy.deepcopy(real)
    for place in places(data):
        templates = copy.deepcopy(changed)
        here = next(
            one["Properties"]["LaunchTemplateData"]
            for one in templates["cluster"]["Resources"].values()
            if one["Type"] == "AWS::EC2::LaunchTemplate"
            and "NetworkInterfaces" in one["Properties"]["LaunchTemplateData"]
        )
        put(here, place, {"Ref": "Parameter"})
        assert template_findings(templates) == [], place


@pytest.mark.parametrize(
    "properties",
    [None, [], 3, "x", {"Ref": "A"}, {"UpdateConfig": {"Ref": "A"}}, {"UpdateConfig": [1]}, {"Subnets": None}],
    ids=json.dumps,
)
def test_the_command_ends_with_findings_on_a_node_group_of_any_shape(tmp_path, capsys, properties):
    file = tmp_path / "Mine.template.json"
    group = {"Type": "AWS::EKS::Nodegroup", "DependsOn": 3, "Properties": properties}
    file.write_text(json.dumps({"Resources": {"Group": group}, "Outputs": [1]}))
    assert command.main(["--template", str(file)]) in (0, 1)
    assert "Traceback" not in capsys.readouterr().err


def test_a_wrong_shape_is_one_line_with_what_belongs_there(tmp_path, capsys):
    file = tmp_path / "Mine.template.json"
    group = {"Type": "AWS::EKS::Nodegroup", "Properties": {"UpdateConfig": [1], "NodeRole": "r", "InstanceTypes": "t"}}
    file.write_text(json.dumps({"Resources": {"Group": group}}))
    assert command.main(["--template", "--json", str(file)]) == 1
    (finding,) = json.loads(capsys.readouterr().out)
    assert finding["path"] == "Mine/Group.UpdateConfig"
    assert finding["value"] == "[1]"
    assert finding["rule"] == "here CloudFormation wants a mapping"


def test_a_template_that_imports_from_itself_in_a_circle_is_read():
    circle = {"Fn::ImportValue": "name"}
    group = {"Type": "AWS::EKS::Nodegroup", "Properties": {"UpdateConfig": circle, "Subnets": circle}}
    template = {"Resources": {"Group": group}, "Outputs": {"A": {"Value": circle, "Export": {"Name": "name"}}}}
    assert "Mine/Group.UpdateConfig" not in {finding.path for finding in template_findings({"Mine": template})}


@pytest.mark.parametrize("depth", [400, 100_000])
def test_a_template_that_is_nested_without_end_is_one_line(tmp_path, capsys, depth):
    file = tmp_path / "x.json"
    properties = "[" * depth + "]" * depth
    file.write_text(f'{{"Resources": {{"A": {{"Type": "AWS::EKS::Nodegroup", "Properties": {{"x": {properties}}}}}}}}}')
    assert command.main(["--template", str(file)]) == 2
    assert "nested too deeply" in capsys.readouterr().err


def test_two_templates_of_one_name_are_not_mixed_up(tmp_path, capsys):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "Mine.template.json").write_text('{"Resources": {}}')
    files = [str(tmp_path / folder / "Mine.template.json") for folder in ("a", "b")]
    assert command.main(["--template", *files]) == 2
    assert "a second template named Mine" in capsys.readouterr().err


def test_text_that_no_terminal_can_show_is_escaped(tmp_path):
    file = tmp_path / "Mine.template.json"
    file.write_text(r'{"Resources": {"A": {"Type": "AWS::EKS::Nodegroup", "Properties": {"CapacityType": "\ud800"}}}}')
    done = subprocess.run(
        [sys.executable, "-m", "config.check", "--template", str(file)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == ""

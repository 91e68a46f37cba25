"""What AWS would refuse, seeded one at a time into the synthesized p5-2node: exactly that is found, and nothing before.

The 17 defects are those of which public offline validators find 2 (docs/decisions.md); four more launch and then fail.
The reports are users' own: each case names its issue. Reports that are no template's are tested elsewhere: mis-cased
and unknown keys in tests/config/test_check.py (eksctl 8320), a worker's EFA request in tests/k8s (ai-on-sagemaker 134),
interface counts in test_gpu_nodegroup.py (parallelcluster 7143, terraform-aws-eks 3653), AMI pins in
test_gpu_nodegroup.py (amazon-eks-ami 1494), p5 and p6 on Amazon Linux 2023, which the CDK's own node group refuses, in
test_app.py (aws-cdk 31347, 29546; cdk-eks-blueprints 1237), the pinned add-ons of a Kubernetes version in
test_cluster.py (containers-roadmap 2625), CSI races (fsx-csi-driver 244) in test_storage.py and tests/k8s, and the
monitoring agent's own defects (node-monitoring-agent 39), which no template can hold.
"""

import ast
from pathlib import Path

import pytest

from config.rules.template import Templates
from config.template_rules import applied_rules, refuse, template_findings
from tests.stacks.template_defects import CASES, RESERVATION, Deployment, put

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("case", CASES)
def test_the_defect_is_found_and_nothing_else(synthesize, case):
    capacity, spoil, expected = CASES[case]
    templates = synthesize(cluster={"capacity": capacity}) if capacity else synthesize()
    deployment = Deployment(templates)
    assert template_findings(deployment.templates) == [], "sound before"
    spoil(deployment)
    findings = template_findings(deployment.templates)
    unexpected = [
        str(finding)
        for finding in findings
        if not any(finding.path.endswith(path) and rule in finding.rule for path, rule in expected)
    ]
    assert unexpected == []
    for path, rule in expected:
        assert any(one.path.endswith(path) and rule in one.rule for one in findings), (path, rule, findings)
    for finding in findings:
        assert finding.fix
        assert finding.source.startswith("https://")


def findings_in_the_source():
    """(rule, first line, last line) of every `yield Finding(...)` in config/rules."""
    files = sorted((ROOT / "config/rules").glob("*.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    for function in (node for node in nodes if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            call = node.value if isinstance(node, ast.Yield) else None
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "Finding":
                yield function.name, node.lineno, node.end_lineno


def test_every_finding_that_a_rule_can_make_is_made_by_a_defect_above(synthesize):
    made = set()
    for capacity, spoil, _ in CASES.values():
        deployment = Deployment(synthesize(cluster={"capacity": capacity}) if capacity else synthesize())
        spoil(deployment)
        for rule, findings in applied_rules(Templates(deployment.templates)):
            made |= {(rule.__name__, findings.gi_frame.f_lineno) for _ in findings}
    in_source = list(findings_in_the_source())
    assert len(in_source) > 50
    never = [
        f"{name}, line {first}"
        for name, first, last in in_source
        if not any((name, line) in made for line in range(first, last + 1))
    ]
    assert never == []


def layout_b(deployment):
    """AWS's older layout, still valid on p5: card 0 carries an `efa` primary, further cards device 1."""
    nics = deployment.nics
    groups = nics[0]["Groups"]
    nics[:] = [
        {
            "NetworkCardIndex": card,
            "DeviceIndex": 0 if card == 0 else 1,
            "InterfaceType": "efa" if card == 0 else "efa-only",
            "Groups": groups,
        }
        for card in range(32)
    ]


def test_the_older_layout_that_aws_also_takes_is_no_finding(templates):
    deployment = Deployment(templates)
    layout_b(deployment)
    assert template_findings(deployment.templates) == []


def test_a_placement_group_of_the_users_own_is_no_finding_with_a_reservation(synthesize):
    """terraform-aws-eks 3661: theirs was ignored and another one made."""
    deployment = Deployment(synthesize(cluster={"capacity": RESERVATION}))
    put(deployment.data, Placement={"GroupName": "where-the-reservation-was-created"})
    assert template_findings(deployment.templates) == []


def lustre_template(group_rules_first, **lustre):
    """A file system of somebody else's template, its security group and the group's rules in one stack."""
    rules = {
        f"{way}{low}": {
            "Type": f"AWS::EC2::SecurityGroup{way}",
            "Properties": {
                "GroupId": {"Fn::GetAtt": ["Group", "GroupId"]},
                f"{peer}SecurityGroupId": {"Fn::GetAtt": ["Group", "GroupId"]},
                "IpProtocol": "tcp",
                "FromPort": str(low),
                "ToPort": high,
            },
        }
        for way, peer in (("Ingress", "Source"), ("Egress", "Destination"))
        for low, high in ((988, {"Ref": "LastPort"}), (1018, "1023"))
    }
    file_system = {
        "Type": "AWS::FSx::FileSystem",
        "DependsOn": sorted(rules) if group_rules_first else [],
        "Properties": {
            "FileSystemType": "LUSTRE",
            "FileSystemTypeVersion": "2.15",
            "StorageCapacity": "4800",
            "SubnetIds": [{"Ref": "Subnet"}],
            "SecurityGroupIds": [{"Fn::GetAtt": ["Group", "GroupId"]}],
            "LustreConfiguration": {
                "DeploymentType": "PERSISTENT_2",
                "PerUnitStorageThroughput": "500",
                "MetadataConfiguration": {"Mode": "AUTOMATIC"},
                **lustre,
            },
        },
    }
    group = {"Type": "AWS::EC2::SecurityGroup", "Properties": {}}
    return {"mine": {"Resources": {"Group": group, "FileSystem": file_system, **rules}}}


def test_numbers_written_as_text_and_values_known_only_at_deploy_are_no_finding():
    assert template_findings(lustre_template(True)) == []
    unknown = {"Fn::If": ["Large", 1000, 500]}
    late = lustre_template(
        True,
        DeploymentType={"Ref": "Kind"},
        PerUnitStorageThroughput=unknown,
        MetadataConfiguration={"Mode": {"Ref": "Mode"}, "Iops": unknown},
    )
    assert template_findings(late) == []


def test_groups_and_subnets_that_are_parameters_are_no_finding():
    nic = {"DeviceIndex": 0, "NetworkCardIndex": 0, "InterfaceType": "efa", "Groups": {"Ref": "Groups"}}
    metadata = {"HttpTokens": "required", "HttpPutResponseHopLimit": 2}
    template = {
        "Type": "AWS::EC2::LaunchTemplate",
        "Properties": {"LaunchTemplateData": {"NetworkInterfaces": [nic], "MetadataOptions": metadata}},
    }
    group = {
        "Type": "AWS::EKS::Nodegroup",
        "Properties": {
            "InstanceTypes": {"Ref": "Types"},
            "Subnets": {"Ref": "Subnets"},
            "NodeRole": {"Ref": "Role"},
            "UpdateConfig": {"Fn::If": ["Reserved", {"Ref": "AWS::NoValue"}, {"MaxUnavailable": 1}]},
            "LaunchTemplate": {
                "Id": {"Ref": "Template"},
                "Version": {"Fn::GetAtt": ["Template", "LatestVersionNumber"]},
            },
        },
    }
    assert template_findings({"mine": {"Resources": {"Template": template, "Group": group}}}) == []


def test_a_wrong_number_written_as_text_is_found():
    findings = template_findings(lustre_template(True, PerUnitStorageThroughput="300"))
    assert [finding.path for finding in findings] == ["mine/FileSystem.LustreConfiguration.PerUnitStorageThroughput"]


def test_security_group_rules_that_may_come_after_the_file_system_are_found():
    """bottlerocket 3459: they do not reach the data servers."""
    findings = template_findings(lustre_template(False))
    assert len(findings) == 4
    assert {finding.path for finding in findings} == {"mine/FileSystem.DependsOn"}


def test_a_refusal_names_every_finding_at_once(templates):
    deployment = Deployment(templates)
    put(deployment.group, DiskSize=100)
    put(deployment.lustre, PerUnitStorageThroughput=300)
    with pytest.raises(ValueError, match="2 problems that AWS would report only while deploying") as refused:
        refuse(deployment.templates)
    assert "DiskSize" in str(refused.value)
    assert "PerUnitStorageThroughput" in str(refused.value)


def test_templates_of_others_with_references_in_any_form_are_read():
    templates = {
        "mine": {
            "Resources": {
                "Group": {
                    "Type": "AWS::EKS::Nodegroup",
                    "DependsOn": "Template",
                    "Properties": {
                        "InstanceTypes": ["m7i.large"],
                        "NodeRole": {"Fn::GetAtt": "Role.Arn"},
                        "LaunchTemplate": {
                            "Id": {"Ref": "Template"},
                            "Version": {"Fn::GetAtt": ["Template", "LatestVersionNumber"]},
                        },
                    },
                },
                "Template": {
                    "Type": "AWS::EC2::LaunchTemplate",
                    "Properties": {
                        "LaunchTemplateData": {
                            "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 2}
                        }
                    },
                },
                "Role": {"Type": "AWS::IAM::Role", "Properties": {}},
            }
        }
    }
    resolved = Templates(templates)
    assert resolved.target("${mine/Template}", "AWS::EC2::LaunchTemplate") is resolved.resources["mine/Template"]
    assert resolved.resources["mine/Group"].depends_on == {"mine/Template"}
    assert [finding.path for finding in template_findings(templates)] == ["mine/Role.ManagedPolicyArns"] * 2

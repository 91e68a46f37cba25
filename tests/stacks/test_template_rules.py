"""What AWS would refuse, seeded one at a time into the synthesized p5-2node: exactly that is found, and nothing before.

The 17 defects are those of which public offline validators find 2 (docs/decisions.md); four more launch and then fail.
The reports are users' own: each case names its issue. Reports that are no template's are tested elsewhere: mis-cased
and unknown keys in tests/config/test_check.py (eksctl 8320), a worker's EFA request in tests/k8s (ai-on-sagemaker 134),
interface counts in test_gpu_nodegroup.py (parallelcluster 7143, terraform-aws-eks 3653), AMI pins in
test_gpu_nodegroup.py (amazon-eks-ami 1494), CSI races (fsx-csi-driver 244) in test_storage.py and tests/k8s, and the
monitoring agent's own defects (node-monitoring-agent 39), which no template can hold.
"""

import copy
import json

import pytest

from config.rules.template import Templates
from config.template_rules import refuse, template_findings

BLOCK = {"kind": "capacity_block", "reservation_id": "cr-0123456789abcdef0", "started": True}
RESERVATION = {"kind": "odcr", "reservation_id": "cr-0123456789abcdef0"}


class Deployment:
    """Templates to spoil: the parts that the cases change."""

    def __init__(self, templates):
        self.templates = {name: copy.deepcopy(template.to_json()) for name, template in templates.items()}

    def find(self, kind, prefix=""):
        found = [
            resource
            for template in self.templates.values()
            for name, resource in template["Resources"].items()
            if resource["Type"] == kind and name.startswith(prefix)
        ]
        assert found, f"no {kind} {prefix}"
        return found[0]["Properties"]

    def remove(self, kind, wanted):
        for template in self.templates.values():
            doomed = [
                name
                for name, resource in template["Resources"].items()
                if resource["Type"] == kind and wanted(resource["Properties"])
            ]
            for name in doomed:
                del template["Resources"][name]
            if doomed:
                return
        raise AssertionError(f"no such {kind}")

    @property
    def data(self):
        return self.find("AWS::EC2::LaunchTemplate", "Gpu")["LaunchTemplateData"]

    @property
    def nics(self):
        return self.data["NetworkInterfaces"]

    @property
    def group(self):
        return self.find("AWS::EKS::Nodegroup", "Gpu")

    @property
    def lustre(self):
        return self.find("AWS::FSx::FileSystem")["LustreConfiguration"]

    @property
    def file_system(self):
        return self.find("AWS::FSx::FileSystem")

    def chart(self, name):
        for template in self.templates.values():
            for resource in template["Resources"].values():
                if resource["Type"] == "Custom::AWSCDK-EKS-HelmChart" and resource["Properties"]["Chart"] == name:
                    return resource["Properties"]
        raise AssertionError(f"no chart {name}")

    def addon(self, name):
        for template in self.templates.values():
            for resource in template["Resources"].values():
                if resource["Type"] == "AWS::EKS::Addon" and resource["Properties"]["AddonName"] == name:
                    return resource["Properties"]
        raise AssertionError(f"no add-on {name}")


def put(target, **values):
    target.update(values)


def without_values(chart, key):
    values = json.loads(chart["Values"])
    values.pop(key, None)
    chart["Values"] = json.dumps(values)


def efa_egress_to_itself(properties):
    return "EfaSecurityGroup" in json.dumps(properties["GroupId"]) and properties["IpProtocol"] == "-1"


# id -> (capacity, how to spoil it, (end of the finding's path, a part of its rule), ...)
CASES = {
    # The 17 seeded defects.
    "01 instance type in template and group": (
        None,
        lambda d: put(d.group, InstanceTypes=["p5.48xlarge"]),
        [("InstanceTypes", "not in both")],
    ),
    "02 disk size beside a launch template": (
        None,
        lambda d: put(d.group, DiskSize=100),
        [("DiskSize", "no DiskSize")],
    ),
    "03 capacity block without market options": (
        BLOCK,
        lambda d: d.data.pop("InstanceMarketOptions"),
        [("InstanceMarketOptions.MarketType", "needs capacity-block here")],
    ),
    "04 subnet in an interface": (
        None,
        lambda d: put(d.nics[0], SubnetId="subnet-0123456789abcdef0"),
        [("NetworkInterfaces[0].SubnetId", "names no subnet")],
    ),
    "05 instance profile in the template": (
        None,
        lambda d: put(d.data, IamInstanceProfile={"Name": "profile"}),
        [("IamInstanceProfile", "no IamInstanceProfile")],
    ),
    "06 security groups at both levels": (
        None,
        lambda d: put(d.data, SecurityGroupIds=["sg-0123456789abcdef0"]),
        [("SecurityGroupIds", "stand in each interface")],
    ),
    "07 efa-only primary": (
        None,
        lambda d: put(d.nics[0], InterfaceType="efa-only"),
        [
            ("NetworkInterfaces", "can't be efa-only"),
            ("NetworkInterfaces", "has one EFA device"),
            ("NetworkInterfaces", "has 32 EFA devices"),
        ],
    ),
    "08 bogus interface type": (
        None,
        lambda d: put(d.nics[5], InterfaceType="efa_only"),
        [("NetworkInterfaces[5].InterfaceType", "interface, efa and efa-only"), ("NetworkInterfaces", "has 32 EFA")],
    ),
    "09 device index 2 on p5": (
        None,
        lambda d: put(d.nics[5], DeviceIndex=2),
        [("NetworkInterfaces[5].DeviceIndex", "device indexes 0 to 1")],
    ),
    "10 card and device used twice": (
        None,
        lambda d: put(d.nics[5], NetworkCardIndex=d.nics[6]["NetworkCardIndex"]),
        [("NetworkInterfaces", "is used once"), ("NetworkInterfaces", "has one EFA device")],
    ),
    "11 efa file system of 1200 GiB at 250": (
        None,
        lambda d: (
            put(d.lustre, EfaEnabled=True, PerUnitStorageThroughput=250),
            put(d.file_system, StorageCapacity=1200),
        ),
        [("StorageCapacity", "19200"), ("network/FsxSecurityGroup94E8AC1C", "file system with EFA")],
    ),
    "12 efa file system without metadata configuration": (
        None,
        lambda d: (
            put(d.lustre, EfaEnabled=True),
            put(d.file_system, StorageCapacity=9600),
            d.lustre.pop("MetadataConfiguration"),
        ),
        [
            ("MetadataConfiguration", "EFA requires it"),
            ("network/FsxSecurityGroup94E8AC1C", "file system with EFA"),
        ],
    ),
    "13 throughput 300": (
        None,
        lambda d: put(d.lustre, PerUnitStorageThroughput=300),
        [("PerUnitStorageThroughput", "125, 250, 500")],
    ),
    "14 capacity 3600": (None, lambda d: put(d.file_system, StorageCapacity=3600), [("StorageCapacity", "2400")]),
    "15 metadata iops 1501": (
        None,
        lambda d: put(d.lustre, MetadataConfiguration={"Mode": "USER_PROVISIONED", "Iops": 1501}),
        [("MetadataConfiguration.Iops", "1500")],
    ),
    "16 import policy on persistent 2": (
        None,
        lambda d: put(d.lustre, AutoImportPolicy="NEW_CHANGED"),
        [("AutoImportPolicy", "takes no AutoImportPolicy")],
    ),
    "17a repair action that does not exist": (
        None,
        lambda d: put(d.group["NodeRepairConfig"]["NodeRepairConfigOverrides"][0], RepairAction="Restart"),
        [("RepairAction", "Replace, Reboot, NoAction")],
    ),
    "17b capacity type that does not exist": (
        None,
        lambda d: put(d.group, CapacityType="ONDEMAND"),
        [("CapacityType", "ON_DEMAND, SPOT, CAPACITY_BLOCK")],
    ),
    # What launches, and then fails.
    "18 dropped egress to itself (awsome-distributed-ai 546)": (
        None,
        lambda d: d.remove("AWS::EC2::SecurityGroupEgress", efa_egress_to_itself),
        [("Groups", "0.0.0.0/0 does not cover it")],
    ),
    "19 no cluster group on the primary": (
        None,
        lambda d: d.nics[0]["Groups"].pop(0),
        [("NetworkInterfaces", "no node joins")],
    ),
    "20 placement group with a block (terraform-aws-eks 3730)": (
        BLOCK,
        lambda d: put(d.data, Placement={"GroupName": "mine"}),
        [("Placement", "UltraCluster")],
    ),
    "21 efa nodes in two zones (containers-roadmap 2204)": (
        None,
        lambda d: d.group["Subnets"].append("subnet-0123456789abcdef0"),
        [("Subnets", "exactly one subnet")],
    ),
    # Users' reports.
    "ingress from itself missing (gardener 1832)": (
        None,
        lambda d: d.remove("AWS::EC2::SecurityGroupIngress", efa_egress_to_itself),
        [("Groups", "all traffic in from itself")],
    ),
    "new placement group with an odcr (eksctl 7949)": (
        RESERVATION,
        lambda d: (
            d.templates["cluster"]["Resources"].update(Pg={"Type": "AWS::EC2::PlacementGroup", "Properties": {}}),
            put(d.data, Placement={"GroupName": {"Ref": "Pg"}}),
        ),
        [("Placement.GroupName", "created in")],
    ),
    "efa group not on the interfaces (eksctl 3465)": (
        None,
        lambda d: [nic["Groups"].pop(1) for nic in d.nics],
        [("Groups", "all traffic in from itself")],
    ),
    "empty reservation target (eksctl 8320)": (
        RESERVATION,
        lambda d: put(d.data, CapacityReservationSpecification={"CapacityReservationTarget": {}}),
        [("CapacityReservationTarget", "names one reservation")],
    ),
    "reservation id that is none (eksctl 8542)": (
        RESERVATION,
        lambda d: put(
            d.data["CapacityReservationSpecification"]["CapacityReservationTarget"], CapacityReservationId="cr-mine"
        ),
        [("CapacityReservationId", "hexadecimal")],
    ),
    "an old efa chart (eksctl 8089)": (
        None,
        lambda d: put(d.chart("aws-efa-k8s-device-plugin"), Version="v0.5.5"),
        [("Version", "mis-detect p6")],
    ),
    "a plugin that does not tolerate the taint (aws-efa-eks 3)": (
        None,
        lambda d: without_values(d.chart("nvidia-device-plugin"), "tolerations"),
        [("Values.tolerations", "nvidia.com/gpu")],
    ),
    "an efa plugin on nodes without efa (eks-charts 1239)": (
        None,
        lambda d: without_values(d.chart("aws-efa-k8s-device-plugin"), "nodeSelector"),
        [("Values.nodeSelector", "crashes")],
    ),
    "al2 on p5 (awsome-distributed-ai 519)": (
        None,
        lambda d: put(d.group, AmiType="AL2_x86_64_GPU"),
        [("AmiType", "Amazon Linux 2023 with the NVIDIA driver")],
    ),
    "lustre 2.10 (fsx-csi-driver 437)": (
        None,
        lambda d: put(d.file_system, FileSystemTypeVersion="2.10"),
        [("FileSystemTypeVersion", "2.15")],
    ),
    "capacity and throughput off the matrix (terraform-aws 24341)": (
        None,
        lambda d: put(d.file_system, StorageCapacity=2500),
        [("StorageCapacity", "2400")],
    ),
    "no metadata configuration, which can't be added later (parallelcluster 7616)": (
        None,
        lambda d: d.lustre.pop("MetadataConfiguration"),
        [("MetadataConfiguration", "can't be added later")],
    ),
    "efa on persistent 1 (awsome-distributed-ai 1124)": (
        None,
        lambda d: put(d.lustre, DeploymentType="PERSISTENT_1"),
        [("DeploymentType", "PERSISTENT_2 only")],
    ),
    "an update that surges in a reservation (terraform-aws 41442)": (
        RESERVATION,
        lambda d: put(d.group["UpdateConfig"], UpdateStrategy="DEFAULT"),
        [("UpdateConfig.UpdateStrategy", "must end an old node")],
    ),
    "more pods than addresses (amazon-eks-ami 1392)": (
        None,
        lambda d: put(d.data, UserData={"Fn::Base64": "kubelet:\n  config:\n    maxPods: 100\n"}),
        [("UserData", "for 51 pods")],
    ),
    "a public address with many interfaces (terraform-aws-eks 3533)": (
        None,
        lambda d: put(d.nics[0], AssociatePublicIpAddress=True),
        [("AssociatePublicIpAddress", "gets no public address")],
    ),
    "the cluster's tag on the efa group (eksctl 8556)": (
        None,
        lambda d: put(
            d.find("AWS::EC2::SecurityGroup", "Efa"), Tags=[{"Key": "kubernetes.io/cluster/mine", "Value": "owned"}]
        ),
        [("Tags", "only the cluster's own group")],
    ),
    "a condition that the agent never sets (eksctl example 44)": (
        None,
        lambda d: put(
            d.group["NodeRepairConfig"]["NodeRepairConfigOverrides"][0],
            NodeMonitoringCondition="AcceleratedInstanceNotReady",
        ),
        [("NodeMonitoringCondition", "AcceleratedHardwareReady")],
    ),
    "an old cni with efa-only (eks guide, node-efa)": (
        None,
        lambda d: put(d.addon("vpc-cni"), AddonVersion="v1.18.0-eksbuild.1"),
        [("AddonVersion", "1.18.5")],
    ),
    "a fixed launch template version": (
        None,
        lambda d: put(d.group["LaunchTemplate"], Version="1"),
        [("LaunchTemplate.Version", "ignores every later change")],
    ),
    "both thresholds": (
        None,
        lambda d: put(
            d.group["NodeRepairConfig"], MaxUnhealthyNodeThresholdCount=2, MaxUnhealthyNodeThresholdPercentage=20
        ),
        [("NodeRepairConfig", "a count or a percentage")],
    ),
}


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

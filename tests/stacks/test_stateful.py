"""Logical ids of whatever would lose something if CloudFormation made it anew under another id.

A new id is a new resource: an empty file system, a new cluster, an unknown address. Change this list with a migration
only.
"""

import pytest

# Data, keys that data is encrypted with, histories, and what other stacks or people hold by its id.
STATEFUL = {
    "AWS::APS::Workspace",
    "AWS::EC2::EIP",
    "AWS::EC2::SecurityGroup",
    "AWS::EC2::Subnet",
    "AWS::EC2::VPC",
    "AWS::ECR::Repository",
    "AWS::EKS::Cluster",
    "AWS::EKS::Nodegroup",
    "AWS::FSx::DataRepositoryAssociation",
    "AWS::FSx::FileSystem",
    "AWS::KMS::Key",
    "AWS::Logs::LogGroup",
    "AWS::S3::Bucket",
    "AWS::SNS::Topic",
    "AWS::SSM::Parameter",
}
PINNED = {
    "network": {
        "EfaSecurityGroup7CA28382",
        "FlowLogGroup3E25AA51",
        "FsxSecurityGroup94E8AC1C",
        "GpuSubnet8C21C310",
        "LustreClientSecurityGroupAE3FE86A",
        "Vpc8378EB38",
        "VpcPrivateSubnet1Subnet536B997A",
        "VpcPrivateSubnet2Subnet3788AAA1",
        "VpcPublicSubnet1EIPD7E02669",
        "VpcPublicSubnet1Subnet5C2D37C4",
        "VpcPublicSubnet2Subnet691E08A3",
    },
    "storage": {"Bucket83908E77", "FileSystem", "Key961B73FD", "LinkData", "LinkRuns"},
    "image": {"BuildLogA2857E83", "ImageParameterEAD1F3E3", "Repository22E53BBD"},
    "cluster": {
        "ClusterEB0386A7",
        "ClusterControlPlaneSecurityGroupD274242C",
        "GpuNodegroup8C147F01",
        "SecretsKey317DCF94",
        "SystemNodegroup7A98E230",
    },
    "observability": {
        "PrometheusLogs9FA26F4B",
        "PrometheusWorkspaceF3098DB6",
        "TopicBFC7AF6E",
        "TopicKeyB2E0C9CB",
    },
}
# aws-cdk-lib's own, which holds nothing.
OF_THE_LIBRARY = "ClusterKubectl"


@pytest.mark.parametrize("stack", PINNED)
def test_what_holds_something_keeps_its_logical_id(synthesize, stack):
    template = synthesize(cluster={"observability": {"metrics": "prometheus"}})[stack].to_json()
    found = {
        name
        for name, resource in template["Resources"].items()
        if resource["Type"] in STATEFUL and not name.startswith(OF_THE_LIBRARY)
    }
    assert found == PINNED[stack]


@pytest.mark.parametrize("stack", PINNED)
def test_the_switch_for_metrics_moves_no_other_resource(templates, stack):
    of_both = {name for name in PINNED[stack] if not name.startswith("Prometheus")}
    assert of_both <= set(templates[stack].to_json()["Resources"])

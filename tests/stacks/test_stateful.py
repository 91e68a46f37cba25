"""Logical ids of what holds data or can't be replaced: a renamed one is a new, empty resource, and the old one gone."""

import pytest

STATEFUL = {
    "network": {"Vpc8378EB38": "AWS::EC2::VPC"},
    "storage": {
        "Bucket83908E77": "AWS::S3::Bucket",
        "FileSystem": "AWS::FSx::FileSystem",
        "Key961B73FD": "AWS::KMS::Key",
        "LinkData": "AWS::FSx::DataRepositoryAssociation",
        "LinkRuns": "AWS::FSx::DataRepositoryAssociation",
    },
    "image": {"ImageParameterEAD1F3E3": "AWS::SSM::Parameter", "Repository22E53BBD": "AWS::ECR::Repository"},
    "cluster": {
        "ClusterEB0386A7": "AWS::EKS::Cluster",
        "ClusterKubectlReadyBarrier200052AF": "AWS::SSM::Parameter",
        "SecretsKey317DCF94": "AWS::KMS::Key",
    },
    "observability": {"TopicBFC7AF6E": "AWS::SNS::Topic", "TopicKeyB2E0C9CB": "AWS::KMS::Key"},
}
# Of these types every resource is named below, so that a new one is not forgotten.
TYPES = (
    "AWS::EC2::VPC",
    "AWS::ECR::Repository",
    "AWS::EKS::Cluster",
    "AWS::FSx::DataRepositoryAssociation",
    "AWS::FSx::FileSystem",
    "AWS::KMS::Key",
    "AWS::S3::Bucket",
    "AWS::SNS::Topic",
    "AWS::SSM::Parameter",
)


@pytest.mark.parametrize("stack", STATEFUL)
def test_no_stateful_resource_changes_its_id(templates, stack):
    resources = templates[stack].to_json()["Resources"]
    found = {name: resource["Type"] for name, resource in resources.items() if resource["Type"] in TYPES}
    assert found == STATEFUL[stack]

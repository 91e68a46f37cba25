import json

import aws_cdk as cdk
import pytest
from pydantic import ValidationError

from app import build
from config import names
from config.cluster import FSX_EFA_CAPACITY_STEP_GIB, StorageConfig
from training.config import describe_errors


@pytest.fixture
def file_system(storage, only):
    return only(storage, "AWS::FSx::FileSystem", "FileSystem")[1]


def test_file_system_is_persistent_2_lustre_2_15_as_configured(file_system):
    properties = file_system["Properties"]
    assert properties["FileSystemType"] == "LUSTRE"
    assert properties["FileSystemTypeVersion"] == "2.15"
    assert properties["StorageType"] == "SSD"
    assert properties["StorageCapacity"] == 4800
    assert properties["LustreConfiguration"] == {
        "DeploymentType": "PERSISTENT_2",
        "PerUnitStorageThroughput": 500,
        "DataCompressionType": "LZ4",
        "MetadataConfiguration": {"Mode": "AUTOMATIC"},
        "AutomaticBackupRetentionDays": 0,
    }


def test_metadata_iops_of_the_deployment_reach_the_file_system(synthesize, only):
    template = synthesize(cluster={"storage": {"metadata_iops": 12000}})["storage"]
    configuration = only(template, "AWS::FSx::FileSystem", "FileSystem")[1]["Properties"]["LustreConfiguration"]
    assert configuration["MetadataConfiguration"] == {"Mode": "USER_PROVISIONED", "Iops": 12000}


def test_file_system_lies_in_the_gpu_subnet_with_its_own_security_group_and_key(file_system, storage, only):
    properties = file_system["Properties"]
    (subnet,), (group,) = properties["SubnetIds"], properties["SecurityGroupIds"]
    assert "GpuSubnet" in subnet["Fn::ImportValue"]
    assert "FsxSecurityGroup" in group["Fn::ImportValue"]
    key, resource = only(storage, "AWS::KMS::Key", "Key")
    assert properties["KmsKeyId"] == {"Fn::GetAtt": [key, "Arn"]}
    assert resource["Properties"]["EnableKeyRotation"] is True


def links(template):
    found = [r["Properties"] for r in template.find_resources("AWS::FSx::DataRepositoryAssociation").values()]
    return {link["FileSystemPath"]: link for link in found}


def test_data_sets_come_from_the_bucket_and_runs_go_to_it(storage, only):
    bucket = only(storage, "AWS::S3::Bucket", "Bucket")[0]
    data, runs = links(storage)["/data"], links(storage)["/runs"]
    assert data["S3"] == {"AutoImportPolicy": {"Events": ["NEW", "CHANGED", "DELETED"]}}
    assert runs["S3"] == {"AutoExportPolicy": {"Events": ["NEW", "CHANGED", "DELETED"]}}
    for path, link in links(storage).items():
        assert link["DataRepositoryPath"] == {"Fn::Join": ["", ["s3://", {"Ref": bucket}, f"{path}/"]]}
        assert link["FileSystemId"] == {"Ref": "FileSystem"}


def test_the_shipped_run_reads_and_writes_below_the_linked_folders(deployment_with):
    train = deployment_with().train
    assert train.data.path.startswith(f"{names.FSX_MOUNT}{names.FSX_DATASETS}/")
    assert train.run_directory.startswith(f"{names.FSX_MOUNT}{names.FSX_RUNS}/")
    assert train.checkpoint.directory.startswith(f"{names.FSX_MOUNT}{names.FSX_RUNS}/")


def test_the_file_system_itself_names_no_bucket(file_system):
    # Refused on PERSISTENT_2.
    refused = {"AutoImportPolicy", "ImportPath", "ExportPath", "ImportedFileChunkSize"}
    assert not refused & set(file_system["Properties"]["LustreConfiguration"])


def test_the_bucket_is_encrypted_private_and_speaks_tls_only(storage, only):
    name, bucket = only(storage, "AWS::S3::Bucket", "Bucket")
    properties = bucket["Properties"]
    (rule,) = properties["BucketEncryption"]["ServerSideEncryptionConfiguration"]
    assert rule["ServerSideEncryptionByDefault"] == {"SSEAlgorithm": "AES256"}
    assert set(properties["PublicAccessBlockConfiguration"].values()) == {True}
    assert "VersioningConfiguration" not in properties, "every pruned checkpoint would live on as a version"
    (policy,) = storage.find_resources("AWS::S3::BucketPolicy").values()
    assert policy["Properties"]["Bucket"] == {"Ref": name}
    assert '"aws:SecureTransport": "false"' in json.dumps(policy)


def test_without_a_data_repository_there_is_no_bucket_and_backups_are_possible(synthesize, only):
    template = synthesize(cluster={"storage": {"data_repository": False, "backup_retention_days": 7}})["storage"]
    template.resource_count_is("AWS::S3::Bucket", 0)
    template.resource_count_is("AWS::FSx::DataRepositoryAssociation", 0)
    configuration = only(template, "AWS::FSx::FileSystem", "FileSystem")[1]["Properties"]["LustreConfiguration"]
    assert configuration["AutomaticBackupRetentionDays"] == 7


def test_efa_is_asked_for_at_creation_together_with_metadata(synthesize, only):
    storage = {"efa": True, "capacity_gib": 9600}
    template = synthesize(cluster={"storage": storage})["storage"]
    properties = only(template, "AWS::FSx::FileSystem", "FileSystem")[1]["Properties"]
    assert properties["StorageCapacity"] == 9600
    assert properties["LustreConfiguration"]["EfaEnabled"] is True
    assert properties["LustreConfiguration"]["MetadataConfiguration"] == {"Mode": "AUTOMATIC"}


@pytest.mark.parametrize(("throughput", "step"), FSX_EFA_CAPACITY_STEP_GIB.items())
def test_efa_takes_the_multiples_of_its_throughputs_step_and_nothing_between(throughput, step):
    for capacity in (step, 2 * step):
        assert StorageConfig(efa=True, capacity_gib=capacity, throughput_mb_per_tib=throughput).efa
    with pytest.raises(ValidationError, match=rf"multiples of {step} GiB; choose {2 * step}, or efa: false"):
        StorageConfig(efa=True, capacity_gib=step + 2400, throughput_mb_per_tib=throughput)


def test_backups_of_a_linked_file_system_are_an_error_with_both_ways_out():
    with pytest.raises(ValidationError) as caught:
        StorageConfig(backup_retention_days=7)
    (line,) = describe_errors(caught.value).splitlines()
    assert "backup_retention_days 7" in line
    assert "set it to 0, or data_repository to false" in line


@pytest.mark.parametrize("retain", [True, False])
def test_stacks_that_hold_data_refuse_deletion_as_long_as_data_is_retained(deployment_with, retain):
    stacks = build(cdk.App(), deployment_with(cluster={"storage": {"retain_data": retain}}))
    assert stacks.storage.termination_protection is retain
    assert stacks.image.termination_protection is retain


STATEFUL = [
    ("storage", "AWS::S3::Bucket", "Bucket"),
    ("storage", "AWS::FSx::FileSystem", "FileSystem"),
    ("storage", "AWS::KMS::Key", "Key"),
    ("image", "AWS::ECR::Repository", "Repository"),
]


@pytest.mark.parametrize(("stack", "kind", "prefix"), STATEFUL)
@pytest.mark.parametrize(("retain", "policy"), [(True, "Retain"), (False, "Delete")])
def test_data_outlives_its_stack_unless_the_deployment_says_otherwise(
    synthesize, only, stack, kind, prefix, retain, policy
):
    resource = only(synthesize(cluster={"storage": {"retain_data": retain}})[stack], kind, prefix)[1]
    assert resource["DeletionPolicy"] == policy
    assert resource["UpdateReplacePolicy"] == policy


@pytest.mark.parametrize(("retain", "emptied"), [(True, 0), (False, 1)])
def test_the_bucket_is_emptied_only_where_it_shall_go(synthesize, retain, emptied):
    template = synthesize(cluster={"storage": {"retain_data": retain}})["storage"]
    template.resource_count_is("Custom::S3AutoDeleteObjects", emptied)


def test_image_tags_cannot_move_and_images_are_scanned(templates):
    templates["image"].has_resource_properties(
        "AWS::ECR::Repository",
        {"ImageTagMutability": "IMMUTABLE", "ImageScanningConfiguration": {"ScanOnPush": True}},
    )

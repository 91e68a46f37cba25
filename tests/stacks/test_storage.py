import pytest


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


STATEFUL = [
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


def test_image_tags_cannot_move_and_images_are_scanned(templates):
    templates["image"].has_resource_properties(
        "AWS::ECR::Repository",
        {"ImageTagMutability": "IMMUTABLE", "ImageScanningConfiguration": {"ScanOnPush": True}},
    )


def test_logical_ids_of_stateful_resources_never_change(templates):
    # A new id is a new resource: an empty file system, a new cluster. Change this list only with a migration.
    pinned = {
        "network": ["Vpc8378EB38", "GpuSubnet8C21C310", "EfaSecurityGroup7CA28382", "FsxSecurityGroup94E8AC1C"],
        "storage": ["FileSystem", "Key961B73FD"],
        "image": ["Repository22E53BBD"],
        "cluster": ["ClusterEB0386A7", "SecretsKey317DCF94", "NodeRoleB5643E21", "GpuNodegroup8C147F01"],
    }
    for stack, ids in pinned.items():
        assert set(ids) <= set(templates[stack].to_json()["Resources"]), stack

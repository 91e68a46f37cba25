"""The shared file system: FSx for Lustre in the GPU zone, encrypted with its own key and kept by default."""

from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_fsx as fsx
from aws_cdk import aws_kms as kms
from constructs import Construct

from config.cluster import StorageConfig
from stacks.network import NetworkStack

# 2.10, the service's default, fails to mount on AL2023 with "Invalid argument" (aws-fsx-csi-driver #437), and 2.12
# can't have a metadata configuration.
LUSTRE_VERSION = "2.15"


class StorageStack(cdk.Stack):
    """FSx for Lustre. `CfnFileSystem`, since the L2 construct has no metadata configuration (aws-cdk-lib 2.275)."""

    def __init__(
        self, scope: Construct, id_: str, *, config: StorageConfig, network: NetworkStack, **kwargs: Any
    ) -> None:
        super().__init__(scope, id_, description="Training: FSx for Lustre", **kwargs)
        removal = removal_policy(config)
        self.key = kms.Key(
            self, "Key", description="FSx for Lustre data", enable_key_rotation=True, removal_policy=removal
        )
        self.file_system = fsx.CfnFileSystem(
            self,
            "FileSystem",
            file_system_type="LUSTRE",
            file_system_type_version=LUSTRE_VERSION,
            storage_type="SSD",
            storage_capacity=config.capacity_gib,
            # One subnet, the GPU nodes': the file system is in one zone, and data across zones is slow and billed.
            subnet_ids=[network.gpu_subnet.subnet_id],
            security_group_ids=[network.fsx_security_group.security_group_id],
            kms_key_id=self.key.key_arn,
            lustre_configuration=fsx.CfnFileSystem.LustreConfigurationProperty(
                deployment_type="PERSISTENT_2",
                per_unit_storage_throughput=config.throughput_mb_per_tib,
                data_compression_type="LZ4",
                # Only possible at creation (aws-parallelcluster #7616).
                metadata_configuration=_metadata(config),
            ),
            tags=[cdk.CfnTag(key="Name", value=self.stack_name)],
        )
        self.file_system.apply_removal_policy(removal)
        cdk.CfnOutput(self, "FileSystemId", value=self.file_system.ref, description="FSx for Lustre file system")
        cdk.CfnOutput(self, "MountName", value=self.file_system.attr_lustre_mount_name, description="Lustre mount name")


def removal_policy(config: StorageConfig) -> cdk.RemovalPolicy:
    """What becomes of data when its stack goes."""
    return cdk.RemovalPolicy.RETAIN if config.retain_data else cdk.RemovalPolicy.DESTROY


def _metadata(config: StorageConfig) -> fsx.CfnFileSystem.MetadataConfigurationProperty:
    if config.metadata_iops is None:
        return fsx.CfnFileSystem.MetadataConfigurationProperty(mode="AUTOMATIC")
    return fsx.CfnFileSystem.MetadataConfigurationProperty(mode="USER_PROVISIONED", iops=config.metadata_iops)

"""The shared file system: FSx for Lustre in the GPU zone, encrypted with its own key, linked to S3, kept by default."""

from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_fsx as fsx
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3 as s3
from constructs import Construct

from config import names
from config.cluster import StorageConfig
from stacks.network import NetworkStack

# 2.10, the service's default, fails to mount on AL2023 with "Invalid argument" (aws-fsx-csi-driver #437), and 2.12
# can't have a metadata configuration.
LUSTRE_VERSION = "2.15"
_EVERY_CHANGE = ["NEW", "CHANGED", "DELETED"]


class StorageStack(cdk.Stack):
    """FSx for Lustre. `CfnFileSystem`, since the L2 construct has no metadata configuration (aws-cdk-lib 2.275)."""

    def __init__(
        self, scope: Construct, id_: str, *, config: StorageConfig, network: NetworkStack, **kwargs: Any
    ) -> None:
        super().__init__(
            scope,
            id_,
            description="Training: FSx for Lustre and its S3 bucket",
            termination_protection=config.retain_data,
            **kwargs,
        )
        removal = removal_policy(config)
        self.key = kms.Key(
            self, "Key", description="FSx for Lustre data", enable_key_rotation=True, removal_policy=removal
        )
        self.file_system = self._file_system(config, network)
        self.file_system.apply_removal_policy(removal)
        cdk.CfnOutput(self, "FileSystemId", value=self.file_system.ref, description="FSx for Lustre file system")
        cdk.CfnOutput(self, "MountName", value=self.file_system.attr_lustre_mount_name, description="Lustre mount name")
        if config.data_repository:
            bucket = self._bucket(removal)
            _link(self, self.file_system, bucket)
            cdk.CfnOutput(self, "BucketName", value=bucket.bucket_name, description="put data sets under data/")

    def _file_system(self, config: StorageConfig, network: NetworkStack) -> fsx.CfnFileSystem:
        return fsx.CfnFileSystem(
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
                # Only possible at creation (aws-parallelcluster #7616); EFA too, and only with it.
                metadata_configuration=_metadata(config),
                efa_enabled=True if config.efa else None,
                # Said even when it is 0: FSx refuses backups of a linked file system, and CDK leaves no default to it.
                automatic_backup_retention_days=config.backup_retention_days,
            ),
            tags=[cdk.CfnTag(key="Name", value=self.stack_name)],
        )

    def _bucket(self, removal: cdk.RemovalPolicy) -> s3.Bucket:
        """Source of data sets and second home of checkpoints; it may be kept when the file system goes.

        No versions: every pruned checkpoint would live on as one, about 96 GB for 8B every few minutes. S3's own key:
        with ours its policy would have to name FSx's service-linked role, which exists only after the link does.
        """
        bucket = s3.Bucket(
            self,
            "Bucket",
            encryption=s3.BucketEncryption.S3_MANAGED,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            enforce_ssl=True,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            removal_policy=removal,
            # CloudFormation deletes no bucket that still holds objects; without this a stack that should go gets stuck.
            auto_delete_objects=removal == cdk.RemovalPolicy.DESTROY,
        )
        # FSx uploads in parts; those of an interrupted upload are invisible and billed.
        bucket.add_lifecycle_rule(id="abandoned-uploads", abort_incomplete_multipart_upload_after=cdk.Duration.days(7))
        return bucket


def _link(scope: Construct, file_system: fsx.CfnFileSystem, bucket: s3.Bucket) -> None:
    """Data sets come in, runs go out.

    One direction each: with both, either side may overwrite the other's change (FSx user guide, "Automatically export
    updates"). CfnFileSystem's own import and export paths are refused on PERSISTENT_2.
    """
    policies = {
        names.FSX_DATASETS: fsx.CfnDataRepositoryAssociation.S3Property(
            auto_import_policy=fsx.CfnDataRepositoryAssociation.AutoImportPolicyProperty(events=_EVERY_CHANGE)
        ),
        # Deletions as well, so that the bucket holds what the file system holds, and not every checkpoint ever made.
        names.FSX_RUNS: fsx.CfnDataRepositoryAssociation.S3Property(
            auto_export_policy=fsx.CfnDataRepositoryAssociation.AutoExportPolicyProperty(events=_EVERY_CHANGE)
        ),
    }
    for path, policy in policies.items():
        fsx.CfnDataRepositoryAssociation(
            scope,
            f"Link{path.removeprefix('/').title()}",
            file_system_id=file_system.ref,
            file_system_path=path,
            data_repository_path=f"s3://{bucket.bucket_name}{path}/",
            batch_import_meta_data_on_create=True,
            s3=policy,
        ).node.add_dependency(bucket)


def removal_policy(config: StorageConfig) -> cdk.RemovalPolicy:
    """What becomes of data when its stack goes."""
    return cdk.RemovalPolicy.RETAIN if config.retain_data else cdk.RemovalPolicy.DESTROY


def _metadata(config: StorageConfig) -> fsx.CfnFileSystem.MetadataConfigurationProperty:
    if config.metadata_iops is None:
        return fsx.CfnFileSystem.MetadataConfigurationProperty(mode="AUTOMATIC")
    return fsx.CfnFileSystem.MetadataConfigurationProperty(mode="USER_PROVISIONED", iops=config.metadata_iops)

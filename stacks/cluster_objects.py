"""Kubernetes objects that live as long as the cluster: the job's namespace, its volume, a class for further ones."""

from typing import Any

from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_fsx as fsx
from constructs import Construct

from config.cluster import StorageConfig
from k8s.shared import POD_SECURITY_LABELS
from k8s.storage import fsx_claim, fsx_volume
from stacks.network import NetworkStack
from stacks.storage import LUSTRE_VERSION

STORAGE_CLASS = "fsx-lustre"


class ClusterObjects(Construct):
    """Namespace, PersistentVolume and claim, StorageClass."""

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        cluster: eks.ICluster,
        namespace: str,
        storage: StorageConfig,
        network: NetworkStack,
        file_system: fsx.CfnFileSystem,
    ) -> None:
        super().__init__(scope, id_)
        manifest = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": namespace, "labels": POD_SECURITY_LABELS},
        }
        objects = eks.KubernetesManifest(self, "Namespace", cluster=cluster, manifest=[manifest])
        volume = fsx_volume(
            namespace=namespace,
            file_system_id=file_system.ref,
            dns_name=file_system.attr_dns_name,
            mount_name=file_system.attr_lustre_mount_name,
            capacity_gib=storage.capacity_gib,
        )
        claim = fsx_claim(namespace=namespace, capacity_gib=storage.capacity_gib)
        volumes = eks.KubernetesManifest(self, "Volume", cluster=cluster, manifest=[volume, claim])
        volumes.node.add_dependency(objects)
        eks.KubernetesManifest(self, "StorageClass", cluster=cluster, manifest=[_storage_class(storage, network)])


def _storage_class(storage: StorageConfig, network: NetworkStack) -> dict[str, Any]:
    """Further file systems like the deployment's, in the GPU zone: whoever makes a claim makes one, and its bill.

    Never with EFA: the driver rounds capacity up to multiples of 2400 GiB, EFA has larger ones (aws-fsx-csi-driver,
    pkg/util). FSx's own key, since ours may go with its stack while these file systems stay. Not the default class: a
    claim must ask for it.
    """
    metadata = {"metadataConfigurationMode": "AUTOMATIC"}
    if storage.metadata_iops is not None:
        metadata = {"metadataConfigurationMode": "USER_PROVISIONED", "metadataIops": str(storage.metadata_iops)}
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": STORAGE_CLASS},
        "provisioner": "fsx.csi.aws.com",
        "parameters": {
            "subnetId": network.gpu_subnet.subnet_id,
            "securityGroupIds": network.fsx_security_group.security_group_id,
            # Said, since the driver's default is 2.10, whose mount fails on AL2023 (aws-fsx-csi-driver #437).
            "fileSystemTypeVersion": LUSTRE_VERSION,
            "deploymentType": "PERSISTENT_2",
            "storageType": "SSD",
            "perUnitStorageThroughput": str(storage.throughput_mb_per_tib),
            "dataCompressionType": "LZ4",
            "automaticBackupRetentionDays": str(storage.backup_retention_days),
            **metadata,
        },
        "mountOptions": ["flock", "noatime"],
        "reclaimPolicy": "Retain" if storage.retain_data else "Delete",
        "allowVolumeExpansion": True,
        # At the claim, not at the pod: making one takes ten minutes, in which GPU nodes would wait.
        "volumeBindingMode": "Immediate",
    }

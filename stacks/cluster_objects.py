"""Kubernetes objects that live as long as the cluster: the job's namespace, and the volume every job mounts."""

from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_fsx as fsx
from constructs import Construct

from config import names
from config.cluster import StorageConfig


class ClusterObjects(Construct):
    """Namespace, PersistentVolume and claim.

    A static volume: dynamic provisioning would make a file system of version 2.10 and round its size in its own way
    (aws-fsx-csi-driver #399, #437).
    """

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        cluster: eks.ICluster,
        namespace: str,
        storage: StorageConfig,
        file_system: fsx.CfnFileSystem,
    ) -> None:
        super().__init__(scope, id_)
        capacity = f"{storage.capacity_gib}Gi"
        objects = eks.KubernetesManifest(
            self,
            "Namespace",
            cluster=cluster,
            manifest=[{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}],
        )
        volume = eks.KubernetesManifest(
            self,
            "Volume",
            cluster=cluster,
            manifest=[_volume(capacity, namespace, file_system), _claim(capacity, namespace)],
        )
        volume.node.add_dependency(objects)


def _volume(capacity: str, namespace: str, file_system: fsx.CfnFileSystem) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": names.FSX_VOLUME},
        "spec": {
            "capacity": {"storage": capacity},
            "accessModes": ["ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            # Only our claim may take it.
            "claimRef": {"namespace": namespace, "name": names.FSX_CLAIM},
            # flock: several data-set libraries lock files, and Lustre clients refuse it by default.
            "mountOptions": ["flock", "noatime"],
            "csi": {
                "driver": "fsx.csi.aws.com",
                "volumeHandle": file_system.ref,
                "volumeAttributes": {
                    "dnsname": file_system.attr_dns_name,
                    "mountname": file_system.attr_lustre_mount_name,
                },
            },
        },
    }


def _claim(capacity: str, namespace: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": names.FSX_CLAIM, "namespace": namespace},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "",
            "volumeName": names.FSX_VOLUME,
            "resources": {"requests": {"storage": capacity}},
        },
    }

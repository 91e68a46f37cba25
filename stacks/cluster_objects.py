"""Kubernetes objects that live as long as the cluster: the job's namespace, and the volume every job mounts."""

from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_fsx as fsx
from constructs import Construct

from config.cluster import StorageConfig
from k8s.shared import POD_SECURITY_LABELS
from k8s.storage import fsx_claim, fsx_storage_class, fsx_volume


class ClusterObjects(Construct):
    """Namespace, storage class, PersistentVolume and claim."""

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
        objects = eks.KubernetesManifest(
            self,
            "Namespace",
            cluster=cluster,
            manifest=[
                {
                    "apiVersion": "v1",
                    "kind": "Namespace",
                    "metadata": {"name": namespace, "labels": POD_SECURITY_LABELS},
                }
            ],
        )
        volume = eks.KubernetesManifest(
            self,
            "Volume",
            cluster=cluster,
            manifest=[
                fsx_storage_class(),
                fsx_volume(
                    namespace=namespace,
                    file_system_id=file_system.ref,
                    dns_name=file_system.attr_dns_name,
                    mount_name=file_system.attr_lustre_mount_name,
                    capacity_gib=storage.capacity_gib,
                ),
                fsx_claim(namespace=namespace, capacity_gib=storage.capacity_gib),
            ],
        )
        volume.node.add_dependency(objects)

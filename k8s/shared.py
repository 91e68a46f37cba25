"""What a job shares with others and needs before it: namespace and claim, in a file of their own."""

from cdk8s import Chart
from cdk8s_plus_33 import k8s as kube
from constructs import Construct

from config.deployment import DeploymentConfig
from config.job import JobConfig
from k8s import storage

# Pod Security Standards. Baseline is enforced, since an init container runs as root to make the run's directories; all
# else keeps to restricted while job.run_as_user is not root.
POD_SECURITY_LABELS = {
    "pod-security.kubernetes.io/enforce": "baseline",
    "pod-security.kubernetes.io/warn": "restricted",
}
_CLAIM_GIB = 20  # a drill's small runs


class SharedChart(Chart):
    """The claim on the shared volume, and the namespace where this project did not build the cluster.

    With a cluster section CDK installs both, and the same claim stands here too, so that the manifests are complete;
    the namespace does not: deleting these files must not take everything in it along. With `job.storage` the volume of
    that file system stands here as well.
    """

    def __init__(self, scope: Construct, id_: str, *, deployment: DeploymentConfig) -> None:
        super().__init__(scope, id_, disable_resource_name_hashes=True)
        job = deployment.job
        if deployment.cluster is not None:
            capacity_gib = deployment.cluster.storage.capacity_gib
            claim = storage.fsx_claim_props(namespace=job.namespace, capacity_gib=capacity_gib)
        else:
            kube.KubeNamespace(
                self, "namespace", metadata=kube.ObjectMeta(name=job.namespace, labels=POD_SECURITY_LABELS)
            )
            claim = self._own_storage(job)
        kube.KubePersistentVolumeClaim(self, "claim", metadata=claim.metadata, spec=claim.spec)

    def _own_storage(self, job: JobConfig) -> kube.KubePersistentVolumeClaimProps:
        """The claim on a cluster from elsewhere; with the volume, where the deployment names a file system."""
        existing = job.storage
        if existing is None:
            return storage.default_class_claim(namespace=job.namespace, capacity_gib=_CLAIM_GIB)
        volume = storage.fsx_volume_props(
            namespace=job.namespace,
            file_system_id=existing.file_system_id,
            dns_name=existing.dns_name,
            mount_name=existing.mount_name,
            capacity_gib=existing.capacity_gib,
        )
        kube.KubeStorageClass(self, "storage-class", **storage.fsx_storage_class_fields())
        kube.KubePersistentVolume(self, "volume", metadata=volume.metadata, spec=volume.spec)
        return storage.fsx_claim_props(namespace=job.namespace, capacity_gib=existing.capacity_gib)

"""What a job shares with others and needs before it: namespace and claim, in a file of their own."""

from cdk8s import Chart
from cdk8s_plus_33 import k8s as kube
from constructs import Construct

from config.deployment import DeploymentConfig
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
    the namespace does not: deleting these files must not take everything in it along.
    """

    def __init__(self, scope: Construct, id_: str, *, deployment: DeploymentConfig) -> None:
        super().__init__(scope, id_, disable_resource_name_hashes=True)
        namespace = deployment.job.namespace
        if deployment.cluster is None:
            kube.KubeNamespace(self, "namespace", metadata=kube.ObjectMeta(name=namespace, labels=POD_SECURITY_LABELS))
            claim = storage.default_class_claim(namespace=namespace, capacity_gib=_CLAIM_GIB)
        else:
            claim = storage.fsx_claim_props(namespace=namespace, capacity_gib=deployment.cluster.storage.capacity_gib)
        kube.KubePersistentVolumeClaim(self, "claim", metadata=claim.metadata, spec=claim.spec)

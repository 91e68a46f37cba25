"""What a job needs before it: namespace and shared claim. With a cluster section CDK installs them instead."""

from cdk8s import Chart
from cdk8s_plus_33 import k8s as kube
from constructs import Construct

from k8s import storage

# Pod Security Standards. Baseline is enforced, since an init container runs as root to make the run's directories; all
# else keeps to restricted while job.run_as_user is not root.
POD_SECURITY_LABELS = {
    "pod-security.kubernetes.io/enforce": "baseline",
    "pod-security.kubernetes.io/warn": "restricted",
}
_CLAIM_GIB = 20  # a drill's small runs


class NamespaceChart(Chart):
    """Namespace and claim for a cluster that this project did not build, such as kind."""

    def __init__(self, scope: Construct, id_: str, *, namespace: str) -> None:
        super().__init__(scope, id_, disable_resource_name_hashes=True)
        kube.KubeNamespace(self, "namespace", metadata=kube.ObjectMeta(name=namespace, labels=POD_SECURITY_LABELS))
        claim = storage.default_class_claim(namespace=namespace, capacity_gib=_CLAIM_GIB)
        kube.KubePersistentVolumeClaim(self, "claim", metadata=claim.metadata, spec=claim.spec)

"""Which nodes a pod goes to: its instance type, one worker each, close to each other in the network."""

from typing import Any

from cdk8s_plus_33 import k8s as kube

from config import names
from config.job import JobConfig
from k8s import policies

_LOST_NODE_SECONDS = 30  # Kubernetes' default is 300: a spare waits for nothing, but the replacement would
_WEIGHTS = (100, 50)  # the nearer layer counts twice


def on_gpu_nodes(job: JobConfig, component: str) -> dict[str, Any]:
    """Fields of a pod's spec that put one pod of `component` on each GPU node; none for CPU pods."""
    if job.instance is None:
        return {}
    return {
        "node_selector": {"node.kubernetes.io/instance-type": job.instance.name},
        "tolerations": _tolerations(),
        "affinity": kube.Affinity(
            pod_anti_affinity=kube.PodAntiAffinity(
                required_during_scheduling_ignored_during_execution=[_near(job, component, "kubernetes.io/hostname")]
            ),
            pod_affinity=_network_affinity(job, component),
        ),
    }


def on_system_nodes(job: JobConfig) -> dict[str, Any]:
    """Fields of a pod's spec that keep it off the GPU nodes, and so out of reach of their faults."""
    return {"node_selector": {names.NODE_ROLE_LABEL: names.NODE_ROLE_SYSTEM}} if job.instance else {}


def topology_annotations(job: JobConfig) -> dict[str, str]:
    """What tells Kueue's topology-aware scheduling the wish that pod affinity tells the scheduler without it."""
    wish = job.placement.topology
    if job.instance is None or job.kueue is None or not job.kueue.topology_aware or wish == "none":
        return {}
    return {f"kueue.x-k8s.io/podset-{wish}-topology": names.NETWORK_LAYER_LABELS[0]}


def _network_affinity(job: JobConfig, component: str) -> kube.PodAffinity | None:
    if job.placement.topology == "none" or (job.kueue is not None and job.kueue.topology_aware):
        return None
    if job.placement.topology == "required":
        # The first pod has no other to be near to: the scheduler lets it pass, as it matches its own term.
        return kube.PodAffinity(
            required_during_scheduling_ignored_during_execution=[_near(job, component, names.NETWORK_LAYER_LABELS[0])]
        )
    return kube.PodAffinity(
        preferred_during_scheduling_ignored_during_execution=[
            kube.WeightedPodAffinityTerm(weight=weight, pod_affinity_term=_near(job, component, layer))
            for layer, weight in zip(names.NETWORK_LAYER_LABELS, _WEIGHTS, strict=True)
        ]
    )


def _near(job: JobConfig, component: str, topology_key: str) -> kube.PodAffinityTerm:
    return kube.PodAffinityTerm(
        topology_key=topology_key,
        label_selector=kube.LabelSelector(match_labels=policies.labels(job, component)),
    )


def _tolerations() -> list[kube.Toleration]:
    lost_node = [
        kube.Toleration(
            key=f"node.kubernetes.io/{condition}",
            operator="Exists",
            effect="NoExecute",
            toleration_seconds=_LOST_NODE_SECONDS,
        )
        for condition in ("not-ready", "unreachable")
    ]
    return [kube.Toleration(key=names.GPU_TAINT_KEY, operator="Exists", effect="NoSchedule"), *lost_node]

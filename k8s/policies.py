"""What surrounds a job's pods: identity, disruption budget, network policy, quota, and the labels that select them."""

from cdk8s_plus_33 import k8s as kube
from constructs import Construct

from config import names
from config.job import JobConfig

CONTROL = "control"
WORKER = "worker"


def labels(job: JobConfig, component: str | None = None) -> dict[str, str]:
    """Labels of a job's objects; with a component, of its pods. Selectors use the same."""
    of_job = {"app.kubernetes.io/name": "training", "app.kubernetes.io/instance": job.name}
    return of_job if component is None else of_job | {"app.kubernetes.io/component": component}


class JobPolicies(Construct):
    """Service account without rights, disruption budget of the active nodes, and traffic only among the job's pods."""

    def __init__(self, scope: Construct, id_: str, *, job: JobConfig) -> None:
        super().__init__(scope, id_)
        metadata = kube.ObjectMeta(name=job.name)
        kube.KubeServiceAccount(self, "service-account", metadata=metadata, automount_service_account_token=False)
        kube.KubePodDisruptionBudget(
            self,
            "disruption-budget",
            metadata=metadata,
            spec=kube.PodDisruptionBudgetSpec(
                # An integer: percentages and maxUnavailable need an owner with a scale subresource, and a Job has none.
                # Without spares this holds up every drain until training is complete.
                min_available=kube.IntOrString.from_number(job.node_count),
                selector=kube.LabelSelector(match_labels=labels(job, WORKER)),
            ),
        )
        kube.KubeNetworkPolicy(self, "network-policy", metadata=metadata, spec=among_themselves(job))
        if job.resource_quota:
            kube.KubeResourceQuota(self, "quota", metadata=metadata, spec=_device_quota(job))


def among_themselves(job: JobConfig, component: str | None = None) -> kube.NetworkPolicySpec:
    """All ports among the pods with these labels, and DNS: store, gloo and NCCL bootstrap listen on ports chosen at
    run time. Prometheus may reach the metrics port; the rest is denied.

    EFA traffic bypasses the kernel and so this policy; the nodes' security group governs it. FSx is mounted by the
    node, and the kubelet's probes come from the node, which may always reach its pods.
    """
    selector = kube.LabelSelector(match_labels=labels(job, component))
    own_pods = kube.NetworkPolicyPeer(pod_selector=selector)
    return kube.NetworkPolicySpec(
        pod_selector=selector,
        policy_types=["Ingress", "Egress"],
        ingress=[kube.NetworkPolicyIngressRule(from_=[own_pods]), *_from_prometheus(job)],
        egress=[
            kube.NetworkPolicyEgressRule(to=[own_pods]),
            # No peer: a node-local DNS cache has a link-local address that no selector matches.
            kube.NetworkPolicyEgressRule(ports=[_port("UDP", 53), _port("TCP", 53)]),
        ],
    )


def _from_prometheus(job: JobConfig) -> list[kube.NetworkPolicyIngressRule]:
    if job.monitoring is None:
        return []
    # The API server labels every namespace with its name.
    namespace = kube.LabelSelector(match_labels={"kubernetes.io/metadata.name": job.monitoring.namespace})
    return [
        kube.NetworkPolicyIngressRule(
            from_=[kube.NetworkPolicyPeer(namespace_selector=namespace)], ports=[_port("TCP", names.METRICS_PORT)]
        )
    ]


def _port(protocol: str, number: int) -> kube.NetworkPolicyPort:
    return kube.NetworkPolicyPort(protocol=protocol, port=kube.IntOrString.from_number(number))


def _device_quota(job: JobConfig) -> kube.ResourceQuotaSpec:
    """As many devices as this job has: a second job by mistake waits, instead of taking a spare's node."""
    assert job.instance is not None, "config/job.py refuses a quota without an instance type"
    devices = {names.GPU_RESOURCE: job.instance.gpu_count, names.EFA_RESOURCE: job.instance.efa_count}
    return kube.ResourceQuotaSpec(
        hard={
            f"requests.{resource}": kube.Quantity.from_number(count * job.pod_count)
            for resource, count in devices.items()
        }
    )

"""What surrounds a job's pods: identity, disruption budget and network policy, and the labels that select them."""

from cdk8s_plus_33 import k8s as kube
from constructs import Construct

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
        kube.KubeNetworkPolicy(self, "network-policy", metadata=metadata, spec=_network_policy(job))


def _network_policy(job: JobConfig) -> kube.NetworkPolicySpec:
    """All ports among the job's own pods, and DNS: store, gloo and NCCL bootstrap listen on ports chosen at run time.

    EFA traffic bypasses the kernel and so this policy; the nodes' security group governs it. FSx is mounted by the
    node, and the kubelet's probes come from the node, which may always reach its pods.
    """
    own_pods = kube.NetworkPolicyPeer(pod_selector=kube.LabelSelector(match_labels=labels(job)))
    dns = [
        kube.NetworkPolicyPort(protocol=protocol, port=kube.IntOrString.from_number(53)) for protocol in ("UDP", "TCP")
    ]
    return kube.NetworkPolicySpec(
        pod_selector=kube.LabelSelector(match_labels=labels(job)),
        policy_types=["Ingress", "Egress"],
        ingress=[kube.NetworkPolicyIngressRule(from_=[own_pods])],
        egress=[
            kube.NetworkPolicyEgressRule(to=[own_pods]),
            # No peer: a node-local DNS cache has a link-local address that no selector matches.
            kube.NetworkPolicyEgressRule(ports=dns),
        ],
    )

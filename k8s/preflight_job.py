"""The preflight Job: one pod on each of the job's nodes, with a worker's resources, before anything trains there.

A node that fails its checks fails its index for good, and the others still finish: one line per node lands in the run's
preflight directory, and `kubectl get pods` names the node.
"""

from cdk8s import Chart
from cdk8s_plus_33 import k8s as kube
from constructs import Construct

from config import names
from config.deployment import DeploymentConfig
from config.worker import worker_resources
from k8s import launcher, placement, pod, policies, queue
from k8s.resources import whole_node
from training.config import EXIT_PREFLIGHT_FAILED

PREFLIGHT = "preflight"
_DEADLINE_SECONDS = 3600
_KEPT_SECONDS = 86_400
_GRACE_SECONDS = 30


class PreflightChart(Chart):
    """The Job, the name its pods meet at, and their network policy."""

    def __init__(self, scope: Construct, id_: str, *, deployment: DeploymentConfig) -> None:
        job = deployment.job
        super().__init__(
            scope,
            id_,
            namespace=job.namespace,
            labels=policies.labels(job, PREFLIGHT),
            disable_resource_name_hashes=True,
        )
        name = _name(deployment)
        kube.KubeService(
            self,
            "service",
            metadata=kube.ObjectMeta(name=name),
            spec=kube.ServiceSpec(
                cluster_ip="None",
                publish_not_ready_addresses=True,  # pods look for each other, and are never ready for anyone else
                selector=policies.labels(job, PREFLIGHT),
                ports=[kube.ServicePort(name="preflight", port=job.rendezvous.port)],
            ),
        )
        kube.KubeNetworkPolicy(
            self,
            "network-policy",
            metadata=kube.ObjectMeta(name=name),
            spec=policies.among_themselves(job, PREFLIGHT),
        )
        kube.KubeJob(
            self,
            "job",
            metadata=kube.ObjectMeta(name=name, labels=queue.labels(job)),
            spec=_job_spec(deployment),
        )


def command(deployment: DeploymentConfig) -> list[str]:
    """Argv of one node's checks."""
    worker = worker_resources(deployment.job, deployment.train)
    on_fsx = deployment.cluster is not None or deployment.job.storage is not None
    return [
        "python",
        "-m",
        "training.preflight",
        f"--expect-gpus={worker.gpu_count}",
        f"--expect-efa={worker.efa_count}",
        f"--mount={names.FSX_MOUNT}",
        f"--results={deployment.train.run_directory}/preflight",
        f"--expect-hugepages-mib={worker.huge_pages_mib}",
        f"--min-shm-mib={worker.shm_gib * 1024}",
        *(["--expect-filesystem=lustre"] if on_fsx else []),
    ]


def _name(deployment: DeploymentConfig) -> str:
    return f"{deployment.job.name}-{PREFLIGHT}"


def _job_spec(deployment: DeploymentConfig) -> kube.JobSpec:
    job = deployment.job
    return kube.JobSpec(
        completion_mode="Indexed",
        completions=job.pod_count,
        parallelism=job.pod_count,
        # A node that is missing makes every other one say "could not be run": once more, when it may be there.
        backoff_limit_per_index=1,
        pod_replacement_policy="Failed",
        pod_failure_policy=kube.PodFailurePolicy(
            rules=[
                kube.PodFailurePolicyRule(
                    action="FailIndex",
                    on_exit_codes=kube.PodFailurePolicyOnExitCodesRequirement(
                        container_name=PREFLIGHT, operator="In", values=[EXIT_PREFLIGHT_FAILED]
                    ),
                )
            ]
        ),
        active_deadline_seconds=_DEADLINE_SECONDS,
        ttl_seconds_after_finished=_KEPT_SECONDS,
        template=_pod(deployment),
    )


def _pod(deployment: DeploymentConfig) -> kube.PodTemplateSpec:
    job, name = deployment.job, _name(deployment)
    worker = worker_resources(job, deployment.train)
    variables = launcher.worker_environment(deployment) | {
        "MASTER_ADDR": f"{name}-0.{name}",
        "MASTER_PORT": str(job.rendezvous.port),
        "WORLD_SIZE": str(job.pod_count),
    }
    container = kube.Container(
        name=PREFLIGHT,
        image=job.image,
        command=launcher.SUPERVISOR,
        args=launcher.supervised(command(deployment)),
        env=[
            pod.from_field("NODE_NAME", "spec.nodeName"),
            pod.from_field("RANK", pod.COMPLETION_INDEX),
            *pod.environment(variables),
        ],
        resources=whole_node(worker),
        security_context=pod.unprivileged(),
        termination_message_policy="FallbackToLogsOnError",
        volume_mounts=pod.node_mounts(worker),
    )
    spec = pod.pod_spec(
        job,
        subdomain=name,
        termination_grace_period_seconds=_GRACE_SECONDS,
        **placement.on_gpu_nodes(job, PREFLIGHT),
        init_containers=[pod.owned_directories(job, [f"{deployment.train.run_directory}/preflight"])],
        containers=[container],
        volumes=pod.node_volumes(worker),
    )
    return kube.PodTemplateSpec(metadata=pod.metadata(job, PREFLIGHT, placement.topology_annotations(job)), spec=spec)

"""The two Jobs of a run, for both kinds of workload: workers, and the rendezvous store in a pod of its own.

The kinds differ in what follows on a loss. A JobSet recreates everything when a Job fails, so the store gets one try.
An Indexed Job is alone: the store is replaced in place, and every loss of it costs each worker's index a retry.
"""

from typing import Any

from cdk8s_plus_33 import k8s as kube

from config.deployment import DeploymentConfig
from k8s import pod
from training.config import EXIT_BAD_CONFIG, EXIT_NO_RESTART

_NOT_RETRIABLE = [EXIT_BAD_CONFIG, EXIT_NO_RESTART]


def rendered(spec: kube.JobSpec) -> dict[str, Any]:
    """The spec as plain data. Rendered first: a typed value put into a JsonPatch keeps its Quantity wrappers."""
    return kube.KubeJob.manifest(spec=spec)["spec"]


def control_job(deployment: DeploymentConfig) -> kube.JobSpec:
    """The store. In a JobSet it has one try: without it every worker ends, and only a new generation helps."""
    alone = deployment.job.kind == "indexed_job"
    return kube.JobSpec(
        completion_mode="Indexed",
        completions=1,
        parallelism=1,
        backoff_limit=deployment.train.restarts.job.max_restarts if alone else 0,
        pod_replacement_policy="Failed",
        pod_failure_policy=kube.PodFailurePolicy(
            rules=[fail_job(pod.CONTROL_CONTAINER, _NOT_RETRIABLE), *([ignore_disruption()] if alone else [])]
        ),
        template=pod.control_pod(deployment),
    )


def worker_job(deployment: DeploymentConfig, *, train_config_map: str) -> kube.JobSpec:
    """Fields that only work together: the rules here need Indexed, Never and podReplacementPolicy Failed."""
    job = deployment.job
    losses_of_the_store = deployment.train.restarts.job.max_restarts if job.kind == "indexed_job" else 0
    return kube.JobSpec(
        completion_mode="Indexed",
        completions=job.pod_count,
        parallelism=job.pod_count,
        backoff_limit_per_index=job.backoff_limit_per_index + losses_of_the_store,
        max_failed_indexes=job.spare_count,
        # Never two pods of one index at a time: the store refuses a second one of a GROUP_RANK, and dies of it.
        pod_replacement_policy="Failed",
        # Any N: a spare may stand in for any index, and which pods are active is decided by who arrives first.
        success_policy=kube.SuccessPolicy(rules=[kube.SuccessPolicyRule(succeeded_count=job.node_count)]),
        pod_failure_policy=kube.PodFailurePolicy(
            rules=[fail_job(pod.WORKER_CONTAINER, _NOT_RETRIABLE), ignore_disruption()]
        ),
        template=pod.worker_pod(deployment, train_config_map=train_config_map),
    )


def fail_job(container: str, exit_codes: list[int]) -> kube.PodFailurePolicyRule:
    """The exit-code contract: these codes end the Job, and through the JobSet's rule the JobSet."""
    return kube.PodFailurePolicyRule(
        action="FailJob",
        on_exit_codes=kube.PodFailurePolicyOnExitCodesRequirement(
            container_name=container, operator="In", values=exit_codes
        ),
    )


def ignore_disruption() -> kube.PodFailurePolicyRule:
    """Eviction, preemption and node loss are not the pod's fault: replaced without being counted."""
    condition = kube.PodFailurePolicyOnPodConditionsPattern(type="DisruptionTarget", status="True")
    return kube.PodFailurePolicyRule(action="Ignore", on_pod_conditions=[condition])

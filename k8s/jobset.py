"""The JobSet: N active and S spare workers as one Indexed Job, and the rendezvous store as another, restarted together.

Who heals what, from inside out: ft_launcher restarts ranks in their pods; a spare takes a lost node's place while the
Job controller replaces its pod; when more indexes are given up than there are spares, or the store is lost, the JobSet
recreates everything as a new generation.
"""

from typing import Any

from cdk8s import ApiObject, ApiObjectMetadata, JsonPatch
from cdk8s_plus_33 import k8s as kube
from constructs import Construct

from config.deployment import DeploymentConfig
from k8s import pod
from k8s.policies import CONTROL, WORKER
from training.config import EXIT_BAD_CONFIG, EXIT_NO_RESTART

API_VERSION = "jobset.x-k8s.io/v1alpha2"

_NOT_RETRIABLE = [EXIT_BAD_CONFIG, EXIT_NO_RESTART]


class TrainingJobSet(Construct):
    """One generation after another of control and workers, until N workers succeed or nothing more may be retried."""

    def __init__(self, scope: Construct, id_: str, *, deployment: DeploymentConfig, train_config_map: str) -> None:
        super().__init__(scope, id_)
        # An untyped object: one CRD does not earn generated bindings. tests/k8s checks it against a schema.
        jobset = ApiObject(
            self,
            "jobset",
            api_version=API_VERSION,
            kind="JobSet",
            metadata=ApiObjectMetadata(name=deployment.job.name),
        )
        jobset.add_json_patch(JsonPatch.add("/spec", _spec(deployment, train_config_map)))


def _spec(deployment: DeploymentConfig, train_config_map: str) -> dict[str, Any]:
    return {
        # Names before readiness: the store looks itself up before it can be ready.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [WORKER]},
        "failurePolicy": {
            "maxRestarts": deployment.train.restarts.job.max_restarts,
            # No pod of the old generation may meet one of the new at the store's name.
            "restartStrategy": "BlockingRecreate",
            # Everything else, lost store and too many lost indexes, restarts the JobSet: the default.
            "rules": [{"name": "noRestart", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        "replicatedJobs": [
            {"name": CONTROL, "replicas": 1, "template": _job(_control_job(deployment))},
            {
                "name": WORKER,
                "replicas": 1,
                "dependsOn": [{"name": CONTROL, "status": "Ready"}],
                "template": _job(_worker_job(deployment, train_config_map)),
            },
        ],
    }


def _job(spec: kube.JobSpec) -> dict[str, Any]:
    """A JobSet's job template. Rendered first: a typed value put into a JsonPatch keeps its Quantity wrappers."""
    return {"spec": kube.KubeJob.manifest(spec=spec)["spec"]}


def _control_job(deployment: DeploymentConfig) -> kube.JobSpec:
    """One try: without the store every worker ends within seconds, so only a new generation helps."""
    return kube.JobSpec(
        completion_mode="Indexed",
        completions=1,
        parallelism=1,
        backoff_limit=0,
        pod_replacement_policy="Failed",
        pod_failure_policy=kube.PodFailurePolicy(rules=[_fail_job(pod.CONTROL_CONTAINER)]),
        template=pod.control_pod(deployment),
    )


def _worker_job(deployment: DeploymentConfig, train_config_map: str) -> kube.JobSpec:
    """Fields that only work together: the rules here need Indexed, Never and podReplacementPolicy Failed."""
    job = deployment.job
    return kube.JobSpec(
        completion_mode="Indexed",
        completions=job.pod_count,
        parallelism=job.pod_count,
        backoff_limit_per_index=job.backoff_limit_per_index,
        max_failed_indexes=job.spare_count,
        # Never two pods of one index at a time: the store refuses a second one of a GROUP_RANK, and dies of it.
        pod_replacement_policy="Failed",
        # Any N: a spare may stand in for any index, and which pods are active is decided by who arrives first.
        success_policy=kube.SuccessPolicy(rules=[kube.SuccessPolicyRule(succeeded_count=job.node_count)]),
        pod_failure_policy=kube.PodFailurePolicy(
            rules=[
                _fail_job(pod.WORKER_CONTAINER),
                # Eviction, preemption and node loss are not the pod's fault: replaced without being counted.
                kube.PodFailurePolicyRule(
                    action="Ignore",
                    on_pod_conditions=[
                        kube.PodFailurePolicyOnPodConditionsPattern(type="DisruptionTarget", status="True")
                    ],
                ),
            ]
        ),
        template=pod.worker_pod(deployment, train_config_map=train_config_map),
    )


def _fail_job(container: str) -> kube.PodFailurePolicyRule:
    """The exit-code contract: these codes end the Job, and through the JobSet's rule the JobSet."""
    return kube.PodFailurePolicyRule(
        action="FailJob",
        on_exit_codes=kube.PodFailurePolicyOnExitCodesRequirement(
            container_name=container, operator="In", values=_NOT_RETRIABLE
        ),
    )

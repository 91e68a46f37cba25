"""The JobSet: N active and S spare workers as one Indexed Job, and the rendezvous store as another, restarted together.

Who heals what, from inside out: ft_launcher restarts ranks in their pods; a spare takes a lost node's place while the
Job controller replaces its pod; when more indexes are given up than there are spares, or the store is lost, the JobSet
recreates everything as a new generation.
"""

from typing import Any

from cdk8s import ApiObject, ApiObjectMetadata, JsonPatch
from constructs import Construct

from config.deployment import DeploymentConfig
from k8s import queue
from k8s.job_specs import control_job, rendered, worker_job
from k8s.policies import CONTROL, WORKER

API_VERSION = "jobset.x-k8s.io/v1alpha2"


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
            metadata=ApiObjectMetadata(name=deployment.job.name, labels=queue.labels(deployment.job)),
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
        "replicatedJobs": _replicated_jobs(deployment, train_config_map),
    }


def _replicated_jobs(deployment: DeploymentConfig, train_config_map: str) -> list[dict[str, Any]]:
    worker = {
        "name": WORKER,
        "replicas": 1,
        "template": {"spec": rendered(worker_job(deployment, train_config_map=train_config_map))},
    }
    if deployment.job.rendezvous.mode == "embedded":
        return [worker]
    control = {"name": CONTROL, "replicas": 1, "template": {"spec": rendered(control_job(deployment))}}
    return [control, worker | {"dependsOn": [{"name": CONTROL, "status": "Ready"}]}]

"""Kueue: the label that hands a workload to a queue, and the queue of the namespace where it comes with the job."""

from cdk8s import ApiObject, ApiObjectMetadata, JsonPatch
from constructs import Construct

from config.job import JobConfig

API_VERSION = "kueue.x-k8s.io/v1beta2"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def labels(job: JobConfig) -> dict[str, str]:
    """Labels of a workload; Kueue's webhook then suspends it until the queue admits it."""
    return {_QUEUE_LABEL: job.kueue.local_queue} if job.kueue else {}


class LocalQueue(Construct):
    """The namespace's queue in front of a cluster queue that others have made."""

    def __init__(self, scope: Construct, id_: str, *, namespace: str, local_queue: str, cluster_queue: str) -> None:
        super().__init__(scope, id_)
        queue = ApiObject(
            self,
            "local-queue",
            api_version=API_VERSION,
            kind="LocalQueue",
            metadata=ApiObjectMetadata(name=local_queue, namespace=namespace),
        )
        queue.add_json_patch(JsonPatch.add("/spec", {"clusterQueue": cluster_queue}))

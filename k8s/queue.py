"""Who goes first: the priority class, and Kueue's label and queue, where they come with the job."""

from cdk8s import ApiObject, ApiObjectMetadata, JsonPatch
from cdk8s_plus_33 import k8s as kube
from constructs import Construct

from config.job import JobConfig
from config.workload import DEFAULT_PRIORITY_CLASS

API_VERSION = "kueue.x-k8s.io/v1beta2"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_PRIORITY = 1_000_000  # pods without a class have 0, the system's classes two billion


def labels(job: JobConfig) -> dict[str, str]:
    """Labels of a workload; Kueue's webhook then suspends it until the queue admits it."""
    return {_QUEUE_LABEL: job.kueue.local_queue} if job.kueue else {}


class Precedence(Construct):
    """The default priority class, and the namespace's queue in front of a cluster queue that others have made.

    Both are shared with other jobs, so they belong into the file that outlives this one.
    """

    def __init__(self, scope: Construct, id_: str, *, job: JobConfig) -> None:
        super().__init__(scope, id_)
        if job.placement.priority_class == DEFAULT_PRIORITY_CLASS:
            kube.KubePriorityClass(
                self,
                "priority-class",
                metadata=kube.ObjectMeta(name=DEFAULT_PRIORITY_CLASS),
                value=_PRIORITY,
                description="training jobs: before everything without a class, after the system's own",
            )
        if job.kueue is not None and job.kueue.cluster_queue is not None:
            metadata = ApiObjectMetadata(name=job.kueue.local_queue, namespace=job.namespace)
            queue = ApiObject(self, "local-queue", api_version=API_VERSION, kind="LocalQueue", metadata=metadata)
            queue.add_json_patch(JsonPatch.add("/spec", {"clusterQueue": job.kueue.cluster_queue}))

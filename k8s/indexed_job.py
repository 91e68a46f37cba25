"""The same workers and store as plain Indexed Jobs and a headless Service, for clusters without the JobSet controller.

What it lacks is the outer layer: nothing recreates everything at once. A lost store is replaced, and every worker ends
and is retried by its index, so the retries of an index include those losses.
"""

from cdk8s_plus_33 import k8s as kube
from constructs import Construct

from config.deployment import DeploymentConfig
from k8s import policies, queue
from k8s.job_specs import control_job, worker_job
from k8s.policies import CONTROL, WORKER


class TrainingIndexedJob(Construct):
    """Service, store and workers; done when N workers have succeeded."""

    def __init__(self, scope: Construct, id_: str, *, deployment: DeploymentConfig, train_config_map: str) -> None:
        super().__init__(scope, id_)
        job = deployment.job
        kube.KubeService(
            self,
            "service",
            metadata=kube.ObjectMeta(name=job.name),
            spec=kube.ServiceSpec(
                cluster_ip="None",
                # Names before readiness: the store looks itself up before it can be ready.
                publish_not_ready_addresses=True,
                selector=policies.labels(job),
                ports=[kube.ServicePort(name="rdzv", port=job.rendezvous.port)],
            ),
        )
        if job.rendezvous.mode == "control":
            self._job(deployment, CONTROL, control_job(deployment))
        self._job(deployment, WORKER, worker_job(deployment, train_config_map=train_config_map))

    def _job(self, deployment: DeploymentConfig, component: str, spec: kube.JobSpec) -> None:
        job = deployment.job
        metadata = kube.ObjectMeta(name=f"{job.name}-{component}", labels=queue.labels(job))
        kube.KubeJob(self, component, metadata=metadata, spec=spec)

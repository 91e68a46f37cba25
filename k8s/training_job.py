"""One training job: settings, policies, monitoring and the workload. Everything here lives as long as the job."""

import hashlib

from cdk8s import Chart
from cdk8s_plus_33 import k8s as kube
from constructs import Construct

from config import names
from config.deployment import DeploymentConfig
from k8s import launcher, policies
from k8s.indexed_job import TrainingIndexedJob
from k8s.jobset import TrainingJobSet
from k8s.monitoring import JobMonitoring


class TrainingJobChart(Chart):
    """All objects of one job, in its namespace."""

    def __init__(self, scope: Construct, id_: str, *, deployment: DeploymentConfig) -> None:
        job = deployment.job
        super().__init__(
            scope,
            id_,
            namespace=job.namespace,
            labels=policies.labels(job),
            disable_resource_name_hashes=True,  # a suffix in the JobSet's name would break the store's DNS name
        )
        settings = launcher.train_json(deployment, launcher.cluster_site(deployment))
        # Changed settings are a new object: pods of a running generation never see two versions.
        config_map = f"{job.name}-train-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"
        kube.KubeConfigMap(
            self,
            "train-config",
            metadata=kube.ObjectMeta(name=config_map),
            data={names.TRAIN_CONFIG_FILE: settings},
            immutable=True,
        )
        policies.JobPolicies(self, "policies", job=job)
        if job.monitoring is not None:
            JobMonitoring(self, "monitoring", job=job, monitoring=job.monitoring)
        workload = TrainingJobSet if job.kind == "jobset" else TrainingIndexedJob
        workload(self, job.kind.replace("_", "-"), deployment=deployment, train_config_map=config_map)

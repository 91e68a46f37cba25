"""One-shot Jobs on the shared volume: directories that belong to the trainer's user, and the tokenized corpus."""

from pathlib import PurePosixPath
from typing import Any

from cdk8s import Chart
from cdk8s_plus_33 import k8s as kube
from constructs import Construct

from config.deployment import DeploymentConfig
from config.job import PrepareDataConfig
from k8s import job_specs, launcher, placement, pod, policies
from k8s.resources import fixed
from training.config import EXIT_BAD_CONFIG

DIRECTORIES = "directories"
PREPARE_DATA = "prepare-data"
_KEPT_SECONDS = 86_400
_GRACE_SECONDS = 30


class DirectoriesChart(Chart):
    """Makes the run's directories as root, once, so that no worker has a root container."""

    def __init__(self, scope: Construct, id_: str, *, deployment: DeploymentConfig) -> None:
        job = deployment.job
        super().__init__(scope, id_, **_chart_options(deployment, DIRECTORIES))
        kube.KubeJob(
            self,
            "job",
            metadata=kube.ObjectMeta(name=f"{job.name}-{DIRECTORIES}"),
            spec=_once(
                deployment,
                DIRECTORIES,
                containers=[pod.directories_container(deployment)],
                volumes=[pod.fsx_volume()],
            ),
        )


class PrepareDataChart(Chart):
    """Tokenizes `job.prepare_data.input_directory` into `train.data.path`; a corpus that is there is left alone."""

    def __init__(
        self, scope: Construct, id_: str, *, deployment: DeploymentConfig, preparation: PrepareDataConfig
    ) -> None:
        job = deployment.job
        super().__init__(scope, id_, **_chart_options(deployment, PREPARE_DATA))
        container = kube.Container(
            name=PREPARE_DATA,
            image=job.image,
            command=launcher.SUPERVISOR,
            args=launcher.supervised(prepare_command(deployment, preparation)),
            env=pod.environment({"PYTHONUNBUFFERED": "1"}),
            resources=fixed(cpu=str(preparation.cpu), memory=f"{preparation.memory_gib}Gi"),
            security_context=pod.unprivileged(),
            termination_message_policy="FallbackToLogsOnError",
            volume_mounts=[pod.fsx_mount(), kube.VolumeMount(name="tmp", mount_path="/tmp")],
        )
        # The corpus appears in its parent by one rename.
        parent = str(PurePosixPath(deployment.train.data.path).parent)
        kube.KubeJob(
            self,
            "job",
            metadata=kube.ObjectMeta(name=f"{job.name}-{PREPARE_DATA}"),
            spec=_once(
                deployment,
                PREPARE_DATA,
                init_containers=[pod.owned_directories(job, [parent])],
                containers=[container],
                volumes=[pod.fsx_volume(), kube.Volume(name="tmp", empty_dir=kube.EmptyDirVolumeSource())],
            ),
        )


def prepare_command(deployment: DeploymentConfig, preparation: PrepareDataConfig) -> list[str]:
    """Argv of the tokenizer."""
    return [
        "python",
        "-m",
        "training.prepare_data",
        f"--input={preparation.input_directory}",
        f"--out={deployment.train.data.path}",
        f"--pattern={preparation.pattern}",
        f"--tokenizer={deployment.train.data.tokenizer}",
        *(["--exclude", *preparation.exclude] if preparation.exclude else []),
    ]


def _chart_options(deployment: DeploymentConfig, component: str) -> dict[str, Any]:
    return {
        "namespace": deployment.job.namespace,
        "labels": policies.labels(deployment.job, component),
        "disable_resource_name_hashes": True,
    }


def _once(deployment: DeploymentConfig, component: str, **pod_fields: Any) -> kube.JobSpec:
    """A Job of one pod on a system node, tried again unless its arguments are wrong."""
    job = deployment.job
    (container,) = pod_fields["containers"]
    return kube.JobSpec(
        backoff_limit=3,
        pod_replacement_policy="Failed",
        pod_failure_policy=kube.PodFailurePolicy(
            rules=[job_specs.fail_job(container.name, [EXIT_BAD_CONFIG]), job_specs.ignore_disruption()]
        ),
        ttl_seconds_after_finished=_KEPT_SECONDS,
        template=kube.PodTemplateSpec(
            metadata=pod.metadata(job, component),
            spec=pod.pod_spec(
                job,
                termination_grace_period_seconds=_GRACE_SECONDS,
                **placement.on_system_nodes(job),
                **pod_fields,
            ),
        ),
    )

"""The two kinds of pod of a job: workers, one per node, and the control pod that owns the rendezvous store."""

from typing import Any

from cdk8s_plus_33 import k8s as kube

from config import names
from config.deployment import DeploymentConfig
from config.job import JobConfig
from config.worker import WorkerResources, worker_resources
from k8s import launcher, placement, policies
from k8s.resources import fixed, whole_node

WORKER_CONTAINER = "trainer"
CONTROL_CONTAINER = "control"
# Set by the Job controller on every pod of an Indexed Job.
COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

_TMP = "tmp"
_SHM = "shm"
_FSX = "fsx"
_LOCAL = "local"
_TRAIN_CONFIG = "train-config"
_PORT_NAME = "rdzv"
_CONTROL_GRACE_SECONDS = 30  # nvrx-control keeps its store for 3 s, so that launchers can read how the job ended


def worker_pod(deployment: DeploymentConfig, *, train_config_map: str) -> kube.PodTemplateSpec:
    """One node of the job: the supervisor runs ft_launcher, which runs one rank per GPU."""
    job = deployment.job
    by_init_container = job.directories == "init_container"
    return kube.PodTemplateSpec(
        metadata=metadata(job, policies.WORKER, placement.topology_annotations(job)),
        spec=pod_spec(
            job,
            **_member(job),
            termination_grace_period_seconds=job.grace_period_seconds(deployment.train.restarts),
            **placement.on_gpu_nodes(job, policies.WORKER),
            init_containers=[directories_container(deployment)] if by_init_container else None,
            containers=[_worker_container(deployment)],
            volumes=[
                *node_volumes(worker_resources(job, deployment.train)),
                kube.Volume(name=_TRAIN_CONFIG, config_map=kube.ConfigMapVolumeSource(name=train_config_map)),
            ],
        ),
    )


def control_pod(deployment: DeploymentConfig) -> kube.PodTemplateSpec:
    """The rendezvous store, on a system node: no fault of a GPU node takes it along."""
    job = deployment.job
    command = launcher.control_command(deployment, launcher.cluster_site(deployment))
    container = kube.Container(
        name=CONTROL_CONTAINER,
        image=job.image,
        # nvrx-control ends with 0 on SIGTERM: after a drain its Job would count as complete, and never come back.
        command=launcher.SUPERVISOR,
        args=launcher.supervised(command),
        env=environment({"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"}),
        ports=[kube.ContainerPort(name=_PORT_NAME, container_port=job.rendezvous.port)],
        # The workers' dependsOn waits for it.
        readiness_probe=kube.Probe(
            tcp_socket=kube.TcpSocketAction(port=kube.IntOrString.from_string(_PORT_NAME)), period_seconds=2
        ),
        resources=fixed(cpu="1", memory="2Gi"),
        security_context=unprivileged(),
        termination_message_policy="FallbackToLogsOnError",
        volume_mounts=[kube.VolumeMount(name=_TMP, mount_path="/tmp")],
    )
    return kube.PodTemplateSpec(
        metadata=metadata(job, policies.CONTROL),
        spec=pod_spec(
            job,
            **_member(job),
            termination_grace_period_seconds=_CONTROL_GRACE_SECONDS,
            **placement.on_system_nodes(job),
            containers=[container],
            volumes=[kube.Volume(name=_TMP, empty_dir=kube.EmptyDirVolumeSource())],
        ),
    )


def _worker_container(deployment: DeploymentConfig) -> kube.Container:
    site, job = launcher.cluster_site(deployment), deployment.job
    worker = worker_resources(job, deployment.train)
    # No liveness probe: NVRx's rank monitors own hang detection, and a probe's kill would cost the index a retry.
    return kube.Container(
        name=WORKER_CONTAINER,
        image=job.image,
        command=launcher.SUPERVISOR,
        args=launcher.supervised(
            launcher.worker_command(deployment, site), run_directory=launcher.run_directory(deployment, site)
        ),
        env=[
            from_field("POD_IP", "status.podIP"),
            from_field("NODE_NAME", "spec.nodeName"),
            # NVRx sorts nodes by it; two pods of one number at a time end the rendezvous (kubernetes.md, probe J).
            from_field("GROUP_RANK", COMPLETION_INDEX),
            *environment(launcher.worker_environment(deployment)),
        ],
        ports=[kube.ContainerPort(name=names.METRICS_PORT_NAME, container_port=names.METRICS_PORT)]
        if job.monitoring
        else None,
        resources=whole_node(worker),
        security_context=unprivileged(),
        termination_message_policy="FallbackToLogsOnError",
        volume_mounts=[
            *node_mounts(worker),
            kube.VolumeMount(name=_TRAIN_CONFIG, mount_path=names.TRAIN_CONFIG_MOUNT, read_only=True),
        ],
    )


def directories_container(deployment: DeploymentConfig) -> kube.Container:
    """Makes the run's directories and gives them to the trainer's user: the root of a new FSx belongs to root.

    fsGroup does not: the driver leaves a ReadWriteMany volume's owner alone (aws-fsx-csi-driver, fsGroupPolicy).
    """
    train = deployment.train
    return owned_directories(deployment.job, [train.run_directory, train.checkpoint.directory])


def owned_directories(job: JobConfig, directories: list[str]) -> kube.Container:
    """A container that makes `directories` on the shared volume, as root, for the job's user."""
    return kube.Container(
        name="directories",
        image=job.image,
        command=["install", "--directory", f"--owner={job.run_as_user}", f"--group={job.run_as_user}"],
        args=directories,
        resources=fixed(cpu="1", memory="256Mi"),
        security_context=kube.SecurityContext(
            run_as_user=0,
            run_as_non_root=False,
            allow_privilege_escalation=False,
            read_only_root_filesystem=True,
            # All within the baseline profile: give directories away, also those that another user owns.
            capabilities=kube.Capabilities(drop=["ALL"], add=["CHOWN", "DAC_OVERRIDE", "FOWNER"]),
        ),
        volume_mounts=[fsx_mount()],
    )


def node_volumes(worker: WorkerResources) -> list[kube.Volume]:
    """The shared volume, and what a pod has of its node: memory, scratch, and NVMe where there is some."""
    # A hostPath /dev/shm would leak from pod to pod, and no Pod Security Standard allows it.
    memory = kube.EmptyDirVolumeSource(medium="Memory", size_limit=kube.Quantity.from_string(f"{worker.shm_gib}Gi"))
    volumes = [
        fsx_volume(),
        kube.Volume(name=_SHM, empty_dir=memory),
        kube.Volume(name=_TMP, empty_dir=kube.EmptyDirVolumeSource()),
    ]
    if worker.nvme_gib:
        # The node group joins the NVMe disks under the kubelet's directory. It outlives processes, not the pod.
        size = kube.Quantity.from_string(f"{worker.nvme_gib}Gi")
        volumes.append(kube.Volume(name=_LOCAL, empty_dir=kube.EmptyDirVolumeSource(size_limit=size)))
    return volumes


def node_mounts(worker: WorkerResources) -> list[kube.VolumeMount]:
    """Where `node_volumes` are."""
    local = [kube.VolumeMount(name=_LOCAL, mount_path=names.LOCAL_MOUNT)] if worker.nvme_gib else []
    return [
        fsx_mount(),
        kube.VolumeMount(name=_SHM, mount_path="/dev/shm"),
        kube.VolumeMount(name=_TMP, mount_path="/tmp"),
        *local,
    ]


def fsx_volume() -> kube.Volume:
    """The shared volume."""
    claim = kube.PersistentVolumeClaimVolumeSource(claim_name=names.FSX_CLAIM)
    return kube.Volume(name=_FSX, persistent_volume_claim=claim)


def fsx_mount() -> kube.VolumeMount:
    """Where the shared volume is."""
    return kube.VolumeMount(name=_FSX, mount_path=names.FSX_MOUNT)


def metadata(job: JobConfig, component: str, annotations: dict[str, str] | None = None) -> kube.ObjectMeta:
    """Labels of the job's pods, and annotations that keep autoscalers from moving them."""
    return kube.ObjectMeta(
        labels=policies.labels(job, component),
        annotations={
            "karpenter.sh/do-not-disrupt": "true",
            "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
            **(annotations or {}),
        },
    )


def pod_spec(job: JobConfig, **fields: Any) -> kube.PodSpec:
    """A pod's spec: what all kinds share, and the given fields."""
    return kube.PodSpec(
        # podFailurePolicy and backoffLimitPerIndex need Never, and JobSet's webhook would fill in OnFailure.
        restart_policy="Never",
        automount_service_account_token=False,
        enable_service_links=False,  # else every Service of the namespace adds variables to the environment
        priority_class_name=job.placement.priority_class,
        security_context=kube.PodSecurityContext(
            run_as_user=job.run_as_user,
            run_as_group=job.run_as_user,
            run_as_non_root=job.run_as_user != 0,
            seccomp_profile=kube.SeccompProfile(type="RuntimeDefault"),
        ),
        **fields,
    )


def _member(job: JobConfig) -> dict[str, str]:
    """Fields of the pods that live as long as the job: its account, and its Service, which a JobSet sets by itself."""
    return {"service_account_name": job.name} | ({"subdomain": job.name} if job.kind == "indexed_job" else {})


def unprivileged() -> kube.SecurityContext:
    """No way to more rights, nothing to write outside the volumes."""
    # No IPC_LOCK: an added capability is not effective for a user other than root. Pinned memory is bounded by the
    # container runtime's memlock limit, which the GPU AMI lifts.
    return kube.SecurityContext(
        allow_privilege_escalation=False,
        read_only_root_filesystem=True,
        capabilities=kube.Capabilities(drop=["ALL"]),
    )


def environment(variables: dict[str, str]) -> list[kube.EnvVar]:
    """Variables of a container."""
    # The root file system is read-only: caches below the home directory (Triton, torch) go to the one writable place.
    return [kube.EnvVar(name=name, value=value) for name, value in (variables | {"HOME": "/tmp"}).items()]


def from_field(name: str, field_path: str) -> kube.EnvVar:
    """A variable that the kubelet fills in from the pod."""
    return kube.EnvVar(
        name=name, value_from=kube.EnvVarSource(field_ref=kube.ObjectFieldSelector(field_path=field_path))
    )

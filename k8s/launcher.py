"""What every node runs: argv, environment and train.json, the same for the manifests and for the local drills.

Only a `Site` differs between the two: addresses, paths and whether there are GPUs.
"""

from dataclasses import dataclass

from config import names
from config.deployment import DeploymentConfig

# The image's WORKDIR holds the `training` package. Exec form: bash as PID 1 would sit on a SIGTERM until its child
# ends (kubernetes #141483).
SUPERVISOR = ["python", "-m", "training.supervisor"]

# Only the pod knows its index, and all pods of a Job have the same arguments: index 0 is told here to hold the store,
# since NVRx would else guess it from host names. No $( ), which the kubelet would take for one of its variables.
_EMBEDDED_STORE = 'exec ft_launcher "--rdzv-conf=is_host=`expr $GROUP_RANK = 0`,$0" "$@"'


@dataclass(frozen=True)
class Site:
    """Where a job runs: the store's endpoint, this node's address, the shared volume and the settings file."""

    rendezvous_host: str
    rendezvous_port: int
    local_address: str
    shared_directory: str
    train_json: str

    @property
    def endpoint(self) -> str:
        """host:port of the rendezvous store."""
        return f"{self.rendezvous_host}:{self.rendezvous_port}"


def cluster_site(deployment: DeploymentConfig) -> Site:
    """The site inside the cluster: a stable DNS name for the store, the pod's own IP, the FSx mount."""
    job = deployment.job
    owner = "control" if job.rendezvous.mode == "control" else "worker"
    # A JobSet numbers its Jobs, too. The second part is the headless Service.
    pod = f"{job.name}-{owner}-0-0" if job.kind == "jobset" else f"{job.name}-{owner}-0"
    return Site(
        rendezvous_host=f"{pod}.{job.name}",
        rendezvous_port=job.rendezvous.port,
        local_address="$(POD_IP)",  # expanded by the kubelet from the container's environment
        shared_directory=names.FSX_MOUNT,
        train_json=f"{names.TRAIN_CONFIG_MOUNT}/{names.TRAIN_CONFIG_FILE}",
    )


def train_json(deployment: DeploymentConfig, site: Site) -> str:
    """The resolved TrainConfig as JSON, with every path moved to the site's shared volume."""
    train = deployment.train
    moved = train.model_copy(
        update={
            "run_directory": _relocate(train.run_directory, site),
            "data": train.data.model_copy(update={"path": _relocate(train.data.path, site)}),
            "evaluation": train.evaluation
            and train.evaluation.model_copy(update={"path": _relocate(train.evaluation.path, site)}),
            "checkpoint": train.checkpoint.model_copy(
                update={"directory": _relocate(train.checkpoint.directory, site)}
            ),
        }
    )
    return moved.model_dump_json(indent=2) + "\n"


def control_command(deployment: DeploymentConfig, site: Site) -> list[str]:
    """Argv of the one-pod rendezvous store (`nvrx-control`)."""
    rendezvous = deployment.job.rendezvous
    return [
        "nvrx-control",
        *_rendezvous_args(deployment, site),
        f"--rdzv-conf=join_timeout={rendezvous.join_timeout_seconds},"
        f"last_call_timeout={rendezvous.last_call_timeout_seconds}",
        "--ft-enable-log-server=false",
    ]


def worker_command(deployment: DeploymentConfig, site: Site) -> list[str]:
    """Argv of one node: ft_launcher with its restart policy, then the trainer."""
    rendezvous = deployment.job.rendezvous
    waits = (
        f"join_timeout={rendezvous.join_timeout_seconds},"
        f"last_call_timeout={rendezvous.last_call_timeout_seconds},"
        f"store_connect_wait_seconds={rendezvous.store_connect_wait_seconds}"
    )
    arguments = _launcher_args(deployment, site)
    if rendezvous.mode == "control":
        # is_host=0: the store lives in nvrx-control, never in a worker (kubernetes.md, probe E).
        return ["ft_launcher", f"--rdzv-conf=is_host=0,{waits}", *arguments]
    return ["sh", "-c", _EMBEDDED_STORE, waits, *arguments]


def _launcher_args(deployment: DeploymentConfig, site: Site) -> list[str]:
    in_job = deployment.train.restarts.in_job
    sections = ",".join(
        f"{name}:{seconds:g}"
        for name, seconds in (
            ("setup", in_job.setup_section_timeout_seconds),
            ("step", in_job.step_section_timeout_seconds),
            ("checkpointing", in_job.checkpointing_section_timeout_seconds),
        )
    )
    return [
        *_rendezvous_args(deployment, site),
        f"--local-addr={site.local_address}",
        f"--nproc-per-node={deployment.job.ranks_per_node}",
        f"--max-restarts={in_job.max_restarts}",
        f"--monitor-interval={in_job.monitor_interval_seconds:g}",
        f"--workers-stop-timeout={in_job.workers_stop_timeout_seconds}",
        f"--term-timeout={in_job.term_timeout_seconds}",
        f"--ft-rank-section-timeouts={sections}",
        f"--ft-rank-out-of-section-timeout={in_job.out_of_section_timeout_seconds:g}",
        f"--ft-initial-rank-heartbeat-timeout={in_job.initial_heartbeat_timeout_seconds:g}",
        f"--ft-rank-heartbeat-timeout={in_job.heartbeat_timeout_seconds:g}",
        f"--ft-max-no-progress-cycles={in_job.max_no_progress_cycles}",
        f"--ft-checkpoint-iteration-file={progress_file(deployment, site)}",
        "-m",
        "training.train",
        f"--config={site.train_json}",
    ]


def supervised(command: list[str], *, run_directory: str | None = None) -> list[str]:
    """Arguments for SUPERVISOR to run `command`, with the directory in which the trainer marks how the run ended."""
    return [*([f"--run-directory={run_directory}"] if run_directory else []), "--", *command]


def run_directory(deployment: DeploymentConfig, site: Site) -> str:
    """Where the run's events, logs and markers are on this site."""
    return _relocate(deployment.train.run_directory, site)


def progress_file(deployment: DeploymentConfig, site: Site) -> str:
    """The checkpoint tracker: last committed step as text, which NVRx reads to tell a crash loop from progress."""
    return f"{_relocate(deployment.train.checkpoint.directory, site)}/latest_step.txt"


def worker_environment(deployment: DeploymentConfig) -> dict[str, str]:
    """Environment of a node's launcher, and so of its ranks: an allow-list; the platform's own names come on top."""
    environment = {
        # The barrier rendezvous polls the store several times a second, and each poll logs a warning.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONUNBUFFERED": "1",
    }
    job = deployment.job
    if job.instance is None:
        return environment | {"OMP_NUM_THREADS": "1"} | job.environment
    environment |= {
        "NCCL_DEBUG": "WARN",
        # pod-id-link is EKS Pod Identity's link-local interface (aws-do-eks #54).
        "NCCL_SOCKET_IFNAME": "^lo,docker,veth,pod-id-link",
    }
    if job.instance.efa_count and not job.efa_huge_pages:
        environment["FI_EFA_USE_HUGE_PAGE"] = "0"  # together with the pod's request, which then asks for none
    if deployment.train.deterministic:
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch refuses deterministic cuBLAS without it
    if deployment.train.restarts.in_process.enabled:
        # NVRx in-process restart aborts NCCL communicators: NVLS does not survive that, and a rethrown CUDA
        # error would end the process that is to be restarted (NVRx usage guide).
        environment |= {"NCCL_NVLS_ENABLE": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
    return environment | job.environment


def _rendezvous_args(deployment: DeploymentConfig, site: Site) -> list[str]:
    job = deployment.job
    return [
        f"--nnodes={job.node_count}:{job.max_nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-id={job.name}",
        f"--rdzv-endpoint={site.endpoint}",
    ]


def _relocate(path: str, site: Site) -> str:
    return site.shared_directory + path.removeprefix(names.FSX_MOUNT)

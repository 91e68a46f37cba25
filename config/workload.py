"""Optional parts of the `job:` section: placement, queue, monitoring, data preparation, and the environment's rules."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from training.config import Config, PositiveInt

DEFAULT_PRIORITY_CLASS = "training-high"

DnsLabel = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]

# What an override may begin with: the tuning knobs of the libraries in the image.
ALLOWED_ENVIRONMENT = ("NCCL_", "TORCH_", "PYTORCH_", "FI_", "OFI_NCCL_", "GLOO_", "OMP_", "NVRX_", "CUDA_", "TRITON_")
# Old recipes' settings: by name, or with * by beginning; why each does harm.
HARMFUL_ENVIRONMENT = {
    "RDMAV_*": "libfabric's EFA provider handles fork itself, and these can break it (aws-ofi-nccl, efa-env-var.md)",
    "FI_EFA_FORK_SAFE": "libfabric 1.18 and newer handle fork themselves",
    "FI_EFA_USE_DEVICE_RDMA": "libfabric uses device RDMA wherever it can",
    "FI_EFA_ENABLE_SHM_TRANSFER": "NCCL does not use libfabric within a node",
    "FI_PROVIDER": "only aws-ofi-nccl up to 1.5.0 needed it",
    "NCCL_PROTO": "the plugin and NCCL's tuner choose the protocol",
    "NCCL_BUFFSIZE": "the plugin and NCCL's tuner size the buffers",
    "NCCL_P2P_NET_CHUNKSIZE": "the plugin sets it by platform",
    "NCCL_TUNER_PLUGIN": "the plugin sets it by platform",
    "NCCL_MIN_CHANNELS": "the tuner chooses the channels",
    "NCCL_SOCKET_NTHREADS": "it tunes TCP, which EFA does not use",
    "NCCL_NET_GDR_LEVEL": "NCCL finds the distance from the topology",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1 is the default, and NVRx's abort counts on it",
    "NCCL_ASYNC_ERROR_HANDLING": "the old name of TORCH_NCCL_ASYNC_ERROR_HANDLING, whose default NVRx counts on",
    "SLURM_*": "NVRx takes a node's rank from it before GROUP_RANK",
    "CROSS_SLURM_*": "NVRx takes a node's rank from it before GROUP_RANK",
    "PET_*": "it changes ft_launcher's arguments behind the manifest's back",
    "LOGLEVEL": "NVRx's and torch's launchers read it differently",
    "CUDA_VISIBLE_DEVICES": "the device plugin and ft_launcher hand out the GPUs",
}
# What the charts or the launcher set themselves, some of it under a condition.
OWNED_ENVIRONMENT = {
    "FI_EFA_USE_HUGE_PAGE": "set job.efa_huge_pages, which changes the pod's request with it",
    "NCCL_NVLS_ENABLE": "train.restarts.in_process decides it",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "train.restarts.in_process decides it",
    "MASTER_ADDR": "ft_launcher sets it from --local-addr",
    "MASTER_PORT": "ft_launcher chooses it anew in every cycle",
    "RANK": "ft_launcher sets it",
    "WORLD_SIZE": "ft_launcher sets it",
    "LOCAL_RANK": "ft_launcher sets it",
    "GROUP_RANK": "it is the pod's completion index",
}
_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|CREDENTIAL|ACCESS_KEY|API_KEY")


def refusal(name: str, among: dict[str, str] = HARMFUL_ENVIRONMENT | OWNED_ENVIRONMENT) -> str | None:
    """Why this environment variable must not be set; None when it may."""
    for refused, reason in among.items():
        if name == refused or (refused.endswith("*") and name.startswith(refused[:-1])):
            return reason
    return None


def _check_environment(environment: dict[str, str]) -> dict[str, str]:
    for name, value in environment.items():
        if (reason := refusal(name)) is not None:
            raise ValueError(f"{name} is refused: {reason}; remove it")
        if _SECRET.search(name):
            raise ValueError(f"{name} looks like a secret, and everyone who reads the manifest reads it; remove it")
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*", name) or not name.startswith(ALLOWED_ENVIRONMENT):
            raise ValueError(
                f"{name} is not on the allow-list; a variable begins with one of {', '.join(ALLOWED_ENVIRONMENT)}"
            )
        if not value.isprintable():
            raise ValueError(f"{name}: {value!r} has control characters; remove them")
    return environment


Environment = Annotated[dict[str, str], AfterValidator(_check_environment)]


class PlacementConfig(Config):
    """Where the workers go, and whom they may push aside."""

    topology: Literal["preferred", "required", "none"] = Field(
        default="preferred",
        description="workers near each other in EC2's network; required keeps a lost node's replacement Pending until "
        "there is room under the same switch",
    )
    priority_class: DnsLabel | None = Field(
        default=DEFAULT_PRIORITY_CLASS,
        description=f"{DEFAULT_PRIORITY_CLASS} comes with the manifests, another one must be there; null is the "
        "cluster's default",
    )


class KueueConfig(Config):
    """Queueing by Kueue, for clusters that several teams share."""

    local_queue: DnsLabel
    cluster_queue: DnsLabel | None = Field(
        default=None, description="the queue behind local_queue, which then comes with the manifests"
    )
    recovery_timeout_seconds: PositiveInt | None = Field(
        default=None,
        description="waitForPodsReady.recoveryTimeout of the cluster's Kueue; leave it out where that is off. Kueue "
        "evicts the whole job when a lost pod is not back by then",
    )
    topology_aware: bool = Field(
        default=False, description="Kueue's topology-aware scheduling places the workers, in place of pod affinity"
    )


class MonitoringConfig(Config):
    """Objects for the Prometheus operator; alerts use kube-state-metrics as well."""

    namespace: DnsLabel = Field(
        default="monitoring", description="where Prometheus runs: it may reach the metrics port"
    )
    labels: dict[str, str] = Field(
        default={"release": "kube-prometheus-stack"},
        description="labels by which the operator selects PodMonitor and PrometheusRule",
    )


class PrepareDataConfig(Config):
    """The one-shot job that tokenizes a directory of the shared volume into train.data.path."""

    input_directory: str = Field(description="text files, on the shared volume")
    pattern: str = "*"
    exclude: tuple[str, ...] = ()
    cpu: PositiveInt = 4
    memory_gib: PositiveInt = 16

    @model_validator(mode="after")
    def _check_patterns(self) -> "PrepareDataConfig":
        for pattern in (self.pattern, *self.exclude):
            if not pattern or pattern.startswith("-") or "$(" in pattern:
                raise ValueError(f"pattern {pattern!r} would be read as an option or a variable; write another")
        return self

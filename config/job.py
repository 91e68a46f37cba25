"""The `job:` section: the shape of the training job on Kubernetes and how its nodes find each other."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from config.instances import INSTANCE_TYPES, InstanceType
from config.workload import Environment, KueueConfig, MonitoringConfig, PlacementConfig, PrepareDataConfig
from training.config import Config, NonNegativeInt, PositiveInt, RestartsConfig

Port = Annotated[int, Field(ge=1024, le=65535)]
DnsLabel = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]
# A pod's name and host name have 63 characters at most.
_MAX_LABEL = 63

# The name rule of the OCI distribution spec, with an optional registry host and port before it.
_PINNED_IMAGE = re.compile(r"[a-z0-9][a-z0-9._-]*(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*@sha256:[0-9a-f]{64}")


class RendezvousConfig(Config):
    """How launchers meet: at a store in a pod of its own (nvrx-control), or in the worker of index 0 (embedded).

    With `control` no worker's loss ends another's process. `embedded` needs one pod less, and each loss of index 0
    costs every index a retry; spares can't help there.
    """

    mode: Literal["control", "embedded"] = "control"
    port: Port = 29500
    join_timeout_seconds: PositiveInt = 1800
    last_call_timeout_seconds: PositiveInt = 15
    store_connect_wait_seconds: PositiveInt = 1800
    unhealthy_events_tolerated: NonNegativeInt = 3

    @model_validator(mode="after")
    def _check_order(self) -> "RendezvousConfig":
        if self.last_call_timeout_seconds >= self.join_timeout_seconds:
            raise ValueError(
                f"last_call_timeout_seconds {self.last_call_timeout_seconds} must be below join_timeout_seconds "
                f"{self.join_timeout_seconds}, which bounds it; raise the second"
            )
        return self


class ExistingFsxConfig(Config):
    """An FSx for Lustre file system that is there already, on a cluster that this project did not build.

    `aws fsx describe-file-systems` prints all four; the cluster needs the FSx CSI driver.
    """

    file_system_id: Annotated[str, Field(pattern=r"^fs-[0-9a-f]{8,17}$")]
    dns_name: Annotated[str, Field(pattern=r"^fs-[0-9a-f]{8,17}\.fsx\.[a-z0-9-]+\.amazonaws\.com$")]
    mount_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,8}$")]
    capacity_gib: PositiveInt

    @model_validator(mode="after")
    def _check_names(self) -> "ExistingFsxConfig":
        if not self.dns_name.startswith(f"{self.file_system_id}."):
            raise ValueError(
                f"dns_name {self.dns_name} is of another file system than file_system_id {self.file_system_id}; "
                "copy both from one"
            )
        return self


class JobConfig(Config):
    """N active nodes + S spares of one instance type; no instance type means CPU pods."""

    name: DnsLabel
    namespace: DnsLabel = "training"
    kind: Literal["jobset", "indexed_job"] = Field(
        default="jobset", description="indexed_job needs no custom resource, but has no restart of everything at once"
    )
    instance_type: str | None = None
    node_count: PositiveInt
    spare_count: NonNegativeInt = 0
    nproc_per_node: PositiveInt | None = None
    image: str
    termination_grace_period_seconds: PositiveInt | None = Field(
        default=None, description="from SIGTERM to SIGKILL; left out, ft_launcher's term-timeout and 30 s"
    )
    efa_huge_pages: bool = Field(
        default=True, description="false also tells libfabric: fork with huge pages fails for want of memory"
    )
    shm_gib: PositiveInt | None = Field(
        default=None, description="size of /dev/shm; left out, computed from the model's state"
    )
    environment: Environment = Field(default={}, description="overrides for the ranks, from an allow-list")
    directories: Literal["init_container", "one_shot_job"] = Field(
        default="init_container",
        description="who makes the run's directories as root: every worker at its start, or a Job before the run "
        "(--chart directories), which leaves no root container in the workers",
    )
    placement: PlacementConfig = PlacementConfig()
    kueue: KueueConfig | None = None
    monitoring: MonitoringConfig | None = Field(default=None, description="needs the Prometheus operator")
    resource_quota: bool = Field(default=False, description="cap the namespace at this job's GPUs and EFA devices")
    prepare_data: PrepareDataConfig | None = None
    # 1000 and not root: the restricted profile of the Pod Security Standards. 0 where a node's EFA devices or memlock
    # limit turn out to need root.
    run_as_user: Annotated[int, Field(ge=0, le=65_533)] = 1000
    # Failures of one pod, each replaced, before its index is given up. More indexes given up than there are spares,
    # and the JobSet starts a new generation (train.restarts.job.max_restarts).
    backoff_limit_per_index: NonNegativeInt = 3
    rendezvous: RendezvousConfig = RendezvousConfig()
    storage: ExistingFsxConfig | None = Field(
        default=None,
        description="without a cluster section: the file system to mount; left out, the default class makes one",
    )

    @field_validator("instance_type")
    @classmethod
    def _known_instance(cls, value: str | None) -> str | None:
        if value is not None and value not in INSTANCE_TYPES:
            raise ValueError(f"unknown instance type; known: {', '.join(sorted(INSTANCE_TYPES))}")
        return value

    @field_validator("image")
    @classmethod
    def _pinned_image(cls, value: str) -> str:
        if not _PINNED_IMAGE.fullmatch(value):
            raise ValueError("an image must be pinned by digest; write REPOSITORY@sha256: and 64 hexadecimal digits")
        return value

    @model_validator(mode="after")
    def _check_names(self) -> "JobConfig":
        # The namespace is a label; of the pods' names the longest is that of the highest index, with 5 random letters.
        for field, value, suffix in (
            ("name", self.name, max(self.pod_suffixes, key=len)),
            ("namespace", self.namespace, ""),
        ):
            if len(value) + len(suffix) > _MAX_LABEL:
                raise ValueError(
                    f"{field} {value}{suffix} has {len(value) + len(suffix)} characters, a DNS label {_MAX_LABEL}; "
                    f"shorten it to {_MAX_LABEL - len(suffix)}"
                )
        return self

    @model_validator(mode="after")
    def _check_rendezvous(self) -> "JobConfig":
        if self.rendezvous.mode == "embedded" and self.spare_count:
            raise ValueError(
                f"spare_count {self.spare_count} with rendezvous.mode embedded: a spare can't take over from index 0, "
                "which holds the store; set it to 0, or the mode to control"
            )
        timeout = self.kueue.recovery_timeout_seconds if self.kueue else None
        if timeout is not None and timeout <= self.rendezvous.join_timeout_seconds:
            raise ValueError(
                f"kueue.recovery_timeout_seconds {timeout} must be above rendezvous.join_timeout_seconds "
                f"{self.rendezvous.join_timeout_seconds}, or Kueue evicts a job that waits for a node; raise the "
                "first, in Kueue too"
            )
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> "JobConfig":
        if self.instance is None and self.nproc_per_node is None:
            raise ValueError(
                "nproc_per_node is needed when there is no instance_type; set it (1 for a CPU rank per node)"
            )
        if self.instance is None and self.resource_quota:
            raise ValueError(
                "resource_quota caps GPUs and EFA devices, and without instance_type there are none; set it to false"
            )
        if self.instance is not None and self.nproc_per_node not in (None, self.instance.gpu_count):
            raise ValueError(
                f"nproc_per_node {self.nproc_per_node} differs from the {self.instance.gpu_count} GPUs of "
                f"{self.instance.name}; leave it out"
            )
        return self

    @property
    def instance(self) -> InstanceType | None:
        """The instance type's row of the table; None for CPU pods."""
        return None if self.instance_type is None else INSTANCE_TYPES[self.instance_type]

    @property
    def ranks_per_node(self) -> int:
        """Training processes per node: one per GPU, or as configured on CPU."""
        return self.instance.gpu_count if self.instance else self.nproc_per_node or 1

    @property
    def world_size(self) -> int:
        """Ranks that train; spares are not counted."""
        return self.node_count * self.ranks_per_node

    @property
    def pod_count(self) -> int:
        """Worker pods: active and spare."""
        return self.node_count + self.spare_count

    @property
    def max_nodes(self) -> int:
        """Upper end of --nnodes: NVRx subtracts every unhealthy event from it for the life of the store."""
        return self.pod_count + self.rendezvous.unhealthy_events_tolerated

    @property
    def pod_suffixes(self) -> tuple[str, ...]:
        """What the controllers add to the job's name in names of pods, for the longest of each kind."""
        last = self.pod_count - 1
        return ("-control-0-0-xxxxx", f"-worker-0-{last}-xxxxx", f"-preflight-{last}-xxxxx", "-prepare-data-xxxxx")

    def grace_period_seconds(self, restarts: RestartsConfig) -> int:
        """Seconds from SIGTERM to SIGKILL.

        Raises:
            ValueError: ft_launcher would not have its term-timeout.
        """
        term = restarts.in_job.term_timeout_seconds
        if self.termination_grace_period_seconds is None:
            return restarts.termination_grace_period_seconds
        if self.termination_grace_period_seconds <= term:
            raise ValueError(
                f"job.termination_grace_period_seconds {self.termination_grace_period_seconds} must be above "
                f"train.restarts.in_job.term_timeout_seconds {term}, or the kubelet kills a save; raise the first"
            )
        return self.termination_grace_period_seconds

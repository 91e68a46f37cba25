"""The `job:` section: the shape of the training job on Kubernetes and how its nodes find each other."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from config.instances import INSTANCE_TYPES, InstanceType
from training.config import Config, NonNegativeInt, PositiveInt

Port = Annotated[int, Field(ge=1024, le=65535)]
# A JobSet's longest pod name is <name>-control-0-0-<5 random>, and a pod's host name has 63 characters at most.
DnsLabel = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=40)]

# The name rule of the OCI distribution spec, with an optional registry host and port before it.
_PINNED_IMAGE = re.compile(r"[a-z0-9][a-z0-9._-]*(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*@sha256:[0-9a-f]{64}")


class RendezvousConfig(Config):
    """How launchers meet: `external` has a one-pod nvrx-control own the store, so no worker's loss ends the job."""

    mode: Literal["external"] = "external"
    port: Port = 29500
    join_timeout_seconds: PositiveInt = 1800
    last_call_timeout_seconds: PositiveInt = 15
    store_connect_wait_seconds: PositiveInt = 1800
    unhealthy_events_tolerated: NonNegativeInt = 3


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
    instance_type: str | None = None
    node_count: PositiveInt
    spare_count: NonNegativeInt = 0
    nproc_per_node: PositiveInt | None = None
    image: str
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
        # Repository: the OCI distribution spec's name rule with an optional registry host and port before it.
        if not re.fullmatch(
            r"[a-z0-9][a-z0-9._-]*(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*@sha256:[0-9a-f]{64}", value
        ):
            raise ValueError("an image must be pinned by digest; write REPOSITORY@sha256: and 64 hexadecimal digits")
        return value

    @model_validator(mode="after")
    def _check_ranks(self) -> "JobConfig":
        if self.instance is None and self.nproc_per_node is None:
            raise ValueError(
                "nproc_per_node is needed when there is no instance_type; set it (1 for a CPU rank per node)"
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

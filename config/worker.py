"""What a worker asks of its node: the whole node less headroom, and shared memory for the staged checkpoint."""

import math
from dataclasses import dataclass
from pathlib import PurePosixPath

from config import names
from config.job import JobConfig
from training.config import TrainConfig

# Left to the kubelet's reservation (255 MiB and 11 MiB for each possible pod, amazon-eks-ami), the node's huge pages,
# the memory that firmware and kernel keep (about 2 %), and the DaemonSets of CNI, storage, devices and monitoring.
_CPU_HEADROOM = 1 / 16
_MEMORY_HEADROOM = 1 / 8
# libfabric's EFA provider takes its bounce buffers from huge pages; AWS's examples ask for 5120 MiB with 32 devices.
_HUGE_PAGES_MIB_PER_EFA = 160
# Half of the NVMe for copies of checkpoints; images, logs and Lustre's own cache take of the rest.
_NVME_SHARE = 1 / 2

# /dev/shm: float32 parameter and two Adam moments, staged once and held once more while the next is staged; and a
# rank's NCCL buffers and data loader queues.
_STATE_BYTES_PER_PARAMETER = 12
_STAGED_COPIES = 2
_SHM_GIB_PER_GPU = 1
# A local save is removed when the next one is complete on every rank.
_LOCAL_COPIES = 2
SHARED_MEMORY = "/dev/shm"
_GIB = 1 << 30

# A CPU rank of the small demonstration model.
_CPU_RANK_CORES = 1
_CPU_RANK_MEMORY_GIB = 4


@dataclass(frozen=True)
class WorkerResources:
    """One worker pod's share of a node. `memory_gib` is the limit, to which `shm_gib` is charged."""

    cpu: int
    memory_gib: int
    shm_gib: int
    nvme_gib: int
    gpu_count: int
    efa_count: int
    huge_pages_mib: int


def worker_resources(job: JobConfig, train: TrainConfig) -> WorkerResources:
    """One worker per node: everything but the headroom; on CPU, a fixed share per rank.

    Raises:
        ValueError: shared memory would take more than half of the memory limit.
    """
    instance, ranks = job.instance, job.ranks_per_node
    if instance is None:
        cpu, memory_gib = _CPU_RANK_CORES * ranks, _CPU_RANK_MEMORY_GIB * ranks
    else:
        cpu = int(instance.vcpu_count * (1 - _CPU_HEADROOM))
        memory_gib = int(instance.memory_mib * (1 - _MEMORY_HEADROOM)) // 1024
    nvme_gib = int(instance.nvme_gb * 1e9 * _NVME_SHARE) // _GIB if instance else 0
    _check_local_tier(job, train, nvme_gib)
    shm_gib = job.shm_gib or staging_gib(job, train)
    if shm_gib > memory_gib // 2:
        raise ValueError(
            f"job.shm_gib {shm_gib}{'' if job.shm_gib else ' (computed from the model)'}: /dev/shm is charged to the "
            f"pod's memory limit of {memory_gib} GiB, of which it may take half; "
            + ("lower it" if job.shm_gib else "raise job.node_count, or choose a larger job.instance_type")
        )
    efa_count = instance.efa_count if instance else 0
    return WorkerResources(
        cpu=cpu,
        memory_gib=memory_gib,
        shm_gib=shm_gib,
        nvme_gib=nvme_gib,
        gpu_count=instance.gpu_count if instance else 0,
        efa_count=efa_count,
        huge_pages_mib=_HUGE_PAGES_MIB_PER_EFA * efa_count if job.efa_huge_pages else 0,
    )


def staging_gib(job: JobConfig, train: TrainConfig) -> int:
    """GiB of /dev/shm that one node needs: staged shards, its ranks' queues, and local copies that are kept there."""
    queues = _SHM_GIB_PER_GPU * job.ranks_per_node if job.instance else 0
    local = train.checkpoint.local
    copies = _STAGED_COPIES
    if local is not None and _below(local.directory, SHARED_MEMORY):
        copies += _LOCAL_COPIES * (1 + local.replicas)
    return math.ceil(copies * _node_state_bytes(job, train) / _GIB) + queues


def _node_state_bytes(job: JobConfig, train: TrainConfig) -> float:
    shards = job.world_size // train.parallelism.dp_replicate  # of which every rank has one
    return train.model.num_parameters * _STATE_BYTES_PER_PARAMETER * job.ranks_per_node / shards


def _check_local_tier(job: JobConfig, train: TrainConfig, nvme_gib: int) -> None:
    """Raise ValueError where local copies can't be written, or do not fit. CPU nodes have whatever disk they have."""
    local = train.checkpoint.local
    if local is None or job.instance is None:
        return
    places = [SHARED_MEMORY, *([names.LOCAL_MOUNT] if nvme_gib else [])]
    if not any(_below(local.directory, place) for place in places):
        raise ValueError(
            f"train.checkpoint.local.directory {local.directory} must lie under {' or '.join(places)}; the rest of a "
            "worker's file system is read-only, or shared"
        )
    needed = math.ceil(_LOCAL_COPIES * (1 + local.replicas) * _node_state_bytes(job, train) / _GIB)
    if _below(local.directory, names.LOCAL_MOUNT) and needed > nvme_gib:
        raise ValueError(
            f"train.checkpoint.local: two saves of a node with {local.replicas} copies of others need {needed} GiB, "
            f"{names.LOCAL_MOUNT} has {nvme_gib}; raise job.node_count"
            + (", or set train.checkpoint.local.replicas to 0" if local.replicas else "")
        )


def _below(directory: str, place: str) -> bool:
    return PurePosixPath(place) in PurePosixPath(directory).parents

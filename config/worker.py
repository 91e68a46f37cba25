"""What a worker asks of its node: the whole node less headroom, and shared memory for the staged checkpoint."""

import math
from dataclasses import dataclass

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
        nvme_gib=int(instance.nvme_gb * 1e9 * _NVME_SHARE) // _GIB if instance else 0,
        gpu_count=instance.gpu_count if instance else 0,
        efa_count=efa_count,
        huge_pages_mib=_HUGE_PAGES_MIB_PER_EFA * efa_count if job.efa_huge_pages else 0,
    )


def staging_gib(job: JobConfig, train: TrainConfig) -> int:
    """GiB of /dev/shm that one node's staged shards and its ranks' queues need."""
    shards = job.world_size // train.parallelism.dp_replicate  # of which every rank stages one
    state = train.model.num_parameters * _STATE_BYTES_PER_PARAMETER * job.ranks_per_node / shards
    queues = _SHM_GIB_PER_GPU * job.ranks_per_node if job.instance else 0
    return math.ceil(_STAGED_COPIES * state / _GIB) + queues

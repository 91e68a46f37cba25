"""What a worker asks of its node: the whole node less headroom, requests equal to limits (Guaranteed quality)."""

from dataclasses import dataclass

from cdk8s_plus_33 import k8s as kube

from config import names
from config.job import JobConfig

# Left to the kubelet's reservation (255 MiB and 11 MiB for each possible pod, amazon-eks-ami), the node's huge pages,
# the memory that firmware and kernel keep (about 2 %), and the DaemonSets of CNI, storage, devices and monitoring.
_CPU_HEADROOM = 1 / 16
_MEMORY_HEADROOM = 1 / 8
# /dev/shm holds one staged checkpoint shard per rank and NCCL's buffers; it is charged to the pod's memory limit.
_SHM_SHARE = 1 / 4
# libfabric's EFA provider takes its bounce buffers from huge pages; AWS's examples ask for 5120 MiB with 32 devices.
_HUGE_PAGES_MIB_PER_EFA = 160

# A CPU rank of the small demonstration model.
_CPU_RANK_CORES = 1
_CPU_RANK_MEMORY_GIB = 4


@dataclass(frozen=True)
class WorkerResources:
    """One worker pod's share of a node."""

    cpu: int
    memory_gib: int
    shm_gib: int
    gpu_count: int
    efa_count: int

    @property
    def huge_pages_mib(self) -> int:
        """2 MiB huge pages for EFA; 0 without."""
        return _HUGE_PAGES_MIB_PER_EFA * self.efa_count

    def requirements(self) -> kube.ResourceRequirements:
        """Requests equal to limits: extended resources and huge pages allow nothing else."""
        amounts = {
            "cpu": kube.Quantity.from_string(str(self.cpu)),
            "memory": kube.Quantity.from_string(f"{self.memory_gib}Gi"),
        }
        if self.gpu_count:
            amounts[names.GPU_RESOURCE] = kube.Quantity.from_number(self.gpu_count)
        if self.efa_count:
            amounts[names.EFA_RESOURCE] = kube.Quantity.from_number(self.efa_count)
            amounts["hugepages-2Mi"] = kube.Quantity.from_string(f"{self.huge_pages_mib}Mi")
        return kube.ResourceRequirements(requests=amounts, limits=amounts)


def worker_resources(job: JobConfig) -> WorkerResources:
    """One worker per node: everything but the headroom; on CPU, a fixed share per rank."""
    instance = job.instance
    if instance is None:
        memory_gib = _CPU_RANK_MEMORY_GIB * job.ranks_per_node
        return WorkerResources(
            cpu=_CPU_RANK_CORES * job.ranks_per_node,
            memory_gib=memory_gib,
            shm_gib=max(1, int(memory_gib * _SHM_SHARE)),
            gpu_count=0,
            efa_count=0,
        )
    memory_gib = int(instance.memory_mib * (1 - _MEMORY_HEADROOM)) // 1024
    return WorkerResources(
        cpu=int(instance.vcpu_count * (1 - _CPU_HEADROOM)),
        memory_gib=memory_gib,
        shm_gib=int(memory_gib * _SHM_SHARE),
        gpu_count=instance.gpu_count,
        efa_count=instance.efa_count,
    )


def fixed(*, cpu: str, memory: str) -> kube.ResourceRequirements:
    """Requests equal to limits for a container that is not a worker."""
    amounts = {"cpu": kube.Quantity.from_string(cpu), "memory": kube.Quantity.from_string(memory)}
    return kube.ResourceRequirements(requests=amounts, limits=amounts)

"""Requests and limits of containers: always equal, so that pods are Guaranteed and the last to be evicted."""

from cdk8s_plus_33 import k8s as kube

from config import names
from config.worker import WorkerResources


def whole_node(worker: WorkerResources) -> kube.ResourceRequirements:
    """A worker's share of its node: extended resources and huge pages allow no request below the limit anyway."""
    amounts = {
        "cpu": kube.Quantity.from_string(str(worker.cpu)),
        "memory": kube.Quantity.from_string(f"{worker.memory_gib}Gi"),
    }
    if worker.gpu_count:
        amounts[names.GPU_RESOURCE] = kube.Quantity.from_number(worker.gpu_count)
    if worker.efa_count:
        amounts[names.EFA_RESOURCE] = kube.Quantity.from_number(worker.efa_count)
    if worker.huge_pages_mib:
        amounts["hugepages-2Mi"] = kube.Quantity.from_string(f"{worker.huge_pages_mib}Mi")
    return kube.ResourceRequirements(requests=amounts, limits=amounts)


def fixed(*, cpu: str, memory: str) -> kube.ResourceRequirements:
    """For a container that is not a worker."""
    amounts = {"cpu": kube.Quantity.from_string(cpu), "memory": kube.Quantity.from_string(memory)}
    return kube.ResourceRequirements(requests=amounts, limits=amounts)

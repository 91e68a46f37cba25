"""EC2 accelerated instance types: GPUs, network cards and their limits. The only place these numbers stand.

Counts from Karpenter's generated instance tables and the EC2 EFA guide (2026-03); see docs/decisions.md.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class InstanceType:
    """One EC2 instance type, as far as training needs to know it."""

    name: str
    gpu_count: int
    gpu_name: str
    efa_count: int
    network_card_count: int
    max_interfaces_per_card: int
    vcpu_count: int
    memory_mib: int
    nvme_gb: int
    primary_card_has_efa: bool = True

    @property
    def interface_count(self) -> int:
        """Network interfaces at launch: one ENA primary plus one EFA-only interface per EFA device."""
        return 1 + self.efa_count


P5_48XLARGE = InstanceType(
    name="p5.48xlarge",
    gpu_count=8,
    gpu_name="H100",
    efa_count=32,
    network_card_count=32,
    max_interfaces_per_card=2,
    vcpu_count=192,
    memory_mib=2_097_152,
    nvme_gb=30_400,
)

INSTANCE_TYPES: dict[str, InstanceType] = {P5_48XLARGE.name: P5_48XLARGE}

"""EC2 accelerated instance types: GPUs, network cards and their limits. The only place these numbers stand.

Counts from Karpenter's generated instance tables and the EC2 EFA guide (2026-03); see docs/decisions.md.
"""

from dataclasses import dataclass, replace
from typing import Literal

# EC2's own words for the two kinds of interface this project launches (InterfaceType of a launch template).
InterfaceType = Literal["interface", "efa-only"]


@dataclass(frozen=True)
class NetworkInterface:
    """One network interface at launch: where it sits, and whether it speaks IP or EFA."""

    network_card_index: int
    device_index: int
    interface_type: InterfaceType


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
    further_card_device_index: int = 0
    ipv4_per_interface: int = 50

    @property
    def interface_count(self) -> int:
        """Network interfaces at launch: one ENA primary plus one EFA-only interface per EFA device."""
        return 1 + self.efa_count

    @property
    def network_interfaces(self) -> tuple[NetworkInterface, ...]:
        """The interfaces of one node: an ENA primary, then one EFA-only interface on every card that has EFA.

        This is the EC2 guide's layout (efa-acc-inst-types.html): the primary can't be efa-only, so card 0 carries
        its EFA device beside it as device 1; every further card has it as device 0. An efa-only interface takes no
        IP address. The card's index never is the device index: a p5 card has devices 0 and 1 only (eksctl #7520).
        """
        primary = NetworkInterface(0, 0, "interface")
        beside = (NetworkInterface(0, 1, "efa-only"),) if self.primary_card_has_efa else ()
        further = tuple(
            NetworkInterface(card, self.further_card_device_index, "efa-only")
            for card in range(1, self.network_card_count)
        )
        return (primary, *beside, *further)

    @property
    def max_pods(self) -> int:
        """Pods that the VPC CNI can give an address: it adds interfaces on card 0 only, in the slots left by EFA.

        The EKS formula per interface (addresses minus its own) plus 2 for aws-node and kube-proxy, which share the
        host's. On p5 the two slots of card 0 are taken, so it is 51, not the 100 that the AMI would assume. And never
        more than EKS recommends for the number of vCPUs (amazon-eks-ami, max-pods-calculator.sh): p4d has the addresses
        for 688, and kubelet would reserve 11 MiB for each.
        """
        slots = self.max_interfaces_per_card - (1 if self.primary_card_has_efa else 0)
        return min(slots * (self.ipv4_per_interface - 1) + 2, 110 if self.vcpu_count < 30 else 250)


# Device 1 on the further cards, where later types have device 0: what eksctl and Terraform's EKS module launch P4d with
# (eksctl #7643), and a card takes 15 interfaces, so either index is free. An ENA primary with efa-only interfaces runs
# on P4d too (aws-parallelcluster #7262). A100s have no FP8.
P4D_24XLARGE = InstanceType(
    name="p4d.24xlarge",
    gpu_count=8,
    gpu_name="A100",
    efa_count=4,
    network_card_count=4,
    max_interfaces_per_card=15,
    further_card_device_index=1,
    vcpu_count=96,
    memory_mib=1_179_648,
    nvme_gb=8_000,
)
P4DE_24XLARGE = replace(P4D_24XLARGE, name="p4de.24xlarge")
P5_4XLARGE = InstanceType(
    name="p5.4xlarge",
    gpu_count=1,
    gpu_name="H100",
    efa_count=1,
    network_card_count=1,
    max_interfaces_per_card=4,
    vcpu_count=16,
    memory_mib=262_144,
    nvme_gb=3_800,
    ipv4_per_interface=30,
)
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
P5E_48XLARGE = InstanceType(
    name="p5e.48xlarge",
    gpu_count=8,
    gpu_name="H200",
    efa_count=32,
    network_card_count=32,
    max_interfaces_per_card=2,
    vcpu_count=192,
    memory_mib=2_097_152,
    nvme_gb=30_400,
)
P5EN_48XLARGE = InstanceType(
    name="p5en.48xlarge",
    gpu_count=8,
    gpu_name="H200",
    efa_count=16,
    network_card_count=16,
    max_interfaces_per_card=4,
    vcpu_count=192,
    memory_mib=2_097_152,
    nvme_gb=30_400,
)
P6_B200_48XLARGE = InstanceType(
    name="p6-b200.48xlarge",
    gpu_count=8,
    gpu_name="B200",
    efa_count=8,
    network_card_count=8,
    max_interfaces_per_card=4,
    vcpu_count=192,
    memory_mib=2_097_152,
    nvme_gb=30_400,
)
# 17 cards, but card 0 is ENA only: EFA count and card count differ (aws-parallelcluster #7143, eksctl #8685).
P6_B300_48XLARGE = InstanceType(
    name="p6-b300.48xlarge",
    gpu_count=8,
    gpu_name="B300",
    efa_count=16,
    network_card_count=17,
    max_interfaces_per_card=4,
    vcpu_count=192,
    memory_mib=4_194_304,
    nvme_gb=30_400,
    primary_card_has_efa=False,
)

INSTANCE_TYPES: dict[str, InstanceType] = {
    instance.name: instance
    for instance in (
        P4D_24XLARGE,
        P4DE_24XLARGE,
        P5_4XLARGE,
        P5_48XLARGE,
        P5E_48XLARGE,
        P5EN_48XLARGE,
        P6_B200_48XLARGE,
        P6_B300_48XLARGE,
    )
}

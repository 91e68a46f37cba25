"""How EKS repairs GPU nodes: which faults, how soon and by what, so that it helps the in-job restart, not fights it."""

from dataclasses import dataclass
from typing import Literal

from aws_cdk import aws_eks_v2 as eks

from config.job import JobConfig

# Set by the node monitoring agent on a GPU node; its fatal reasons (eks-node-monitoring-agent, pkg/reasons and
# dcgm_policies.go). Every other Xid is a warning, which repairs nothing. EFA errors are warnings too: a degraded EFA
# card never leads to a repair.
CONDITION = "AcceleratedHardwareReady"
FATAL_XIDS = (46, 48, 54, 62, 63, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 142, 143, 151, 155, 156, 158)
FATAL_REASONS = frozenset(
    {f"NvidiaXID{xid}Error" for xid in FATAL_XIDS}
    | {
        "NvidiaDoubleBitError",
        "NvidiaNVLinkError",
        "NvidiaDeviceCountMismatch",
        "NvidiaFabricError",
        "FabricManagerNotRunning",
        "DCGMError",
        "DCGMDiagnosticFailure",
    }
)


@dataclass(frozen=True)
class Repair:
    """One override: for this reason, after so many minutes, that action; for why, see the table."""

    reason: str
    wait_minutes: int
    action: Literal["Replace", "Reboot", "NoAction"]


# EKS itself waits ten minutes. By then the job has long decided: in-job restart takes the spare within seconds to a
# minute of a fault that kills a rank. From there on the bad node is idle, and until it is back the next fault has no
# spare and costs the whole job a restart. So: at once, where the GPU can't compute any more.
#
# Reboot, where a reset mends it: the NVMe disks and the local checkpoints on them stay, a reserved slot stays ours
# (a replaced instance of a Capacity Block takes minutes of cleaning before the slot is free), and it is faster.
# Replace, where the part is broken and would come back broken. Actions after NVIDIA's Xid catalog.
REPAIRS: tuple[Repair, ...] = (
    Repair("NvidiaXID79Error", 1, "Replace"),  # fell off the bus
    Repair("NvidiaXID64Error", 1, "Replace"),  # row remapping failed: no spare rows are left
    Repair("NvidiaXID54Error", 1, "Replace"),  # auxiliary power missing
    Repair("NvidiaDeviceCountMismatch", 1, "Replace"),
    Repair("NvidiaFabricError", 1, "Replace"),  # "persists across reboots", say the agent's own reasons
    Repair("NvidiaXID74Error", 1, "Replace"),  # NVLink
    Repair("NvidiaNVLinkError", 1, "Replace"),
    Repair("NvidiaXID48Error", 1, "Reboot"),  # double-bit ECC error: the reset remaps the row
    Repair("NvidiaDoubleBitError", 1, "Reboot"),
    Repair("NvidiaXID95Error", 1, "Reboot"),  # uncontained ECC error
    Repair("NvidiaXID119Error", 1, "Reboot"),  # GSP does not answer
    Repair("NvidiaXID120Error", 1, "Reboot"),  # GSP error
    Repair("FabricManagerNotRunning", 2, "Reboot"),  # systemd restarts it first
    # A remapping is recorded and takes effect at the next reset; until then the GPU computes correctly. A repair would
    # kill a healthy rank, and use up a spare, for housekeeping.
    Repair("NvidiaXID63Error", 60, "NoAction"),
    # The agent lost its own DCGM host engine; that says nothing about the GPU. Healthy nodes have been replaced for it
    # (containers-roadmap #2555).
    Repair("DCGMError", 60, "NoAction"),
)


def node_repair(job: JobConfig) -> eks.CfnNodegroup.NodeRepairConfigProperty:
    """Repair of this job's node group. Counts, not percentages: EKS takes one of the two, and spares are counted.

    EKS stops repairing when more nodes than the threshold are unhealthy; by itself at 20% of groups above 5 nodes,
    which is the fourth node of 16, and never in smaller ones. Ours: half the group. Up to there it is a string of
    broken nodes, and without them the job is down anyway. Beyond it is something that they share (a bad AMI, a
    fabric, the power), and new nodes would break the same way, one by one, while somebody looks for the cause. Never
    below spares + 1: losing every spare and one more is what the job layer is for.

    And as many at once as there are spares, one at least: rebooting more would leave in-job restart too few nodes.
    """
    return eks.CfnNodegroup.NodeRepairConfigProperty(
        enabled=True,
        max_unhealthy_node_threshold_count=max(job.spare_count + 1, -(-job.pod_count // 2)),
        max_parallel_nodes_repaired_count=max(1, job.spare_count),
        # All four fields: EKS takes no partial override.
        node_repair_config_overrides=[
            eks.CfnNodegroup.NodeRepairConfigOverridesProperty(
                node_monitoring_condition=CONDITION,
                node_unhealthy_reason=repair.reason,
                min_repair_wait_time_mins=repair.wait_minutes,
                repair_action=repair.action,
            )
            for repair in REPAIRS
        ],
    )

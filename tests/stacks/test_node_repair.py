import pytest

from stacks.node_repair import CONDITION, FATAL_REASONS, REPAIRS


@pytest.fixture
def repair(cluster, nodegroup):
    return nodegroup(cluster)["NodeRepairConfig"]


def test_every_override_has_all_four_fields_and_a_known_action(repair):
    assert len(repair["NodeRepairConfigOverrides"]) == len(REPAIRS)
    for override in repair["NodeRepairConfigOverrides"]:
        assert set(override) == {
            "NodeMonitoringCondition",
            "NodeUnhealthyReason",
            "MinRepairWaitTimeMins",
            "RepairAction",
        }
        assert override["NodeMonitoringCondition"] == CONDITION
        assert override["RepairAction"] in {"Replace", "Reboot", "NoAction"}
        assert override["MinRepairWaitTimeMins"] >= 1


def test_every_override_names_a_reason_that_the_agent_gives_and_none_twice(repair):
    reasons = [override["NodeUnhealthyReason"] for override in repair["NodeRepairConfigOverrides"]]
    assert set(reasons) <= FATAL_REASONS, "a reason that no condition ever has would override nothing"
    assert len(set(reasons)) == len(reasons)


@pytest.mark.parametrize(
    ("reason", "action", "minutes"),
    [
        ("NvidiaXID79Error", "Replace", 1),
        ("NvidiaXID64Error", "Replace", 1),
        ("NvidiaFabricError", "Replace", 1),
        ("NvidiaXID48Error", "Reboot", 1),
        ("NvidiaXID119Error", "Reboot", 1),
        ("NvidiaXID63Error", "NoAction", 60),
        ("DCGMError", "NoAction", 60),
    ],
)
def test_broken_parts_are_replaced_resets_are_reboots_and_monitors_repair_nothing(repair, reason, action, minutes):
    (override,) = [
        override for override in repair["NodeRepairConfigOverrides"] if override["NodeUnhealthyReason"] == reason
    ]
    assert (override["RepairAction"], override["MinRepairWaitTimeMins"]) == (action, minutes)


@pytest.mark.parametrize(
    ("nodes", "spares", "threshold", "parallel"),
    [
        (1, 0, 1, 1),
        (2, 1, 2, 1),  # shipped: p5-2node
        (8, 0, 4, 1),
        (16, 2, 9, 2),  # EKS's own 20% would stop at the fourth
        (2, 4, 5, 4),
    ],
)
def test_repair_goes_on_up_to_half_the_group_and_never_takes_more_nodes_than_spares(
    synthesize, nodegroup, nodes, spares, threshold, parallel
):
    template = synthesize(job={"node_count": nodes, "spare_count": spares})["cluster"]
    repair = nodegroup(template)["NodeRepairConfig"]
    assert repair["Enabled"] is True
    assert repair["MaxUnhealthyNodeThresholdCount"] == threshold
    assert repair["MaxParallelNodesRepairedCount"] == parallel
    # EKS takes a count or a percentage of each, not both.
    assert not [field for field in repair if field.endswith("Percentage")]


def test_threshold_exceeds_the_spares_so_that_losing_them_all_does_not_stop_repair(synthesize, nodegroup):
    repair = nodegroup(synthesize(job={"node_count": 2, "spare_count": 4})["cluster"])["NodeRepairConfig"]
    assert repair["MaxUnhealthyNodeThresholdCount"] > 4

import pytest

from config.instances import INSTANCE_TYPES


@pytest.mark.parametrize("instance", INSTANCE_TYPES.values(), ids=lambda instance: instance.name)
def test_the_layout_has_as_many_interfaces_as_the_table_says(instance):
    interfaces = instance.network_interfaces
    assert len(interfaces) == instance.interface_count
    assert len([nic for nic in interfaces if nic.interface_type == "efa-only"]) == instance.efa_count


@pytest.mark.parametrize(
    ("name", "max_pods"),
    [("p4d.24xlarge", 250), ("p5.4xlarge", 89), ("p5.48xlarge", 51), ("p5en.48xlarge", 149), ("p6-b300.48xlarge", 198)],
)
def test_max_pods_counts_the_slots_that_efa_leaves_on_card_0_up_to_what_eks_recommends(name, max_pods):
    assert INSTANCE_TYPES[name].max_pods == max_pods

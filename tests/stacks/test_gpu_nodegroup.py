from email import message_from_string

import pytest
import yaml

from config import names
from config.instances import INSTANCE_TYPES

BLOCK = {"kind": "capacity_block", "reservation_id": "cr-0123456789abcdef0"}
RESERVATION = {"kind": "odcr", "reservation_id": "cr-0123456789abcdef0"}


def layout(data):
    return [(nic["NetworkCardIndex"], nic["DeviceIndex"], nic["InterfaceType"]) for nic in data["NetworkInterfaces"]]


def test_a_p5_node_gets_one_ena_primary_and_32_efa_only_interfaces(cluster, launch_template):
    expected = [(0, 0, "interface"), (0, 1, "efa-only"), *[(card, 0, "efa-only") for card in range(1, 32)]]
    assert layout(launch_template(cluster)) == expected


COUNTS = {
    "p4d.24xlarge": 5,
    "p4de.24xlarge": 5,
    "p5.4xlarge": 2,
    "p5.48xlarge": 33,
    "p5e.48xlarge": 33,
    "p5en.48xlarge": 17,
    "p6-b200.48xlarge": 9,
    "p6-b300.48xlarge": 17,
}
KINDS = {
    "on_demand": {"kind": "on_demand"},
    "spot": {"kind": "spot"},
    "odcr": RESERVATION,
    "capacity_block": BLOCK | {"started": True},
}


def test_every_instance_type_of_the_table_is_counted_here():
    assert COUNTS.keys() == INSTANCE_TYPES.keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("instance_type", COUNTS)
def test_every_instance_type_synthesizes_with_every_kind_of_capacity(
    gpu_template, deployment_with, launch_template, nodegroup, instance_type, kind
):
    template = gpu_template(
        deployment_with(
            cluster={"capacity": KINDS[kind]}, job={"instance_type": instance_type}, train={"global_batch_size": 256}
        )
    )
    data, group, instance = launch_template(template), nodegroup(template), INSTANCE_TYPES[instance_type]
    nics, count = layout(data), COUNTS[instance_type]
    assert len(nics) == len({nic[:2] for nic in nics}) == count, "a card and device pair is used twice"
    assert nics[0] == (0, 0, "interface"), "the primary can't be efa-only"
    efa_cards = [card for card, _, kind in nics if kind == "efa-only"]
    assert len(set(efa_cards)) == len(efa_cards) == instance.efa_count, "one EFA device per card"
    assert all(device < instance.max_interfaces_per_card for _, device, _ in nics)
    assert data["InstanceType"] == instance_type
    assert group["CapacityType"] == {"spot": "SPOT", "capacity_block": "CAPACITY_BLOCK"}.get(kind, "ON_DEMAND")
    assert group["UpdateConfig"]["UpdateStrategy"] == ("MINIMAL" if kind in ("odcr", "capacity_block") else "DEFAULT")
    assert ("Placement" in data) == (kind == "on_demand")
    market = {"capacity_block": "capacity-block"}.get(kind)
    assert data.get("InstanceMarketOptions", {}).get("MarketType") == market
    assert ("CapacityReservationSpecification" in data) == (kind in ("odcr", "capacity_block"))
    assert group["ScalingConfig"]["DesiredSize"] == 3


def test_p6_b300_has_no_efa_on_card_0(synthesize, launch_template):
    data = launch_template(synthesize(job={"instance_type": "p6-b300.48xlarge"})["cluster"])
    assert [kind for card, _, kind in layout(data) if card == 0] == ["interface"]


def test_every_interface_carries_the_security_groups_of_cluster_efa_and_lustre(cluster, launch_template):
    for nic in launch_template(cluster)["NetworkInterfaces"]:
        cluster_group, efa_group, lustre_group = nic["Groups"]
        assert cluster_group["Fn::GetAtt"][1] == "ClusterSecurityGroupId"
        assert "EfaSecurityGroup" in efa_group["Fn::ImportValue"]
        assert "LustreClientSecurityGroup" in lustre_group["Fn::ImportValue"]


def test_interfaces_ask_for_no_address_subnet_or_public_ip(cluster, launch_template):
    allowed = {"NetworkCardIndex", "DeviceIndex", "InterfaceType", "Groups", "DeleteOnTermination"}
    assert all(set(nic) <= allowed for nic in launch_template(cluster)["NetworkInterfaces"])


def test_launch_template_holds_nothing_that_eks_refuses(cluster, launch_template):
    refused = {"ImageId", "IamInstanceProfile", "SecurityGroupIds", "InstanceInitiatedShutdownBehavior"}
    assert not refused & set(launch_template(cluster))


def test_instance_type_stands_in_the_launch_template_only(cluster, launch_template, nodegroup):
    assert launch_template(cluster)["InstanceType"] == "p5.48xlarge"
    assert not {"InstanceTypes", "DiskSize", "RemoteAccess"} & set(nodegroup(cluster))


def test_node_group_follows_the_newest_version_of_its_launch_template(cluster, nodegroup):
    version = nodegroup(cluster)["LaunchTemplate"]["Version"]
    assert version["Fn::GetAtt"][1] == "LatestVersionNumber"


def test_metadata_service_wants_a_token(cluster, launch_template):
    assert launch_template(cluster)["MetadataOptions"]["HttpTokens"] == "required"


def test_root_volume_is_encrypted_and_as_large_as_configured(synthesize, launch_template):
    data = launch_template(synthesize(cluster={"root_volume_gib": 300})["cluster"])
    (root,) = data["BlockDeviceMappings"]
    assert root["DeviceName"] == "/dev/xvda"
    assert root["Ebs"]["Encrypted"] is True
    assert root["Ebs"]["VolumeSize"] == 300


def node_config(data):
    user_data = data["UserData"]["Fn::Base64"]
    (part,) = message_from_string(user_data).get_payload()
    assert part.get_content_type() == "application/node.eks.aws"
    return yaml.safe_load(part.get_payload())


def test_nvme_disks_become_one_raid0_and_max_pods_is_what_the_cni_can_serve(cluster, launch_template):
    config = node_config(launch_template(cluster))
    assert config["kind"] == "NodeConfig"
    assert config["spec"]["instance"]["localStorage"]["strategy"] == "RAID0"
    # Card 0 has two slots and EFA takes one: 49 addresses, and two pods that share the host's.
    assert config["spec"]["kubelet"]["config"]["maxPods"] == 51
    assert "cluster" not in config["spec"], "EKS adds its own part with the cluster"


def test_labels_and_taint_are_those_that_the_charts_select(cluster, nodegroup):
    group = nodegroup(cluster)
    assert group["Labels"] == {
        names.NODE_ROLE_LABEL: names.NODE_ROLE_GPU,
        names.GPU_PRESENT_LABEL: "true",
        names.EFA_PRESENT_LABEL: "true",
    }
    (taint,) = group["Taints"]
    assert (taint["Key"], taint["Effect"]) == (names.GPU_TAINT_KEY, "NO_SCHEDULE")


def test_node_group_runs_the_nvidia_ami_with_node_repair_in_the_gpu_subnet_alone(cluster, nodegroup):
    group = nodegroup(cluster)
    assert group["AmiType"] == "AL2023_x86_64_NVIDIA"
    assert group["Version"] == "1.36"
    assert group["NodeRepairConfig"]["Enabled"] is True
    (subnet,) = group["Subnets"]
    assert "GpuSubnet" in subnet["Fn::ImportValue"]


def test_pinned_ami_release_replaces_the_version(synthesize, nodegroup):
    group = nodegroup(synthesize(cluster={"ami_release_version": "1.36.2-20261101"})["cluster"])
    assert group["ReleaseVersion"] == "1.36.2-20261101"
    assert "Version" not in group


def test_there_are_as_many_nodes_as_the_job_has_pods(cluster, nodegroup, deployment_with):
    pods = deployment_with().job.pod_count
    assert pods == 3
    assert nodegroup(cluster)["ScalingConfig"] == {"MinSize": pods, "DesiredSize": pods, "MaxSize": pods}


def test_node_group_waits_for_the_network_add_ons(cluster, only):
    depends_on = only(cluster, "AWS::EKS::Nodegroup", "Gpu")[1]["DependsOn"]
    assert {name[: len("NetworkAddonsVpcCni")] for name in depends_on} >= {"NetworkAddonsVpcCni"}


def test_on_demand_nodes_share_a_cluster_placement_group_of_their_own(cluster, launch_template, nodegroup, only):
    name, group = only(cluster, "AWS::EC2::PlacementGroup", "Gpu")
    assert group["Properties"]["Strategy"] == "cluster"
    data = launch_template(cluster)
    assert data["Placement"] == {"GroupName": {"Ref": name}}
    assert not {"CapacityReservationSpecification", "InstanceMarketOptions"} & set(data)
    assert nodegroup(cluster)["CapacityType"] == "ON_DEMAND"
    assert nodegroup(cluster)["UpdateConfig"] == {"MaxUnavailable": 1, "UpdateStrategy": "DEFAULT"}


def test_spot_is_said_in_the_node_group_and_asks_for_no_placement(synthesize, launch_template, nodegroup):
    template = synthesize(cluster={"capacity": {"kind": "spot"}})["cluster"]
    assert nodegroup(template)["CapacityType"] == "SPOT"
    assert not {"Placement", "InstanceMarketOptions"} & set(launch_template(template))
    template.resource_count_is("AWS::EC2::PlacementGroup", 0)


def test_a_reservation_is_targeted_by_id_without_surge_or_placement_group(synthesize, launch_template, nodegroup):
    template = synthesize(cluster={"capacity": RESERVATION})["cluster"]
    data, group = launch_template(template), nodegroup(template)
    assert data["CapacityReservationSpecification"] == {
        "CapacityReservationTarget": {"CapacityReservationId": RESERVATION["reservation_id"]}
    }
    assert not {"Placement", "InstanceMarketOptions"} & set(data)
    template.resource_count_is("AWS::EC2::PlacementGroup", 0)
    assert group["CapacityType"] == "ON_DEMAND"
    assert group["UpdateConfig"]["UpdateStrategy"] == "MINIMAL"
    assert group["ScalingConfig"]["DesiredSize"] == 3


def test_a_reservations_own_placement_group_is_used_and_none_is_made(synthesize, launch_template):
    template = synthesize(cluster={"capacity": {**RESERVATION, "placement_group": "ours"}})["cluster"]
    assert launch_template(template)["Placement"] == {"GroupName": "ours"}
    template.resource_count_is("AWS::EC2::PlacementGroup", 0)


@pytest.mark.parametrize(("started", "desired"), [(False, 0), (True, 3)])
def test_a_capacity_block_is_asked_for_nodes_only_once_it_has_started(
    synthesize, launch_template, nodegroup, started, desired
):
    template = synthesize(cluster={"capacity": {**BLOCK, "started": started}})["cluster"]
    data, group = launch_template(template), nodegroup(template)
    assert data["InstanceMarketOptions"] == {"MarketType": "capacity-block"}
    assert data["CapacityReservationSpecification"] == {
        "CapacityReservationTarget": {"CapacityReservationId": BLOCK["reservation_id"]}
    }
    assert "Placement" not in data
    template.resource_count_is("AWS::EC2::PlacementGroup", 0)
    assert group["CapacityType"] == "CAPACITY_BLOCK"
    assert group["UpdateConfig"]["UpdateStrategy"] == "MINIMAL"
    # The minimum lets EKS scale to 0 before the block ends.
    assert group["ScalingConfig"] == {"MinSize": 0, "DesiredSize": desired, "MaxSize": 3}

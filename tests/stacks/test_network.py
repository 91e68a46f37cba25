from ipaddress import IPv4Network

import pytest
from aws_cdk.assertions import Match


def group_id(logical_id):
    return {"Fn::GetAtt": [logical_id, "GroupId"]}


@pytest.fixture
def efa(network, only):
    return only(network, "AWS::EC2::SecurityGroup", "Efa")


@pytest.fixture
def fsx(network, only):
    return only(network, "AWS::EC2::SecurityGroup", "Fsx")


def test_efa_security_group_accepts_everything_from_itself(network, efa):
    itself = group_id(efa[0])
    network.has_resource_properties(
        "AWS::EC2::SecurityGroupIngress",
        {"IpProtocol": "-1", "GroupId": itself, "SourceSecurityGroupId": itself},
    )


def test_efa_security_group_sends_everything_to_itself(network, efa):
    # CDK drops this rule with only a warning when it is added the usual way; EFA is dead without it.
    itself = group_id(efa[0])
    network.has_resource_properties(
        "AWS::EC2::SecurityGroupEgress",
        {"IpProtocol": "-1", "GroupId": itself, "DestinationSecurityGroupId": itself},
    )


def test_efa_security_group_carries_no_cluster_tag(efa):
    # A load balancer controller wants exactly one tagged group per interface.
    assert not [tag for tag in efa[1]["Properties"].get("Tags", []) if tag["Key"].startswith("kubernetes.io/")]


@pytest.mark.parametrize(("low", "high"), [(988, 988), (1018, 1023)])
@pytest.mark.parametrize("peer", ["LustreClient", "Fsx"])
def test_lustre_ports_are_open_both_ways_between_servers_and_nodes(network, only, fsx, peer, low, high):
    ports = {"IpProtocol": "tcp", "FromPort": low, "ToPort": high}
    servers, other = group_id(fsx[0]), group_id(only(network, "AWS::EC2::SecurityGroup", peer)[0])
    for to, source in ((servers, other), (other, servers)):
        network.has_resource_properties(
            "AWS::EC2::SecurityGroupIngress", {**ports, "GroupId": to, "SourceSecurityGroupId": source}
        )
    network.has_resource_properties(
        "AWS::EC2::SecurityGroupEgress", {**ports, "GroupId": servers, "DestinationSecurityGroupId": other}
    )


def test_gpu_subnet_is_private_large_and_in_the_gpu_zone(network, only):
    subnet = only(network, "AWS::EC2::Subnet", "Gpu")[1]["Properties"]
    assert subnet["AvailabilityZone"] == "us-west-2a"
    assert IPv4Network(subnet["CidrBlock"]).prefixlen <= 21
    assert not subnet.get("MapPublicIpOnLaunch", False)


def test_gpu_subnet_reaches_the_internet_through_the_nat_gateway_of_its_own_zone(network, only):
    table = only(network, "AWS::EC2::RouteTable", "Gpu")[0]
    gateway, resource = only(network, "AWS::EC2::NatGateway", "")
    network.has_resource_properties(
        "AWS::EC2::Route",
        {
            "RouteTableId": {"Ref": table},
            "DestinationCidrBlock": "0.0.0.0/0",
            "NatGatewayId": {"Ref": gateway},
        },
    )
    subnet = network.find_resources("AWS::EC2::Subnet")[resource["Properties"]["SubnetId"]["Ref"]]
    assert subnet["Properties"]["AvailabilityZone"] == "us-west-2a"


def test_s3_traffic_of_every_private_subnet_bypasses_the_nat_gateway(network):
    private = [name for name in network.find_resources("AWS::EC2::RouteTable") if "Public" not in name]
    network.has_resource_properties(
        "AWS::EC2::VPCEndpoint",
        {"VpcEndpointType": "Gateway", "RouteTableIds": Match.array_with([{"Ref": name} for name in private])},
    )


@pytest.mark.parametrize("cidr", ["10.0.0.0/16", "172.16.0.0/20", "192.168.0.0/18"])
def test_subnets_never_overlap_and_lie_inside_the_vpc(synthesize, cidr):
    template = synthesize(cluster={"vpc_cidr": cidr})["network"]
    subnets = [
        IPv4Network(resource["Properties"]["CidrBlock"])
        for resource in template.find_resources("AWS::EC2::Subnet").values()
    ]
    assert len(subnets) == 5
    assert all(subnet.subnet_of(IPv4Network(cidr)) for subnet in subnets)
    assert not [(one, two) for index, one in enumerate(subnets) for two in subnets[index + 1 :] if one.overlaps(two)]

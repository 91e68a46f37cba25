from ipaddress import IPv4Network

import pytest
from aws_cdk.assertions import Match
from pydantic import ValidationError

from config.cluster import NetworkConfig
from stacks.network import ENDPOINTS


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


MIRROR = "123456789012.dkr.ecr.us-west-2.amazonaws.com/mirror"


@pytest.fixture(scope="session")
def private(synthesize):
    """The network stack of a deployment with no way out."""
    return synthesize(cluster={"network": {"egress": "none", "mirror_registry": MIRROR}})


def endpoints(template, kind):
    found = [r["Properties"] for r in template.find_resources("AWS::EC2::VPCEndpoint").values()]
    return {
        "".join(part if isinstance(part, str) else "?" for part in endpoint["ServiceName"]["Fn::Join"][1])
        if isinstance(endpoint["ServiceName"], dict)
        else endpoint["ServiceName"]: endpoint
        for endpoint in found
        if endpoint["VpcEndpointType"] == kind
    }


def test_without_a_way_out_nothing_leads_to_the_internet(private):
    for kind in ("AWS::EC2::NatGateway", "AWS::EC2::InternetGateway", "AWS::EC2::Route", "AWS::EC2::EIP"):
        private["network"].resource_count_is(kind, 0)
    private["network"].resource_count_is("AWS::EC2::Subnet", 3)


def test_without_a_way_out_every_service_in_use_has_a_private_endpoint_in_both_zones(private):
    found = endpoints(private["network"], "Interface")
    assert {name.removeprefix("com.amazonaws.us-west-2.") for name in found} == set(ENDPOINTS.values())
    assert set(ENDPOINTS.values()) >= {
        *("ec2", "ecr.api", "ecr.dkr", "sts", "eks", "eks-auth", "logs", "ssm", "ssmmessages", "ec2messages", "fsx"),
    }
    for endpoint in found.values():
        assert endpoint["PrivateDnsEnabled"] is True
        assert len(endpoint["SubnetIds"]) == 2
    assert len(endpoints(private["network"], "Gateway")) == 1, "S3, where ECR keeps image layers"


def test_endpoints_answer_https_from_inside_the_vpc_only(private, only):
    group = only(private["network"], "AWS::EC2::SecurityGroup", "Endpoint")[1]["Properties"]
    (rule,) = group["SecurityGroupIngress"]
    assert (rule["CidrIp"], rule["FromPort"], rule["ToPort"]) == ("10.0.0.0/16", 443, 443)


def test_without_a_way_out_the_gpu_subnet_and_the_control_plane_keep_their_places(private, only):
    subnet = only(private["network"], "AWS::EC2::Subnet", "Gpu")[1]["Properties"]
    assert IPv4Network(subnet["CidrBlock"]) == IPv4Network("10.0.128.0/17")
    cluster = only(private["cluster"], "AWS::EKS::Cluster", "Cluster")[1]["Properties"]
    assert len(cluster["ResourcesVpcConfig"]["SubnetIds"]) == 2
    assert len(only(private["cluster"], "AWS::EKS::Nodegroup", "System")[1]["Properties"]["Subnets"]) == 2


def test_with_a_nat_gateway_no_interface_endpoint_is_paid_for(network):
    assert endpoints(network, "Interface") == {}


def test_flow_logs_of_the_whole_vpc_are_kept_for_a_month(network, only):
    vpc = only(network, "AWS::EC2::VPC", "Vpc")[0]
    network.has_resource_properties("AWS::EC2::FlowLog", {"ResourceId": {"Ref": vpc}, "TrafficType": "ALL"})
    assert only(network, "AWS::Logs::LogGroup", "FlowLog")[1]["Properties"]["RetentionInDays"] == 30


@pytest.mark.parametrize(
    "settings",
    [{"egress": "none"}, {"egress": "nat", "mirror_registry": MIRROR}],
)
def test_no_way_out_needs_a_mirror_and_a_way_out_takes_none(settings):
    with pytest.raises(ValidationError, match="set both or neither"):
        NetworkConfig(**settings)


def test_a_mirror_is_a_registry_that_the_endpoints_reach():
    with pytest.raises(ValidationError, match=r"must be an ECR registry, such as"):
        NetworkConfig(egress="none", mirror_registry="registry.example.com/mirror")


def test_a_mirror_in_another_region_is_an_error(deployment_with):
    mirror = MIRROR.replace("us-west-2", "eu-west-1")
    with pytest.raises(ValidationError, match="is in another region, which no endpoint of us-west-2 reaches"):
        deployment_with(cluster={"network": {"egress": "none", "mirror_registry": mirror}})


@pytest.mark.parametrize("peer", ["LustreClient", "Fsx"])
def test_with_efa_everything_may_pass_between_servers_and_nodes(synthesize, only, peer):
    template = synthesize(cluster={"storage": {"efa": True, "capacity_gib": 9600}})["network"]
    servers = group_id(only(template, "AWS::EC2::SecurityGroup", "Fsx")[0])
    other = group_id(only(template, "AWS::EC2::SecurityGroup", peer)[0])
    for here, there in ((servers, other), (other, servers)):
        template.has_resource_properties(
            "AWS::EC2::SecurityGroupIngress", {"IpProtocol": "-1", "GroupId": here, "SourceSecurityGroupId": there}
        )
        template.has_resource_properties(
            "AWS::EC2::SecurityGroupEgress", {"IpProtocol": "-1", "GroupId": here, "DestinationSecurityGroupId": there}
        )

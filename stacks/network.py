"""The VPC: public and private subnets in two zones, one GPU subnet, and the security groups of EFA and Lustre."""

from typing import Any, cast

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_logs as logs
from constructs import Construct

from config.cluster import ClusterConfig

# Lustre's ports (FSx user guide, "File system access control with Amazon VPC").
LUSTRE_PORTS = (ec2.Port.tcp(988), ec2.Port.tcp_range(1018, 1023))

# What a cluster without a way out still has to reach (EKS user guide, "Deploy private clusters with limited internet
# access"): name of our construct -> service. S3, the fifth wheel of ECR, is a gateway endpoint in both modes.
ENDPOINTS: dict[str, str] = {
    "Ec2": "ec2",  # nodeadm and the VPC CNI
    "EcrApi": "ecr.api",
    "EcrDocker": "ecr.dkr",
    "Sts": "sts",
    "Eks": "eks",  # nodeadm describes its cluster
    "EksAuth": "eks-auth",  # Pod Identity
    "Autoscaling": "autoscaling",
    "Logs": "logs",
    "Monitoring": "monitoring",  # metrics of the CloudWatch agent
    "Fsx": "fsx",  # the CSI driver describes the file system
    "Ssm": "ssm",  # a shell on a node, which has no other way in
    "SsmMessages": "ssmmessages",
    "Ec2Messages": "ec2messages",
    "Lambda": "lambda",  # the kubectl provider's framework calls its handler from inside the VPC
    "Kms": "kms",
}


class NetworkStack(cdk.Stack):
    """Where nodes and file system live.

    The GPU subnet is one, private and large. EFA traffic does not cross subnets, an instance with several interfaces
    can't have a public address (terraform-aws-eks #3533), and every node keeps up to 50 addresses warm.
    """

    def __init__(self, scope: Construct, id_: str, *, config: ClusterConfig, **kwargs: Any) -> None:
        super().__init__(scope, id_, description="Training: VPC, subnets and security groups", **kwargs)
        # One NAT gateway, in the GPU zone: without that zone there is no training either.
        nat = ec2.NatProvider.gateway() if config.network.egress == "nat" else None
        self.vpc = self._vpc(config, nat)
        # Where the control plane, system nodes and endpoints are: one per zone.
        self.private_subnets = self.vpc.private_subnets if nat else self.vpc.isolated_subnets
        self.gpu_subnet = ec2.PrivateSubnet(
            self,
            "GpuSubnet",
            vpc_id=self.vpc.vpc_id,
            availability_zone=config.availability_zone,
            cidr_block=config.gpu_subnet_cidr,
        )
        cdk.Tags.of(self.gpu_subnet).add("Name", f"{self.stack_name}/gpu")
        if nat is not None:
            self.gpu_subnet.add_default_nat_route(nat.configured_gateways[0].gateway_id)
        else:
            self._interface_endpoints(config)
        # Image layers and data sets come from S3: past the NAT gateway, which bills by the gigabyte.
        private: list[ec2.ISubnet] = [*self.private_subnets, cast(ec2.ISubnet, self.gpu_subnet)]
        self.vpc.add_gateway_endpoint(
            "S3",
            service=ec2.GatewayVpcEndpointAwsService.S3,
            subnets=[ec2.SubnetSelection(subnets=private)],
        )
        self._flow_logs()
        self.efa_security_group = self._efa_security_group()
        self.lustre_client_security_group = ec2.SecurityGroup(
            self, "LustreClientSecurityGroup", vpc=self.vpc, description="Nodes that mount FSx for Lustre"
        )
        self.fsx_security_group = self._fsx_security_group(efa=config.storage.efa)

    def _vpc(self, config: ClusterConfig, nat: ec2.NatProvider | None) -> ec2.Vpc:
        # From the low end of the range; together a /22, which leaves the upper half to the GPU subnet.
        public = ec2.SubnetConfiguration(name="Public", subnet_type=ec2.SubnetType.PUBLIC, cidr_mask=26)
        kind = ec2.SubnetType.PRIVATE_WITH_EGRESS if nat else ec2.SubnetType.PRIVATE_ISOLATED
        private = ec2.SubnetConfiguration(name="Private", subnet_type=kind, cidr_mask=24)
        return ec2.Vpc(
            self,
            "Vpc",
            ip_addresses=ec2.IpAddresses.cidr(config.vpc_cidr),
            availability_zones=[config.availability_zone, config.second_availability_zone],
            nat_gateway_provider=nat,
            nat_gateways=1 if nat else 0,
            subnet_configuration=[public, private] if nat else [private],
        )

    def _interface_endpoints(self, config: ClusterConfig) -> None:
        """One endpoint per service, in both zones, for whoever is inside the VPC."""
        group = ec2.SecurityGroup(
            self, "EndpointSecurityGroup", vpc=self.vpc, description="AWS service endpoints", allow_all_outbound=False
        )
        group.add_ingress_rule(ec2.Peer.ipv4(config.vpc_cidr), ec2.Port.tcp(443), "HTTPS from inside the VPC")
        for id_, service in ENDPOINTS.items():
            ec2.InterfaceVpcEndpoint(
                self,
                f"Endpoint{id_}",
                vpc=self.vpc,
                service=ec2.InterfaceVpcEndpointAwsService(service),
                subnets=ec2.SubnetSelection(subnets=self.private_subnets),
                security_groups=[group],
                open=False,
                private_dns_enabled=True,
            )

    def _flow_logs(self) -> None:
        """Who talked to whom, for a month, in ten-minute records. EFA bypasses the IP stack and does not appear."""
        group = logs.LogGroup(
            self, "FlowLogGroup", retention=logs.RetentionDays.ONE_MONTH, removal_policy=cdk.RemovalPolicy.DESTROY
        )
        self.vpc.add_flow_log(
            "FlowLog",
            destination=ec2.FlowLogDestination.to_cloud_watch_logs(group),
            traffic_type=ec2.FlowLogTrafficType.ALL,
            max_aggregation_interval=ec2.FlowLogMaxAggregationInterval.TEN_MINUTES,
        )

    def _efa_security_group(self) -> ec2.SecurityGroup:
        """All traffic from and to itself, on every interface of every GPU node.

        An egress rule to 0.0.0.0/0 does not cover EFA: without the rule to itself NCCL hangs or fails with "Unable to
        insert remote address" (awsome-distributed-ai #546, aws-ofi-nccl #663). `add_egress_rule` would drop that rule
        with only a warning, because the group allows all outbound traffic: hence the resource of its own.
        """
        group = ec2.SecurityGroup(
            self, "EfaSecurityGroup", vpc=self.vpc, description="EFA between GPU nodes", allow_all_outbound=True
        )
        group.add_ingress_rule(group, ec2.Port.all_traffic(), "EFA from the other GPU nodes")
        ec2.CfnSecurityGroupEgress(
            self,
            "EfaEgressToItself",
            group_id=group.security_group_id,
            destination_security_group_id=group.security_group_id,
            ip_protocol="-1",
            description="EFA to the other GPU nodes",
        )
        return group

    def _fsx_security_group(self, *, efa: bool) -> ec2.SecurityGroup:
        """Lustre between the file servers and the nodes, both ways; with EFA all traffic, which FSx checks.

        The rules stand in this stack, and so before the file system: rules added later do not reach its data servers
        (bottlerocket #3459). Hence a client group of its own, instead of the one that EKS makes with the cluster.
        """
        group = ec2.SecurityGroup(
            self, "FsxSecurityGroup", vpc=self.vpc, description="FSx for Lustre servers", allow_all_outbound=False
        )
        clients = self.lustre_client_security_group
        for port in (ec2.Port.all_traffic(),) if efa else LUSTRE_PORTS:
            for peer, name in ((group, "the servers"), (clients, "the nodes")):
                group.add_ingress_rule(peer, port, f"Lustre from {name}")
                group.add_egress_rule(peer, port, f"Lustre to {name}")
            clients.add_ingress_rule(group, port, "Lustre from the servers")
        if efa:
            # The clients' rule to 0.0.0.0/0 does not cover EFA, and `add_egress_rule` would drop this one beside it.
            ec2.CfnSecurityGroupEgress(
                self,
                "EfaEgressToLustre",
                group_id=clients.security_group_id,
                destination_security_group_id=group.security_group_id,
                ip_protocol="-1",
                description="Lustre over EFA to the servers",
            )
        return group

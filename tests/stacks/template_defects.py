"""What AWS would refuse, one defect at a time, for synthesized templates: how to seed it, and what is to be found."""

import copy
import json

BLOCK = {"kind": "capacity_block", "reservation_id": "cr-0123456789abcdef0", "started": True}
RESERVATION = {"kind": "odcr", "reservation_id": "cr-0123456789abcdef0"}


class Deployment:
    """Templates to spoil: the parts that the cases change."""

    def __init__(self, templates):
        self.templates = {name: copy.deepcopy(template.to_json()) for name, template in templates.items()}

    def find(self, kind, prefix=""):
        found = [
            resource
            for template in self.templates.values()
            for name, resource in template["Resources"].items()
            if resource["Type"] == kind and name.startswith(prefix)
        ]
        assert found, f"no {kind} {prefix}"
        return found[0]["Properties"]

    def remove(self, kind, wanted):
        for template in self.templates.values():
            doomed = [
                name
                for name, resource in template["Resources"].items()
                if resource["Type"] == kind and wanted(resource["Properties"])
            ]
            for name in doomed:
                del template["Resources"][name]
            if doomed:
                return
        raise AssertionError(f"no such {kind}")

    def name_of(self, kind):
        return next(
            name
            for template in self.templates.values()
            for name, resource in template["Resources"].items()
            if resource["Type"] == kind
        )

    def import_of(self, prefix):
        """What another stack writes for a resource of the network stack."""
        outputs = self.templates["network"]["Outputs"].values()
        (name,) = [output["Export"]["Name"] for output in outputs if output["Value"].get("Ref", "").startswith(prefix)]
        return {"Fn::ImportValue": name}

    @property
    def data(self):
        return self.find("AWS::EC2::LaunchTemplate", "Gpu")["LaunchTemplateData"]

    @property
    def nics(self):
        return self.data["NetworkInterfaces"]

    @property
    def group(self):
        return self.find("AWS::EKS::Nodegroup", "Gpu")

    @property
    def lustre(self):
        return self.find("AWS::FSx::FileSystem")["LustreConfiguration"]

    @property
    def file_system(self):
        return self.find("AWS::FSx::FileSystem")

    def chart(self, name):
        for template in self.templates.values():
            for resource in template["Resources"].values():
                if resource["Type"] == "Custom::AWSCDK-EKS-HelmChart" and resource["Properties"]["Chart"] == name:
                    return resource["Properties"]
        raise AssertionError(f"no chart {name}")

    def addon(self, name):
        for template in self.templates.values():
            for resource in template["Resources"].values():
                if resource["Type"] == "AWS::EKS::Addon" and resource["Properties"]["AddonName"] == name:
                    return resource["Properties"]
        raise AssertionError(f"no add-on {name}")


def put(target, **values):
    target.update(values)


def without_values(chart, key):
    values = json.loads(chart["Values"])
    values.pop(key, None)
    chart["Values"] = json.dumps(values)


def put_values(chart, **values):
    chart["Values"] = json.dumps(json.loads(chart["Values"]) | values)


def trust_of(deployment, role):
    return deployment.find("AWS::IAM::Role", role)["AssumeRolePolicyDocument"]["Statement"][0]


def efa_on_every_card_of_b300(deployment):
    groups = deployment.nics[0]["Groups"]
    places = [(0, 0, "interface"), (0, 1, "efa-only"), *((card, 0, "efa-only") for card in range(1, 17))]
    put(
        deployment.data,
        InstanceType="p6-b300.48xlarge",
        NetworkInterfaces=[
            {"NetworkCardIndex": card, "DeviceIndex": device, "InterfaceType": kind, "Groups": groups}
            for card, device, kind in places
        ],
    )


def lustre_from_itself(properties):
    return "FsxSecurityGroup" in json.dumps(properties["GroupId"]) and "FsxSecurityGroup" in json.dumps(
        properties["SourceSecurityGroupId"]
    )


def efa_egress_to_itself(properties):
    return "EfaSecurityGroup" in json.dumps(properties["GroupId"]) and properties["IpProtocol"] == "-1"


# id -> (capacity, how to spoil it, (end of the finding's path, a part of its rule), ...)
CASES = {
    # The 17 seeded defects.
    "01 instance type in template and group": (
        None,
        lambda d: put(d.group, InstanceTypes=["p5.48xlarge"]),
        [("InstanceTypes", "not in both")],
    ),
    "02 disk size beside a launch template": (
        None,
        lambda d: put(d.group, DiskSize=100),
        [("DiskSize", "no DiskSize")],
    ),
    "03 capacity block without market options": (
        BLOCK,
        lambda d: d.data.pop("InstanceMarketOptions"),
        [("InstanceMarketOptions.MarketType", "needs capacity-block here")],
    ),
    "04 subnet in an interface": (
        None,
        lambda d: put(d.nics[0], SubnetId="subnet-0123456789abcdef0"),
        [("NetworkInterfaces[0].SubnetId", "names no subnet")],
    ),
    "05 instance profile in the template": (
        None,
        lambda d: put(d.data, IamInstanceProfile={"Name": "profile"}),
        [("IamInstanceProfile", "no IamInstanceProfile")],
    ),
    "06 security groups at both levels": (
        None,
        lambda d: put(d.data, SecurityGroupIds=["sg-0123456789abcdef0"]),
        [("SecurityGroupIds", "stand in each interface")],
    ),
    "07 efa-only primary": (
        None,
        lambda d: put(d.nics[0], InterfaceType="efa-only"),
        [
            ("NetworkInterfaces", "can't be efa-only"),
            ("NetworkInterfaces", "has one EFA device"),
            ("NetworkInterfaces", "has 32 EFA devices"),
        ],
    ),
    "08 bogus interface type": (
        None,
        lambda d: put(d.nics[5], InterfaceType="efa_only"),
        [("NetworkInterfaces[5].InterfaceType", "interface, efa and efa-only"), ("NetworkInterfaces", "has 32 EFA")],
    ),
    "09 device index 2 on p5": (
        None,
        lambda d: put(d.nics[5], DeviceIndex=2),
        [("NetworkInterfaces[5].DeviceIndex", "device indexes 0 to 1")],
    ),
    "10 card and device used twice": (
        None,
        lambda d: put(d.nics[5], NetworkCardIndex=d.nics[6]["NetworkCardIndex"]),
        [("NetworkInterfaces", "is used once"), ("NetworkInterfaces", "has one EFA device")],
    ),
    "11 efa file system of 1200 GiB at 250": (
        None,
        lambda d: (
            put(d.lustre, EfaEnabled=True, PerUnitStorageThroughput=250),
            put(d.file_system, StorageCapacity=1200),
        ),
        [("StorageCapacity", "19200"), ("network/FsxSecurityGroup94E8AC1C", "file system with EFA")],
    ),
    "12 efa file system without metadata configuration": (
        None,
        lambda d: (
            put(d.lustre, EfaEnabled=True),
            put(d.file_system, StorageCapacity=9600),
            d.lustre.pop("MetadataConfiguration"),
        ),
        [
            ("MetadataConfiguration", "EFA requires it"),
            ("network/FsxSecurityGroup94E8AC1C", "file system with EFA"),
        ],
    ),
    "13 throughput 300": (
        None,
        lambda d: put(d.lustre, PerUnitStorageThroughput=300),
        [("PerUnitStorageThroughput", "125, 250, 500")],
    ),
    "14 capacity 3600": (None, lambda d: put(d.file_system, StorageCapacity=3600), [("StorageCapacity", "2400")]),
    "15 metadata iops 1501": (
        None,
        lambda d: put(d.lustre, MetadataConfiguration={"Mode": "USER_PROVISIONED", "Iops": 1501}),
        [("MetadataConfiguration.Iops", "1500")],
    ),
    "16 import policy on persistent 2": (
        None,
        lambda d: put(d.lustre, AutoImportPolicy="NEW_CHANGED"),
        [("AutoImportPolicy", "takes no AutoImportPolicy")],
    ),
    "17a repair action that does not exist": (
        None,
        lambda d: put(d.group["NodeRepairConfig"]["NodeRepairConfigOverrides"][0], RepairAction="Restart"),
        [("RepairAction", "Replace, Reboot, NoAction")],
    ),
    "17b capacity type that does not exist": (
        None,
        lambda d: put(d.group, CapacityType="ONDEMAND"),
        [("CapacityType", "ON_DEMAND, SPOT, CAPACITY_BLOCK")],
    ),
    # What launches, and then fails.
    "18 dropped egress to itself (awsome-distributed-ai 546)": (
        None,
        lambda d: d.remove("AWS::EC2::SecurityGroupEgress", efa_egress_to_itself),
        [("Groups", "0.0.0.0/0 does not cover it")],
    ),
    "19 no cluster group on the primary": (
        None,
        lambda d: d.nics[0]["Groups"].pop(0),
        [("NetworkInterfaces", "no node joins")],
    ),
    "20 placement group with a block (terraform-aws-eks 3730)": (
        BLOCK,
        lambda d: put(d.data, Placement={"GroupName": "mine"}),
        [("Placement", "UltraCluster")],
    ),
    "21 efa nodes in two zones (containers-roadmap 2204)": (
        None,
        lambda d: d.group["Subnets"].append("subnet-0123456789abcdef0"),
        [("Subnets", "exactly one subnet")],
    ),
    # Users' reports.
    "ingress from itself missing (gardener 1832)": (
        None,
        lambda d: d.remove("AWS::EC2::SecurityGroupIngress", efa_egress_to_itself),
        [("Groups", "all traffic in from itself")],
    ),
    "new placement group with an odcr (eksctl 7949)": (
        RESERVATION,
        lambda d: (
            d.templates["cluster"]["Resources"].update(Pg={"Type": "AWS::EC2::PlacementGroup", "Properties": {}}),
            put(d.data, Placement={"GroupName": {"Ref": "Pg"}}),
        ),
        [("Placement.GroupName", "created in")],
    ),
    "efa group not on the interfaces (eksctl 3465)": (
        None,
        lambda d: [nic["Groups"].pop(1) for nic in d.nics],
        [("Groups", "all traffic in from itself")],
    ),
    "empty reservation target (eksctl 8320)": (
        RESERVATION,
        lambda d: put(d.data, CapacityReservationSpecification={"CapacityReservationTarget": {}}),
        [("CapacityReservationTarget", "names one reservation")],
    ),
    "reservation id that is none (eksctl 8542)": (
        RESERVATION,
        lambda d: put(
            d.data["CapacityReservationSpecification"]["CapacityReservationTarget"], CapacityReservationId="cr-mine"
        ),
        [("CapacityReservationId", "hexadecimal")],
    ),
    "an old efa chart (eksctl 8089)": (
        None,
        lambda d: put(d.chart("aws-efa-k8s-device-plugin"), Version="v0.5.5"),
        [("Version", "mis-detect p6")],
    ),
    "a plugin that does not tolerate the taint (aws-efa-eks 3)": (
        None,
        lambda d: without_values(d.chart("nvidia-device-plugin"), "tolerations"),
        [("Values.tolerations", "nvidia.com/gpu")],
    ),
    "an efa plugin on nodes without efa (eks-charts 1239)": (
        None,
        lambda d: without_values(d.chart("aws-efa-k8s-device-plugin"), "nodeSelector"),
        [("Values.nodeSelector", "crashes")],
    ),
    "a second dcgm host engine (containers-roadmap 2555)": (
        None,
        lambda d: without_values(d.chart("dcgm-exporter"), "extraEnv"),
        [("Values.extraEnv", "beside the node monitoring agent's")],
    ),
    "an efa chart that mounts no /dev/infiniband (eks-charts 1069)": (
        None,
        lambda d: put(d.chart("aws-efa-k8s-device-plugin"), Version="v0.5.3"),
        [("Version", "older charts")],
    ),
    "al2 on p5 (awsome-distributed-ai 519)": (
        None,
        lambda d: put(d.group, AmiType="AL2_x86_64_GPU"),
        [("AmiType", "Amazon Linux 2023 with the NVIDIA driver")],
    ),
    "lustre 2.10 (fsx-csi-driver 437)": (
        None,
        lambda d: put(d.file_system, FileSystemTypeVersion="2.10"),
        [("FileSystemTypeVersion", "2.15")],
    ),
    "capacity and throughput off the matrix (terraform-aws 24341)": (
        None,
        lambda d: put(d.file_system, StorageCapacity=2500),
        [("StorageCapacity", "2400")],
    ),
    "no metadata configuration, which can't be added later (parallelcluster 7616)": (
        None,
        lambda d: d.lustre.pop("MetadataConfiguration"),
        [("MetadataConfiguration", "can't be added later")],
    ),
    "efa on persistent 1 (awsome-distributed-ai 1124)": (
        None,
        lambda d: put(d.lustre, DeploymentType="PERSISTENT_1"),
        [("DeploymentType", "PERSISTENT_2 only")],
    ),
    "an update that surges in a reservation (terraform-aws 41442)": (
        RESERVATION,
        lambda d: put(d.group["UpdateConfig"], UpdateStrategy="DEFAULT"),
        [("UpdateConfig.UpdateStrategy", "must end an old node")],
    ),
    "more pods than addresses (amazon-eks-ami 1392)": (
        None,
        lambda d: put(d.data, UserData={"Fn::Base64": "kubelet:\n  config:\n    maxPods: 100\n"}),
        [("UserData", "for 51 pods")],
    ),
    "a public address with many interfaces (terraform-aws-eks 3533)": (
        None,
        lambda d: put(d.nics[0], AssociatePublicIpAddress=True),
        [("AssociatePublicIpAddress", "gets no public address")],
    ),
    "the cluster's tag on the efa group (eksctl 8556)": (
        None,
        lambda d: put(
            d.find("AWS::EC2::SecurityGroup", "Efa"), Tags=[{"Key": "kubernetes.io/cluster/mine", "Value": "owned"}]
        ),
        [("Tags", "only the cluster's own group")],
    ),
    "a condition that the agent never sets (eksctl example 44)": (
        None,
        lambda d: put(
            d.group["NodeRepairConfig"]["NodeRepairConfigOverrides"][0],
            NodeMonitoringCondition="AcceleratedInstanceNotReady",
        ),
        [("NodeMonitoringCondition", "AcceleratedHardwareReady")],
    ),
    "an old cni with efa-only (eks guide, node-efa)": (
        None,
        lambda d: put(d.addon("vpc-cni"), AddonVersion="v1.18.0-eksbuild.1"),
        [("AddonVersion", "1.18.5")],
    ),
    "a fixed launch template version": (
        None,
        lambda d: put(d.group["LaunchTemplate"], Version="1"),
        [("LaunchTemplate.Version", "ignores every later change")],
    ),
    "both thresholds": (
        None,
        lambda d: put(
            d.group["NodeRepairConfig"], MaxUnhealthyNodeThresholdCount=2, MaxUnhealthyNodeThresholdPercentage=20
        ),
        [("NodeRepairConfig", "a count or a percentage")],
    ),
    # What no public report was found of, and AWS or Kubernetes would refuse all the same.
    "no instance type anywhere, which is t3.medium": (
        None,
        lambda d: d.data.pop("InstanceType"),
        [("InstanceTypes", "takes t3.medium")],
    ),
    "an image of one's own beside an ami type": (
        None,
        lambda d: put(d.data, ImageId="ami-0123456789abcdef0"),
        [("AmiType", "names no AMI type"), ("Version", "names no AMI type")],
    ),
    "a block without its reservation": (
        BLOCK,
        lambda d: d.data.pop("CapacityReservationSpecification"),
        [("CapacityReservationTarget.CapacityReservationId", "launched into by its reservation id")],
    ),
    "a block's instance type in the node group": (
        BLOCK,
        lambda d: put(d.group, InstanceTypes=[d.data.pop("InstanceType")]),
        [("LaunchTemplateData.InstanceType", "stands in the launch template")],
    ),
    "a preference beside a target": (
        RESERVATION,
        lambda d: put(d.data["CapacityReservationSpecification"], CapacityReservationPreference="open"),
        [("CapacityReservationSpecification", "a preference or a target")],
    ),
    "spot in a reservation": (
        RESERVATION,
        lambda d: put(d.group, CapacityType="SPOT"),
        [("CapacityType", "never run in a reservation")],
    ),
    "the old metadata service": (
        None,
        lambda d: put(d.data["MetadataOptions"], HttpTokens="optional"),
        [("MetadataOptions.HttpTokens", "IMDSv2")],
    ),
    "a metadata service that pods can't reach": (
        None,
        lambda d: put(d.data["MetadataOptions"], HttpPutResponseHopLimit=1),
        [("MetadataOptions.HttpPutResponseHopLimit", "one hop away")],
    ),
    "a group without a role": (None, lambda d: d.group.pop("NodeRole"), [("NodeRole", "has a role")]),
    "a role without the policies of a node": (
        None,
        lambda d: d.find("AWS::IAM::Role", "NodeRole").pop("ManagedPolicyArns"),
        [("ManagedPolicyArns", "joins with AmazonEKSWorkerNodePolicy")],
    ),
    "no primary interface": (
        None,
        lambda d: d.nics.pop(0),
        [("NetworkInterfaces", "exactly one interface is the primary"), ("NetworkInterfaces", "no node joins")],
    ),
    "a card that the type does not have": (
        None,
        lambda d: put(d.nics[5], NetworkCardIndex=32),
        [("NetworkInterfaces[5].NetworkCardIndex", "network cards 0 to 31")],
    ),
    "efa on the first card of p6-b300 (parallelcluster 7143)": (
        None,
        efa_on_every_card_of_b300,
        [("NetworkInterfaces", "is ENA only"), ("NetworkInterfaces", "has 16 EFA devices")],
    ),
    "an address on an efa-only interface": (
        None,
        lambda d: put(d.nics[5], SecondaryPrivateIpAddressCount=10),
        [("NetworkInterfaces[5].SecondaryPrivateIpAddressCount", "takes no IP address")],
    ),
    "gpu nodes in a public subnet": (
        None,
        lambda d: put(
            d.find("AWS::EC2::Route", "GpuSubnet"), GatewayId={"Ref": d.name_of("AWS::EC2::InternetGateway")}
        ),
        [("Subnets", "never join from a public subnet")],
    ),
    "gpu nodes in a subnet that maps public addresses": (
        None,
        lambda d: put(d.find("AWS::EC2::Subnet", "GpuSubnet"), MapPublicIpOnLaunch=True),
        [("Subnets", "never join from a public subnet")],
    ),
    "the aws-auth config map": (
        None,
        lambda d: put(d.find("AWS::EKS::Cluster")["AccessConfig"], AuthenticationMode="API_AND_CONFIG_MAP"),
        [("AccessConfig.AuthenticationMode", "access entries only")],
    ),
    "a control plane in one subnet": (
        None,
        lambda d: d.find("AWS::EKS::Cluster")["ResourcesVpcConfig"]["SubnetIds"].pop(),
        [("ResourcesVpcConfig.SubnetIds", "two availability zones")],
    ),
    "a control plane in one zone": (
        None,
        lambda d: put(d.find("AWS::EC2::Subnet", "VpcPrivateSubnet2"), AvailabilityZone="us-west-2a"),
        [("ResourcesVpcConfig.SubnetIds", "two availability zones")],
    ),
    "an override without a reason": (
        None,
        lambda d: d.group["NodeRepairConfig"]["NodeRepairConfigOverrides"][0].pop("NodeUnhealthyReason"),
        [("NodeRepairConfigOverrides[0]", "all four fields")],
    ),
    "an override that waits for no minute": (
        None,
        lambda d: put(d.group["NodeRepairConfig"]["NodeRepairConfigOverrides"][0], MinRepairWaitTimeMins=0),
        [("MinRepairWaitTimeMins", "at least one minute")],
    ),
    "a type that the efa plugin does not list (data-addons 53)": (
        None,
        lambda d: put_values(
            d.chart("aws-efa-k8s-device-plugin"), supportedInstanceLabels={"values": ["p4d.24xlarge"]}
        ),
        [("Values.supportedInstanceLabels", "elsewhere no EFA is allocatable")],
    ),
    "values that are no json": (
        None,
        lambda d: put(d.chart("nvidia-device-plugin"), Values="tolerations: []"),
        [("Values", "a JSON object")],
    ),
    "values of another shape": (
        None,
        lambda d: put_values(d.chart("nvidia-device-plugin"), tolerations={"key": "nvidia.com/gpu"}),
        [("Values.tolerations", "Helm wants a list")],
    ),
    "a pod identity role without session tags": (
        None,
        lambda d: trust_of(d, "AddonsFsx").update(Action="sts:AssumeRole"),
        [("AssumeRolePolicyDocument", "with session tags")],
    ),
    "full access": (
        None,
        lambda d: put(
            d.find("AWS::IAM::Role", "AddonsFsx"), ManagedPolicyArns=["arn:aws:iam::aws:policy/AmazonFSxFullAccess"]
        ),
        [("ManagedPolicyArns", "every right on a service")],
    ),
    "iops that nobody provisioned": (
        None,
        lambda d: put(d.lustre, MetadataConfiguration={"Mode": "AUTOMATIC", "Iops": 1500}),
        [("MetadataConfiguration.Mode", "USER_PROVISIONED has Iops")],
    ),
    "backups of a linked file system": (
        None,
        lambda d: put(d.lustre, AutomaticBackupRetentionDays=7),
        [("AutomaticBackupRetentionDays", "has no backups")],
    ),
    "a file system in another zone than the nodes": (
        None,
        lambda d: (
            put(d.find("AWS::EC2::Subnet", "GpuSubnet"), AvailabilityZone="us-west-2c")
            or put(d.file_system, SubnetIds=[d.import_of("VpcPrivateSubnet1Subnet")])
        ),
        [("SubnetIds", "in the zone of the nodes")],
    ),
    "a file system in two subnets": (
        None,
        lambda d: d.file_system["SubnetIds"].append("subnet-0123456789abcdef0"),
        [("SubnetIds", "has one subnet")],
    ),
    "lustre's ports closed": (
        None,
        lambda d: d.remove("AWS::EC2::SecurityGroupIngress", lustre_from_itself),
        [("network/FsxSecurityGroup94E8AC1C", "TCP 988 and 1018-1023")],
    ),
    "rules that come after the file system (bottlerocket 3459)": (
        None,
        lambda d: d.templates["storage"]["Resources"].update(
            Late={
                "Type": "AWS::EC2::SecurityGroupIngress",
                "Properties": {"GroupId": d.file_system["SecurityGroupIds"][0], "IpProtocol": "tcp"},
            }
        ),
        [("FileSystem.DependsOn", "do not reach its data servers")],
    ),
    "a mapping where a list belongs": (
        None,
        lambda d: put(d.group, UpdateConfig=["MINIMAL"]),
        [("UpdateConfig", "CloudFormation wants a mapping")],
    ),
}

"""The shape of every property that a rule reads, so that the rules can trust what they get.

Other people's templates hold a reference where ours hold a mapping, `"50"` where ours hold 50, and mistakes.
"""

import json
from typing import Any

from config.finding import Finding

_TYPES = "https://docs.aws.amazon.com/AWSCloudFormation/latest/UserGuide/aws-template-resource-type-ref.html"

# What stands for a value that nobody knows before the deploy, be it there or not.
LATE = "${known only at deploy}"

# str, int, bool: a scalar; {...}: a mapping, of which only these members are looked at; [x]: a list; (x,): one or
# several, where CloudFormation and IAM take both.
Shape = type | dict[str, "Shape"] | list["Shape"] | tuple["Shape"]

_RULE_OF_SECURITY_GROUP: Shape = {
    "GroupId": str,
    "SourceSecurityGroupId": str,
    "DestinationSecurityGroupId": str,
    "IpProtocol": str,
    "FromPort": int,
    "ToPort": int,
}
SHAPES: dict[str, dict[str, Shape]] = {
    "AWS::EKS::Nodegroup": {
        "AmiType": str,
        "CapacityType": str,
        "InstanceTypes": (str,),
        "LaunchTemplate": {"Id": str, "Name": str, "Version": str},
        "NodeRole": str,
        "NodeRepairConfig": {
            "NodeRepairConfigOverrides": [
                {
                    "NodeMonitoringCondition": str,
                    "NodeUnhealthyReason": str,
                    "MinRepairWaitTimeMins": int,
                    "RepairAction": str,
                }
            ],
        },
        "Subnets": (str,),
        "UpdateConfig": {"UpdateStrategy": str},
    },
    "AWS::EC2::LaunchTemplate": {
        "LaunchTemplateData": {
            "CapacityReservationSpecification": {
                "CapacityReservationPreference": str,
                "CapacityReservationTarget": {
                    "CapacityReservationId": str,
                    "CapacityReservationResourceGroupArn": str,
                },
            },
            "InstanceMarketOptions": {"MarketType": str},
            "InstanceType": str,
            "MetadataOptions": {"HttpTokens": str, "HttpPutResponseHopLimit": int},
            "NetworkInterfaces": [
                {
                    "AssociatePublicIpAddress": bool,
                    "DeviceIndex": int,
                    "Groups": (str,),
                    "InterfaceType": str,
                    "NetworkCardIndex": int,
                }
            ],
            "Placement": {"GroupName": str, "GroupId": str},
            "SecurityGroupIds": (str,),
            "SecurityGroups": (str,),
            "UserData": str,
        }
    },
    "AWS::EKS::Cluster": {
        "AccessConfig": {"AuthenticationMode": str},
        "ResourcesVpcConfig": {"SubnetIds": (str,)},
    },
    "AWS::EKS::Addon": {"AddonName": str, "AddonVersion": str},
    "Custom::AWSCDK-EKS-HelmChart": {"Chart": str, "Release": str, "Version": str, "Values": str},
    "AWS::IAM::Role": {
        "AssumeRolePolicyDocument": {"Statement": ({"Action": (str,)},)},
        "ManagedPolicyArns": (str,),
    },
    "AWS::EC2::SecurityGroup": {
        "SecurityGroupIngress": [_RULE_OF_SECURITY_GROUP],
        "SecurityGroupEgress": [_RULE_OF_SECURITY_GROUP],
        "Tags": [{"Key": str}],
    },
    "AWS::EC2::SecurityGroupIngress": _RULE_OF_SECURITY_GROUP,
    "AWS::EC2::SecurityGroupEgress": _RULE_OF_SECURITY_GROUP,
    "AWS::EC2::Subnet": {"AvailabilityZone": str, "MapPublicIpOnLaunch": bool},
    "AWS::EC2::SubnetRouteTableAssociation": {"RouteTableId": str, "SubnetId": str},
    "AWS::EC2::Route": {"GatewayId": str, "RouteTableId": str},
    "AWS::FSx::FileSystem": {
        "FileSystemType": str,
        "FileSystemTypeVersion": str,
        "LustreConfiguration": {
            "AutomaticBackupRetentionDays": int,
            "DeploymentType": str,
            "EfaEnabled": bool,
            "MetadataConfiguration": {"Iops": int, "Mode": str},
            "PerUnitStorageThroughput": int,
        },
        "SecurityGroupIds": (str,),
        "StorageCapacity": int,
        "SubnetIds": (str,),
    },
    "AWS::FSx::DataRepositoryAssociation": {"FileSystemId": str},
}
# What a chart's values look like to the rules, once their text has been parsed.
CHART_VALUES: Shape = {
    "extraEnv": [{"name": str}],
    "nodeSelector": {},
    "supportedInstanceLabels": {"values": [str]},
    "tolerations": [{"key": str}],
}

_WORDS = {str: "text", int: "a whole number", bool: "true or false", dict: "a mapping", list: "a list"}


class Shaper:
    """Brings resolved values into shape, and keeps a finding for each whose shape is wrong."""

    def __init__(self, reader: str = "CloudFormation", source: str = _TYPES) -> None:
        self.findings: list[Finding] = []
        self._reader = reader
        self._source = source

    def shaped(self, value: Any, shape: Shape, path: str) -> Any:
        """`value` in `shape`; LATE at every place where it is known only at deploy, or wrong."""
        if isinstance(shape, dict):
            return self._mapping(value, shape, path)
        if isinstance(shape, list | tuple):
            return self._list(value, shape[0], path, one_will_do=isinstance(shape, tuple))
        return self._scalar(value, shape, path)

    def _mapping(self, value: Any, shape: dict[str, Shape], path: str) -> dict[str, Any]:
        if not isinstance(value, dict) or is_intrinsic(value):
            self._refuse_unless_late(value, dict, path)
            return {key: self.shaped(LATE, inner, path) for key, inner in shape.items()}
        known = {key: self.shaped(value[key], shape[key], f"{path}.{key}") for key in shape.keys() & value.keys()}
        return value | known

    def _list(self, value: Any, inner: Shape, path: str, *, one_will_do: bool) -> list[Any]:
        if isinstance(value, list):
            return [self.shaped(item, inner, f"{path}[{number}]") for number, item in enumerate(value)]
        if not one_will_do:
            self._refuse_unless_late(value, list, path)
            value = LATE
        return [self.shaped(value, inner, path)]

    def _scalar(self, value: Any, shape: type, path: str) -> Any:
        if isinstance(value, str) and (shape is str or is_late(value)):
            return value
        # CloudFormation turns one scalar into another where it can.
        text = str(value).lower() if isinstance(value, bool | int | float | str) else ""
        if shape is str and text:
            return text
        if shape is int and _is_whole(text):
            return int(text.removesuffix(".0"))
        if shape is bool and text in ("true", "false"):
            return text == "true"
        self._refuse_unless_late(value, shape, path)
        return LATE

    def _refuse_unless_late(self, value: Any, wanted: type, path: str) -> None:
        if is_late(value):
            return
        shown = "null" if value is None else _short(json.dumps(value))
        self.findings.append(
            Finding(
                path,
                shown,
                f"here {self._reader} wants {_WORDS[wanted]}",
                f"write {_WORDS[wanted]}, or leave it out",
                self._source,
            )
        )


def is_intrinsic(value: Any) -> bool:
    """Whether the mapping is a function that CloudFormation evaluates."""
    if not isinstance(value, dict) or len(value) != 1:
        return False
    (name,) = value
    return name in ("Ref", "Condition") or name.startswith("Fn::")


def is_late(value: Any) -> bool:
    """Whether all or a part of the value is known only at deploy: a reference, or a function of one."""
    return is_intrinsic(value) or (isinstance(value, str) and "${" in value)


def _is_whole(text: str) -> bool:
    digits = text.removeprefix("-").removesuffix(".0")
    return digits.isascii() and digits.isdecimal()


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."

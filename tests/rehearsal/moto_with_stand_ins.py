"""A moto server, with what moto 5.2.5 lacks of CloudFormation put beside what it has. Run as a script, with a port.

The templates reach it unaltered, as app.py makes them. A resource type that moto does not know and that nothing refers
to is skipped by moto itself, with a warning on stderr.
"""

import sys
from typing import Any

from moto.cloudformation import parsing
from moto.cloudformation.exceptions import ValidationError
from moto.cloudformation.models import CloudFormationBackend, Stack
from moto.cloudformation.responses import CloudFormationResponse
from moto.core.responses import ActionResult
from moto.ec2.models import ec2_backends
from moto.ec2.models.nat_gateways import NatGateway
from moto.ec2.models.route_tables import Route, RouteTable
from moto.ec2.models.vpcs import VPCEndPoint
from moto.server import main

# Types that moto's CloudFormation does not know and that other resources refer to. Their stand-ins keep nothing and
# check nothing: a Ref is the generated name, an attribute is named after what was asked for.
STAND_INS = (
    "AWS::CodeBuild::Project",
    "AWS::EC2::PlacementGroup",
    "AWS::EKS::Cluster",
    "AWS::EKS::Nodegroup",
    "AWS::FSx::FileSystem",
)
ATTRIBUTES = {
    "AWS::EKS::Cluster": {"ClusterSecurityGroupId": "sg-0c1a57e4000000000", "CertificateAuthorityData": "none"},
    "AWS::FSx::FileSystem": {"LustreMountName": "standin", "DNSName": "fs-0.fsx.us-west-2.amazonaws.com"},
}


class StandIn:
    """A resource that exists in name only."""

    type_ = ""

    def __init__(self, name: str) -> None:
        self.physical_resource_id = name

    @classmethod
    def has_cfn_attr(cls, _attr: str) -> bool:
        return True

    def get_cfn_attribute(self, attribute: str) -> str:
        arn = f"arn:aws:standin:us-west-2:123456789012:{self.physical_resource_id}/{attribute}"
        return ATTRIBUTES.get(self.type_, {}).get(attribute, arn)

    @classmethod
    def create_from_cloudformation_json(cls, resource_name: str, *_: Any, **__: Any) -> "StandIn":
        return cls(resource_name)

    @classmethod
    def update_from_cloudformation_json(cls, original_resource: "StandIn", **_: Any) -> "StandIn":
        return original_resource

    def delete(self, *_: Any) -> None:
        pass

    def is_created(self) -> bool:
        return True


class SecurityGroupEgress(StandIn):
    """AWS::EC2::SecurityGroupEgress, which really adds the rule to moto's EC2 (moto has only the ingress one)."""

    type_ = "AWS::EC2::SecurityGroupEgress"

    @classmethod
    def create_from_cloudformation_json(
        cls, resource_name: str, cloudformation_json: dict, account_id: str, region_name: str, **_: Any
    ) -> "SecurityGroupEgress":
        rule = cloudformation_json["Properties"]
        ec2_backends[account_id][region_name].authorize_security_group_egress(
            rule["GroupId"],
            ip_protocol=rule["IpProtocol"],
            from_port=rule.get("FromPort"),
            to_port=rule.get("ToPort"),
            ip_ranges=[],
            source_groups=[{"GroupId": rule["DestinationSecurityGroupId"]}],
        )
        return cls(resource_name)


def _protect(response: CloudFormationResponse) -> ActionResult:
    """UpdateTerminationProtection, which moto does not implement."""
    stack = response.cloudformation_backend.get_stack(response._get_param("StackName"))
    stack.enable_termination_protection = response._get_param("EnableTerminationProtection") in (True, "true")
    return ActionResult({"StackId": stack.stack_id})


def _keep_defaults(resolve):
    """Parameters of an update; one that was never given keeps its default, which moto takes for missing."""

    def resolved(backend: CloudFormationBackend, instance: Stack, incoming_params: list[dict]) -> dict:
        kept = [p for p in incoming_params if "ParameterValue" in p or p["ParameterKey"] in instance.parameters]
        return resolve(backend, instance=instance, incoming_params=kept)

    return resolved


def _refuse_protected(delete_stack):
    """DeleteStack, refusing a protected stack in CloudFormation's words; moto's deletes it."""

    def checked(backend: CloudFormationBackend, name_or_stack_id: str) -> None:
        for stack in backend.stacks.values():
            if name_or_stack_id in (stack.name, stack.stack_id) and stack.enable_termination_protection:
                raise ValidationError(
                    message=f"Stack [{stack.name}] cannot be deleted while TerminationProtection is enabled"
                )
        delete_stack(backend, name_or_stack_id)
        for stack in backend.deleted_stacks.values():
            stack.output_map._output_json_map = {}  # moto would make resources again to describe what refers to them

    return checked


def _as_moto_reads_it(parse):
    """Keys and parameters in the form of those services' own calls: moto translates neither tags nor a missing name."""

    def parsed(resource_json: dict, resources_map: Any) -> tuple | None:
        found = parse(resource_json, resources_map)
        if found is None:
            return None
        _, resource, type_ = found
        if type_ == "AWS::KMS::Key":
            tags = resource["Properties"].get("Tags", [])
            resource["Properties"]["Tags"] = [{"TagKey": tag["Key"], "TagValue": tag["Value"]} for tag in tags]
        if type_ == "AWS::SSM::Parameter":
            tags = resource["Properties"].get("Tags", {})
            resource["Properties"]["Tags"] = [{"Key": key, "Value": value} for key, value in tags.items()]
            resource["Properties"].setdefault("Name", f"CFN-{parsing.random_suffix()}")
        return found

    return parsed


def _keep_what_cannot_be_updated(update):
    """Updates of resources; those that moto can't update, or loses, stay as they are (keys, buckets, functions)."""

    def updated(logical_id: str, resource_json: dict, resources_map: Any, **where: str) -> Any:
        # moto's update wants a name that the template gives, and layers that it still has.
        if resource_json["Type"] in ("AWS::S3::Bucket", "AWS::Lambda::Function"):
            return resources_map[logical_id]
        return update(logical_id, resource_json, resources_map, **where) or resources_map[logical_id]

    return updated


def _lower_case_repositories(generate):
    """Generated names of ECR repositories in lower case, as CloudFormation makes them and as ECR demands."""

    def named(resource_type: str, *arguments: str) -> str:
        name = generate(resource_type, *arguments)
        return name.lower() if resource_type == "AWS::ECR::Repository" else name

    return named


def _delete_with_their_stack() -> None:
    """Route tables, NAT gateways and endpoints go with their stack; moto leaves them, and then keeps the VPC."""

    def through(delete):
        return lambda resource, account, region: delete(ec2_backends[account][region], resource.id)

    Route.delete = lambda *_: None  # a route goes with its table
    RouteTable.delete = through(lambda backend, id_: backend.delete_route_table(id_))
    NatGateway.delete = through(lambda backend, id_: backend.delete_nat_gateway(id_))
    # Not through delete_vpc_endpoints, which looks for routes in tables that may be gone already.
    VPCEndPoint.delete = through(lambda backend, id_: backend.vpc_end_points.pop(id_))


def extend_moto() -> None:
    """Everything above, in place."""
    known = dict(parsing.get_model_map())
    known |= {type_: type(type_.replace("::", ""), (StandIn,), {"type_": type_}) for type_ in STAND_INS}
    known["AWS::EC2::SecurityGroupEgress"] = SecurityGroupEgress
    parsing.get_model_map = lambda: known
    # Custom resources run a Lambda function in Docker, which is not there, and would reach for a real cluster.
    parsing.CustomModel = StandIn
    parsing.parse_resource = _as_moto_reads_it(parsing.parse_resource)
    parsing.parse_and_update_resource = _keep_what_cannot_be_updated(parsing.parse_and_update_resource)
    parsing.generate_resource_name = _lower_case_repositories(parsing.generate_resource_name)
    CloudFormationResponse.update_termination_protection = _protect
    _delete_with_their_stack()
    CloudFormationBackend._resolve_update_parameters = _keep_defaults(CloudFormationBackend._resolve_update_parameters)
    CloudFormationBackend.delete_stack = _refuse_protected(CloudFormationBackend.delete_stack)


if __name__ == "__main__":
    extend_moto()
    sys.exit(main(["-H", "localhost", "-p", sys.argv[1]]))

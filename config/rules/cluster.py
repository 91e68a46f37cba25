"""The control plane, node repair, add-ons, charts and roles."""

import json
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from config import names
from config.finding import Finding
from config.rules.node_group import NodeGroup, node_groups
from config.rules.shapes import CHART_VALUES, LATE, Shaper, is_late
from config.rules.template import Resource, Templates, is_literal

_ACCESS = "https://docs.aws.amazon.com/eks/latest/userguide/access-entries.html"
_NETWORK = "https://docs.aws.amazon.com/eks/latest/userguide/network-reqs.html"
_POD_IDENTITY = "https://docs.aws.amazon.com/eks/latest/userguide/pod-id-role.html"
_NODE_ROLE = "https://docs.aws.amazon.com/eks/latest/userguide/create-node-role.html"
_REPAIR = "https://docs.aws.amazon.com/eks/latest/userguide/node-repair.html"
_REPAIR_EXAMPLE = "https://github.com/eksctl-io/eksctl/blob/main/examples/44-node-repair.yaml"
_EFA_NODES = "https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html"
_EFA_PLUGIN = "https://github.com/eksctl-io/eksctl/issues/8089"
_PLUGIN_TAINT = "https://github.com/aws-samples/aws-efa-eks/pull/3"
_TWO_ENGINES = "https://github.com/aws/containers-roadmap/issues/2555"
_PLUGIN_CRASH = "https://github.com/aws/eks-charts/issues/1239"
_HELM_VALUES = "https://helm.sh/docs/chart_template_guide/values_files/"

_PODS = "pods.eks.amazonaws.com"

# Conditions that the node monitoring agent sets (its v1.7; pkg/conditions), and what EKS does about them.
_CONDITIONS = (
    "AcceleratedHardwareReady",
    "ContainerRuntimeReady",
    "KernelReady",
    "NetworkingReady",
    "StorageReady",
)
_ACTIONS = ("Replace", "Reboot", "NoAction")
_OVERRIDE_FIELDS = ("NodeMonitoringCondition", "NodeUnhealthyReason", "MinRepairWaitTimeMins", "RepairAction")
_THRESHOLDS = (
    ("MaxUnhealthyNodeThresholdCount", "MaxUnhealthyNodeThresholdPercentage"),
    ("MaxParallelNodesRepairedCount", "MaxParallelNodesRepairedPercentage"),
)

_EFA_CHART = "aws-efa-k8s-device-plugin"
_EFA_CHART_MINIMUM = (0, 5, 30)
_CNI_MINIMUM = (1, 18, 5)
# Charts whose DaemonSets must reach tainted GPU nodes.
_EXPORTER_CHART = "dcgm-exporter"
_GPU_CHARTS = (_EFA_CHART, "nvidia-device-plugin", _EXPORTER_CHART)
_HOST_ENGINE_VARIABLE = "DCGM_REMOTE_HOSTENGINE_INFO"


def access_entries_only(templates: Templates) -> Iterator[Finding]:
    """No aws-auth ConfigMap, which locks everybody out when it is malformed."""
    for cluster in templates.of_type("AWS::EKS::Cluster"):
        mode = cluster.properties.get("AccessConfig", {}).get("AuthenticationMode")
        if mode != "API" and is_literal(mode):
            yield Finding(
                cluster.at("AccessConfig.AuthenticationMode"), str(mode), "access entries only", "set API", _ACCESS
            )
        subnets = cluster.properties.get("ResourcesVpcConfig", {}).get("SubnetIds", [])
        zones = {templates.zone(subnet) for subnet in subnets}
        alone = len(subnets) < 2 and not any(templates.is_unknown(subnet) for subnet in subnets)
        if alone or (len(zones) < 2 and None not in zones):
            yield Finding(
                cluster.at("ResourcesVpcConfig.SubnetIds"),
                f"{len(subnets)} subnets in {len(zones)} zone",
                "the control plane needs subnets in two availability zones",
                "add a subnet in a second zone",
                _NETWORK,
            )


def repair_thresholds(group: NodeGroup) -> Iterator[Finding]:
    """A count or a percentage."""
    repair = group.group.properties.get("NodeRepairConfig", {})
    for pair in _THRESHOLDS:
        if all(field in repair for field in pair):
            yield Finding(
                group.in_group("NodeRepairConfig"),
                " and ".join(pair),
                "a threshold is a count or a percentage",
                f"remove {pair[1]}",
                _REPAIR,
            )


def repair_overrides(group: NodeGroup) -> Iterator[Finding]:
    """All four fields, from the agent's own words; a wrong word repairs nothing."""
    overrides = group.group.properties.get("NodeRepairConfig", {}).get("NodeRepairConfigOverrides", [])
    for number, override in enumerate(overrides):
        path = group.in_group(f"NodeRepairConfig.NodeRepairConfigOverrides[{number}]")
        missing = [field for field in _OVERRIDE_FIELDS if field not in override]
        if missing:
            yield Finding(
                path,
                f"no {', '.join(missing)}",
                "an override has all four fields",
                f"set {', '.join(missing)}",
                _REPAIR,
            )
        action, condition = override.get("RepairAction"), override.get("NodeMonitoringCondition")
        if action is not None and action not in _ACTIONS and is_literal(action):
            yield Finding(
                f"{path}.RepairAction",
                str(action),
                f"EKS knows {', '.join(_ACTIONS)}",
                "choose one of them, in this spelling",
                _REPAIR_EXAMPLE,
            )
        if condition is not None and condition not in _CONDITIONS and is_literal(condition):
            yield Finding(
                f"{path}.NodeMonitoringCondition",
                str(condition),
                f"the monitoring agent sets {', '.join(_CONDITIONS)}",
                "choose one of them",
                _REPAIR_EXAMPLE,
            )
        minutes = override.get("MinRepairWaitTimeMins")
        if isinstance(minutes, int) and minutes < 1:
            yield Finding(
                f"{path}.MinRepairWaitTimeMins", str(minutes), "at least one minute", "set 1 or more", _REPAIR
            )


def cni_knows_efa_only(templates: Templates) -> Iterator[Finding]:
    """An older CNI takes an efa-only interface for one with addresses."""
    efa_only = any(
        interface.get("InterfaceType") == "efa-only"
        for group in node_groups(templates)
        for interface in group.interfaces
    )
    for addon in templates.of_type("AWS::EKS::Addon"):
        if addon.properties.get("AddonName") != "vpc-cni" or not efa_only:
            continue
        given = addon.properties.get("AddonVersion", LATE)  # left out, it is EKS's default
        if is_literal(given) and _version(given) < _CNI_MINIMUM:
            yield Finding(
                addon.at("AddonVersion"),
                given,
                "efa-only interfaces need VPC CNI 1.18.5",
                "pin v1.18.5 or newer",
                _EFA_NODES,
            )


def _version(text: str) -> tuple[int, ...]:
    found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


def charts_reach_gpu_nodes(templates: Templates) -> Iterator[Finding]:
    """Their DaemonSets tolerate the taint, and the EFA plugin stays away from nodes without EFA interfaces."""
    for chart, name, values in _charts(templates, *_GPU_CHARTS):
        # A toleration without a key is one of everything.
        keys = [item.get("key", names.GPU_TAINT_KEY) for item in values["tolerations"]]
        if names.GPU_TAINT_KEY not in keys and not any(map(is_late, keys)):
            yield Finding(
                chart.at("Values.tolerations"),
                str(values["tolerations"] or "none"),
                f"{name} runs on GPU nodes, whose taint is {names.GPU_TAINT_KEY}",
                f"tolerate {{key: {names.GPU_TAINT_KEY}, operator: Exists}}",
                _PLUGIN_TAINT,
            )


def efa_plugin(templates: Templates) -> Iterator[Finding]:
    """Old charts do not know p6; on a node without EFA interfaces the plugin crashes again and again."""
    used = {group.instance_type for group in node_groups(templates) if group.has_efa and group.instance is not None}
    for chart, _, values in _charts(templates, _EFA_CHART):
        given = chart.properties.get("Version", "none")
        if is_literal(given) and _version(given) < _EFA_CHART_MINIMUM:
            yield Finding(
                chart.at("Version"),
                given,
                "older charts mis-detect p6 and lack types",
                "pin v0.5.30 or newer",
                _EFA_PLUGIN,
            )
        listed = values.get("supportedInstanceLabels", {}).get("values", [LATE])  # left out, it is the chart's own
        for instance_type in sorted(kind for kind in used if kind and LATE not in listed and kind not in listed):
            yield Finding(
                chart.at("Values.supportedInstanceLabels"),
                "missing " + instance_type,
                "the plugin runs on the listed instance types only; elsewhere no EFA is allocatable",
                f"add {instance_type}",
                _EFA_PLUGIN,
            )
        if names.EFA_PRESENT_LABEL not in values["nodeSelector"]:
            yield Finding(
                chart.at("Values.nodeSelector"),
                str(values["nodeSelector"] or "none"),
                "on a node without EFA interfaces the plugin crashes: No valid EFA devices found",
                f"select {names.EFA_PRESENT_LABEL}",
                _PLUGIN_CRASH,
            )


def one_dcgm_host_engine(templates: Templates) -> Iterator[Finding]:
    """The node monitoring agent runs one on every GPU node; with a second one healthy nodes were replaced."""
    agents = [addon.properties.get("AddonName") for addon in templates.of_type("AWS::EKS::Addon")]
    if "eks-node-monitoring-agent" not in agents:
        return
    for chart, _, values in _charts(templates, _EXPORTER_CHART):
        variables = [variable["name"] for variable in values["extraEnv"]]
        if _HOST_ENGINE_VARIABLE not in variables and not any(map(is_late, variables)):
            yield Finding(
                chart.at("Values.extraEnv"),
                f"no {_HOST_ENGINE_VARIABLE}",
                "without it the exporter starts a DCGM host engine beside the node monitoring agent's",
                f"set {_HOST_ENGINE_VARIABLE} to $(HOST_IP):5555, the agent's",
                _TWO_ENGINES,
            )


def chart_values(templates: Templates) -> Iterator[Finding]:
    """A JSON object, in which what the rules read is what Helm can read."""
    for chart, _ in _releases(templates, *_GPU_CHARTS):
        shaper = Shaper("Helm", _HELM_VALUES)
        text = chart.properties.get("Values", "{}")
        values = _parsed(text)
        if is_literal(text) and values is None:
            yield Finding(chart.at("Values"), text[:80], "values are a JSON object", "write one", _HELM_VALUES)
        elif values is not None:
            shaper.shaped(values, CHART_VALUES, chart.at("Values"))
            yield from shaper.findings


def _charts(templates: Templates, *wanted: str) -> Iterator[tuple[Resource, str, dict[str, Any]]]:
    """(release, chart's name, its values) of these charts, without those whose values are known only at deploy."""
    for chart, name in _releases(templates, *wanted):
        values = _parsed(chart.properties.get("Values", "{}"))
        if values is not None:
            given = {"tolerations": [], "nodeSelector": {}, "extraEnv": []} | values
            yield chart, name, Shaper().shaped(given, CHART_VALUES, name)


def _releases(templates: Templates, *wanted: str) -> Iterator[tuple[Resource, str]]:
    """(release, chart's name) of these charts; from a mirror the name ends a path."""
    for chart in templates.of_type("Custom::AWSCDK-EKS-HelmChart"):
        name = str(chart.properties.get("Chart") or chart.properties.get("Release")).rpartition("/")[2]
        if name in wanted:
            yield chart, name


def _parsed(text: str) -> dict[str, Any] | None:
    """A chart's values, without the keys that null takes away from its defaults; None for what is no JSON object."""
    try:
        values = json.loads(text)
    except ValueError:
        return None
    return _without_nulls(values) if isinstance(values, dict) else None


def _without_nulls(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {key: _without_nulls(value) for key, value in values.items() if value is not None}


def pod_identity_trust(templates: Templates) -> Iterator[Finding]:
    """Without sts:TagSession the agent gets AccessDenied, and the add-on's pods crash."""
    for role in templates.of_type("AWS::IAM::Role"):
        for statement in role.properties.get("AssumeRolePolicyDocument", {}).get("Statement", []):
            principal = statement.get("Principal")
            service = principal.get("Service") if isinstance(principal, dict) else None
            if _PODS not in (service if isinstance(service, list) else [service]):
                continue
            given = statement.get("Action", [])
            needed = ("sts:AssumeRole", "sts:TagSession")
            if not all(is_late(action) for action in given) and not all(_allows(given, action) for action in needed):
                yield Finding(
                    role.at("AssumeRolePolicyDocument"),
                    ", ".join(sorted(given)) or "no action",
                    "EKS Pod Identity assumes a role with session tags",
                    "allow sts:AssumeRole and sts:TagSession",
                    _POD_IDENTITY,
                )


def _allows(actions: list[str], wanted: str) -> bool:
    """Whether one of them is it; IAM knows no upper case, and wildcards."""
    return any(is_late(action) or fnmatchcase(wanted.lower(), action.lower()) for action in actions)


def no_full_access(templates: Templates) -> Iterator[Finding]:
    """Least privilege."""
    for role in templates.of_type("AWS::IAM::Role"):
        for policy in role.properties.get("ManagedPolicyArns", []):
            found = re.search(r"(\w*FullAccess|AdministratorAccess|PowerUserAccess)\b", policy)
            if found:
                yield Finding(
                    role.at("ManagedPolicyArns"),
                    found[0],
                    "no role of a cluster needs every right on a service",
                    "write a policy with the actions in use",
                    _POD_IDENTITY,
                )


def node_role_policies(group: NodeGroup) -> Iterator[Finding]:
    """Without them a node does not join, or pulls no image."""
    role = group.templates.target(group.group.properties.get("NodeRole"), "AWS::IAM::Role")
    if role is None:
        return
    # arn:${AWS::Partition}:iam::aws:policy/NAME says which policy it is, ${Parameter} or ${Stack}-nodes does not.
    attached = [re.sub(r"\$\{[^}]*\}", "?", arn) for arn in role.properties.get("ManagedPolicyArns", [])]
    if any("?" in arn.rpartition("/")[2] for arn in attached):
        return
    for wanted in ("AmazonEKSWorkerNodePolicy", "AmazonEC2ContainerRegistry"):
        if not any(wanted in arn for arn in attached):
            yield Finding(
                role.at("ManagedPolicyArns"),
                f"no {wanted}",
                "a node joins with AmazonEKSWorkerNodePolicy and pulls with AmazonEC2ContainerRegistryPullOnly",
                f"attach {wanted}" + ("PullOnly" if wanted.endswith("Registry") else ""),
                _NODE_ROLE,
            )


GROUP_RULES: tuple[Callable[[NodeGroup], Iterator[Finding]], ...] = (
    repair_thresholds,
    repair_overrides,
    node_role_policies,
)
RULES: tuple[Callable[[Templates], Iterator[Finding]], ...] = (
    access_entries_only,
    cni_knows_efa_only,
    chart_values,
    charts_reach_gpu_nodes,
    efa_plugin,
    one_dcgm_host_engine,
    pod_identity_trust,
    no_full_access,
)

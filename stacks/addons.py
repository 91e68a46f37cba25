"""The EKS add-ons of a cluster, pinned in one table, with the least that each may do."""

import json
from dataclasses import dataclass, field
from typing import Any

from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_iam as iam
from constructs import Construct

from config import names
from config.cluster import ClusterConfig

# Every DaemonSet of ours tolerates the GPU nodes' taint; otherwise its plugin never lands there and every pod that
# asks for its devices stays Pending (aws-efa-eks #3, containers-roadmap #2567).
GPU_TOLERATION = {"key": names.GPU_TAINT_KEY, "operator": "Exists", "effect": "NoSchedule"}


@dataclass(frozen=True)
class ManagedAddon:
    """An EKS add-on. `actions`: what its service account may do through EKS Pod Identity."""

    id_: str
    name: str
    version: str
    before_nodes: bool
    service_account: str | None = None
    managed_policy: str | None = None
    actions: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)


# Versions that clusters of Kubernetes 1.36 resolved to in autumn 2026. `aws eks describe-addon-versions
# --kubernetes-version 1.36 --addon-name NAME` lists what a region offers; a fresh Kubernetes version may lack an
# add-on for weeks (containers-roadmap #2625).
MANAGED_ADDONS: tuple[ManagedAddon, ...] = (
    # >= 1.18.5 understands EFA-only interfaces (EKS user guide, node-efa).
    ManagedAddon(
        "VpcCni",
        "vpc-cni",
        "v1.22.4-eksbuild.3",
        before_nodes=True,
        service_account="aws-node",
        managed_policy="AmazonEKS_CNI_Policy",
    ),
    ManagedAddon("KubeProxy", "kube-proxy", "v1.36.0-eksbuild.25", before_nodes=True),
    ManagedAddon("PodIdentityAgent", "eks-pod-identity-agent", "v1.3.10-eksbuild.3", before_nodes=True),
    # Deployments: an add-on whose pods have no node stays "creating" until CloudFormation gives up.
    ManagedAddon("CoreDns", "coredns", "v1.14.3-eksbuild.23", before_nodes=False),
    # The volume exists already, so the controller only ever describes it: no AmazonFSxFullAccess.
    ManagedAddon(
        "FsxCsiDriver",
        "aws-fsx-csi-driver",
        "v1.9.0-eksbuild.1",
        before_nodes=False,
        service_account="fsx-csi-controller-sa",
        actions=("fsx:DescribeFileSystems",),
    ),
    # Sees Xid errors and the like and sets the node conditions that node repair acts on.
    ManagedAddon(
        "NodeMonitoringAgent",
        "eks-node-monitoring-agent",
        "v1.7.2-eksbuild.1",
        before_nodes=False,
        values={"dcgmAgent": {"tolerations": [GPU_TOLERATION]}},
    ),
)

# Container Insights with GPU metrics. `agent.config` replaces the add-on's own whole; what it does not name is off.
# Off on purpose: Application Signals, which versions from 5.0.0 inject into every pod, trainers included. 5.3.0 exists
# (application-signals-demo #334); that 1.36 offers it was not verified.
CLOUDWATCH_ADDON = ManagedAddon(
    "CloudWatch",
    "amazon-cloudwatch-observability",
    "v5.3.0-eksbuild.1",
    before_nodes=False,
    service_account="cloudwatch-agent",
    managed_policy="CloudWatchAgentServerPolicy",
    values={
        "agent": {
            "config": {
                "logs": {
                    "metrics_collected": {
                        "kubernetes": {"enhanced_container_insights": True, "accelerated_compute_metrics": True}
                    }
                }
            }
        },
        "manager": {"applicationSignals": {"autoMonitor": {"monitorAllServices": False}}},
    },
)


def managed_addons(config: ClusterConfig) -> tuple[ManagedAddon, ...]:
    """The EKS add-ons of a cluster."""
    return (*MANAGED_ADDONS, CLOUDWATCH_ADDON) if config.observability.metrics == "cloudwatch" else MANAGED_ADDONS


class ManagedAddons(Construct):
    """The EKS add-ons that come before the nodes, or after them.

    `CfnAddon`, since the L2 add-on knows no Pod Identity (aws-cdk-lib 2.275).
    """

    def __init__(
        self, scope: Construct, id_: str, *, cluster: eks.ICluster, config: ClusterConfig, before_nodes: bool
    ) -> None:
        super().__init__(scope, id_)
        addons = [addon for addon in managed_addons(config) if addon.before_nodes == before_nodes]
        self.addons = [self._addon(cluster, addon) for addon in addons]

    def _addon(self, cluster: eks.ICluster, addon: ManagedAddon) -> eks.CfnAddon:
        associations = None
        if addon.service_account is not None:
            association = eks.CfnAddon.PodIdentityAssociationProperty(
                role_arn=self._role(addon).role_arn, service_account=addon.service_account
            )
            associations = [association]
        return eks.CfnAddon(
            self,
            addon.id_,
            cluster_name=cluster.cluster_name,
            addon_name=addon.name,
            addon_version=addon.version,
            configuration_values=json.dumps(addon.values, sort_keys=True) if addon.values else None,
            pod_identity_associations=associations,
            resolve_conflicts="OVERWRITE",
        )

    def _role(self, addon: ManagedAddon) -> iam.Role:
        principal = iam.ServicePrincipal("pods.eks.amazonaws.com")
        statement = iam.PolicyStatement(actions=list(addon.actions), resources=["*"])
        role = iam.Role(
            self,
            f"{addon.id_}Role",
            # Pod Identity tags its sessions: without the second action every assume fails.
            assumed_by=iam.SessionTagsPrincipal(principal),  # pyright: ignore[reportArgumentType]
            description=f"Pod Identity of the add-on {addon.name}",
            inline_policies={"addon": iam.PolicyDocument(statements=[statement])} if addon.actions else None,
        )
        if addon.managed_policy is not None:
            role.add_managed_policy(iam.ManagedPolicy.from_aws_managed_policy_name(addon.managed_policy))
        return role

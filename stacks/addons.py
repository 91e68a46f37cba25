"""What runs in every cluster before a job does: EKS add-ons and Helm charts, each pinned, in one table each."""

import json
from dataclasses import dataclass, field
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_iam as iam
from constructs import Construct

from config import names
from config.cluster import ClusterConfig
from config.instances import INSTANCE_TYPES

# Every DaemonSet of ours tolerates the GPU nodes' taint; otherwise its plugin never lands there and every pod that
# asks for its devices stays Pending (aws-efa-eks #3, containers-roadmap #2567).
GPU_TOLERATION = {"key": names.GPU_TAINT_KEY, "operator": "Exists", "effect": "NoSchedule"}


@dataclass(frozen=True)
class ManagedAddon:
    """An EKS add-on. `permissions`: what its service account may do through EKS Pod Identity."""

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


@dataclass(frozen=True)
class HelmRelease:
    """A pinned Helm chart; an OCI repository names the chart itself."""

    id_: str
    chart: str
    repository: str
    version: str
    namespace: str
    values: dict[str, Any]


def helm_releases(config: ClusterConfig) -> tuple[HelmRelease, ...]:
    """The Helm charts of a cluster: neither device plugin exists as an EKS add-on."""
    return (
        # Its affinity wants NVIDIA's feature discovery or the label that our node group sets.
        HelmRelease(
            "NvidiaDevicePlugin",
            chart="nvidia-device-plugin",
            repository="https://nvidia.github.io/k8s-device-plugin",
            version="0.19.3",
            namespace="kube-system",
            values={"nodeSelector": {names.GPU_PRESENT_LABEL: "true"}, "tolerations": [GPU_TOLERATION]},
        ),
        # The selector keeps it off GPU nodes launched without EFA, where it would crash in a loop (eks-charts #1239).
        HelmRelease(
            "EfaDevicePlugin",
            chart="aws-efa-k8s-device-plugin",
            repository="https://aws.github.io/eks-charts",
            version="v0.5.30",
            namespace="kube-system",
            values={
                "image": {"repository": f"{config.eks_image_registry}/eks/aws-efa-k8s-device-plugin"},
                "nodeSelector": {names.EFA_PRESENT_LABEL: "true"},
                "tolerations": [GPU_TOLERATION],
                # The chart's own list of instance types lags behind new ones (eksctl #8089).
                "supportedInstanceLabels": {
                    "keys": ["node.kubernetes.io/instance-type"],
                    "values": sorted(INSTANCE_TYPES),
                },
            },
        ),
        HelmRelease(
            "JobSet",
            chart="jobset",
            repository="oci://registry.k8s.io/jobset/charts/jobset",
            version="0.12.0",
            namespace="jobset-system",
            values={"controller": {"nodeSelector": {names.NODE_ROLE_LABEL: names.NODE_ROLE_SYSTEM}}},
        ),
    )


class ManagedAddons(Construct):
    """The EKS add-ons that come before the nodes, or after them.

    `CfnAddon`, since the L2 add-on knows no Pod Identity (aws-cdk-lib 2.275).
    """

    def __init__(self, scope: Construct, id_: str, *, cluster: eks.ICluster, before_nodes: bool) -> None:
        super().__init__(scope, id_)
        self.addons = [self._addon(cluster, addon) for addon in MANAGED_ADDONS if addon.before_nodes == before_nodes]

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


class HelmReleases(Construct):
    """Installs the Helm charts through the cluster's kubectl provider, after the add-ons."""

    def __init__(
        self, scope: Construct, id_: str, *, cluster: eks.ICluster, config: ClusterConfig, after: ManagedAddons
    ) -> None:
        super().__init__(scope, id_)
        for release in helm_releases(config):
            chart = eks.HelmChart(
                self,
                release.id_,
                cluster=cluster,
                # A release name that survives a renamed construct.
                release=release.chart,
                chart=release.chart,
                repository=release.repository,
                version=release.version,
                namespace=release.namespace,
                values=release.values,
                timeout=cdk.Duration.minutes(10),
            )
            chart.node.add_dependency(*after.addons)

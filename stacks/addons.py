"""What runs in every cluster before a job does: EKS add-ons and Helm charts, each pinned, in one table each."""

import copy
import dataclasses
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


# On every file system that the driver makes (aws-fsx-csi-driver, pkg/cloud: VolumeNameTagKey).
FSX_DRIVER_TAG = "CSIVolumeName"


@dataclass(frozen=True)
class Permission:
    """Actions on everything, or on what carries a tag: the condition key without the tag, and the tag."""

    actions: tuple[str, ...]
    tag: tuple[str, str] | None = None

    def statement(self) -> iam.PolicyStatement:
        """The IAM statement that allows it."""
        conditions = None if self.tag is None else {"StringLike": {"/".join(self.tag): "*"}}
        return iam.PolicyStatement(actions=list(self.actions), resources=["*"], conditions=conditions)


@dataclass(frozen=True)
class ManagedAddon:
    """An EKS add-on. `permissions`: what its service account may do through EKS Pod Identity."""

    id_: str
    name: str
    version: str
    before_nodes: bool
    service_account: str | None = None
    managed_policy: str | None = None
    permissions: tuple[Permission, ...] = ()
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
    # No AmazonFSxFullAccess: it makes file systems that carry the driver's tag and touches no other, ours among them.
    ManagedAddon(
        "FsxCsiDriver",
        "aws-fsx-csi-driver",
        "v1.9.0-eksbuild.1",
        before_nodes=False,
        service_account="fsx-csi-controller-sa",
        permissions=(
            Permission(("fsx:DescribeFileSystems",)),
            Permission(("fsx:CreateFileSystem", "fsx:TagResource"), tag=("aws:RequestTag", FSX_DRIVER_TAG)),
            Permission(("fsx:DeleteFileSystem", "fsx:UpdateFileSystem"), tag=("aws:ResourceTag", FSX_DRIVER_TAG)),
        ),
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


@dataclass(frozen=True)
class HelmRelease:
    """A pinned Helm chart; an OCI repository names the chart itself.

    `image` is where the chart's image comes from, and `image_path` the value that says so: what a cluster without
    internet replaces by its mirror's. An image that is in the region's EKS registry needs no mirror and gives none.
    """

    id_: str
    chart: str
    repository: str
    version: str
    namespace: str
    values: dict[str, Any]
    image: str | None = None
    image_path: tuple[str, ...] = ("image", "repository")
    registry_apart: bool = False  # whether the chart wants the host beside it, as `registry`


def helm_releases(config: ClusterConfig) -> tuple[HelmRelease, ...]:
    """The Helm charts of a cluster, from the internet or from its mirror."""
    releases = [NVIDIA_DEVICE_PLUGIN, _efa_device_plugin(config), JOBSET]
    releases += [DCGM_EXPORTER] if config.addons.dcgm_exporter else []
    releases += [KUEUE] if config.addons.kueue else []
    releases += [KUBE_STATE_METRICS] if config.observability.metrics == "prometheus" else []
    mirror = config.network.mirror_registry
    return tuple(releases if mirror is None else [_mirrored(release, mirror) for release in releases])


# Neither device plugin exists as an EKS add-on. This one's affinity wants NVIDIA's feature discovery or the label that
# our node group sets.
NVIDIA_DEVICE_PLUGIN = HelmRelease(
    "NvidiaDevicePlugin",
    chart="nvidia-device-plugin",
    repository="https://nvidia.github.io/k8s-device-plugin",
    version="0.19.3",
    namespace="kube-system",
    image="nvcr.io/nvidia/k8s-device-plugin",
    values={"nodeSelector": {names.GPU_PRESENT_LABEL: "true"}, "tolerations": [GPU_TOLERATION]},
)

JOBSET = HelmRelease(
    "JobSet",
    chart="jobset",
    repository="oci://registry.k8s.io/jobset/charts/jobset",
    version="0.12.0",
    namespace="jobset-system",
    image="registry.k8s.io/jobset/jobset",
    registry_apart=True,
    values={"controller": {"nodeSelector": {names.NODE_ROLE_LABEL: names.NODE_ROLE_SYSTEM}}},
)

# DCGM fields, in the exporter's own format: what a training run looks at, and the last Xid, which its default list
# may leave out. https://docs.nvidia.com/datacenter/dcgm/latest/dcgm-api/dcgm-api-field-ids.html
_DCGM_FIELDS = """\
DCGM_FI_DEV_XID_ERRORS,            gauge,   Value of the last XID error encountered.
DCGM_FI_DEV_GPU_UTIL,              gauge,   GPU utilization (in %).
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE,   gauge,   Share of cycles in which the tensor pipe is active.
DCGM_FI_DEV_FB_USED,               gauge,   Framebuffer memory used (in MiB).
DCGM_FI_DEV_FB_FREE,               gauge,   Framebuffer memory free (in MiB).
DCGM_FI_DEV_GPU_TEMP,              gauge,   GPU temperature (in C).
DCGM_FI_DEV_POWER_USAGE,           gauge,   Power draw (in W).
DCGM_FI_DEV_SM_CLOCK,              gauge,   SM clock frequency (in MHz).
DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL, counter, NVLink bandwidth over all lanes.
DCGM_FI_DEV_ECC_DBE_VOL_TOTAL,     counter, Double-bit volatile ECC errors.
DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS, counter, Rows remapped for uncorrectable errors.
DCGM_FI_DEV_ROW_REMAP_FAILURE,     gauge,   Whether remapping of rows has failed.
"""

# A client of the host engine that the node monitoring agent already runs on every GPU node (its dcgm-server listens on
# host port 5555): engines of our own beside it have been how healthy nodes got replaced (containers-roadmap #2555).
# 1 GiB: with eight GPUs the chart's usual 128 MiB to 512 MiB end in OOM kills.
DCGM_EXPORTER = HelmRelease(
    "DcgmExporter",
    chart="dcgm-exporter",
    repository="https://nvidia.github.io/dcgm-exporter/helm-charts",
    version="4.8.3",
    namespace="kube-system",
    image="nvcr.io/nvidia/k8s/dcgm-exporter",
    values={
        "nodeSelector": {names.GPU_PRESENT_LABEL: "true"},
        "tolerations": [GPU_TOLERATION],
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "1Gi"}},
        "extraEnv": [
            {"name": "HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
            {"name": "DCGM_REMOTE_HOSTENGINE_INFO", "value": "$(HOST_IP):5555"},
        ],
        "customMetrics": _DCGM_FIELDS,
        # Its custom resource exists only where the Prometheus operator is installed.
        "serviceMonitor": {"enabled": False},
    },
)

# Queues for several teams; it learns about JobSets from its own defaults.
KUEUE = HelmRelease(
    "Kueue",
    chart="kueue",
    repository="oci://registry.k8s.io/kueue/charts/kueue",
    version="0.19.4",
    namespace="kueue-system",
    image="registry.k8s.io/kueue/kueue",
    image_path=("controllerManager", "manager", "image", "repository"),
    values={"controllerManager": {"nodeSelector": {names.NODE_ROLE_LABEL: names.NODE_ROLE_SYSTEM}}},
)

# What Kubernetes knows of nodes and pods, as metrics: allocatable GPUs and the monitoring agent's conditions, for the
# alerts in stacks/prometheus.py. The annotations are what the scraper looks for.
KUBE_STATE_METRICS = HelmRelease(
    "KubeStateMetrics",
    chart="kube-state-metrics",
    repository="https://prometheus-community.github.io/helm-charts",
    version="7.5.1",
    namespace="kube-system",
    image="registry.k8s.io/kube-state-metrics/kube-state-metrics",
    registry_apart=True,
    values={
        "collectors": ["nodes", "pods", "jobs"],
        "nodeSelector": {names.NODE_ROLE_LABEL: names.NODE_ROLE_SYSTEM},
        "podAnnotations": {"prometheus.io/scrape": "true", "prometheus.io/port": "8080"},
    },
)


def _efa_device_plugin(config: ClusterConfig) -> HelmRelease:
    return HelmRelease(
        "EfaDevicePlugin",
        chart="aws-efa-k8s-device-plugin",
        repository="https://aws.github.io/eks-charts",
        version="v0.5.30",
        namespace="kube-system",
        values={
            "image": {"repository": f"{config.eks_image_registry}/eks/aws-efa-k8s-device-plugin"},
            # Keeps it off GPU nodes launched without EFA, where it would crash in a loop (eks-charts #1239).
            "nodeSelector": {names.EFA_PRESENT_LABEL: "true"},
            "tolerations": [GPU_TOLERATION],
            # The chart's own list of instance types lags behind new ones (eksctl #8089).
            "supportedInstanceLabels": {
                "keys": ["node.kubernetes.io/instance-type"],
                "values": sorted(INSTANCE_TYPES),
            },
        },
    )


def _mirrored(release: HelmRelease, mirror: str) -> HelmRelease:
    """The release from `mirror`: charts under charts/, images under their upstream path without the host."""
    values = copy.deepcopy(release.values)
    if release.image is not None:
        *parents, last = release.image_path
        section = values
        for key in parents:
            section = section.setdefault(key, {})
        host, _, path = f"{mirror}/{release.image.partition('/')[2]}".partition("/")
        section |= {"registry": host, last: path} if release.registry_apart else {last: f"{host}/{path}"}
    return dataclasses.replace(release, repository=f"oci://{mirror}/charts/{release.chart}", values=values)


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
        policy = iam.PolicyDocument(statements=[permission.statement() for permission in addon.permissions])
        role = iam.Role(
            self,
            f"{addon.id_}Role",
            # Pod Identity tags its sessions: without the second action every assume fails.
            assumed_by=iam.SessionTagsPrincipal(principal),  # pyright: ignore[reportArgumentType]
            description=f"Pod Identity of the add-on {addon.name}",
            inline_policies={"addon": policy} if addon.permissions else None,
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

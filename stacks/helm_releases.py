"""The Helm charts of a cluster, pinned in one table, from the internet or from the cluster's mirror."""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_eks_v2 as eks
from constructs import Construct

from config import names
from config.cluster import ClusterConfig
from config.instances import INSTANCE_TYPES
from stacks.addons import GPU_TOLERATION, ManagedAddons


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
    releases, mirror = upstream_releases(config), config.network.mirror_registry
    return releases if mirror is None else tuple(_mirrored(release, mirror) for release in releases)


def upstream_releases(config: ClusterConfig) -> tuple[HelmRelease, ...]:
    """The Helm charts of a cluster, as their publishers offer them."""
    releases = [NVIDIA_DEVICE_PLUGIN, _efa_device_plugin(config), JOBSET]
    releases += [DCGM_EXPORTER] if config.addons.dcgm_exporter else []
    releases += [KUEUE] if config.addons.kueue else []
    releases += [KUBE_STATE_METRICS] if config.observability.metrics == "prometheus" else []
    return tuple(releases)


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

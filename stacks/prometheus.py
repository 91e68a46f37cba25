"""Amazon Managed Service for Prometheus: a workspace, AWS's own scraper of the cluster, and alerts on what it reads."""

from typing import Any

import aws_cdk as cdk
import yaml
from aws_cdk import aws_aps as aps
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_iam as iam
from aws_cdk import aws_logs as logs
from aws_cdk import aws_sns as sns
from constructs import Construct

from config import names
from config.cluster import CapacityBlock, ClusterConfig
from config.job import JobConfig

_NAMES = [
    {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
    {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
    {"source_labels": ["__meta_kubernetes_pod_node_name"], "target_label": "node"},
]
_SCRAPE: dict[str, Any] = {
    "global": {"scrape_interval": "30s", "scrape_timeout": "10s"},
    "scrape_configs": [
        {
            "job_name": "dcgm-exporter",
            "kubernetes_sd_configs": [{"role": "pod"}],
            "relabel_configs": [
                {
                    "source_labels": ["__meta_kubernetes_pod_label_app_kubernetes_io_name"],
                    "action": "keep",
                    "regex": "dcgm-exporter",
                },
                *_NAMES,
            ],
        },
        {
            # What else has metrics says so itself, by the annotations that most charts know; kube-state-metrics does.
            "job_name": "pods",
            "kubernetes_sd_configs": [{"role": "pod"}],
            "relabel_configs": [
                {
                    "source_labels": ["__meta_kubernetes_pod_annotation_prometheus_io_scrape"],
                    "action": "keep",
                    "regex": "true",
                },
                {
                    "source_labels": ["__address__", "__meta_kubernetes_pod_annotation_prometheus_io_port"],
                    "action": "replace",
                    "regex": r"([^:]+)(?::\d+)?;(\d+)",
                    "replacement": "$1:$2",
                    "target_label": "__address__",
                },
                *_NAMES,
            ],
        },
        {
            # The kubelet's own view of pods and volumes, through the API server: no port of a node is opened.
            "job_name": "cadvisor",
            "scheme": "https",
            "kubernetes_sd_configs": [{"role": "node"}],
            # As the service's own default configuration has it: the scraper's identity in the cluster.
            "authorization": {"credentials_file": "/var/run/secrets/kubernetes.io/serviceaccount/token"},
            "relabel_configs": [
                {"target_label": "__address__", "replacement": "kubernetes.default.svc:443"},
                {
                    "source_labels": ["__meta_kubernetes_node_name"],
                    "regex": "(.+)",
                    "target_label": "__metrics_path__",
                    "replacement": "/api/v1/nodes/$1/proxy/metrics/cadvisor",
                },
            ],
        },
    ],
}


def _scrape(namespace: str) -> dict[str, Any]:
    """The cluster's own metrics, and those of the job's pods, which name the port that they have them on."""
    training = {
        "job_name": "training",
        "kubernetes_sd_configs": [{"role": "pod", "namespaces": {"names": [namespace]}}],
        "relabel_configs": [
            {
                "source_labels": ["__meta_kubernetes_pod_container_port_name"],
                "action": "keep",
                "regex": names.METRICS_PORT_NAME,
            },
            *_NAMES,
        ],
    }
    return {**_SCRAPE, "scrape_configs": [*_SCRAPE["scrape_configs"], training]}


class Prometheus(Construct):
    """Metrics of the cluster without an agent in it. Grafana or any PromQL client reads the workspace.

    No access entry for the scraper here: the service makes one for its service-linked role, with
    AmazonPrometheusScraperPolicy, in clusters that have access entries, and EKS lets nobody else make one for such a
    role. No key of ours on the workspace: a managed scraper can't write to such a one (both: Amazon Managed Service for
    Prometheus user guide, "Set up managed collectors for Amazon EKS").
    """

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        config: ClusterConfig,
        job: JobConfig,
        cluster: eks.ICluster,
        subnets: list[ec2.ISubnet],
        topic: sns.Topic,
    ) -> None:
        super().__init__(scope, id_)
        self.workspace = self._workspace(topic)
        self._let_publish(topic)
        self._scraper(cluster, subnets, job.namespace)
        aps.CfnRuleGroupsNamespace(
            self, "Alerts", name="training", workspace=self.workspace.attr_arn, data=_yaml(alerts(config, job))
        )

    def _workspace(self, topic: sns.Topic) -> aps.CfnWorkspace:
        log_group = logs.LogGroup(
            self,
            "Logs",
            # The prefix is the service's rule.
            log_group_name=f"/aws/vendedlogs/prometheus/{cdk.Names.unique_id(self)}",
            retention=logs.RetentionDays.ONE_MONTH,
            removal_policy=cdk.RemovalPolicy.DESTROY,
        )
        return aps.CfnWorkspace(
            self,
            "Workspace",
            alert_manager_definition=_alert_manager(topic),
            logging_configuration=aps.CfnWorkspace.LoggingConfigurationProperty(log_group_arn=log_group.log_group_arn),
        )

    def _scraper(self, cluster: eks.ICluster, subnets: list[ec2.ISubnet], namespace: str) -> aps.CfnScraper:
        return aps.CfnScraper(
            self,
            "Scraper",
            destination=aps.CfnScraper.DestinationProperty(
                amp_configuration=aps.CfnScraper.AmpConfigurationProperty(workspace_arn=self.workspace.attr_arn)
            ),
            scrape_configuration=aps.CfnScraper.ScrapeConfigurationProperty(
                configuration_blob=cdk.Fn.base64(_yaml(_scrape(namespace)))
            ),
            source=aps.CfnScraper.SourceProperty(
                eks_configuration=aps.CfnScraper.EksConfigurationProperty(
                    cluster_arn=cluster.cluster_arn,
                    subnet_ids=[subnet.subnet_id for subnet in subnets],  # in two zones, as the service demands
                    # The nodes' own group: it reaches every pod.
                    security_group_ids=[cluster.cluster_security_group_id],
                )
            ),
        )

    def _let_publish(self, topic: sns.Topic) -> None:
        """The workspace alone may publish, and use the topic's key for it."""
        service = iam.ServicePrincipal("aps.amazonaws.com")
        stack = cdk.Stack.of(self)
        topic.add_to_resource_policy(
            iam.PolicyStatement(
                actions=["sns:Publish", "sns:GetTopicAttributes"],
                principals=[service],  # pyright: ignore[reportArgumentType]
                resources=[topic.topic_arn],
                conditions={
                    # Any workspace of this account: naming this one, which names the topic, would be a circle.
                    "ArnLike": {"aws:SourceArn": stack.format_arn(service="aps", resource="workspace/*")},
                    "StringEquals": {"aws:SourceAccount": stack.account},
                },
            )
        )
        assert topic.master_key is not None
        topic.master_key.grant(service, "kms:Decrypt", "kms:GenerateDataKey*")  # pyright: ignore[reportArgumentType]


def _alert_manager(topic: sns.Topic) -> str:
    """Everything to the one topic; SNS is the only receiver that the service has."""
    stack = cdk.Stack.of(topic)
    receiver = {"name": "operators", "sns_configs": [{"topic_arn": topic.topic_arn, "sigv4": {"region": stack.region}}]}
    config = {"route": {"receiver": "operators", "group_by": ["alertname"]}, "receivers": [receiver]}
    # JSON is YAML, and a CDK token in it stays one word.
    return cdk.Fn.join("", ["alertmanager_config: |\n  ", stack.to_json_string(config)])


# What a program's own mistake or its end by SIGKILL leaves behind; the in-job restart deals with it. NVIDIA's Xid
# catalog: 13 graphics exception, 31 page fault, 43 stopped processing, 45 preemptive cleanup.
_XIDS_OF_PROGRAMS = (13, 31, 43, 45)


def alerts(config: ClusterConfig, job: JobConfig) -> dict[str, Any]:
    """The alarms that CloudWatch has (stacks/observability.py), from kube-state-metrics, and Xids of dcgm-exporter."""
    assert job.instance is not None, "DeploymentConfig asks for it where there is a cluster"
    rules = _faults(job.instance.gpu_count)
    if not isinstance(config.capacity, CapacityBlock):  # Its nodes come and go with the block; that is no fault.
        rules += _absences(job.pod_count + config.system_nodes.node_count)
    return {"groups": [{"name": "training", "rules": rules}]}


def _faults(gpus: int) -> list[dict[str, Any]]:
    own = " or ".join(f"DCGM_FI_DEV_XID_ERRORS == {xid}" for xid in _XIDS_OF_PROGRAMS)
    return [
        _alert(
            "NodeUnhealthy",
            # Every condition whose name ends like this is good when true: the kubelet's, and the monitoring agent's,
            # on which node repair acts.
            'kube_node_status_condition{condition=~".*Ready",status!="true"} == 1',
            3,
            "{{ $labels.node }} is not {{ $labels.condition }}",
        ),
        _alert(
            "GpusPerNode",
            # So that a GPU which the device plugin marks unhealthy counts too; Container Insights has capacity only.
            f'kube_node_status_allocatable{{resource="nvidia_com_gpu"}} < {gpus}',
            10,
            f"{{{{ $labels.node }}}} has {{{{ $value }}}} of {gpus} GPUs to give",
        ),
        _alert(
            "GpuXidError",
            f"DCGM_FI_DEV_XID_ERRORS > 0 unless ({own})",
            1,
            "{{ $labels.node }}: GPU {{ $labels.gpu }} reports Xid {{ $value }}",
        ),
    ]


def _absences(nodes: int) -> list[dict[str, Any]]:
    """Metrics that are not there at all are no number below any other: hence `absent`."""
    fewer = f"count(kube_node_info) < {nodes} or absent(kube_node_info)"
    return [
        _alert("Nodes", fewer, 15, f"fewer nodes than the deployment's {nodes}"),
        _alert("GpuMetricsMissing", "absent(DCGM_FI_DEV_GPU_TEMP)", 15, "no GPU node reports to dcgm-exporter"),
    ]


def _alert(name: str, expr: str, minutes: int, summary: str) -> dict[str, Any]:
    return {"alert": name, "expr": expr, "for": f"{minutes}m", "annotations": {"summary": summary}}


class _PlainDumper(yaml.SafeDumper):
    """Without anchors, which not every reader of these files knows."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _yaml(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_PlainDumper, sort_keys=False)

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
            # What else has metrics says so itself, by the annotations that most charts know.
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
            "bearer_token_file": "/var/run/secrets/kubernetes.io/serviceaccount/token",
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


class Prometheus(Construct):
    """Metrics of the cluster without an agent in it. Grafana or any PromQL client reads the workspace.

    The scraper finds its way in by an access entry that the service makes for its own role, since the cluster has
    access entries only (Amazon Managed Service for Prometheus user guide, "Set up managed collectors").
    """

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        cluster: eks.ICluster,
        subnets: list[ec2.ISubnet],
        topic: sns.Topic,
        gpus_per_node: int,
    ) -> None:
        super().__init__(scope, id_)
        log_group = logs.LogGroup(
            self,
            "Logs",
            # The prefix is the service's rule.
            log_group_name=f"/aws/vendedlogs/prometheus/{cdk.Names.unique_id(self)}",
            retention=logs.RetentionDays.ONE_MONTH,
            removal_policy=cdk.RemovalPolicy.DESTROY,
        )
        self.workspace = aps.CfnWorkspace(
            self,
            "Workspace",
            alert_manager_definition=_alert_manager(topic),
            logging_configuration=aps.CfnWorkspace.LoggingConfigurationProperty(log_group_arn=log_group.log_group_arn),
        )
        self._let_publish(topic)
        self._scraper(cluster, subnets)
        aps.CfnRuleGroupsNamespace(
            self, "Alerts", name="training", workspace=self.workspace.attr_arn, data=_alerts(gpus_per_node)
        )

    def _scraper(self, cluster: eks.ICluster, subnets: list[ec2.ISubnet]) -> None:
        aps.CfnScraper(
            self,
            "Scraper",
            destination=aps.CfnScraper.DestinationProperty(
                amp_configuration=aps.CfnScraper.AmpConfigurationProperty(workspace_arn=self.workspace.attr_arn)
            ),
            scrape_configuration=aps.CfnScraper.ScrapeConfigurationProperty(
                configuration_blob=cdk.Fn.base64(_yaml(_SCRAPE))
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


def _alerts(gpus_per_node: int) -> str:
    rules = [
        {
            "alert": "GpusPerNode",
            "expr": f"count by (node) (DCGM_FI_DEV_GPU_TEMP) < {gpus_per_node}",
            "for": "10m",
            "annotations": {"summary": f"{{{{ $labels.node }}}} shows fewer than {gpus_per_node} GPUs"},
        },
        {
            "alert": "GpuXidError",
            "expr": "DCGM_FI_DEV_XID_ERRORS > 0",
            "for": "1m",
            "annotations": {"summary": "{{ $labels.node }}: GPU {{ $labels.gpu }} reports Xid {{ $value }}"},
        },
        {
            "alert": "GpuMetricsMissing",
            "expr": "absent(DCGM_FI_DEV_GPU_TEMP)",
            "for": "15m",
            "annotations": {"summary": "no GPU node reports to dcgm-exporter"},
        },
    ]
    return _yaml({"groups": [{"name": "training", "rules": rules}]})


class _PlainDumper(yaml.SafeDumper):
    """Without anchors, which not every reader of these files knows."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _yaml(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_PlainDumper, sort_keys=False)

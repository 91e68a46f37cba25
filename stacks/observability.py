"""Alarms of a running cluster, who is told, and a budget for the account."""

from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_budgets as budgets
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_fsx as fsx
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sns_subscriptions as subscriptions
from constructs import Construct

from config.cluster import CapacityBlock, ClusterConfig, ObservabilityConfig
from config.job import JobConfig
from stacks.prometheus import Prometheus

FREE_SPACE_SHARE = 0.1
_GIB = 1024**3
_MINUTE = cdk.Duration.minutes(1)


class ObservabilityStack(cdk.Stack):
    """Alarms on what FSx and EC2 report by themselves and on what the nodes say, to CloudWatch or to Prometheus."""

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        config: ClusterConfig,
        job: JobConfig,
        file_system: fsx.CfnFileSystem,
        cluster: eks.ICluster,
        gpu_nodegroup: eks.CfnNodegroup,
        subnets: list[ec2.ISubnet],
        **kwargs: Any,
    ) -> None:
        super().__init__(scope, id_, description="Training: alarms and budget", **kwargs)
        self.topic = self._topic(config.observability)
        self._alarm_on_free_space(config, file_system)
        self._tell_of_replaced_nodes(gpu_nodegroup)
        if config.observability.metrics == "cloudwatch":
            self._alarm_on_nodes(config, job, cluster)
        if config.observability.metrics == "prometheus":
            Prometheus(self, "Prometheus", config=config, job=job, cluster=cluster, subnets=subnets, topic=self.topic)
        self._budget(config.observability)
        cdk.CfnOutput(self, "TopicArn", value=self.topic.topic_arn, description="subscribe here to be told")

    def _topic(self, config: ObservabilityConfig) -> sns.Topic:
        key = kms.Key(
            self,
            "TopicKey",
            description="Alarms in transit",
            enable_key_rotation=True,
            removal_policy=cdk.RemovalPolicy.DESTROY,
        )
        # AWS's own key for SNS lets neither service publish: an alarm would fire and nobody hear of it.
        for service in ("cloudwatch.amazonaws.com", "events.amazonaws.com"):
            key.grant(
                iam.ServicePrincipal(service),  # pyright: ignore[reportArgumentType]
                "kms:Decrypt",
                "kms:GenerateDataKey*",
            )
        topic = sns.Topic(self, "Topic", display_name=self.stack_name, master_key=key, enforce_ssl=True)  # pyright: ignore[reportArgumentType]
        if config.alarm_email is not None:
            topic.add_subscription(subscriptions.EmailSubscription(config.alarm_email))  # pyright: ignore[reportArgumentType]
        return topic

    def _alarm_on_free_space(self, config: ClusterConfig, file_system: fsx.CfnFileSystem) -> None:
        """A full file system fails the next save, and every one after it.

        FSx reports every storage target once a minute: their sum over one minute is the whole.
        """
        metric = cloudwatch.Metric(
            namespace="AWS/FSx",
            metric_name="FreeDataStorageCapacity",
            dimensions_map={"FileSystemId": file_system.ref},
            statistic="Sum",
            period=_MINUTE,
        )
        self._alarm(
            "FreeSpace",
            metric,
            "Less than a tenth of the file system is free",
            below=config.storage.capacity_gib * _GIB * FREE_SPACE_SHARE,
            minutes=5,
        )

    def _tell_of_replaced_nodes(self, nodegroup: eks.CfnNodegroup) -> None:
        """A mail whenever a GPU node is ended: by node repair, an update, Spot, or a reservation that runs out.

        EKS tells of repairs in Kubernetes events only; the node group's Auto Scaling group, whose name begins like
        this, says it to EventBridge. A repair by reboot ends no instance: the alarm on failed nodes sees that.
        """
        events.Rule(
            self,
            "GpuNodeEnded",
            description="A GPU node has been terminated",
            event_pattern=events.EventPattern(
                source=["aws.autoscaling"],
                detail_type=["EC2 Instance Terminate Successful"],
                detail={"AutoScalingGroupName": events.Match.prefix(f"eks-{nodegroup.attr_nodegroup_name}-")},
            ),
            targets=[targets.SnsTopic(self.topic)],  # pyright: ignore[reportArgumentType]
        )

    def _alarm_on_nodes(self, config: ClusterConfig, job: JobConfig, cluster: eks.ICluster) -> None:
        assert job.instance is not None, "DeploymentConfig asks for it where there is a cluster"

        def insight(name: str, statistic: str) -> cloudwatch.Metric:
            return cloudwatch.Metric(
                namespace="ContainerInsights",
                metric_name=name,
                dimensions_map={"ClusterName": cluster.cluster_name},
                statistic=statistic,
                period=_MINUTE,
            )

        # Any condition counts, so the monitoring agent's verdicts do: node repair is at work, or has nothing for it.
        self._alarm(
            "FailedNodes", insight("cluster_failed_node_count", "Maximum"), "A node is unhealthy", at_least=1, minutes=3
        )
        # The worst node, which a sum would hide: one GPU less, and no pod of the job fits on it. It is the node's
        # capacity, as the agent reads it (getNodeStatusCapacityGPUs): a GPU that the device plugin only marks unhealthy
        # lowers allocatable and not this, and is what the alarm above is for.
        self._alarm(
            "GpusPerNode",
            insight("node_gpu_limit", "Minimum"),
            f"A GPU node has fewer than {job.instance.gpu_count} GPUs to give",
            below=job.instance.gpu_count,
            minutes=10,
        )
        if isinstance(config.capacity, CapacityBlock):
            return  # Its nodes come and go with the block; that is no fault.
        self._alarm(
            "Nodes",
            insight("cluster_node_count", "Minimum"),
            "Fewer nodes than the deployment has",
            below=job.pod_count + config.system_nodes.node_count,
            minutes=15,  # longer than it takes to replace one
        )

    def _alarm(
        self,
        id_: str,
        metric: cloudwatch.Metric,
        description: str,
        *,
        minutes: int,
        below: float | None = None,
        at_least: float | None = None,
    ) -> None:
        """One alarm, on and off both told; `minutes` in a row, so that one bad reading wakes nobody."""
        assert (below is None) != (at_least is None)
        low = below is not None
        operator = cloudwatch.ComparisonOperator
        comparison = operator.LESS_THAN_THRESHOLD if low else operator.GREATER_THAN_OR_EQUAL_TO_THRESHOLD
        alarm = cloudwatch.Alarm(
            self,
            id_,
            metric=metric,  # pyright: ignore[reportArgumentType]
            alarm_description=description,
            threshold=below if below is not None else at_least or 0,
            comparison_operator=comparison.LESS_THAN_THRESHOLD
            if low
            else comparison.GREATER_THAN_OR_EQUAL_TO_THRESHOLD,
            evaluation_periods=minutes,
            # A cluster that is just being built reports nothing yet: insufficient data, not an alarm.
            treat_missing_data=cloudwatch.TreatMissingData.MISSING,
        )
        tell = actions.SnsAction(self.topic)  # pyright: ignore[reportArgumentType]
        alarm.add_alarm_action(tell)  # pyright: ignore[reportArgumentType]
        alarm.add_ok_action(tell)  # pyright: ignore[reportArgumentType]

    def _budget(self, config: ObservabilityConfig) -> None:
        """The whole account's: a filter by our tag stays at 0 until somebody activates the tag for billing."""
        if config.monthly_budget_usd is None or config.alarm_email is None:
            return
        reader = budgets.CfnBudget.SubscriberProperty(subscription_type="EMAIL", address=config.alarm_email)
        budgets.CfnBudget(
            self,
            "Budget",
            budget=budgets.CfnBudget.BudgetDataProperty(
                budget_type="COST",
                time_unit="MONTHLY",
                budget_limit=budgets.CfnBudget.SpendProperty(amount=config.monthly_budget_usd, unit="USD"),
            ),
            notifications_with_subscribers=[
                budgets.CfnBudget.NotificationWithSubscribersProperty(
                    notification=budgets.CfnBudget.NotificationProperty(
                        notification_type=kind, comparison_operator="GREATER_THAN", threshold=percent
                    ),
                    subscribers=[reader],
                )
                for kind, percent in (("ACTUAL", 80), ("FORECASTED", 100))
            ],
        )

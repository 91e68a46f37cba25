"""The EKS cluster: control plane, add-ons, system and GPU nodes, and the objects that every job expects."""

from typing import Any, cast

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from aws_cdk.lambda_layer_kubectl_v36 import KubectlV36Layer
from constructs import Construct

from config.cluster import ClusterConfig
from config.job import JobConfig
from stacks.addons import ManagedAddons
from stacks.cluster_objects import ClusterObjects
from stacks.gpu_nodegroup import GpuNodegroup
from stacks.helm_releases import HelmReleases
from stacks.network import NetworkStack
from stacks.nodes import node_role
from stacks.storage import StorageStack
from stacks.system_nodegroup import SystemNodegroup

_LOGS = (
    eks.ClusterLoggingTypes.API,
    eks.ClusterLoggingTypes.AUDIT,
    eks.ClusterLoggingTypes.AUTHENTICATOR,
    eks.ClusterLoggingTypes.CONTROLLER_MANAGER,
    eks.ClusterLoggingTypes.SCHEDULER,
)


class ClusterStack(cdk.Stack):
    """Composes the cluster in the order in which it has to come up.

    Network add-ons before any node (nodes are not ready without a CNI), system nodes before the add-ons that are
    Deployments, those before the charts.

    The casts and ignores for type checkers: jsii's Python protocols differ from their own classes in the names of
    parameters, so that no class matches its interface.
    """

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        config: ClusterConfig,
        job: JobConfig,
        network: NetworkStack,
        storage: StorageStack,
        **kwargs: Any,
    ) -> None:
        super().__init__(scope, id_, description="Training: EKS cluster, nodes and add-ons", **kwargs)
        admin_role = self._admin_role()
        self.cluster = self._cluster(config, network, admin_role)
        role = node_role(self, "NodeRole")

        network_addons = ManagedAddons(self, "NetworkAddons", cluster=self.cluster, config=config, before_nodes=True)
        system = SystemNodegroup(
            self, "SystemNodegroup", config=config, cluster=self.cluster, network=network, node_role=role
        )
        gpu = GpuNodegroup(
            self, "GpuNodegroup", config=config, job=job, cluster=self.cluster, network=network, node_role=role
        )
        self.gpu_nodegroup = gpu.nodegroup
        for nodegroup in (system.nodegroup, gpu.nodegroup):
            nodegroup.node.add_dependency(*network_addons.addons)
        addons = ManagedAddons(self, "Addons", cluster=self.cluster, config=config, before_nodes=False)
        for addon in addons.addons:
            addon.node.add_dependency(system.nodegroup)
        HelmReleases(self, "HelmReleases", cluster=self.cluster, config=config, after=addons)
        ClusterObjects(
            self,
            "Objects",
            cluster=self.cluster,
            namespace=job.namespace,
            storage=config.storage,
            file_system=storage.file_system,
        )
        self._outputs(admin_role, gpu)

    def _admin_role(self) -> iam.Role:
        """Full rights in the cluster for whoever the account lets assume it.

        The cluster's creator is CloudFormation's role, which no human can use: without an entry nobody gets in.
        """
        return iam.Role(
            self,
            "AdminRole",
            assumed_by=iam.AccountRootPrincipal(),  # pyright: ignore[reportArgumentType]
            description="Administrators of the training cluster: allow sts:AssumeRole on it to let somebody in",
        )

    def _cluster(self, config: ClusterConfig, network: NetworkStack, admin_role: iam.Role) -> eks.ICluster:
        secrets_key = kms.Key(
            self,
            "SecretsKey",
            description="Kubernetes secrets",
            enable_key_rotation=True,
            removal_policy=cdk.RemovalPolicy.DESTROY,
        )
        cluster = eks.Cluster(
            self,
            "Cluster",
            version=eks.KubernetesVersion.of(config.kubernetes_version),
            vpc=network.vpc,
            vpc_subnets=[ec2.SubnetSelection(subnets=network.private_subnets)],
            endpoint_access=_endpoint_access(config),
            # The default would be Auto Mode, which brings its own nodes and no EFA.
            default_capacity_type=eks.DefaultCapacityType.NODEGROUP,
            default_capacity=0,
            # Add-ons come pinned from our table; changing this later would replace the cluster.
            bootstrap_self_managed_addons=False,
            bootstrap_cluster_creator_admin_permissions=False,
            masters_role=admin_role,  # pyright: ignore[reportArgumentType]
            secrets_encryption_key=secrets_key,
            cluster_logging=list(_LOGS),
            kubectl_provider_options=eks.KubectlProviderOptions(kubectl_layer=KubectlV36Layer(self, "KubectlLayer")),
            output_config_command=False,
        )
        # Of the kubectl provider's functions: by itself the library keeps them for two years after the stack is gone.
        cdk.RemovalPolicies.of(self).destroy(apply_to_resource_types=[logs.CfnLogGroup.CFN_RESOURCE_TYPE_NAME])
        resource = cluster.node.default_child
        assert isinstance(resource, eks.CfnCluster)
        # Not a property of the L2. At the end of standard support EKS upgrades, instead of charging six times as much.
        resource.add_property_override("UpgradePolicy.SupportType", "STANDARD")
        admin_role.add_to_policy(iam.PolicyStatement(actions=["eks:DescribeCluster"], resources=[cluster.cluster_arn]))
        return cast(eks.ICluster, cluster)

    def _outputs(self, admin_role: iam.Role, gpu: GpuNodegroup) -> None:
        name = self.cluster.cluster_name
        command = f"aws eks update-kubeconfig --name {name} --region {self.region} --role-arn {admin_role.role_arn}"
        cdk.CfnOutput(self, "ClusterName", value=name, description="EKS cluster")
        cdk.CfnOutput(self, "KubeconfigCommand", value=command, description="gives kubectl access to the cluster")
        cdk.CfnOutput(self, "GpuNodegroupName", value=gpu.nodegroup.attr_nodegroup_name, description="GPU node group")


def _endpoint_access(config: ClusterConfig) -> eks.EndpointAccess:
    if not config.endpoint_public_cidrs:
        return eks.EndpointAccess.PRIVATE
    return eks.EndpointAccess.PUBLIC_AND_PRIVATE.only_from(*config.endpoint_public_cidrs)

import json

import pytest
from aws_cdk.assertions import Match

from config import names
from config.instances import INSTANCE_TYPES
from stacks.addons import CLOUDWATCH_ADDON, MANAGED_ADDONS

PODS_TRUST = ["sts:AssumeRole", "sts:TagSession"]


def test_api_server_is_private_by_default(cluster):
    cluster.has_resource_properties(
        "AWS::EKS::Cluster",
        {"ResourcesVpcConfig": {"EndpointPrivateAccess": True, "EndpointPublicAccess": False}},
    )


def test_api_server_opens_to_the_listed_networks_only(synthesize):
    template = synthesize(cluster={"endpoint_public_cidrs": ["198.51.100.0/24"]})["cluster"]
    template.has_resource_properties(
        "AWS::EKS::Cluster",
        {
            "ResourcesVpcConfig": {
                "EndpointPrivateAccess": True,
                "EndpointPublicAccess": True,
                "PublicAccessCidrs": ["198.51.100.0/24"],
            }
        },
    )


def test_control_plane_spans_two_subnets_and_none_of_them_holds_gpus(cluster, only):
    subnets = only(cluster, "AWS::EKS::Cluster", "Cluster")[1]["Properties"]["ResourcesVpcConfig"]["SubnetIds"]
    assert len(subnets) == 2
    assert not [subnet for subnet in subnets if "Gpu" in subnet["Fn::ImportValue"]]


def test_cluster_is_pinned_encrypted_logged_and_free_of_auto_mode(cluster):
    cluster.has_resource_properties(
        "AWS::EKS::Cluster",
        {
            "Version": "1.36",
            "AccessConfig": {"AuthenticationMode": "API", "BootstrapClusterCreatorAdminPermissions": False},
            "BootstrapSelfManagedAddons": False,
            "ComputeConfig": {"Enabled": False},
            "UpgradePolicy": {"SupportType": "STANDARD"},
            "EncryptionConfig": [{"Resources": ["secrets"], "Provider": {"KeyArn": Match.any_value()}}],
        },
    )
    (resource,) = cluster.find_resources("AWS::EKS::Cluster").values()
    enabled = resource["Properties"]["Logging"]["ClusterLogging"]["EnabledTypes"]
    assert {entry["Type"] for entry in enabled} == {
        "api",
        "audit",
        "authenticator",
        "controllerManager",
        "scheduler",
    }


def test_an_admin_role_of_the_account_gets_in_through_an_access_entry(cluster, only):
    role = only(cluster, "AWS::IAM::Role", "Admin")[0]
    cluster.has_resource_properties(
        "AWS::EKS::AccessEntry",
        {
            "PrincipalArn": {"Fn::GetAtt": [role, "Arn"]},
            "AccessPolicies": [
                Match.object_like({"PolicyArn": {"Fn::Join": Match.any_value()}, "AccessScope": {"Type": "cluster"}})
            ],
        },
    )


@pytest.mark.parametrize("addon", [*MANAGED_ADDONS, CLOUDWATCH_ADDON], ids=lambda addon: addon.name)
def test_every_add_on_is_pinned_and_on_time(cluster, addon, only):
    prefix = ("NetworkAddons" if addon.before_nodes else "Addons") + addon.id_
    found = [
        resource
        for name, resource in cluster.find_resources("AWS::EKS::Addon").items()
        if name.startswith(prefix) and resource["Properties"]["AddonName"] == addon.name
    ]
    (resource,) = found
    assert resource["Properties"]["AddonVersion"] == addon.version
    nodes = [name for name in resource.get("DependsOn", []) if name.startswith("SystemNodegroup")]
    assert bool(nodes) != addon.before_nodes


@pytest.mark.parametrize(
    ("addon", "account"),
    [
        ("vpc-cni", "aws-node"),
        ("aws-fsx-csi-driver", "fsx-csi-controller-sa"),
        ("amazon-cloudwatch-observability", "cloudwatch-agent"),
    ],
)
def test_add_ons_that_call_aws_have_a_pod_identity_role(cluster, addon, account):
    (resource,) = [
        resource
        for resource in cluster.find_resources("AWS::EKS::Addon").values()
        if resource["Properties"]["AddonName"] == addon
    ]
    (association,) = resource["Properties"]["PodIdentityAssociations"]
    assert association["ServiceAccount"] == account
    role = cluster.find_resources("AWS::IAM::Role")[association["RoleArn"]["Fn::GetAtt"][0]]
    (statement,) = role["Properties"]["AssumeRolePolicyDocument"]["Statement"]
    assert statement["Action"] == PODS_TRUST
    assert statement["Principal"] == {"Service": "pods.eks.amazonaws.com"}


def test_the_lustre_driver_may_describe_file_systems_and_nothing_else(cluster, only):
    role = only(cluster, "AWS::IAM::Role", "AddonsFsx")[1]["Properties"]
    assert not role.get("ManagedPolicyArns")
    (policy,) = role["Policies"]
    (statement,) = policy["PolicyDocument"]["Statement"]
    assert statement["Action"] == "fsx:DescribeFileSystems"


def test_nodes_have_no_rights_that_belong_to_add_ons(cluster, only):
    arns = json.dumps(only(cluster, "AWS::IAM::Role", "NodeRole")[1]["Properties"]["ManagedPolicyArns"])
    for policy in ("AmazonEKSWorkerNodePolicy", "AmazonEC2ContainerRegistryPullOnly", "AmazonSSMManagedInstanceCore"):
        assert policy in arns
    assert "AmazonEKS_CNI_Policy" not in arns


def test_system_nodes_are_labelled_untainted_and_in_both_zones(cluster, only):
    group = only(cluster, "AWS::EKS::Nodegroup", "System")[1]["Properties"]
    assert group["Labels"] == {names.NODE_ROLE_LABEL: names.NODE_ROLE_SYSTEM}
    assert "Taints" not in group
    assert len(group["Subnets"]) == 2
    assert group["ScalingConfig"]["DesiredSize"] == 2


def test_system_nodes_join_the_cluster_and_may_mount_the_file_system(cluster, only):
    data = only(cluster, "AWS::EC2::LaunchTemplate", "System")[1]["Properties"]["LaunchTemplateData"]
    cluster_group, lustre_group = data["SecurityGroupIds"]
    assert cluster_group["Fn::GetAtt"][1] == "ClusterSecurityGroupId"
    assert "LustreClientSecurityGroup" in lustre_group["Fn::ImportValue"]


def charts(template):
    found = [r["Properties"] for r in template.find_resources("Custom::AWSCDK-EKS-HelmChart").values()]
    return {chart["Chart"]: {**chart, "Values": json.loads(chart["Values"])} for chart in found}


def test_every_chart_is_pinned(cluster):
    assert {name: chart["Version"] for name, chart in charts(cluster).items()} == {
        "nvidia-device-plugin": "0.19.3",
        "aws-efa-k8s-device-plugin": "v0.5.30",
        "jobset": "0.12.0",
        "dcgm-exporter": "4.8.3",
    }


@pytest.mark.parametrize("chart", ["nvidia-device-plugin", "aws-efa-k8s-device-plugin", "dcgm-exporter"])
def test_daemon_sets_tolerate_the_taint_of_the_gpu_nodes(cluster, nodegroup, chart):
    (taint,) = nodegroup(cluster)["Taints"]
    (toleration,) = charts(cluster)[chart]["Values"]["tolerations"]
    assert toleration == {"key": taint["Key"], "operator": "Exists", "effect": "NoSchedule"}


@pytest.mark.parametrize("chart", ["nvidia-device-plugin", "aws-efa-k8s-device-plugin", "dcgm-exporter"])
def test_daemon_sets_select_a_label_that_the_gpu_nodes_have(cluster, nodegroup, chart):
    selector = charts(cluster)[chart]["Values"]["nodeSelector"]
    assert selector.items() <= nodegroup(cluster)["Labels"].items()


def test_the_monitoring_agents_gpu_half_reaches_the_gpu_nodes(cluster):
    (agent,) = [
        resource["Properties"]
        for resource in cluster.find_resources("AWS::EKS::Addon").values()
        if resource["Properties"]["AddonName"] == "eks-node-monitoring-agent"
    ]
    (toleration,) = json.loads(agent["ConfigurationValues"])["dcgmAgent"]["tolerations"]
    assert toleration["key"] == names.GPU_TAINT_KEY


def test_efa_plugin_comes_from_the_regions_own_registry_and_knows_our_instance_types(synthesize):
    zones = {"region": "eu-north-1", "availability_zone": "eu-north-1a", "second_availability_zone": "eu-north-1b"}
    values = charts(synthesize(cluster=zones)["cluster"])["aws-efa-k8s-device-plugin"]["Values"]
    assert values["image"]["repository"].startswith("602401143452.dkr.ecr.eu-north-1.amazonaws.com/")
    assert set(values["supportedInstanceLabels"]["values"]) == set(INSTANCE_TYPES)


def test_gpu_metrics_count_xids_have_room_and_use_the_agents_host_engine(cluster):
    values = charts(cluster)["dcgm-exporter"]["Values"]
    fields = [line.split(",")[0] for line in values["customMetrics"].splitlines()]
    assert "DCGM_FI_DEV_XID_ERRORS" in fields
    assert values["resources"]["limits"] == {"memory": "1Gi"}
    host, engine = values["extraEnv"]
    assert host["valueFrom"] == {"fieldRef": {"fieldPath": "status.hostIP"}}
    assert engine == {"name": "DCGM_REMOTE_HOSTENGINE_INFO", "value": "$(HOST_IP):5555"}
    assert values["serviceMonitor"] == {"enabled": False}, "its CRD is not there"


@pytest.mark.parametrize(("addons", "chart"), [({"dcgm_exporter": False}, "dcgm-exporter"), ({}, "kueue")])
def test_what_the_deployment_does_not_ask_for_is_not_installed(synthesize, addons, chart):
    assert chart not in charts(synthesize(cluster={"addons": addons})["cluster"])


def test_kueue_is_pinned_and_runs_on_system_nodes(synthesize):
    kueue = charts(synthesize(cluster={"addons": {"kueue": True}})["cluster"])["kueue"]
    assert kueue["Version"] == "0.19.4"
    selector = kueue["Values"]["controllerManager"]["nodeSelector"]
    assert selector == {names.NODE_ROLE_LABEL: names.NODE_ROLE_SYSTEM}


def addon(template, name):
    found = [r["Properties"] for r in template.find_resources("AWS::EKS::Addon").values()]
    return [properties for properties in found if properties["AddonName"] == name]


def test_container_insights_collects_gpus_and_injects_nothing_into_trainers(cluster):
    (agent,) = addon(cluster, "amazon-cloudwatch-observability")
    values = json.loads(agent["ConfigurationValues"])
    kubernetes = values["agent"]["config"]["logs"]["metrics_collected"]["kubernetes"]
    assert kubernetes == {"enhanced_container_insights": True, "accelerated_compute_metrics": True}
    assert values["manager"]["applicationSignals"]["autoMonitor"] == {"monitorAllServices": False}


def test_without_metrics_there_is_no_agent(synthesize):
    template = synthesize(cluster={"observability": {"metrics": "none"}})["cluster"]
    assert addon(template, "amazon-cloudwatch-observability") == []


def test_without_internet_every_chart_and_image_comes_from_the_mirror(synthesize):
    mirror = "123456789012.dkr.ecr.us-west-2.amazonaws.com/mirror"
    settings = {"network": {"egress": "none", "mirror_registry": mirror}, "addons": {"kueue": True}}
    found = charts(synthesize(cluster=settings)["cluster"])
    assert {name: chart["Repository"] for name, chart in found.items()} == {
        name: f"oci://{mirror}/charts/{name}" for name in found
    }
    images = {name: chart["Values"].get("image", {}).get("repository") for name, chart in found.items()}
    assert images == {
        "nvidia-device-plugin": f"{mirror}/nvidia/k8s-device-plugin",
        "aws-efa-k8s-device-plugin": "602401143452.dkr.ecr.us-west-2.amazonaws.com/eks/aws-efa-k8s-device-plugin",
        "jobset": "mirror/jobset/jobset",
        "dcgm-exporter": f"{mirror}/nvidia/k8s/dcgm-exporter",
        "kueue": None,
    }
    assert found["jobset"]["Values"]["image"]["registry"] == mirror.removesuffix("/mirror")
    manager = found["kueue"]["Values"]["controllerManager"]["manager"]
    assert manager == {"image": {"repository": f"{mirror}/kueue/kueue"}}


def manifests(template):
    """Kubernetes objects by kind; what CloudFormation fills in reads as its logical id."""
    found = {}
    for resource in template.find_resources("Custom::AWSCDK-EKS-KubernetesResource").values():
        text = resource["Properties"]["Manifest"]
        if not isinstance(text, str):
            text = "".join(
                part if isinstance(part, str) else part["Fn::ImportValue"].rpartition(":")[2]
                for part in text["Fn::Join"][1]
            )
        found |= {item["kind"]: item for item in json.loads(text)}
    return found


def test_volume_and_claim_are_bound_to_each_other_under_the_agreed_names(cluster, deployment_with):
    objects, job = manifests(cluster), deployment_with().job
    volume, claim = objects["PersistentVolume"], objects["PersistentVolumeClaim"]
    assert objects["Namespace"]["metadata"]["name"] == job.namespace
    assert volume["metadata"]["name"] == claim["spec"]["volumeName"] == names.FSX_VOLUME
    assert claim["metadata"]["name"] == names.FSX_CLAIM
    assert claim["metadata"]["namespace"] == job.namespace
    assert volume["spec"]["claimRef"] == {"namespace": job.namespace, "name": names.FSX_CLAIM}
    assert volume["spec"]["capacity"] == claim["spec"]["resources"]["requests"] == {"storage": "4800Gi"}
    for spec in (volume["spec"], claim["spec"]):
        assert spec["accessModes"] == ["ReadWriteMany"]
        assert spec["storageClassName"] == "fsx-static", "any other class would provision another file system"


def test_the_storage_class_makes_nothing_by_itself(cluster):
    made = manifests(cluster)["StorageClass"]
    assert made["metadata"]["name"] == names.FSX_STORAGE_CLASS
    assert (made["provisioner"], made["reclaimPolicy"]) == ("kubernetes.io/no-provisioner", "Retain")


def test_volume_names_the_file_system_by_id_dns_name_and_mount_name(cluster):
    spec = manifests(cluster)["PersistentVolume"]["spec"]
    assert spec["persistentVolumeReclaimPolicy"] == "Retain"
    assert spec["mountOptions"] == ["flock", "noatime"]
    assert spec["csi"]["driver"] == "fsx.csi.aws.com"
    assert "RefFileSystem" in spec["csi"]["volumeHandle"]
    assert "DNSName" in spec["csi"]["volumeAttributes"]["dnsname"]
    assert "LustreMountName" in spec["csi"]["volumeAttributes"]["mountname"]


def test_no_log_of_the_librarys_own_functions_outlives_the_stack(cluster):
    groups = cluster.find_resources("AWS::Logs::LogGroup")
    assert groups
    assert {group["DeletionPolicy"] for group in groups.values()} == {"Delete"}


@pytest.mark.parametrize(
    ("stack", "output"),
    [
        ("cluster", "ClusterName"),
        ("cluster", "KubeconfigCommand"),
        ("cluster", "GpuNodegroupName"),
        ("image", "RepositoryUri"),
        ("storage", "FileSystemId"),
        ("storage", "MountName"),
    ],
)
def test_a_user_is_told_what_the_next_command_needs(templates, stack, output):
    assert output in templates[stack].to_json()["Outputs"]


def test_the_kubeconfig_command_names_cluster_region_and_role(cluster):
    command = json.dumps(cluster.to_json()["Outputs"]["KubeconfigCommand"])
    assert "aws eks update-kubeconfig --name " in command
    assert " --region us-west-2 --role-arn " in command

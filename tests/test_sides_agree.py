"""What CDK builds and what the manifests ask of it: two programs, one deployment file, no number in both."""

import json
from pathlib import Path

import aws_cdk as cdk
import pytest
import yaml
from aws_cdk.assertions import Template

import app
from config import names
from config.deployment import DeploymentConfig, load
from k8s import main

ROOT = Path(__file__).parents[1]
SHIPPED = {path.stem: load(path) for path in sorted((ROOT / "deployments").glob("*.yaml"))}
SHIPPED = {name: deployment for name, deployment in SHIPPED.items() if deployment.cluster is not None}
# Instance types that no shipped deployment has, and their odd cases: few cards, one GPU, a card without EFA.
OTHER_TYPES = ("p4d.24xlarge", "p5.4xlarge", "p6-b300.48xlarge")
CONTEXT = json.loads((ROOT / "cdk.json").read_text())["context"] | {"aws:cdk:disable-asset-staging": True}
# The AL2023 NVIDIA AMI allocates 5128 huge pages of 2 MiB where the instance has EFA (EKS user guide, node-efa).
AMI_HUGE_PAGES_MIB = 5128 * 2
# vpc-cni, kube-proxy, Pod Identity, Lustre driver, monitoring agent and its DCGM, both device plugins, dcgm-exporter,
# CloudWatch's agent and logs, and as many again of somebody else's.
DAEMON_PODS = 24
CLUSTER_SCOPED = ("ClusterQueue", "Namespace", "PersistentVolume", "PriorityClass", "ResourceFlavor", "StorageClass")
EFFECTS = {"NO_SCHEDULE": "NoSchedule", "NO_EXECUTE": "NoExecute", "PREFER_NO_SCHEDULE": "PreferNoSchedule"}


def with_type(instance_type: str) -> DeploymentConfig:
    document = yaml.safe_load((ROOT / "deployments/p5-2node.yaml").read_text())
    document["job"]["instance_type"] = instance_type
    return DeploymentConfig.model_validate({"name": "p5-2node", **document})


class Sides:
    """One deployment's templates and manifests."""

    def __init__(self, deployment: DeploymentConfig, out: Path) -> None:
        self.deployment = deployment
        cdk_app = cdk.App(
            context=CONTEXT,
            analytics_reporting=False,
            builtin_cloud_formation_validation=False,
            outdir=str(out / "cdk"),
        )
        self.stacks = app.build(cdk_app, deployment)
        self.cluster = Template.from_stack(self.stacks.cluster)
        self.storage = Template.from_stack(self.stacks.storage)
        files = main.write(deployment, out / "manifests")
        self.manifests = [document for file in files for document in yaml.safe_load_all(file.read_text())]

    def _named(self, kind: str, prefix: str) -> dict:
        found = self.cluster.find_resources(kind).items()
        (properties,) = [resource["Properties"] for name, resource in found if name.startswith(prefix)]
        return properties

    @property
    def gpu_nodes(self) -> dict:
        return self._named("AWS::EKS::Nodegroup", "Gpu")

    @property
    def system_nodes(self) -> dict:
        return self._named("AWS::EKS::Nodegroup", "System")

    @property
    def launch(self) -> dict:
        return self._named("AWS::EC2::LaunchTemplate", "Gpu")["LaunchTemplateData"]

    @property
    def node_config(self) -> dict:
        (part,) = [text for text in self.launch["UserData"]["Fn::Base64"].split("--//") if "kind: NodeConfig" in text]
        return yaml.safe_load(part.split("\n\n", 1)[1])

    def installed(self, kind: str) -> dict:
        """The Kubernetes object of this kind that CDK installs."""
        found = []
        for resource in self.cluster.find_resources("Custom::AWSCDK-EKS-KubernetesResource").values():
            text = resource["Properties"]["Manifest"]
            parts = [text] if isinstance(text, str) else text["Fn::Join"][1]
            joined = "".join(part if isinstance(part, str) else "FROM-CLOUDFORMATION" for part in parts)
            found += [item for item in json.loads(joined) if item["kind"] == kind]
        (item,) = found
        return item

    def replicated_job(self, name: str) -> dict:
        (jobset,) = [document for document in self.manifests if document["kind"] == "JobSet"]
        (job,) = [job for job in jobset["spec"]["replicatedJobs"] if job["name"] == name]
        return job["template"]["spec"]

    def pod(self, name: str) -> dict:
        return self.replicated_job(name)["template"]["spec"]

    @property
    def limits(self) -> dict:
        (container,) = self.pod("worker")["containers"]
        return container["resources"]["limits"]


@pytest.fixture(scope="module", params=[*SHIPPED, *OTHER_TYPES])
def sides(request, tmp_path_factory):
    name = request.param
    return Sides(SHIPPED.get(name) or with_type(name), tmp_path_factory.mktemp("sides"))


def tolerates(pod: dict, taint: dict) -> bool:
    return any(
        toleration.get("key") == taint["Key"]
        and toleration.get("effect") in (None, EFFECTS[taint["Effect"]])
        and (toleration.get("operator") == "Exists" or toleration.get("value") == taint["Value"])
        for toleration in pod.get("tolerations", [])
    )


def selects(pod: dict, nodes: dict, instance_type: str) -> bool:
    labels = nodes["Labels"] | {"node.kubernetes.io/instance-type": instance_type}
    return pod["nodeSelector"].items() <= labels.items()


def test_workers_tolerate_every_taint_of_the_gpu_nodes_and_select_them_alone(sides):
    worker = sides.pod("worker")
    assert sides.gpu_nodes["Taints"]
    assert all(tolerates(worker, taint) for taint in sides.gpu_nodes["Taints"])
    assert selects(worker, sides.gpu_nodes, sides.launch["InstanceType"])
    assert not selects(worker, sides.system_nodes, sides.deployment.cluster.system_nodes.instance_type)


def test_the_rendezvous_runs_on_system_nodes_away_from_the_gpu_nodes(sides):
    control = sides.pod("control")
    assert "Taints" not in sides.system_nodes
    assert selects(control, sides.system_nodes, sides.deployment.cluster.system_nodes.instance_type)
    assert not selects(control, sides.gpu_nodes, sides.launch["InstanceType"])
    assert not any(tolerates(control, taint) for taint in sides.gpu_nodes["Taints"])


def test_a_worker_asks_for_every_gpu_and_every_efa_device_that_its_node_is_launched_with(sides):
    devices = [nic for nic in sides.launch["NetworkInterfaces"] if nic["InterfaceType"] == "efa-only"]
    assert sides.limits[names.EFA_RESOURCE] == len(devices)
    assert sides.limits[names.GPU_RESOURCE] == sides.deployment.job.instance.gpu_count
    assert sides.gpu_nodes["Labels"][names.EFA_PRESENT_LABEL] == "true"


def test_a_worker_leaves_room_on_its_node(sides):
    instance = sides.deployment.job.instance
    assert sides.launch["InstanceType"] == instance.name
    assert int(sides.limits["hugepages-2Mi"].removesuffix("Mi")) <= AMI_HUGE_PAGES_MIB
    assert int(sides.limits["cpu"]) < instance.vcpu_count
    assert int(sides.limits["memory"].removesuffix("Gi")) * 1024 < instance.memory_mib - AMI_HUGE_PAGES_MIB


def test_there_is_a_node_for_every_worker_and_an_address_for_every_pod_on_it(sides):
    job = sides.replicated_job("worker")
    assert job["parallelism"] == job["completions"] == sides.gpu_nodes["ScalingConfig"]["MaxSize"]
    assert sides.node_config["spec"]["kubelet"]["config"]["maxPods"] >= 1 + DAEMON_PODS


def test_what_pods_write_to_their_node_lands_on_its_nvme_disks(sides):
    assert sides.node_config["spec"]["instance"]["localStorage"]["strategy"] == "RAID0"
    volumes = sides.pod("worker")["volumes"]
    assert [volume for volume in volumes if "emptyDir" in volume]
    assert not [volume for volume in volumes if "hostPath" in volume], "a path of the small root volume"


def test_namespace_claim_and_volume_are_the_ones_that_cdk_installs(sides):
    (claim,) = [document for document in sides.manifests if document["kind"] == "PersistentVolumeClaim"]
    installed, volume = sides.installed("PersistentVolumeClaim"), sides.installed("PersistentVolume")
    assert claim["spec"] == installed["spec"]
    assert claim["metadata"]["name"] == installed["metadata"]["name"] == volume["spec"]["claimRef"]["name"]
    assert installed["spec"]["volumeName"] == volume["metadata"]["name"]
    made = sides.installed("StorageClass")["metadata"]["name"]
    assert installed["spec"]["storageClassName"] == volume["spec"]["storageClassName"] == made
    namespace = sides.installed("Namespace")["metadata"]["name"]
    placed = [document for document in sides.manifests if document["kind"] not in CLUSTER_SCOPED]
    assert {document["metadata"]["namespace"] for document in placed} == {namespace}
    used = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in sides.pod("worker")["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert used == {claim["metadata"]["name"]}


def test_the_volume_is_as_large_as_the_file_system(sides):
    (file_system,) = sides.storage.find_resources("AWS::FSx::FileSystem").values()
    size = f"{file_system['Properties']['StorageCapacity']}Gi"
    assert sides.installed("PersistentVolume")["spec"]["capacity"]["storage"] == size
    assert sides.installed("PersistentVolumeClaim")["spec"]["resources"]["requests"]["storage"] == size


def test_runs_and_data_lie_in_the_folders_that_are_linked_to_s3(sides):
    links = sides.storage.find_resources("AWS::FSx::DataRepositoryAssociation").values()
    linked = {link["Properties"]["FileSystemPath"] for link in links}
    (container,) = sides.pod("worker")["containers"]
    (mount,) = [m["mountPath"] for m in container["volumeMounts"] if m["mountPath"] == names.FSX_MOUNT]
    train = sides.deployment.train
    for path in (train.data.path, train.run_directory, train.checkpoint.directory):
        assert not linked or any(path.startswith(f"{mount}{folder}/") for folder in linked), path

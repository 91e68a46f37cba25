"""What a switch of the job section changes in the manifests: both sides of each."""

import re
from pathlib import Path

import pytest

from config.workload import HARMFUL_ENVIRONMENT, OWNED_ENVIRONMENT
from tests.k8s.shapes import EVERYTHING


def worker_of(render, changed, **job):
    return render(changed("p5-2node", job=job))


def limits(manifests):
    return manifests.container("worker")["resources"]["limits"]


def volume(manifests, name):
    (found,) = [volume for volume in manifests.pod("worker")["volumes"] if volume["name"] == name]
    return found


def test_huge_pages_and_libfabrics_switch_go_together(shipped, render, changed):
    on, off = shipped("p5-2node"), worker_of(render, changed, efa_huge_pages=False)
    assert limits(on)["hugepages-2Mi"] == "5120Mi"
    assert "FI_EFA_USE_HUGE_PAGE" not in on.environment("worker")
    assert "hugepages-2Mi" not in limits(off)
    assert off.environment("worker")["FI_EFA_USE_HUGE_PAGE"] == "0"


def test_shared_memory_holds_two_staged_checkpoints_unless_it_is_given(shipped, render, changed):
    # 8.03e9 parameters x 12 bytes over 16 ranks, 8 of them here, twice: 90 GiB; and 1 GiB for each GPU.
    assert volume(shipped("p5-2node"), "shm")["emptyDir"] == {"medium": "Memory", "sizeLimit": "98Gi"}
    assert volume(worker_of(render, changed, shm_gib=200), "shm")["emptyDir"]["sizeLimit"] == "200Gi"


def test_shards_are_larger_where_fewer_ranks_share_them(render, changed):
    replicated = changed("p5-2node", train={"parallelism": {"dp_replicate": 2}})
    assert volume(render(replicated), "shm")["emptyDir"]["sizeLimit"] == "188Gi"


def test_the_nvme_is_there_where_the_instance_has_some(shipped):
    assert volume(shipped("p5-2node"), "local")["emptyDir"] == {"sizeLimit": "14156Gi"}
    mounts = {mount["name"]: mount["mountPath"] for mount in shipped("p5-2node").container("worker")["volumeMounts"]}
    assert mounts["local"] == "/local"
    assert not [volume for volume in shipped("local").pod("worker")["volumes"] if volume["name"] == "local"]


def test_an_override_reaches_the_ranks_and_wins(render, changed):
    manifests = worker_of(render, changed, environment={"NCCL_DEBUG": "INFO", "NCCL_CROSS_NIC": "1"})
    assert manifests.environment("worker")["NCCL_DEBUG"] == "INFO"
    assert manifests.environment("worker")["NCCL_CROSS_NIC"] == "1"
    assert "NCCL_CROSS_NIC" not in manifests.environment("control")


def test_no_container_sets_what_is_refused(manifests):
    for job in manifests.jobs().values():
        for container in job["template"]["spec"]["containers"]:
            names = {variable["name"] for variable in container.get("env", [])}
            assert not {name for name in names if name in HARMFUL_ENVIRONMENT}
            assert not names & (OWNED_ENVIRONMENT.keys() - {"GROUP_RANK", "NCCL_NVLS_ENABLE"}) - {
                "TORCH_NCCL_RETHROW_CUDA_ERRORS"
            }


def affinity(manifests):
    return manifests.pod("worker")["affinity"].get("podAffinity")


def test_topology_is_a_wish_a_must_or_nothing(shipped, render, changed):
    layer = "topology.k8s.aws/network-node-layer-3"
    assert list(affinity(shipped("p5-2node"))) == ["preferredDuringSchedulingIgnoredDuringExecution"]
    (term,) = affinity(worker_of(render, changed, placement={"topology": "required"}))[
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert term["topologyKey"] == layer
    assert affinity(worker_of(render, changed, placement={"topology": "none"})) is None


def annotations(manifests):
    return manifests.job("worker")["template"]["metadata"]["annotations"]


@pytest.mark.parametrize("wish", ["preferred", "required"])
def test_kueues_topology_takes_the_place_of_affinity(render, changed, wish):
    kueue = {"local_queue": "research", "topology_aware": True}
    manifests = worker_of(render, changed, kueue=kueue, placement={"topology": wish})
    assert affinity(manifests) is None
    assert annotations(manifests)[f"kueue.x-k8s.io/podset-{wish}-topology"] == "topology.k8s.aws/network-node-layer-3"


@pytest.mark.parametrize("kind", ["jobset", "indexed_job"])
def test_the_queue_gets_the_workload(shipped, render, changed, kind):
    kueue = {"local_queue": "research", "cluster_queue": "gpus"}
    manifests = worker_of(render, changed, kind=kind, kueue=kueue)
    workloads = manifests.all("JobSet") or manifests.all("Job")
    assert {workload["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] for workload in workloads} == {"research"}
    queue = manifests.only("LocalQueue")
    assert (queue["metadata"]["name"], queue["spec"]) == ("research", {"clusterQueue": "gpus"})
    assert not shipped("p5-2node").all("LocalQueue")
    assert "kueue.x-k8s.io/queue-name" not in shipped("p5-2node").only("JobSet")["metadata"]["labels"]


def test_a_queue_that_is_there_is_only_named(render, changed):
    assert not worker_of(render, changed, kueue={"local_queue": "research"}).all("LocalQueue")


def test_the_default_priority_class_comes_along_and_another_is_only_named(shipped, render, changed):
    assert shipped("p5-2node").only("PriorityClass")["metadata"]["name"] == "training-high"
    assert shipped("p5-2node").pod("worker")["priorityClassName"] == "training-high"
    gold = worker_of(render, changed, placement={"priority_class": "gold"})
    assert (gold.pod("control")["priorityClassName"], gold.all("PriorityClass")) == ("gold", [])
    none = worker_of(render, changed, placement={"priority_class": None})
    assert "priorityClassName" not in none.pod("worker")
    assert not none.all("PriorityClass")


def test_without_root_init_containers_the_workers_meet_the_restricted_profile(shipped, render, changed):
    assert shipped("p5-2node").pod("worker")["initContainers"]
    manifests = worker_of(render, changed, directories="one_shot_job")
    pod = manifests.pod("worker")
    assert "initContainers" not in pod
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = pod["containers"][0]["securityContext"]
    assert (security["allowPrivilegeEscalation"], security["capabilities"]) == (False, {"drop": ["ALL"]})
    assert {next(iter(volume.keys() - {"name"})) for volume in pod["volumes"]} <= {
        "configMap",
        "emptyDir",
        "persistentVolumeClaim",
    }


def test_the_grace_period_may_be_longer_than_the_launchers(shipped, render, changed):
    assert shipped("p5-2node").pod("worker")["terminationGracePeriodSeconds"] == 180
    longer = worker_of(render, changed, termination_grace_period_seconds=600)
    assert longer.pod("worker")["terminationGracePeriodSeconds"] == 600


def test_the_quota_is_what_the_job_needs(shipped, render, changed):
    quota = worker_of(render, changed, resource_quota=True).only("ResourceQuota")
    assert quota["spec"]["hard"] == {"requests.nvidia.com/gpu": 24, "requests.vpc.amazonaws.com/efa": 96}
    assert not shipped("p5-2node").all("ResourceQuota")


# Monitoring


@pytest.fixture
def monitored(render, changed):
    return worker_of(render, changed, monitoring={"namespace": "prometheus", "labels": {"team": "research"}})


def test_prometheus_finds_the_workers_port_and_may_reach_it(shipped, monitored):
    monitor = monitored.only("PodMonitor")
    assert monitor["metadata"]["labels"]["team"] == "research"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (port,) = monitored.container("worker")["ports"]
    assert endpoint["port"] == port["name"]
    labels = monitored.job("worker")["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    _, rule = monitored.only("NetworkPolicy")["spec"]["ingress"]
    assert rule["ports"] == [{"port": port["containerPort"], "protocol": "TCP"}]
    (source,) = rule["from"]
    assert source["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "prometheus"}


def test_without_monitoring_nothing_of_it_is_there(shipped):
    assert not shipped("p5-2node").all("PodMonitor") + shipped("p5-2node").all("PrometheusRule")
    assert "ports" not in shipped("p5-2node").container("worker")
    assert len(shipped("p5-2node").only("NetworkPolicy")["spec"]["ingress"]) == 1


@pytest.mark.parametrize("kind", ["jobset", "indexed_job"])
def test_alerts_select_this_jobs_jobs_and_pods(render, changed, kind):
    manifests = worker_of(render, changed, kind=kind, monitoring={})
    (group,) = manifests.only("PrometheusRule")["spec"]["groups"]
    suffix = "-0" if kind == "jobset" else ""
    expressions = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    assert set(expressions) == {
        "TrainingJobFailed",
        "TrainingNodesMissing",
        "TrainingPodsFailing",
        "TrainingPodStuckTerminating",
    }
    for expression in expressions.values():
        assert expression.count("(") == expression.count(")")
        assert 'namespace="training"' in expression
    # As Prometheus matches: anchored at both ends.
    for pattern in re.findall(r'job_name=~"([^"]*)"', expressions["TrainingJobFailed"]):
        assert all(re.fullmatch(pattern, f"llama-8b-{job}{suffix}") for job in ("worker", "control"))
        assert not re.fullmatch(pattern, "llama-8b-2-worker-0")
    (pattern,) = re.findall(r'pod=~"([^"]*)"', expressions["TrainingPodStuckTerminating"])
    assert re.fullmatch(pattern, f"llama-8b-worker{suffix}-2-x7k2p")


def test_every_alert_is_in_the_runbook(monitored):
    runbook = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()
    (group,) = monitored.only("PrometheusRule")["spec"]["groups"]
    for rule in group["rules"]:
        assert f"**{rule['alert']}** ({rule['labels']['severity']})" in runbook


def test_everything_at_once_is_still_one_job(render, changed):
    manifests = worker_of(render, changed, **EVERYTHING)
    assert {"JobSet", "PodMonitor", "PrometheusRule", "ResourceQuota", "LocalQueue"} <= {
        document["kind"] for document in manifests.documents
    }

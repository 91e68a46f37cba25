"""Rendered manifests against a real API server, its Job controller and its scheduler.

No kubelet: pods' ends are written into their status, as a kubelet would. conftest.py says what each test needs.
"""

import uuid

import pytest

from config.deployment import load
from config.worker import worker_resources
from k8s import rules, server_pod_rules, server_rules
from tests.k8s.conftest import DEPLOYMENTS, changed, render, shipped  # noqa: F401  fixtures
from tests.k8s.shapes import CHARTS, with_preparation
from tests.k8s.test_rules import BREACHES, changed_at, whole

# Kinds of controllers that these binaries do not bring; a JobSet's templates are applied as Jobs.
CUSTOM = {"LocalQueue", "PodMonitor", "PrometheusRule"}
# Refused by JobSet's webhook or by the kubelet, or by nobody in every version.
NOT_THIS_SERVERS = {
    server_rules.jobset_targets,
    server_rules.jobset_pod_names,
    server_pod_rules.user_may_run,
    server_pod_rules.container_ports,
    server_pod_rules.environment_names,
}
SERVERS = [
    breach[1:4]
    for breach in BREACHES
    if breach[0].__module__ != "k8s.project_rules" and breach[0] not in NOT_THIS_SERVERS
]


def load_named(name, namespace="training"):
    deployment = load(next(path for path in DEPLOYMENTS if path.stem == name))
    return deployment.model_copy(update={"job": deployment.job.model_copy(update={"namespace": namespace})})


def as_known(document):
    """What a server without custom resources can judge: a JobSet's templates as Jobs."""
    if document["kind"] == "JobSet":
        name, namespace = document["metadata"]["name"], document["metadata"]["namespace"]
        return [
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": f"{name}-{job['name']}-0", "namespace": namespace},
                "spec": job["template"]["spec"],
            }
            for job in document["spec"]["replicatedJobs"]
        ]
    return [] if document["kind"] in CUSTOM else [document]


@pytest.fixture
def training(cluster):
    """The manifests' own namespace, for what is only tried."""
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "training"}})


@pytest.fixture
def namespace(cluster):
    """A namespace of the test's own, for what is really made."""
    name = f"training-{uuid.uuid4().hex[:8]}"
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield name
    cluster.run("delete", "pods", "--all", "-n", name, "--grace-period=0", "--force", "--wait=false")
    cluster.run("delete", "namespace", name, "--wait=false")


@pytest.mark.parametrize("chart", CHARTS)
@pytest.mark.parametrize("name", [path.stem for path in DEPLOYMENTS])
def test_the_server_accepts_every_manifest(cluster, training, render, name, chart):  # noqa: F811
    for document in render(with_preparation(load_named(name)), chart).documents:
        for known in as_known(document):
            cluster.apply(known, dry_run=True)


@pytest.mark.parametrize(("kind", "path", "value"), SERVERS)
def test_the_server_refuses_what_the_rules_refuse(
    cluster,
    training,
    shipped,  # noqa: F811
    render,  # noqa: F811
    changed,  # noqa: F811
    kind,
    path,
    value,
):
    document = changed_at(whole(kind, shipped, render, changed), path, value)
    assert list(rules.broken(document))
    outcomes = [cluster.apply(known, dry_run=True, check=False).returncode for known in as_known(document)]
    assert any(outcomes)


@pytest.fixture
def workers(controllers, namespace, render):  # noqa: F811
    """The workers' Job of p5-2node, applied: namespace and name."""
    documents = render(load_named("p5-2node", namespace)).documents
    (jobset,) = [document for document in documents if document["kind"] == "JobSet"]
    job = as_known(jobset)[1]
    account = next(document for document in documents if document["kind"] == "ServiceAccount")
    priority = next(document for document in documents if document["kind"] == "PriorityClass")
    for document in (priority, account, job):
        controllers.apply(document)
    return namespace, job["metadata"]["name"]


def pods(cluster, job):
    """The job's pods that are not over, by completion index."""
    namespace, name = job
    found = cluster.get("pods", "-n", namespace, "-l", f"batch.kubernetes.io/job-name={name}")["items"]
    alive = [pod for pod in found if pod.get("status", {}).get("phase") not in ("Failed", "Succeeded")]
    return {int(pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]): pod for pod in alive}


def started(cluster, job, count=3):
    return cluster.wait_for(lambda: len(found := pods(cluster, job)) == count and found, f"{count} pods")


def end(cluster, pod, exit_code, *, disrupted=False):
    """Write a pod's end into its status, as its kubelet does."""
    state = {"terminated": {"exitCode": exit_code, "finishedAt": "2030-01-01T00:00:00Z", "reason": "Test"}}
    status = {
        "phase": "Succeeded" if exit_code == 0 else "Failed",
        "containerStatuses": [
            {"name": "trainer", "image": "x", "imageID": "x", "ready": False, "restartCount": 0, "state": state}
        ],
    }
    if disrupted:
        status["conditions"] = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]
    metadata = pod["metadata"]
    cluster.patch_status("pod", metadata["name"], metadata["namespace"], {"status": status})


def condition(cluster, job, kind):
    namespace, name = job
    conditions = cluster.get("job", name, "-n", namespace).get("status", {}).get("conditions", [])
    return next((found for found in conditions if found["type"] == kind and found["status"] == "True"), None)


def test_a_failed_index_gets_a_new_pod_of_the_same_index(controllers, workers):
    before = started(controllers, workers)
    end(controllers, before[1], 1)
    after = started(controllers, workers)
    assert after[1]["metadata"]["uid"] != before[1]["metadata"]["uid"]
    assert after[1]["metadata"]["annotations"]["batch.kubernetes.io/job-index-failure-count"] == "1"


def test_a_disrupted_pod_is_replaced_and_not_counted(controllers, workers):
    before = started(controllers, workers)
    end(controllers, before[0], 143, disrupted=True)
    after = started(controllers, workers)
    annotations = after[0]["metadata"]["annotations"]
    assert annotations.get("batch.kubernetes.io/job-index-failure-count", "0") == "0"
    assert annotations.get("batch.kubernetes.io/job-index-ignored-failure-count") == "1"


@pytest.mark.parametrize("code", [2, 93])
def test_a_code_that_no_restart_can_mend_fails_the_job(controllers, workers, code):
    end(controllers, started(controllers, workers)[2], code)
    failed = controllers.wait_for(lambda: condition(controllers, workers, "Failed"), "the job's failure")
    assert failed["reason"] == "PodFailurePolicy"


def test_the_job_succeeds_with_n_workers_although_its_spare_has_failed(controllers, workers):
    found = started(controllers, workers)
    for failures in range(1, 5):  # backoffLimitPerIndex is 3
        end(controllers, found[2], 1)
        if failures < 4:
            found = started(controllers, workers)
    for index in (0, 1):
        end(controllers, found[index], 0)
    complete = controllers.wait_for(lambda: condition(controllers, workers, "SuccessCriteriaMet"), "success")
    assert complete["reason"] == "SuccessPolicy"


def test_one_worker_lands_on_each_node_shaped_like_a_p5(scheduler, namespace, render):  # noqa: F811
    deployment = load_named("p5-2node", namespace)
    resources = worker_resources(deployment.job, deployment.train)
    capacity = {
        "cpu": "191",
        "memory": "2000Gi",
        "pods": "51",
        "nvidia.com/gpu": str(resources.gpu_count),
        "vpc.amazonaws.com/efa": str(resources.efa_count),
        "hugepages-2Mi": f"{resources.huge_pages_mib}Mi",
    }
    nodes = [f"p5-{number}" for number in range(3)]
    for name in nodes:
        labels = {"node.kubernetes.io/instance-type": "p5.48xlarge", "kubernetes.io/hostname": name}
        taints = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        scheduler.apply(node | {"spec": {"taints": taints}})
        scheduler.patch_status("node", name, "", {"status": {"capacity": capacity, "allocatable": capacity}})
    documents = render(deployment).documents
    claim = next(document for document in documents if document["kind"] == "PersistentVolumeClaim")
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": claim["spec"]["volumeName"]},
        "spec": {
            "capacity": claim["spec"]["resources"]["requests"],
            "accessModes": claim["spec"]["accessModes"],
            "nfs": {"server": "127.0.0.1", "path": "/"},
        },
    }
    (jobset,) = [document for document in documents if document["kind"] == "JobSet"]
    wanted = [document for document in documents if document["kind"] in ("ServiceAccount", "PriorityClass")]
    for document in [volume, claim, *wanted, as_known(jobset)[1]]:
        scheduler.apply(document)

    def placed():
        found = pods(scheduler, (namespace, as_known(jobset)[1]["metadata"]["name"]))
        return sorted(pod["spec"].get("nodeName", "") for pod in found.values())

    assert scheduler.wait_for(lambda: len(names := placed()) == 3 and all(names) and names, "placement") == nodes

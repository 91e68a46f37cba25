"""The Jobs that run once before training: preflight, directories, data."""

import pytest

from config.deployment import load
from k8s.data_job import DIRECTORIES, PREPARE_DATA
from k8s.preflight_job import PREFLIGHT
from tests.k8s.conftest import DEPLOYMENTS
from tests.k8s.shapes import with_preparation
from training import prepare_data
from training.preflight import __main__ as preflight_main
from training.supervisor import parse_arguments


@pytest.fixture(params=[path.stem for path in DEPLOYMENTS])
def preflight(request, shipped):
    return shipped(request.param, PREFLIGHT)


@pytest.fixture
def preparation(render):
    return render(with_preparation(load(next(path for path in DEPLOYMENTS if path.stem == "p5-2node"))), PREPARE_DATA)


def options(container):
    return dict(word.removeprefix("--").split("=", 1) for word in container["args"] if "=" in word)


def test_preflight_takes_every_node_of_the_job_with_a_workers_resources(preflight, shipped):
    deployment = preflight.deployment
    spec, training = preflight.job(PREFLIGHT), shipped(deployment.name)
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == deployment.job.pod_count
    assert preflight.container(PREFLIGHT)["resources"] == training.container("worker")["resources"]
    for field in ("nodeSelector", "tolerations", "securityContext", "priorityClassName"):
        assert preflight.pod(PREFLIGHT).get(field) == training.pod("worker").get(field)
    for name in ("shm", "fsx", "tmp"):
        (ours,) = [volume for volume in preflight.pod(PREFLIGHT)["volumes"] if volume["name"] == name]
        assert ours in training.pod("worker")["volumes"]


def test_preflight_pods_stay_on_different_nodes(shipped):
    manifests = shipped("p5-2node", PREFLIGHT)
    (apart,) = manifests.pod(PREFLIGHT)["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    labels = manifests.job(PREFLIGHT)["template"]["metadata"]["labels"]
    assert apart["labelSelector"]["matchLabels"].items() <= labels.items()


def test_preflight_pods_meet_at_the_first_of_them(preflight):
    service, job = preflight.only("Service"), preflight.only("Job")
    environment = preflight.environment(PREFLIGHT)
    name, index = job["metadata"]["name"], preflight.container(PREFLIGHT)["env"][1]
    assert service["metadata"]["name"] == preflight.pod(PREFLIGHT)["subdomain"] == name
    assert environment["MASTER_ADDR"] == f"{name}-0.{name}"
    assert int(environment["MASTER_PORT"]) == service["spec"]["ports"][0]["port"]
    assert int(environment["WORLD_SIZE"]) == job["spec"]["completions"]
    assert index["name"] == "RANK"
    assert "job-completion-index" in index["valueFrom"]["fieldRef"]["fieldPath"]


def test_preflight_expects_what_the_instance_has(shipped):
    manifests = shipped("p5-2node", PREFLIGHT)
    assert options(manifests.container(PREFLIGHT)) == {
        "expect-gpus": "8",
        "expect-efa": "32",
        "mount": "/fsx",
        "results": "/fsx/runs/llama-8b/preflight",
        "expect-hugepages-mib": "5120",
        "min-shm-mib": str(98 * 1024),
        "expect-filesystem": "lustre",
    }
    local = options(shipped("local", PREFLIGHT).container(PREFLIGHT))
    assert (local["expect-gpus"], local["expect-efa"], local["expect-hugepages-mib"]) == ("0", "0", "0")
    assert "expect-filesystem" not in local


def test_the_preflight_module_takes_these_arguments(preflight):
    command = parse_arguments(preflight.container(PREFLIGHT)["args"]).command
    instance = preflight.deployment.job.instance
    assert command[:3] == ["python", "-m", "training.preflight"]
    assert preflight_main.parse_arguments(command[3:]).expect_gpus == (instance.gpu_count if instance else 0)


def test_an_unfit_node_is_not_tried_again_and_the_others_finish(preflight):
    spec = preflight.job(PREFLIGHT)
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailIndex"
    assert rule["onExitCodes"]["values"] == [94]
    assert "maxFailedIndexes" not in spec  # else the first one would end the rest
    assert spec["backoffLimitPerIndex"] == 1


def test_preflight_ends_by_itself_and_is_cleaned_up(preflight):
    spec = preflight.job(PREFLIGHT)
    assert spec["activeDeadlineSeconds"] == 3600
    assert spec["ttlSecondsAfterFinished"] == 86_400


def test_directories_are_those_that_an_init_container_would_make(shipped):
    (step,) = shipped("p5-2node").pod("worker")["initContainers"]
    manifests = shipped("p5-2node", DIRECTORIES)
    assert manifests.container(DIRECTORIES) == step
    assert manifests.pod(DIRECTORIES)["nodeSelector"] == {"node-role": "system"}


def test_data_preparation_takes_the_arguments_that_the_tokenizer_has(preparation):
    command = parse_arguments(preparation.container(PREPARE_DATA)["args"]).command
    assert command[:3] == ["python", "-m", "training.prepare_data"]
    arguments = prepare_data._parser().parse_args(command[3:])
    train = preparation.deployment.train
    assert (str(arguments.input), str(arguments.out)) == ("/fsx/data/raw", train.data.path)
    assert (arguments.pattern, arguments.exclude, arguments.tokenizer) == ("*", ["*.md", ".git"], train.data.tokenizer)


def test_data_preparation_may_write_beside_the_corpus_and_stays_off_gpu_nodes(preparation):
    pod = preparation.pod(PREPARE_DATA)
    (step,) = pod["initContainers"]
    assert step["args"] == ["/fsx/data"]
    assert "tolerations" not in pod
    assert pod["nodeSelector"] == {"node-role": "system"}


def test_wrong_arguments_are_not_tried_again(preparation):
    first, second = preparation.job(PREPARE_DATA)["podFailurePolicy"]["rules"]
    assert (first["action"], first["onExitCodes"]["values"]) == ("FailJob", [2])
    assert second["action"] == "Ignore"


@pytest.mark.parametrize("chart", [PREFLIGHT, DIRECTORIES])
def test_what_runs_once_needs_nothing_of_the_training_jobs_chart(shipped, chart):
    manifests = shipped("p5-2node", chart)
    assert "serviceAccountName" not in manifests.pod(chart)
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in manifests.pod(chart)["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == {manifests.only("PersistentVolumeClaim")["metadata"]["name"]}

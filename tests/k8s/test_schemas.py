"""Every object of every shipped deployment against Kubernetes' strict schemas, and what only an API server refuses."""

import copy
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from k8s import storage
from tests.k8s.server_rules import violations

KUBERNETES_VERSION = "1.36"
JOBSET_SCHEMA = yaml.safe_load((Path(__file__).parent / "jobset_schema.yaml").read_text())


def check(document):
    """Raises on an unknown field, a wrong type, or a kind that has no schema."""
    if document["kind"] != "JobSet":
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
        return
    jsonschema.validate(document, JOBSET_SCHEMA)
    for job in document["spec"]["replicatedJobs"]:
        check({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]})


def test_every_object_is_valid(manifests):
    assert manifests.documents
    for document in manifests.documents:
        check(document)


def test_no_object_breaks_a_rule_of_the_api_server(manifests):
    assert {document["kind"]: violations(document) for document in manifests.documents} == {
        document["kind"]: [] for document in manifests.documents
    }


def test_every_object_is_named_once_and_has_its_namespace(manifests):
    names = [(document["kind"], document["metadata"]["name"]) for document in manifests.documents]
    assert len(set(names)) == len(names)
    namespaces = {
        document["metadata"].get("namespace", document["metadata"]["name"])
        for document in manifests.documents
        if document["kind"] not in ("PersistentVolume", "StorageClass")  # of the whole cluster
    }
    assert namespaces == {manifests.deployment.job.namespace}


@pytest.mark.parametrize("cluster", [True, False])
def test_the_other_shapes_are_valid_too(render, changed, cluster):
    largest = {"name": "a" * 40, "node_count": 16, "spare_count": 4, "run_as_user": 0}
    for document in render(changed("p5-2node", cluster=cluster, job=largest)).documents:
        check(document)
        assert violations(document) == []


def fsx_objects():
    volume = storage.fsx_volume(
        namespace="training", file_system_id="fs-1", dns_name="fs-1.example", mount_name="abc", capacity_gib=4800
    )
    return [volume, storage.fsx_claim(namespace="training", capacity_gib=4800)]


def test_the_fsx_volume_and_its_claim_are_valid():
    for document in fsx_objects():
        check(document)
        assert violations(document) == []


def test_a_kind_without_a_schema_is_a_failure():
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        check({"apiVersion": "example.org/v1", "kind": "Nothing", "metadata": {"name": "x"}})


def at(document, path):
    for key in path:
        document = document[key]
    return document


JOB = ("spec", "replicatedJobs", 1, "template", "spec")
POD = (*JOB, "template", "spec")
CONTAINER = (*POD, "containers", 0)
LIMITS = (*CONTAINER, "resources", "limits")
REQUESTS = (*CONTAINER, "resources", "requests")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "unknown"), 1),
        (("spec", "failurePolicy", "maxRestarts"), "5"),
        (("spec", "failurePolicy", "restartStrategy"), "Blocking"),
        (("spec", "failurePolicy", "rules", 0, "onJobFailureReasons"), ["PodFailed"]),
        (("spec", "replicatedJobs", 1, "dependsOn", 0, "status"), "Running"),
        ((*JOB, "completions"), "3"),
        ((*JOB, "max_failed_indexes"), 1),
        ((*CONTAINER, "envs"), []),
        ((*CONTAINER, "env", 0, "value"), 4),
    ],
)
def test_the_schemas_catch(shipped, path, value):
    document = copy.deepcopy(shipped("p5-2node").only("JobSet"))
    at(document, path[:-1])[path[-1]] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(document)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*POD, "restartPolicy"), "Always"),
        ((*POD, "restartPolicy"), "OnFailure"),
        ((*POD, "restartPolicy"), "never"),
        ((*JOB, "completionMode"), "NonIndexed"),
        ((*JOB, "backoffLimitPerIndex"), None),
        ((*JOB, "podReplacementPolicy"), "TerminatingOrFailed"),
        ((*JOB, "maxFailedIndexes"), 4),
        ((*JOB, "successPolicy", "rules", 0, "succeededCount"), 4),
        ((*JOB, "podFailurePolicy", "rules", 0, "onExitCodes", "values"), [0, 2]),
        ((*JOB, "podFailurePolicy", "rules", 0, "onExitCodes", "values"), [93, 2]),
        ((*JOB, "podFailurePolicy", "rules", 0, "onExitCodes", "containerName"), "worker"),
        ((*LIMITS, "nvidia.com/gpu"), None),
        ((*LIMITS, "nvidia.com/gpu"), 4),
        ((*LIMITS, "memory"), "1800GiB"),
        ((*REQUESTS, "cpu"), "180 cores"),
        ((*POD, "volumes", 0, "name"), "other"),
        ((*CONTAINER, "env", 0, "name"), "1 IP"),
        ((*CONTAINER, "name"), "Trainer"),
        (("metadata", "name"), "Llama"),
        (("metadata", "name"), "a" * 60),
        (("metadata", "labels"), {"app": "x" * 64}),
        ((*POD, "volumes", 2, "emptyDir", "sizeLimit"), "448GiB"),
        ((*POD, "initContainers", 0, "securityContext", "runAsNonRoot"), True),
        (("spec", "replicatedJobs", 1, "dependsOn", 0, "name"), "worker"),
        (("spec", "successPolicy", "targetReplicatedJobs"), ["trainer"]),
        (("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0, "ports"), []),
    ],
)
def test_the_rules_catch(shipped, path, value):
    document = copy.deepcopy(shipped("p5-2node").only("JobSet"))
    if value is None:
        del at(document, path[:-1])[path[-1]]
    else:
        at(document, path[:-1])[path[-1]] = value
    assert violations(document)


def test_the_rules_catch_half_a_gpu_and_huge_pages_alone(shipped):
    document = copy.deepcopy(shipped("p5-2node").only("JobSet"))
    half = at(document, (*CONTAINER, "resources"))
    half["limits"]["nvidia.com/gpu"] = half["requests"]["nvidia.com/gpu"] = "500m"
    assert violations(document)
    at(document, CONTAINER)["resources"] = {"limits": {"hugepages-2Mi": "4Mi"}, "requests": {"hugepages-2Mi": "4Mi"}}
    assert violations(document)


def test_the_rules_catch_a_volume_with_two_sources():
    volume, claim = fsx_objects()
    volume["spec"]["nfs"] = {"server": "x", "path": "/"}
    del claim["spec"]["resources"]
    assert violations(volume)
    assert violations(claim)

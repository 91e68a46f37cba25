"""Every object of every deployment, shape and chart against the rules and four Kubernetes versions' strict schemas."""

import copy
import functools
import json
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from config.deployment import load
from k8s import rules, storage
from k8s.data_job import PREPARE_DATA
from tests.k8s.conftest import DEPLOYMENTS
from tests.k8s.shapes import CHARTS, SHAPES, drill_runs, with_preparation

KUBERNETES_VERSIONS = ("1.33", "1.34", "1.35", "1.36")
# Ours, by kind; see the top of each. Everything else must be known to Kubernetes.
OWN_SCHEMAS = {
    kind: yaml.safe_load((Path(__file__).parent / "schemas" / f"{kind.lower()}.yaml").read_text())
    for kind in ("JobSet", "LocalQueue", "PodMonitor", "PrometheusRule")
}


def check(document, version="1.36"):
    """Raises on an unknown field, a wrong type, or a kind that has no schema."""
    schema = OWN_SCHEMAS.get(document["kind"])
    if schema is None:
        kubernetes_validate.validate(document, version, strict=True)
        return
    jsonschema.validate(document, schema)
    if document["kind"] == "JobSet":
        for job in document["spec"]["replicatedJobs"]:
            check(
                {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}, version
            )


@functools.cache
def check_once(text, version):
    """The same object, such as the claim, is in many charts."""
    check(json.loads(text), version)


def check_all(manifests):
    assert manifests.documents
    for document in manifests.documents:
        assert list(rules.broken(document)) == []
        for version in KUBERNETES_VERSIONS:
            check_once(json.dumps(document, sort_keys=True), version)


@pytest.mark.parametrize("chart", CHARTS)
@pytest.mark.parametrize("name", [path.stem for path in DEPLOYMENTS])
def test_every_chart_of_every_shipped_deployment_is_valid(render, name, chart):
    deployment = load(next(path for path in DEPLOYMENTS if path.stem == name))
    check_all(render(with_preparation(deployment) if chart == PREPARE_DATA else deployment, chart))


@pytest.mark.parametrize("chart", CHARTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_chart_of_every_shape_is_valid(render, changed, shape, chart):
    job, cluster = SHAPES[shape]
    deployment = changed("p5-2node", cluster=cluster, job=job, train={"global_batch_size": 256 * 9 * 5})
    check_all(render(with_preparation(deployment) if chart == PREPARE_DATA else deployment, chart))


@pytest.mark.parametrize("name", ["local", "p5-2node"])
def test_both_runs_of_a_drill_are_valid(render, name):
    deployment = load(next(path for path in DEPLOYMENTS if path.stem == name))
    for run in drill_runs(deployment):
        check_all(render(run))


def test_every_object_is_named_once_and_has_its_namespace(manifests):
    names = [(document["kind"], document["metadata"]["name"]) for document in manifests.documents]
    assert len(set(names)) == len(names)
    cluster_wide = {"Namespace", "PriorityClass", "PersistentVolume", "StorageClass"}
    namespaces = {
        document["metadata"].get("namespace")
        for document in manifests.documents
        if document["kind"] not in cluster_wide
    }
    assert namespaces == {manifests.deployment.job.namespace}


def test_the_fsx_volume_and_its_claim_are_valid():
    volume = storage.fsx_volume(
        namespace="training", file_system_id="fs-1", dns_name="fs-1.example", mount_name="abc", capacity_gib=4800
    )
    for document in (volume, storage.fsx_claim(namespace="training", capacity_gib=4800)):
        assert list(rules.broken(document)) == []
        for version in KUBERNETES_VERSIONS:
            check(document, version)


def test_a_kind_without_a_schema_is_a_failure():
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        check({"apiVersion": "example.org/v1", "kind": "Nothing", "metadata": {"name": "x"}})


JOB = ("spec", "replicatedJobs", 1, "template", "spec")
CONTAINER = (*JOB, "template", "spec", "containers", 0)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("JobSet", ("spec", "unknown"), 1),
        ("JobSet", ("spec", "failurePolicy", "maxRestarts"), "5"),
        ("JobSet", ("spec", "failurePolicy", "restartStrategy"), "Blocking"),
        ("JobSet", ("spec", "failurePolicy", "rules", 0, "onJobFailureReasons"), ["PodFailed"]),
        ("JobSet", ("spec", "replicatedJobs", 1, "dependsOn", 0, "status"), "Running"),
        ("JobSet", ("apiVersion",), "jobset.x-k8s.io/v1"),
        ("JobSet", (*JOB, "completions"), "3"),
        ("JobSet", (*JOB, "max_failed_indexes"), 1),
        ("JobSet", (*CONTAINER, "envs"), []),
        ("JobSet", (*CONTAINER, "env", 0, "value"), 4),
        ("LocalQueue", ("spec", "clusterQueue"), "Gpus"),
        ("LocalQueue", ("spec", "namespaceSelector"), {}),
        ("PodMonitor", ("spec", "podMetricsEndpoints", 0, "targetport"), 9464),
        ("PodMonitor", ("spec", "selector"), {"app": "x"}),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "for"), "five minutes"),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "expression"), "up"),
        ("NetworkPolicy", ("spec", "podselector"), {}),
    ],
)
def test_the_schemas_catch(render, changed, kind, path, value):
    manifests = render(changed("p5-2node", job=SHAPES["everything"][0]))
    document = copy.deepcopy(manifests.only(kind))
    check(document)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(document)

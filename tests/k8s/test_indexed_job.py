"""The workload without the JobSet controller, and the store inside a worker."""

import json
import os
import subprocess

import pytest

from k8s import launcher
from tests.k8s.shapes import EMBEDDED
from training.supervisor import parse_arguments


@pytest.fixture
def indexed(render, changed):
    return render(changed("p5-2node", job={"kind": "indexed_job"}))


def embedded(render, changed, **job):
    return render(changed("p5-2node", job=EMBEDDED | job))


def option(words, name):
    (value,) = [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]
    return value


def test_both_kinds_run_the_same_pods(shipped, indexed):
    jobset = shipped("p5-2node")
    for name in ("control", "worker"):
        ours, theirs = dict(indexed.pod(name)), jobset.pod(name)
        assert ours.pop("subdomain") == "llama-8b"
        # A JobSet's Jobs have a number, too.
        assert ours == json.loads(json.dumps(theirs).replace("llama-8b-control-0-0.", "llama-8b-control-0."))


def test_the_jobs_differ_only_in_how_often_they_may_fail(shipped, indexed):
    jobset = shipped("p5-2node")
    worker, in_set = dict(indexed.job("worker")), dict(jobset.job("worker"))
    assert worker.pop("backoffLimitPerIndex") == in_set.pop("backoffLimitPerIndex") + 5
    for spec in (worker, in_set):
        del spec["template"]
    assert worker == in_set


def test_a_lost_store_is_replaced_and_a_disruption_of_it_is_not_counted(indexed):
    control = indexed.job("control")
    assert control["backoffLimit"] == indexed.deployment.train.restarts.job.max_restarts
    assert [rule["action"] for rule in control["podFailurePolicy"]["rules"]] == ["FailJob", "Ignore"]


def test_the_service_gives_every_pod_a_name_before_it_is_ready(indexed):
    service = indexed.only("Service")
    assert service["metadata"]["name"] == indexed.pod("worker")["subdomain"] == "llama-8b"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    for name in ("control", "worker"):
        labels = indexed.job(name)["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()


def test_the_endpoint_is_the_name_of_a_pod_that_the_jobs_make(shipped, indexed, render, changed):
    def endpoint(manifests):
        return option(manifests.container("worker")["args"], "rdzv-endpoint")

    assert endpoint(shipped("p5-2node")) == "llama-8b-control-0-0.llama-8b:29500"
    assert endpoint(indexed) == "llama-8b-control-0.llama-8b:29500"
    assert endpoint(embedded(render, changed)) == "llama-8b-worker-0-0.llama-8b:29500"
    assert endpoint(embedded(render, changed, kind="indexed_job")) == "llama-8b-worker-0.llama-8b:29500"


@pytest.mark.parametrize("kind", ["jobset", "indexed_job"])
def test_with_the_embedded_store_there_is_no_control_and_nobody_waits_for_it(render, changed, kind):
    manifests = embedded(render, changed, kind=kind)
    assert list(manifests.jobs()) == ["worker"]
    for jobset in manifests.all("JobSet"):
        assert "dependsOn" not in jobset["spec"]["replicatedJobs"][0]


def test_the_embedded_stores_launcher_is_told_by_its_index(render, changed):
    command = parse_arguments(embedded(render, changed).container("worker")["args"]).command
    shell, dash_c, script, waits, *rest = command
    assert (shell, dash_c) == ("sh", "-c")
    assert "$(" not in script  # the kubelet would take it for one of its variables
    assert waits == "join_timeout=1800,last_call_timeout=15,store_connect_wait_seconds=1800"
    assert rest[-3:] == ["-m", "training.train", "--config=/etc/training/train.json"]


@pytest.mark.parametrize(("index", "is_host"), [("0", "1"), ("1", "0"), ("10", "0")])
def test_exactly_index_0_holds_the_embedded_store(tmp_path, monkeypatch, changed, index, is_host):
    """The real shell, with a launcher that only prints what it was given."""
    fake = tmp_path / "ft_launcher"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    deployment = changed("p5-2node", job=EMBEDDED)
    command = launcher.worker_command(deployment, launcher.cluster_site(deployment))
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "GROUP_RANK": index}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    conf, *rest = done.stdout.splitlines()
    assert conf.startswith(f"--rdzv-conf=is_host={is_host},join_timeout=1800,")
    assert rest[-1] == "--config=/etc/training/train.json"
    assert option(rest, "nnodes") == "2:5"

"""Random valid deployments: each renders, and Kubernetes takes every object."""

import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from config.deployment import DeploymentConfig
from config.instances import INSTANCE_TYPES
from k8s import rules
from k8s.data_job import DIRECTORIES
from k8s.main import JOB
from k8s.preflight_job import PREFLIGHT
from tests.k8s.conftest import ROOT
from tests.k8s.test_schemas import check

DNS_LABELS = st.from_regex(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?", fullmatch=True)
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=0x17F).filter(str.isprintable), max_size=8)
JOBS = st.fixed_dictionaries(
    {
        "name": DNS_LABELS,
        "namespace": DNS_LABELS,
        "kind": st.sampled_from(["jobset", "indexed_job"]),
        "instance_type": st.sampled_from([None, *INSTANCE_TYPES]),
        "node_count": st.integers(1, 40),
        "spare_count": st.integers(0, 3),
        "backoff_limit_per_index": st.integers(0, 5),
        "run_as_user": st.sampled_from([0, 1000, 65_533]),
        "rendezvous": st.fixed_dictionaries(
            {
                "mode": st.sampled_from(["control", "embedded"]),
                "port": st.integers(1024, 65_535),
                "join_timeout_seconds": st.integers(2, 4000),
                "last_call_timeout_seconds": st.integers(1, 30),
                "unhealthy_events_tolerated": st.integers(0, 3),
            }
        ),
        "termination_grace_period_seconds": st.none() | st.integers(100, 400),
        "efa_huge_pages": st.booleans(),
        "shm_gib": st.none() | st.integers(1, 112),
        "environment": st.dictionaries(st.from_regex(r"NCCL_[A-Z_]{1,20}", fullmatch=True), VALUES, max_size=2),
        "directories": st.sampled_from(["init_container", "one_shot_job"]),
        "placement": st.fixed_dictionaries(
            {
                "topology": st.sampled_from(["preferred", "required", "none"]),
                "priority_class": st.none() | st.just("training-high") | DNS_LABELS,
            }
        ),
        "kueue": st.none()
        | st.fixed_dictionaries(
            {"local_queue": DNS_LABELS, "cluster_queue": st.none() | DNS_LABELS, "topology_aware": st.booleans()}
        ),
        "monitoring": st.none() | st.just({}) | st.just({"namespace": "prometheus", "labels": {}}),
        "resource_quota": st.booleans(),
    }
)


def document(job):
    """A deployment with this job, its contradictions taken out, and a batch that divides over its ranks."""
    whole = yaml.safe_load((ROOT / "deployments" / "local.yaml").read_text())
    instance = INSTANCE_TYPES.get(job["instance_type"])
    ranks = instance.gpu_count if instance else 1
    whole["job"] = job | {
        "image": whole["job"]["image"],
        "nproc_per_node": ranks,
        "spare_count": 0 if job["rendezvous"]["mode"] == "embedded" else job["spare_count"],
        "resource_quota": job["resource_quota"] and instance is not None,
        "shm_gib": job["shm_gib"] if instance else None,
    }
    whole["job"]["rendezvous"]["join_timeout_seconds"] += whole["job"]["rendezvous"]["last_call_timeout_seconds"]
    whole["train"] |= {"global_batch_size": 4 * job["node_count"] * ranks}
    return {"name": "random", **whole}


# Without shrinking: an example is small enough to read, and each takes part of a second.
@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(job=JOBS, chart=st.sampled_from([JOB, JOB, PREFLIGHT, DIRECTORIES]))
def test_a_valid_deployment_renders_manifests_that_kubernetes_takes(render, job, chart):
    deployment = DeploymentConfig.model_validate(document(job))
    for manifest in render(deployment, chart).documents:
        assert list(rules.broken(manifest)) == []
        check(manifest)

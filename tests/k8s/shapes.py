"""Every shape that the charts have: shipped deployments, and the switches one by one and together."""

from config.deployment import DeploymentConfig
from k8s import drill
from k8s.data_job import DIRECTORIES, PREPARE_DATA
from k8s.main import JOB
from k8s.preflight_job import PREFLIGHT

CHARTS = (JOB, PREFLIGHT, DIRECTORIES, PREPARE_DATA)
PREPARATION = {"prepare_data": {"input_directory": "/fsx/data/raw", "exclude": ["*.md", ".git"]}}
EVERYTHING = {
    "efa_huge_pages": False,
    "shm_gib": 200,
    "environment": {"NCCL_DEBUG": "INFO", "NCCL_CROSS_NIC": "1"},
    "directories": "one_shot_job",
    "placement": {"topology": "required", "priority_class": "gold"},
    "kueue": {"local_queue": "research", "cluster_queue": "gpus", "recovery_timeout_seconds": 3600},
    "monitoring": {"namespace": "prometheus", "labels": {"team": "research"}},
    "resource_quota": True,
    "termination_grace_period_seconds": 600,
}
EMBEDDED = {"rendezvous": {"mode": "embedded"}, "spare_count": 0}
# name: (job settings, whether there is a cluster section)
SHAPES = {
    "everything": (EVERYTHING, True),
    "everything-indexed": (EVERYTHING | {"kind": "indexed_job"}, True),
    "indexed": ({"kind": "indexed_job"}, True),
    "embedded": (EMBEDDED, True),
    "embedded-indexed": (EMBEDDED | {"kind": "indexed_job"}, False),
    "kueue-topology": ({"kueue": {"local_queue": "research", "topology_aware": True}}, True),
    "nowhere-near": ({"placement": {"topology": "none", "priority_class": None}}, False),
    "root": ({"run_as_user": 0}, True),
    "large": ({"name": "a" * 44, "namespace": "n" * 63, "node_count": 16, "spare_count": 4}, True),
    "one-gpu": ({"instance_type": "p5.4xlarge", "node_count": 16, "spare_count": 1}, False),
}


def with_preparation(deployment: DeploymentConfig) -> DeploymentConfig:
    """The deployment, with something to tokenize."""
    document = deployment.model_dump(mode="json")
    document["job"] |= PREPARATION
    return DeploymentConfig.model_validate(document)


def drill_runs(deployment: DeploymentConfig) -> list[DeploymentConfig]:
    """The two jobs of a fault drill."""
    faults = (drill.parse_fault("exception@25:rank1"), drill.parse_fault("sigkill@42:rank0"))
    return list(drill.fault_drill(deployment, faults, steps=60).runs.values())

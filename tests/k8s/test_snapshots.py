"""One reviewed picture per deployment of who runs what, where and with how much. To accept a change:

UPDATE_SNAPSHOTS=1 python -m pytest tests/k8s/test_snapshots.py
"""

import os
import re
from pathlib import Path

import yaml

SNAPSHOTS = Path(__file__).parent / "snapshots"


def picture(manifests):
    """The parts of the manifests that a reviewer wants to see, and none of the plumbing."""
    return {
        # Without the settings' hash: the settings are reviewed in the deployment file.
        "objects": [
            re.sub("-train-[0-9a-f]{8}$", "-train-HASH", f"{document['kind']} {document['metadata']['name']}")
            for document in manifests.documents
        ],
        "restarts": manifests.only("JobSet")["spec"]["failurePolicy"],
        **{name: _job(manifests, name) for name in ("control", "worker")},
    }


def _job(manifests, name):
    spec, pod, container = manifests.job(name), manifests.pod(name), manifests.container(name)
    return {
        "job": {key: value for key, value in spec.items() if key not in ("template", "podFailurePolicy")},
        "run": [*container["command"], *container["args"]],
        "env": manifests.environment(name),
        "limits": container["resources"]["limits"],
        "grace_seconds": pod["terminationGracePeriodSeconds"],
        "node_selector": pod.get("nodeSelector", {}),
        "tolerations": [toleration["key"] for toleration in pod.get("tolerations", [])],
        "mounts": {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]},
    }


def test_the_deployment_looks_as_reviewed(manifests):
    file = SNAPSHOTS / f"{manifests.deployment.name}.yaml"
    text = yaml.safe_dump(picture(manifests), sort_keys=False, width=120)
    if os.environ.get("UPDATE_SNAPSHOTS"):
        file.write_text(text)
    assert file.exists(), f"no {file.name} yet; run with UPDATE_SNAPSHOTS=1 and review it"
    assert yaml.safe_load(file.read_text()) == yaml.safe_load(text)


def test_every_snapshot_has_its_deployment():
    deployments = {path.name for path in (SNAPSHOTS.parents[2] / "deployments").glob("*.yaml")}
    assert {path.name for path in SNAPSHOTS.iterdir()} == deployments

"""Checks of rendered manifests that no schema makes: what an API server refuses, and what this project must not say.

Plain data in, lines out: `k8s.main` runs them on every render. A rule is a generator of problems; which part of an
object it sees is said by the table that it stands in.
"""

from collections.abc import Iterator
from typing import Any

from k8s import project_rules, server_pod_rules, server_rules

Manifest = dict[str, Any]


def broken(manifest: Manifest) -> Iterator[str]:
    """Every problem of one object."""
    yield from _apply(server_rules.OBJECT_RULES, manifest)
    yield from _apply(server_rules.KIND_RULES.get(manifest["kind"], []), manifest)
    yield from _apply(project_rules.KIND_RULES.get(manifest["kind"], []), manifest)
    for job in jobs(manifest):
        yield from _apply(server_rules.JOB_RULES + project_rules.JOB_RULES, job)
        yield from server_rules.labels_and_annotations(job["template"])
        pod = job["template"]["spec"]
        yield from _apply(server_pod_rules.POD_RULES + project_rules.POD_RULES, pod)
        for container in server_pod_rules.containers(pod):
            yield from _apply(server_pod_rules.CONTAINER_RULES + project_rules.CONTAINER_RULES, container)


def jobs(manifest: Manifest) -> list[Manifest]:
    """The JobSpecs in an object: its own, or those of a JobSet's templates."""
    if manifest["kind"] == "Job":
        return [manifest["spec"]]
    if manifest["kind"] == "JobSet":
        return [job["template"]["spec"] for job in manifest["spec"]["replicatedJobs"]]
    return []


def _apply(table: list[Any], subject: Manifest) -> Iterator[str]:
    for rule in table:
        yield from rule(subject)

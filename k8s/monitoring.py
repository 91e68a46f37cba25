"""For the Prometheus operator: what to scrape of a job, and what wakes whom. Alerts use kube-state-metrics too.

Each alert has its paragraph in docs/operations.md. Restarted generations show up as young pods: JobSet's own metrics
count only jobs that are over.
"""

from typing import Any

from cdk8s import ApiObject, ApiObjectMetadata, JsonPatch
from constructs import Construct

from config import names
from config.job import JobConfig, MonitoringConfig
from k8s import policies

API_VERSION = "monitoring.coreos.com/v1"
_RUNBOOK = "docs/operations.md"


class JobMonitoring(Construct):
    """PodMonitor and PrometheusRule of one job."""

    def __init__(self, scope: Construct, id_: str, *, job: JobConfig, monitoring: MonitoringConfig) -> None:
        super().__init__(scope, id_)
        for kind, spec in (("PodMonitor", _pod_monitor(job)), ("PrometheusRule", _alerts(job))):
            metadata = ApiObjectMetadata(name=job.name, labels=dict(monitoring.labels))
            api_object = ApiObject(self, kind.lower(), api_version=API_VERSION, kind=kind, metadata=metadata)
            api_object.add_json_patch(JsonPatch.add("/spec", spec))


def _pod_monitor(job: JobConfig) -> dict[str, Any]:
    return {
        "selector": {"matchLabels": policies.labels(job, policies.WORKER)},
        "namespaceSelector": {"matchNames": [job.namespace]},
        "podMetricsEndpoints": [{"port": names.METRICS_PORT_NAME, "path": "/metrics", "interval": "30s"}],
    }


def _alerts(job: JobConfig) -> dict[str, Any]:
    # A JobSet adds the Job's number to its name.
    jobs = f'namespace="{job.namespace}", job_name=~"{job.name}-(worker|control)(-0)?"'
    workers = f'namespace="{job.namespace}", pod=~"{job.name}-worker-.*"'
    active = f'kube_job_status_active{{namespace="{job.namespace}", job_name=~"{job.name}-worker(-0)?"}} > 0'
    running = f'sum(kube_pod_status_phase{{{workers}, phase="Running"}}) by (namespace)'
    rules = [
        _alert(
            "TrainingJobFailed",
            f'kube_job_failed{{{jobs}, condition="true"}} > 0',
            "0m",
            "critical",
            f"{job.name}: a Job has failed; its pods' termination messages say why",
        ),
        _alert(
            "TrainingNodesMissing",
            # Without a running pod there is no sum at all.
            f"({running} or on (namespace) 0 * sum({active}) by (namespace)) < {job.node_count} "
            f"and on (namespace) sum({active}) by (namespace)",
            "15m",
            "critical",
            f"{job.name}: fewer than {job.node_count} workers run, so nothing trains",
        ),
        _alert(
            "TrainingPodsFailing",
            f"sum(increase(kube_job_status_failed{{{jobs}}}[1h])) by (namespace) > {job.spare_count + 1}",
            "0m",
            "warning",
            f"{job.name}: pods fail again and again; look for one node or one step that they share",
        ),
        _alert(
            "TrainingPodStuckTerminating",
            f"time() - kube_pod_deletion_timestamp{{{workers}}} > 600",
            "5m",
            "warning",
            f"{job.name}: a pod can't end, mostly since its node does not answer; its index gets no replacement",
        ),
    ]
    return {"groups": [{"name": f"{job.name}.training", "rules": rules}]}


def _alert(name: str, expression: str, duration: str, severity: str, summary: str) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expression,
        "for": duration,
        "labels": {"severity": severity},
        "annotations": {"summary": summary, "runbook": f"{_RUNBOOK}, {name}"},
    }

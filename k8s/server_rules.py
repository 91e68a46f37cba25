"""What a Kubernetes API server, or JobSet's webhook, refuses although the schema allows it.

The rules restate Kubernetes' validation (pkg/apis/*/validation) in our words, as far as our kinds can meet it.
"""

import re
from collections.abc import Iterator
from typing import Any

from k8s.server_pod_rules import containers

Manifest = dict[str, Any]

_QUANTITY = re.compile(r"[+-]?(\d+|\d+\.\d*|\.\d+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?\d+)?")
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_DNS_LABEL_KINDS = {"Namespace", "JobSet", "Service", "Job"}
_QUANTITY_MAPS = {"requests", "limits", "capacity", "hard"}
_VOLUME_SOURCES = {"csi", "nfs", "hostPath", "local", "fc", "iscsi"}
_MAX_PORT = 65_535


# Objects


def object_name(manifest: Manifest) -> Iterator[str]:
    """Names are lower-case DNS names; a name in a host name is a label of one."""
    name, kind = manifest.get("metadata", {}).get("name"), manifest.get("kind")
    if name is not None and not (_DNS_LABEL if kind in _DNS_LABEL_KINDS else _DNS_SUBDOMAIN).fullmatch(name):
        yield f"metadata.name {name} is no DNS name in lower case"


def labels_and_annotations(manifest: Manifest) -> Iterator[str]:
    """Label keys and values have 63 characters at most; annotations are strings."""
    metadata = manifest.get("metadata", {})
    for key, value in metadata.get("labels", {}).items():
        prefix, _, short = key.rpartition("/")
        if not _LABEL_NAME.fullmatch(short) or (prefix and not _DNS_SUBDOMAIN.fullmatch(prefix)):
            yield f"label key {key} is malformed or too long"
        if value and not _LABEL_NAME.fullmatch(value):
            yield f"label {key}: value {value} is malformed or longer than 63 characters"
    for key, value in metadata.get("annotations", {}).items():
        if not isinstance(value, str):
            yield f"annotation {key}: {value!r} is no string"


def quantities(node: Any, inside: bool = False) -> Iterator[str]:
    """Amounts have Kubernetes' suffixes: Gi, not GiB."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in _QUANTITY_MAPS and isinstance(value, dict):
                yield from quantities(value, inside=True)
            elif inside or key == "sizeLimit":
                if not _QUANTITY.fullmatch(str(value)):
                    yield f"{key}: {value} is no quantity; the suffixes are m, k, M, G, T, Ki, Mi, Gi, Ti"
            else:
                yield from quantities(value)
    elif isinstance(node, list):
        for item in node:
            yield from quantities(item)


# Kinds


def service_ports(service: Manifest) -> Iterator[str]:
    """Ports are 1 to 65535."""
    for port in service["spec"].get("ports", []):
        for field in ("port", "targetPort"):
            if isinstance(port.get(field, 1), int) and not 0 < port.get(field, 1) <= _MAX_PORT:
                yield f"{field} {port[field]} is none"


def selector_matches_template(workload: Manifest) -> Iterator[str]:
    """A DaemonSet's or Deployment's selector selects the pods of its own template."""
    wanted = workload["spec"].get("selector", {}).get("matchLabels", {})
    given = workload["spec"]["template"].get("metadata", {}).get("labels", {})
    if not wanted or not wanted.items() <= given.items():
        yield f"selector {wanted} does not match the template's labels {given}"


def one_volume_source(volume: Manifest) -> Iterator[str]:
    """A PersistentVolume has exactly one source, a capacity and access modes."""
    spec = volume["spec"]
    if len(_VOLUME_SOURCES & spec.keys()) != 1:
        yield f"needs exactly one source, has {sorted(_VOLUME_SOURCES & spec.keys())}"
    if "storage" not in spec.get("capacity", {}) or not spec.get("accessModes"):
        yield "needs capacity.storage and accessModes"


def claim_asks_for_storage(claim: Manifest) -> Iterator[str]:
    """A claim requests storage and says how it is mounted."""
    spec = claim["spec"]
    if "storage" not in spec.get("resources", {}).get("requests", {}) or not spec.get("accessModes"):
        yield "needs resources.requests.storage and accessModes"


def role_rules_have_groups(role: Manifest) -> Iterator[str]:
    """A rule on resources names their API groups."""
    for rule in role.get("rules", []):
        if rule.get("resources") and "apiGroups" not in rule:
            yield f"rule on {rule['resources']} needs apiGroups"


def role_ref(binding: Manifest) -> Iterator[str]:
    """A binding refers to a role; a ClusterRoleBinding to a ClusterRole."""
    kinds = {"ClusterRole"} if binding["kind"] == "ClusterRoleBinding" else {"Role", "ClusterRole"}
    if binding["roleRef"].get("kind") not in kinds:
        yield f"roleRef.kind {binding['roleRef'].get('kind')} must be one of {sorted(kinds)}"


def priority_class(manifest: Manifest) -> Iterator[str]:
    """User classes stay below a billion, and the names of the system's are taken."""
    if manifest["metadata"]["name"].startswith("system-") or manifest["value"] > 1_000_000_000:
        yield f"{manifest['metadata']['name']} with value {manifest['value']} is kept for the system"


def jobset_targets(jobset: Manifest) -> Iterator[str]:
    """Policies and dependencies name replicated jobs that are there, dependencies earlier ones."""
    spec = jobset["spec"]
    names = [job["name"] for job in spec["replicatedJobs"]]
    if len(set(names)) != len(names):
        yield f"two replicated jobs of one name: {names}"
    policies = [spec.get("successPolicy", {}), *spec.get("failurePolicy", {}).get("rules", [])]
    for target in (target for policy in policies for target in policy.get("targetReplicatedJobs", [])):
        if target not in names:
            yield f"targetReplicatedJobs: there is no {target}"
    for position, job in enumerate(spec["replicatedJobs"]):
        for dependency in job.get("dependsOn", []):
            if dependency["name"] not in names[:position]:
                yield f"{job['name']}.dependsOn: {dependency['name']} must come before it"


def jobset_pod_names(jobset: Manifest) -> Iterator[str]:
    """<JobSet>-<job>-<job index>-<pod index> is a host name, and with 6 characters more the pod's name."""
    for job in jobset["spec"]["replicatedJobs"]:
        numbers = f"{job.get('replicas', 1) - 1}-{job['template']['spec'].get('completions', 1) - 1}"
        yield from _pod_name(f"{jobset['metadata']['name']}-{job['name']}-{numbers}")


def job_pod_names(job: Manifest) -> Iterator[str]:
    """<Job>-<pod index>, with an index, is a host name, and with 6 characters more the pod's name."""
    spec = job["spec"]
    index = f"-{spec['completions'] - 1}" if spec.get("completionMode") == "Indexed" and "completions" in spec else ""
    yield from _pod_name(f"{job['metadata']['name']}{index}")


def _pod_name(host: str) -> Iterator[str]:
    longest = f"{host}-abcde"
    if len(longest) > 63:
        yield f"pod name {longest} has {len(longest)} characters, a DNS label 63; shorten the job's name"


# Jobs: a JobSpec


def restart_policy(job: Manifest) -> Iterator[str]:
    """A Job's pods never restart for good; counting by pod or index needs Never."""
    policy = job["template"]["spec"].get("restartPolicy")
    if policy not in ("Never", "OnFailure"):
        yield f"restartPolicy {policy} must be Never or OnFailure in a Job"
    for field in ("podFailurePolicy", "backoffLimitPerIndex"):
        if field in job and policy != "Never":
            yield f"{field} needs restartPolicy Never"


def pod_replacement_policy(job: Manifest) -> Iterator[str]:
    """Two values, of which a podFailurePolicy allows one."""
    policy = job.get("podReplacementPolicy", "Failed")
    if policy not in ("Failed", "TerminatingOrFailed"):
        yield f"podReplacementPolicy {policy} must be Failed or TerminatingOrFailed"
    elif policy != "Failed" and "podFailurePolicy" in job:
        yield "podFailurePolicy needs podReplacementPolicy Failed"


def indexed_fields(job: Manifest) -> Iterator[str]:
    """Fields that only an Indexed Job may have, and those that need each other."""
    indexed = job.get("completionMode") == "Indexed"
    for field in ("backoffLimitPerIndex", "successPolicy"):
        if field in job and not indexed:
            yield f"{field} needs completionMode Indexed"
    if indexed and "completions" not in job:
        yield "completionMode Indexed needs completions"
    if "maxFailedIndexes" in job and "backoffLimitPerIndex" not in job:
        yield "maxFailedIndexes needs backoffLimitPerIndex"
    for rule in job.get("podFailurePolicy", {}).get("rules", []):
        if rule.get("action") == "FailIndex" and "backoffLimitPerIndex" not in job:
            yield "action FailIndex needs backoffLimitPerIndex"


def counts_within_completions(job: Manifest) -> Iterator[str]:
    """No more failed or succeeded indexes than there are."""
    completions = job.get("completions", 1)
    if job.get("maxFailedIndexes", 0) > completions:
        yield f"maxFailedIndexes {job['maxFailedIndexes']} exceeds completions {completions}"
    for rule in job.get("successPolicy", {}).get("rules", []):
        if not 0 < rule.get("succeededCount", 1) <= completions:
            yield f"succeededCount {rule['succeededCount']} is not within completions {completions}"


def pod_failure_policy(job: Manifest) -> Iterator[str]:
    """Every rule looks at exit codes or at conditions, of containers that are there; 0 is no failure."""
    known = {container["name"] for container in containers(job["template"]["spec"])}
    for rule in job.get("podFailurePolicy", {}).get("rules", []):
        if ("onExitCodes" in rule) == ("onPodConditions" in rule):
            yield "a podFailurePolicy rule needs exactly one of onExitCodes and onPodConditions"
        if rule["action"] not in ("FailJob", "FailIndex", "Ignore", "Count"):
            yield f"podFailurePolicy: there is no action {rule['action']}"
        codes = rule.get("onExitCodes")
        if codes is None:
            continue
        if codes.get("containerName") is not None and codes["containerName"] not in known:
            yield f"podFailurePolicy: there is no container {codes['containerName']}"
        values = codes.get("values", [])
        if codes.get("operator") == "In" and 0 in values:
            yield "podFailurePolicy: exit code 0 is no failure"
        if sorted(set(values)) != values:
            yield f"podFailurePolicy: exit codes {values} must be in order, and each once"


OBJECT_RULES = [object_name, labels_and_annotations, quantities]
KIND_RULES = {
    "Service": [service_ports],
    "DaemonSet": [selector_matches_template],
    "Deployment": [selector_matches_template],
    "PersistentVolume": [one_volume_source],
    "PersistentVolumeClaim": [claim_asks_for_storage],
    "Role": [role_rules_have_groups],
    "ClusterRole": [role_rules_have_groups],
    "RoleBinding": [role_ref],
    "ClusterRoleBinding": [role_ref],
    "PriorityClass": [priority_class],
    "JobSet": [jobset_targets, jobset_pod_names],
    "Job": [job_pod_names],
}
JOB_RULES = [restart_policy, pod_replacement_policy, indexed_fields, counts_within_completions, pod_failure_policy]

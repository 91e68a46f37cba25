"""What a Kubernetes API server refuses although the schema allows it, as far as our kinds of object can meet it.

Each rule yields one line per breach. The rules restate Kubernetes' validation (pkg/apis/*/validation) in our words.
"""

import re
from collections.abc import Iterator
from typing import Any

Document = dict[str, Any]

QUANTITY = re.compile(r"[+-]?(\d+|\d+\.\d*|\.\d+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?\d+)?")
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
LABEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?")
DNS_LABEL_KINDS = {"Namespace", "JobSet"}
# These, and only these, may be asked for in other than whole numbers, or requested below their limit.
OVERCOMMIT = {"cpu", "memory", "ephemeral-storage"}
VOLUME_SOURCES = {"csi", "nfs", "hostPath", "local", "fc", "iscsi"}


def violations(document: Document) -> list[str]:
    """Every breach in one object; a JobSet's job templates are seen as Jobs."""
    found = list(_metadata(document, document["kind"] in DNS_LABEL_KINDS)) + list(_quantities(document))
    match document["kind"]:
        case "JobSet":
            found += _jobset(document)
        case "PersistentVolume":
            found += _persistent_volume(document["spec"])
        case "PersistentVolumeClaim":
            found += _claim(document["spec"])
    return found


def _metadata(document: Document, dns_label: bool) -> Iterator[str]:
    metadata = document.get("metadata", {})
    name = metadata.get("name")
    if name is not None and not (DNS_LABEL if dns_label else DNS_SUBDOMAIN).fullmatch(name):
        yield f"metadata.name {name!r}"
    for key, value in metadata.get("labels", {}).items():
        prefix, _, short = key.rpartition("/")
        if not LABEL_NAME.fullmatch(short) or (prefix and not DNS_SUBDOMAIN.fullmatch(prefix)):
            yield f"label key {key!r}"
        if value and not LABEL_NAME.fullmatch(value):
            yield f"label value {value!r}"
    for key, value in metadata.get("annotations", {}).items():
        if not isinstance(value, str):
            yield f"annotation {key} is no string"


def _quantities(node: Any, inside: bool = False) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("requests", "limits", "capacity") and isinstance(value, dict):
                yield from _quantities(value, inside=True)
            elif inside or key == "sizeLimit":
                if not QUANTITY.fullmatch(str(value)):
                    yield f"{key}: quantity {value!r}"
            else:
                yield from _quantities(value)
    elif isinstance(node, list):
        for item in node:
            yield from _quantities(item)


def _jobset(document: Document) -> Iterator[str]:
    jobs = document["spec"]["replicatedJobs"]
    names = [job["name"] for job in jobs]
    if len(set(names)) != len(names):
        yield "two replicated jobs of one name"
    policies = [document["spec"].get("successPolicy", {}), *document["spec"].get("failurePolicy", {}).get("rules", [])]
    for target in (target for policy in policies for target in policy.get("targetReplicatedJobs", [])):
        if target not in names:
            yield f"targetReplicatedJobs: unknown {target}"
    for position, job in enumerate(jobs):
        for dependency in job.get("dependsOn", []):
            if dependency["name"] not in names[:position]:
                yield f"dependsOn {dependency['name']}: must come earlier"
        spec = job["template"]["spec"]
        # <JobSet>-<job>-<job index>-<pod index>: host name of the pod, and with 6 characters more its name.
        longest = f"{document['metadata']['name']}-{job['name']}-{job['replicas'] - 1}-{spec['completions'] - 1}-abcde"
        if len(longest) > 63:
            yield f"pod name {longest} has more than 63 characters"
        yield from job_violations(spec)


def job_violations(spec: Document) -> Iterator[str]:
    """Breaches of batch/v1's rules for a JobSpec."""
    indexed, pod = spec.get("completionMode") == "Indexed", spec["template"]["spec"]
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        yield f"restartPolicy {pod.get('restartPolicy')}"
    if "podFailurePolicy" in spec:
        if pod.get("restartPolicy") != "Never":
            yield "podFailurePolicy needs restartPolicy Never"
        if spec.get("podReplacementPolicy", "Failed") != "Failed":
            yield "podFailurePolicy needs podReplacementPolicy Failed"
    if spec.get("podReplacementPolicy", "Failed") not in ("Failed", "TerminatingOrFailed"):
        yield f"podReplacementPolicy {spec['podReplacementPolicy']}"
    for field in ("backoffLimitPerIndex", "successPolicy"):
        if field in spec and not indexed:
            yield f"{field} needs completionMode Indexed"
    if "backoffLimitPerIndex" in spec and pod.get("restartPolicy") != "Never":
        yield "backoffLimitPerIndex needs restartPolicy Never"
    if "maxFailedIndexes" in spec:
        if "backoffLimitPerIndex" not in spec:
            yield "maxFailedIndexes needs backoffLimitPerIndex"
        if spec["maxFailedIndexes"] > spec["completions"]:
            yield "maxFailedIndexes exceeds completions"
    for rule in spec.get("successPolicy", {}).get("rules", []):
        if not 0 < rule.get("succeededCount", 1) <= spec["completions"]:
            yield "succeededCount out of range"
    if indexed and "completions" not in spec:
        yield "Indexed needs completions"
    yield from _failure_rules(spec, {container["name"] for container in _containers(pod)})
    yield from _metadata(spec["template"], dns_label=True)
    yield from _pod(pod)


def _failure_rules(spec: Document, containers: set[str]) -> Iterator[str]:
    for rule in spec.get("podFailurePolicy", {}).get("rules", []):
        if ("onExitCodes" in rule) == ("onPodConditions" in rule):
            yield "a podFailurePolicy rule needs exactly one of onExitCodes and onPodConditions"
        if rule["action"] not in ("FailJob", "FailIndex", "Ignore", "Count"):
            yield f"action {rule['action']}"
        codes = rule.get("onExitCodes")
        if codes is None:
            continue
        if codes.get("containerName") is not None and codes["containerName"] not in containers:
            yield f"podFailurePolicy: unknown container {codes['containerName']}"
        if codes["operator"] == "In" and 0 in codes["values"]:
            yield "podFailurePolicy: exit code 0"
        if sorted(set(codes["values"])) != codes["values"]:
            yield "podFailurePolicy: exit codes must be ordered and unique"


def _containers(pod: Document) -> list[Document]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def _pod(pod: Document) -> Iterator[str]:
    names = [container["name"] for container in _containers(pod)]
    if len(set(names)) != len(names):
        yield "two containers of one name"
    volumes = [volume["name"] for volume in pod.get("volumes", [])]
    if len(set(volumes)) != len(volumes):
        yield "two volumes of one name"
    for volume in pod.get("volumes", []):
        if len(volume) != 2:
            yield f"volume {volume['name']} needs exactly one source"
    for toleration in pod.get("tolerations", []):
        if toleration.get("operator") == "Exists" and "value" in toleration:
            yield "toleration: Exists takes no value"
        if "tolerationSeconds" in toleration and toleration.get("effect") != "NoExecute":
            yield "toleration: tolerationSeconds needs NoExecute"
    security = pod.get("securityContext", {})
    for container in _containers(pod):
        yield from _container(container, set(volumes))
        own = container.get("securityContext", {})
        if {**security, **own}.get("runAsNonRoot") and {**security, **own}.get("runAsUser") == 0:
            yield f"{container['name']}: runAsNonRoot with user 0 (refused by the kubelet)"


def _container(container: Document, volumes: set[str]) -> Iterator[str]:
    if not DNS_LABEL.fullmatch(container["name"]):
        yield f"container name {container['name']!r}"
    yield from _resources(container.get("resources", {}))
    mounts = container.get("volumeMounts", [])
    yield from (f"undeclared volume {mount['name']}" for mount in mounts if mount["name"] not in volumes)
    if len({mount["mountPath"] for mount in mounts}) != len(mounts):
        yield "two mounts at one path"
    ports = container.get("ports", [])
    for port in ports:
        if not 0 < port["containerPort"] < 65_536 or not PORT_NAME.fullmatch(port.get("name", "a")):
            yield f"port {port}"
    probed = container.get("readinessProbe", {}).get("tcpSocket", {}).get("port")
    if isinstance(probed, str) and probed not in {port.get("name") for port in ports}:
        yield f"readinessProbe: unknown port {probed}"
    for variable in container.get("env", []):
        if not ENV_NAME.fullmatch(variable["name"]):
            yield f"environment variable {variable['name']!r}"
        if not isinstance(variable.get("value", ""), str) or ("value" in variable) == ("valueFrom" in variable):
            yield f"environment variable {variable['name']}: one value, and a string"


def _resources(resources: Document) -> Iterator[str]:
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    for name in requests.keys() | limits.keys():
        if name in OVERCOMMIT:
            continue
        if requests.get(name, limits.get(name)) != limits.get(name):
            yield f"{name}: request {requests.get(name)} and limit {limits.get(name)} must be equal"
        if not name.startswith("hugepages-") and not str(limits.get(name)).isdigit():
            yield f"{name}: must be a whole number"
    if any(name.startswith("hugepages-") for name in limits) and not {"cpu", "memory"} & limits.keys():
        yield "hugepages need cpu or memory"


def _persistent_volume(spec: Document) -> Iterator[str]:
    if len(VOLUME_SOURCES & spec.keys()) != 1:
        yield "a PersistentVolume needs exactly one source"
    if "storage" not in spec.get("capacity", {}) or not spec.get("accessModes"):
        yield "a PersistentVolume needs capacity and accessModes"


def _claim(spec: Document) -> Iterator[str]:
    if "storage" not in spec.get("resources", {}).get("requests", {}) or not spec.get("accessModes"):
        yield "a claim needs a storage request and accessModes"

"""What a Kubernetes API server refuses of pods and containers although the schema allows it. See `server_rules.py`."""

import re
from collections.abc import Iterator
from typing import Any

Manifest = dict[str, Any]

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?")
# These, and only these, may be asked for in other than whole numbers, or requested below their limit.
_OVERCOMMIT = {"cpu", "memory", "ephemeral-storage"}
_MAX_PORT = 65_535


# Pods: a PodSpec


def containers(pod: Manifest) -> list[Manifest]:
    """Init containers, then containers."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def unique_names(pod: Manifest) -> Iterator[str]:
    """Containers and volumes have names of their own."""
    for what, items in (("containers", containers(pod)), ("volumes", pod.get("volumes", []))):
        names = [item["name"] for item in items]
        if len(set(names)) != len(names):
            yield f"two {what} of one name: {names}"


def volume_sources(pod: Manifest) -> Iterator[str]:
    """A volume is one thing."""
    for volume in pod.get("volumes", []):
        if len(volume) != 2:
            yield f"volume {volume['name']} needs exactly one source"


def mounts_are_declared(pod: Manifest) -> Iterator[str]:
    """Containers mount volumes that the pod has, each path once."""
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    for container in containers(pod):
        mounts = container.get("volumeMounts", [])
        yield from (f"volume {mount['name']} is not declared" for mount in mounts if mount["name"] not in volumes)
        if len({mount["mountPath"] for mount in mounts}) != len(mounts):
            yield f"container {container['name']}: two mounts at one path"


def subdomain(pod: Manifest) -> Iterator[str]:
    """A subdomain is a DNS label: a headless Service's name."""
    if "subdomain" in pod and not _DNS_LABEL.fullmatch(pod["subdomain"]):
        yield f"subdomain {pod['subdomain']} is no DNS label"


def tolerations(pod: Manifest) -> Iterator[str]:
    """Exists takes no value; only NoExecute can be borne for a time."""
    for toleration in pod.get("tolerations", []):
        if toleration.get("operator") == "Exists" and "value" in toleration:
            yield f"toleration {toleration['key']}: Exists takes no value"
        if "tolerationSeconds" in toleration and toleration.get("effect") != "NoExecute":
            yield f"toleration {toleration['key']}: tolerationSeconds needs NoExecute"


def user_may_run(pod: Manifest) -> Iterator[str]:
    """The kubelet starts no root where runAsNonRoot is said."""
    for container in containers(pod):
        security = {**pod.get("securityContext", {}), **container.get("securityContext", {})}
        if security.get("runAsNonRoot") and security.get("runAsUser") == 0:
            yield f"container {container['name']}: runAsNonRoot with user 0"


# Containers


def container_name(container: Manifest) -> Iterator[str]:
    """A container's name is a DNS label."""
    if not _DNS_LABEL.fullmatch(container["name"]):
        yield f"container name {container['name']} is no DNS label"


def environment_names(container: Manifest) -> Iterator[str]:
    """Variables have a name, and one value, which is a string."""
    for variable in container.get("env", []):
        if not _ENV_NAME.fullmatch(variable["name"]):
            yield f"environment variable {variable['name']!r} is no name"
        if not isinstance(variable.get("value", ""), str) or ("value" in variable) == ("valueFrom" in variable):
            yield f"environment variable {variable['name']} needs one value, a string"


def container_ports(container: Manifest) -> Iterator[str]:
    """Ports are ports, and probes name one that is there."""
    ports = container.get("ports", [])
    for port in ports:
        if not 0 < port["containerPort"] <= _MAX_PORT or not _PORT_NAME.fullmatch(port.get("name", "a")):
            yield f"containerPort {port} has a wrong number or name"
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        probed = container.get(probe, {}).get("tcpSocket", {}).get("port")
        if isinstance(probed, str) and probed not in {port.get("name") for port in ports}:
            yield f"{probe}: there is no port {probed}"


def devices(container: Manifest) -> Iterator[str]:
    """Extended resources are whole numbers with equal request and limit."""
    resources = container.get("resources", {})
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    for name in sorted((requests.keys() | limits.keys()) - _OVERCOMMIT):
        if requests.get(name, limits.get(name)) != limits.get(name):
            yield f"{name}: request {requests.get(name)} and limit {limits.get(name)} must be equal"
        if not name.startswith("hugepages-") and not str(limits.get(name)).isdigit():
            yield f"{name}: {limits.get(name)} must be a whole number"


def huge_pages_need_memory(container: Manifest) -> Iterator[str]:
    """Huge pages come with cpu or memory."""
    limits = container.get("resources", {}).get("limits", {})
    if any(name.startswith("hugepages-") for name in limits) and not {"cpu", "memory"} & limits.keys():
        yield "huge pages need cpu or memory beside them"


POD_RULES = [unique_names, volume_sources, mounts_are_declared, subdomain, tolerations, user_may_run]
CONTAINER_RULES = [container_name, environment_names, container_ports, devices, huge_pages_need_memory]

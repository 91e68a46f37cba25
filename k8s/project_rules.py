"""What no server refuses and yet costs a run: each rule is a report of somebody's lost job, or a measured one."""

import re
from collections.abc import Iterator
from typing import Any

from config import names
from config.workload import HARMFUL_ENVIRONMENT, refusal
from training.config import EXIT_BAD_CONFIG, EXIT_NO_RESTART

Manifest = dict[str, Any]

_PINNED = re.compile(r".+@sha256:[0-9a-f]{64}")
_SHELLS = {"sh", "bash", "/bin/sh", "/bin/bash"}
_BYTES = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_RDZV_PORTS = range(1024, 65_536)


# Containers


def image_is_pinned(container: Manifest) -> Iterator[str]:
    """A tag can move between two pods of one job."""
    if not _PINNED.fullmatch(container["image"]):
        yield f"image {container['image']} must be pinned by digest"


def no_shell_as_first_process(container: Manifest) -> Iterator[str]:
    """Bash as PID 1 sits on SIGTERM until its child ends (kubernetes #141483)."""
    if container.get("command", [""])[0] in _SHELLS:
        yield f"container {container['name']}: a shell must not be the first process"


def no_harmful_environment(container: Manifest) -> Iterator[str]:
    """Old recipes' tuning."""
    for variable in container.get("env", []):
        if (reason := refusal(variable["name"], HARMFUL_ENVIRONMENT)) is not None:
            yield f"environment variable {variable['name']} is refused: {reason}"


def huge_pages_with_their_switch(container: Manifest) -> Iterator[str]:
    """EFA's libfabric takes huge pages unless it is told not to: request and variable say the same."""
    limits = container.get("resources", {}).get("limits", {})
    if names.EFA_RESOURCE not in limits:
        return
    values = {variable["name"]: variable.get("value") for variable in container.get("env", [])}
    off, asked = values.get("FI_EFA_USE_HUGE_PAGE") == "0", any(name.startswith("hugepages-") for name in limits)
    if off == asked:
        yield (
            "EFA without hugepages-2Mi needs FI_EFA_USE_HUGE_PAGE=0, and with it must not have it; "
            "job.efa_huge_pages changes both"
        )


def no_process_killing_hooks(container: Manifest) -> Iterator[str]:
    """A preStop hook eats the grace period, a liveness probe's kill costs the index a retry."""
    for field in ("lifecycle", "livenessProbe"):
        if field in container and _launcher_words(container):
            yield f"container {container['name']}: no {field} on a launcher"


def launcher_timeouts_nest(container: Manifest) -> Iterator[str]:
    """Workers stop before the launcher gives up on them."""
    words = _launcher_words(container)
    if words:
        stop, term = (int(_option(words, name) or 0) for name in ("workers-stop-timeout", "term-timeout"))
        if not 0 < stop < term:
            yield f"--workers-stop-timeout {stop} must be below --term-timeout {term}"


def launcher_says_who_it_is(container: Manifest) -> Iterator[str]:
    """Without its own address MASTER_ADDR is localhost; without GROUP_RANK ranks move when a node does."""
    words = _launcher_words(container)
    if not words:
        return
    by_field = {variable["name"] for variable in container.get("env", []) if "valueFrom" in variable}
    if _option(words, "local-addr") != "$(POD_IP)" or "POD_IP" not in by_field:
        yield "ft_launcher needs --local-addr=$(POD_IP), from the pod's own address"
    if "GROUP_RANK" not in by_field:
        yield "ft_launcher needs GROUP_RANK from the completion index"


def rendezvous_id_is_its_own(container: Manifest) -> Iterator[str]:
    """The default of torch is `none` for everyone (pytorch #82160)."""
    words = _rendezvous_words(container)
    if words and _option(words, "rdzv-id") in (None, "", "none"):
        yield "--rdzv-id must name the job"


def endpoint_is_a_name(container: Manifest) -> Iterator[str]:
    """An address dies with its pod; the name is the next pod's, too."""
    words = _rendezvous_words(container)
    if not words:
        return
    host, _, port = (_option(words, "rdzv-endpoint") or "").rpartition(":")
    if not re.search("[a-z]", host) or "." not in host or not port.isdigit() or int(port) not in _RDZV_PORTS:
        yield f"--rdzv-endpoint {host}:{port} must be POD.SERVICE:PORT"


# Pods


def nothing_of_the_host(pod: Manifest) -> Iterator[str]:
    """A hostPath leaks from pod to pod; one to /dev/infiniband silently drops EFA for TCP (aws-do-eks #63)."""
    for field in ("hostNetwork", "hostIPC", "hostPID"):
        if pod.get(field):
            yield f"{field} is refused"
    for volume in pod.get("volumes", []):
        if "hostPath" in volume:
            yield f"volume {volume['name']}: hostPath is refused; devices come from their plugin"


def no_token_and_no_service_links(pod: Manifest) -> Iterator[str]:
    """A trainer needs no API, and variables of foreign Services are not its business."""
    if pod.get("automountServiceAccountToken") is not False:
        yield "automountServiceAccountToken must be false"
    if pod.get("enableServiceLinks") is not False:
        yield "enableServiceLinks must be false"


def shared_memory_fits_the_limit(pod: Manifest) -> Iterator[str]:
    """A memory-backed volume is charged to the pod's memory limit: its size must leave room."""
    shared = 0
    for volume in pod.get("volumes", []):
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            size = volume["emptyDir"].get("sizeLimit")
            if size is None:
                yield f"volume {volume['name']}: a memory-backed volume needs a sizeLimit"
                return
            shared += _bytes(size)
    limits = [container.get("resources", {}).get("limits", {}).get("memory") for container in pod["containers"]]
    if shared and (None in limits or shared >= sum(_bytes(limit) for limit in limits)):
        yield f"memory-backed volumes of {shared // 2**30} GiB must be below the memory limit {limits}"


def gpu_pods_tolerate_the_taint(pod: Manifest) -> Iterator[str]:
    """The node group's taint keeps every pod off that does not say so; and no other pod has business there."""
    asks = any(names.GPU_RESOURCE in _limits(container) for container in pod["containers"])
    tolerates = any(toleration.get("key") == names.GPU_TAINT_KEY for toleration in pod.get("tolerations", []))
    if asks != tolerates:
        yield f"a pod tolerates the taint {names.GPU_TAINT_KEY} exactly when it asks for GPUs"


def launcher_has_time_to_stop(pod: Manifest) -> Iterator[str]:
    """ft_launcher's own default for its term-timeout is 1800 s, Kubernetes' grace is 30 s."""
    for container in pod["containers"]:
        words = _launcher_words(container)
        term, grace = int(_option(words, "term-timeout") or 1800), pod.get("terminationGracePeriodSeconds", 30)
        if words and term >= grace:
            yield f"terminationGracePeriodSeconds {grace} must be above --term-timeout {term}"


# Jobs


def one_pod_of_an_index(job: Manifest) -> Iterator[str]:
    """Two pods of one GROUP_RANK at a time kill the store (kubernetes.md, probe J)."""
    if job.get("podReplacementPolicy") != "Failed":
        yield "podReplacementPolicy must be said, and be Failed"


def launcher_contract(job: Manifest) -> Iterator[str]:
    """Exit codes 2 and 93 end the Job, disruptions are not charged, and the launchers' numbers are the Job's."""
    launchers = [(container, _launcher_words(container)) for container in job["template"]["spec"]["containers"]]
    for container, words in launchers:
        if not words:
            continue
        rules = job.get("podFailurePolicy", {}).get("rules", [])
        codes = {"containerName": container["name"], "operator": "In", "values": [EXIT_BAD_CONFIG, EXIT_NO_RESTART]}
        if {"action": "FailJob", "onExitCodes": codes} not in rules:
            yield f"exit codes {codes['values']} must fail the Job"
        disrupted = [{"type": "DisruptionTarget", "status": "True"}]
        if {"action": "Ignore", "onPodConditions": disrupted} not in rules:
            yield "a DisruptionTarget must be ignored"
        low, _, high = (_option(words, "nnodes") or "").partition(":")
        active = [rule.get("succeededCount") for rule in job.get("successPolicy", {}).get("rules", [])]
        if active != [int(low)]:
            yield f"successPolicy {active} and --nnodes {low}:{high} differ on the active nodes"
        # NVRx 0.6.0 closed the rendezvous for good on one more agent than --nnodes allows (nvidia-resiliency-ext #348).
        if int(high) < job.get("completions", 1):
            yield f"--nnodes {low}:{high} must admit all {job.get('completions')} pods"
        if job.get("maxFailedIndexes") != job.get("completions", 1) - int(low):
            yield f"maxFailedIndexes {job.get('maxFailedIndexes')} must be the number of spares"


# Kinds


def jobset_restarts_as_one(jobset: Manifest) -> Iterator[str]:
    """No pod of an old generation may meet one of the new; names resolve before pods are ready."""
    spec = jobset["spec"]
    if spec.get("failurePolicy", {}).get("restartStrategy") != "BlockingRecreate":
        yield "failurePolicy.restartStrategy must be BlockingRecreate"
    if not spec.get("network", {}).get("publishNotReadyAddresses"):
        yield "network.publishNotReadyAddresses must be true: the store looks itself up before it is ready"


def rendezvous_service(service: Manifest) -> Iterator[str]:
    """The same for a Service of our own."""
    if service["spec"].get("clusterIP") == "None" and not service["spec"].get("publishNotReadyAddresses"):
        yield "a headless Service must publishNotReadyAddresses"


def disruption_budget_is_a_number(budget: Manifest) -> Iterator[str]:
    """Percentages and maxUnavailable need an owner with a scale subresource, and a Job has none."""
    if not isinstance(budget["spec"].get("minAvailable"), int):
        yield "minAvailable must be a whole number"


def network_policy_denies_the_rest(policy: Manifest) -> Iterator[str]:
    """A policy type that is left out allows everything."""
    if set(policy["spec"].get("policyTypes", [])) != {"Ingress", "Egress"}:
        yield "policyTypes must be Ingress and Egress"


def _launcher_words(container: Manifest) -> list[str]:
    """The arguments, if this container runs ft_launcher."""
    words = container.get("args", [])
    return words if any(re.match(r"(exec )?ft_launcher\b", word) for word in words) else []


def _rendezvous_words(container: Manifest) -> list[str]:
    return container.get("args", []) if "nvrx-control" in container.get("args", []) else _launcher_words(container)


def _option(words: list[str], name: str) -> str | None:
    return next((word.partition("=")[2] for word in words if word.startswith(f"--{name}=")), None)


def _limits(container: Manifest) -> Manifest:
    return container.get("resources", {}).get("limits", {})


def _bytes(quantity: Any) -> int:
    match = re.fullmatch(r"(\d+)([a-zA-Z]*)", str(quantity))
    return int(match[1]) * _BYTES.get(match[2], 1) if match else 0


KIND_RULES = {
    "JobSet": [jobset_restarts_as_one],
    "Service": [rendezvous_service],
    "PodDisruptionBudget": [disruption_budget_is_a_number],
    "NetworkPolicy": [network_policy_denies_the_rest],
}
JOB_RULES = [one_pod_of_an_index, launcher_contract]
POD_RULES = [
    nothing_of_the_host,
    no_token_and_no_service_links,
    shared_memory_fits_the_limit,
    gpu_pods_tolerate_the_taint,
    launcher_has_time_to_stop,
]
CONTAINER_RULES = [
    image_is_pinned,
    no_shell_as_first_process,
    no_harmful_environment,
    huge_pages_with_their_switch,
    no_process_killing_hooks,
    launcher_timeouts_nest,
    launcher_says_who_it_is,
    rendezvous_id_is_its_own,
    endpoint_is_a_name,
]

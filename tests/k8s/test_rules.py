"""Each rule, with a manifest broken on purpose: it is refused, for this reason, and was not before."""

import copy

import pytest

from k8s import main as k8s_main
from k8s import placement, project_rules, rules, server_pod_rules, server_rules, storage
from tests.k8s.shapes import SHAPES

JOB = ("spec", "replicatedJobs", 1, "template", "spec")
CONTROL = ("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0)
POD = (*JOB, "template", "spec")
CONTAINER = (*POD, "containers", 0)
LIMITS = (*CONTAINER, "resources", "limits")
REQUESTS = (*CONTAINER, "resources", "requests")
RULES = (*JOB, "podFailurePolicy", "rules")

REMOVED = object()


def appended(value):
    return lambda items: [*items, value]


def option(name, value):
    """Another value for one option among a container's arguments."""
    return lambda words: [f"--{name}={value}" if word.startswith(f"--{name}=") else word for word in words]


def without_variable(name):
    return lambda variables: [variable for variable in variables if variable["name"] != name]


ROLE = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "Role",
    "metadata": {"name": "reader", "namespace": "training"},
    "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}],
}
BINDING = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "RoleBinding",
    "metadata": {"name": "reader", "namespace": "training"},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
}
DAEMON_SET = {
    "apiVersion": "apps/v1",
    "kind": "DaemonSet",
    "metadata": {"name": "exporter", "namespace": "training"},
    "spec": {
        "selector": {"matchLabels": {"app": "x"}},
        "template": {"metadata": {"labels": {"app": "x"}}, "spec": {"containers": [{"name": "x", "image": "x"}]}},
    },
}
VOLUME = storage.fsx_volume(
    namespace="training", file_system_id="fs-1", dns_name="fs-1.example", mount_name="abc", capacity_gib=4800
)
OWN = {"Role": ROLE, "RoleBinding": BINDING, "DaemonSet": DAEMON_SET, "PersistentVolume": VOLUME}

# rule, kind of object (jobs: those of an Indexed Job), path, value, what the problem says
BREACHES = [
    # The 23 classes that only a server catches.
    (server_rules.restart_policy, "JobSet", (*POD, "restartPolicy"), "never", "restartPolicy never must be"),
    (server_rules.restart_policy, "JobSet", (*POD, "restartPolicy"), "Always", "restartPolicy Always must be"),
    (
        server_rules.restart_policy,
        "JobSet",
        (*POD, "restartPolicy"),
        "OnFailure",
        "podFailurePolicy needs restartPolicy",
    ),
    (
        server_pod_rules.devices,
        "JobSet",
        (*LIMITS, "nvidia.com/gpu"),
        REMOVED,
        "nvidia.com/gpu: request 8 and limit None",
    ),
    (server_pod_rules.devices, "JobSet", (*LIMITS, "nvidia.com/gpu"), 4, "nvidia.com/gpu: request 8 and limit 4"),
    (server_pod_rules.devices, "JobSet", (*LIMITS, "vpc.amazonaws.com/efa"), "500m", "500m must be a whole number"),
    (server_rules.quantities, "JobSet", (*LIMITS, "memory"), "1800GiB", "memory: 1800GiB is no quantity"),
    (server_rules.quantities, "JobSet", (*POD, "volumes", 1, "emptyDir", "sizeLimit"), "98GB", "sizeLimit: 98GB is no"),
    (
        server_pod_rules.mounts_are_declared,
        "JobSet",
        (*POD, "volumes", 0, "name"),
        "other",
        "volume fsx is not declared",
    ),
    (server_rules.indexed_fields, "JobSet", (*JOB, "completionMode"), "NonIndexed", "backoffLimitPerIndex needs"),
    (server_rules.indexed_fields, "JobSet", (*JOB, "backoffLimitPerIndex"), REMOVED, "maxFailedIndexes needs"),
    (server_rules.indexed_fields, "JobSet", (*JOB, "completions"), REMOVED, "Indexed needs completions"),
    (
        server_rules.pod_failure_policy,
        "JobSet",
        (*RULES, 0, "onExitCodes", "containerName"),
        "worker",
        "there is no container worker",
    ),
    (server_rules.pod_failure_policy, "JobSet", (*RULES, 0, "onExitCodes", "values"), [0, 2], "exit code 0 is no"),
    (server_rules.pod_failure_policy, "JobSet", (*RULES, 0, "onExitCodes", "values"), [93, 2], "must be in order"),
    (server_rules.pod_failure_policy, "JobSet", (*RULES, 0, "action"), "Fail", "there is no action Fail"),
    (server_rules.pod_failure_policy, "JobSet", (*RULES, 1, "onExitCodes"), {}, "exactly one of onExitCodes"),
    (server_rules.pod_replacement_policy, "JobSet", (*JOB, "podReplacementPolicy"), "Always", "must be Failed or Term"),
    (
        server_rules.pod_replacement_policy,
        "JobSet",
        (*JOB, "podReplacementPolicy"),
        "TerminatingOrFailed",
        "podFailurePolicy needs podReplacementPolicy Failed",
    ),
    (server_rules.object_name, "JobSet", ("metadata", "name"), "Llama", "Llama is no DNS name"),
    (
        server_pod_rules.subdomain,
        "Job",
        ("spec", "template", "spec", "subdomain"),
        "llama.8b",
        "llama.8b is no DNS label",
    ),
    (
        server_rules.labels_and_annotations,
        "JobSet",
        (*JOB, "template", "metadata", "labels", "app"),
        "x" * 64,
        "longer than 63",
    ),
    (
        server_rules.labels_and_annotations,
        "JobSet",
        (*JOB, "template", "metadata", "annotations", "a"),
        True,
        "True is no string",
    ),
    (
        server_pod_rules.huge_pages_need_memory,
        "JobSet",
        (*CONTAINER, "resources"),
        {"limits": {"hugepages-2Mi": "4Mi"}},
        "huge pages need cpu or memory",
    ),
    (server_pod_rules.environment_names, "JobSet", (*CONTAINER, "env", 0, "name"), "1 IP", "'1 IP' is no name"),
    (server_pod_rules.environment_names, "JobSet", (*CONTAINER, "env", 3, "value"), 1, "needs one value, a string"),
    (server_rules.service_ports, "Service", ("spec", "ports", 0, "port"), 70_000, "port 70000 is none"),
    (
        server_rules.selector_matches_template,
        "DaemonSet",
        ("spec", "selector", "matchLabels", "app"),
        "y",
        "does not match the template",
    ),
    (server_rules.one_volume_source, "PersistentVolume", ("spec", "nfs"), {"path": "/"}, "has ['csi', 'nfs']"),
    (server_rules.role_rules_have_groups, "Role", ("rules", 0, "apiGroups"), REMOVED, "needs apiGroups"),
    (server_rules.role_ref, "RoleBinding", ("roleRef", "kind"), "Group", "roleRef.kind Group must be"),
    # More of a server's.
    (server_rules.claim_asks_for_storage, "PersistentVolumeClaim", ("spec", "accessModes"), [], "and accessModes"),
    (server_rules.priority_class, "PriorityClass", ("value",), 2_000_000_000, "kept for the system"),
    (
        server_rules.jobset_targets,
        "JobSet",
        ("spec", "replicatedJobs", 1, "dependsOn", 0, "name"),
        "worker",
        "before it",
    ),
    (
        server_rules.jobset_targets,
        "JobSet",
        ("spec", "successPolicy", "targetReplicatedJobs"),
        ["trainer"],
        "there is no trainer",
    ),
    (server_rules.jobset_pod_names, "JobSet", ("metadata", "name"), "a" * 50, "has 68 characters, a DNS label 63"),
    (server_rules.job_pod_names, "Job", ("metadata", "name"), "a" * 60, "a DNS label 63"),
    (server_rules.counts_within_completions, "JobSet", (*JOB, "maxFailedIndexes"), 4, "exceeds completions 3"),
    (
        server_rules.counts_within_completions,
        "JobSet",
        (*JOB, "successPolicy", "rules", 0, "succeededCount"),
        4,
        "succeededCount 4 is not within",
    ),
    (
        server_pod_rules.unique_names,
        "JobSet",
        (*POD, "volumes"),
        appended({"name": "shm", "emptyDir": {}}),
        "two volumes",
    ),
    (server_pod_rules.volume_sources, "JobSet", (*POD, "volumes", 0, "emptyDir"), {}, "exactly one source"),
    (server_pod_rules.tolerations, "JobSet", (*POD, "tolerations", 0, "value"), "true", "Exists takes no value"),
    (
        server_pod_rules.user_may_run,
        "JobSet",
        (*POD, "initContainers", 0, "securityContext", "runAsNonRoot"),
        True,
        "runAsNonRoot with user 0",
    ),
    (server_pod_rules.container_name, "JobSet", (*CONTAINER, "name"), "Trainer", "Trainer is no DNS label"),
    (server_pod_rules.container_ports, "JobSet", (*CONTROL, "ports"), [], "there is no port rdzv"),
    # The project's own.
    (project_rules.image_is_pinned, "JobSet", (*CONTAINER, "image"), "trainer:latest", "pinned by digest"),
    (project_rules.no_shell_as_first_process, "JobSet", (*CONTAINER, "command"), ["bash", "-c"], "a shell must not"),
    (
        project_rules.no_harmful_environment,
        "JobSet",
        (*CONTAINER, "env"),
        appended({"name": "NCCL_PROTO", "value": "simple"}),
        "NCCL_PROTO is refused",
    ),
    (
        project_rules.huge_pages_with_their_switch,
        "JobSet",
        (*CONTAINER, "env"),
        appended({"name": "FI_EFA_USE_HUGE_PAGE", "value": "0"}),
        "job.efa_huge_pages changes both",
    ),
    (project_rules.no_process_killing_hooks, "JobSet", (*CONTAINER, "livenessProbe"), {}, "no livenessProbe"),
    (
        project_rules.launcher_timeouts_nest,
        "JobSet",
        (*CONTAINER, "args"),
        option("workers-stop-timeout", 150),
        "must be below --term-timeout 150",
    ),
    (
        project_rules.launcher_says_who_it_is,
        "JobSet",
        (*CONTAINER, "args"),
        option("local-addr", "localhost"),
        "--local-addr=$(POD_IP)",
    ),
    (
        project_rules.launcher_says_who_it_is,
        "JobSet",
        (*CONTAINER, "env"),
        without_variable("GROUP_RANK"),
        "needs GROUP_RANK",
    ),
    (
        project_rules.rendezvous_id_is_its_own,
        "JobSet",
        (*CONTROL, "args"),
        option("rdzv-id", "none"),
        "--rdzv-id must name the job",
    ),
    (
        project_rules.endpoint_is_a_name,
        "JobSet",
        (*CONTAINER, "args"),
        option("rdzv-endpoint", "10.0.0.7:29500"),
        "10.0.0.7:29500 must be POD.SERVICE:PORT",
    ),
    (
        project_rules.nothing_of_the_host,
        "JobSet",
        (*POD, "volumes", 0),
        {"name": "fsx", "hostPath": {"path": "/dev/infiniband"}},
        "hostPath is refused",
    ),
    (project_rules.nothing_of_the_host, "JobSet", (*POD, "hostNetwork"), True, "hostNetwork is refused"),
    (
        project_rules.no_token_and_no_service_links,
        "JobSet",
        (*POD, "automountServiceAccountToken"),
        REMOVED,
        "automountServiceAccountToken must be false",
    ),
    (
        project_rules.shared_memory_fits_the_limit,
        "JobSet",
        (*POD, "volumes", 1, "emptyDir", "sizeLimit"),
        "1792Gi",
        "must be below the memory limit",
    ),
    (
        project_rules.shared_memory_fits_the_limit,
        "JobSet",
        (*POD, "volumes", 1, "emptyDir", "sizeLimit"),
        REMOVED,
        "needs a sizeLimit",
    ),
    (project_rules.gpu_pods_tolerate_the_taint, "JobSet", (*POD, "tolerations"), [], "exactly when it asks for GPUs"),
    (
        project_rules.launcher_has_time_to_stop,
        "JobSet",
        (*POD, "terminationGracePeriodSeconds"),
        150,
        "150 must be above --term-timeout 150",
    ),
    (project_rules.one_pod_of_an_index, "JobSet", (*JOB, "podReplacementPolicy"), REMOVED, "must be said"),
    (
        project_rules.launcher_contract,
        "JobSet",
        (*RULES, 0, "onExitCodes", "values"),
        [2],
        "exit codes [2, 93] must fail",
    ),
    (project_rules.launcher_contract, "JobSet", (*RULES, 1, "action"), "Count", "DisruptionTarget must be ignored"),
    (project_rules.launcher_contract, "JobSet", (*CONTAINER, "args"), option("nnodes", "2:2"), "must admit all 3 pods"),
    (
        project_rules.launcher_contract,
        "JobSet",
        (*JOB, "successPolicy", "rules", 0, "succeededCount"),
        3,
        "differ on the active nodes",
    ),
    (project_rules.launcher_contract, "JobSet", (*JOB, "maxFailedIndexes"), 0, "must be the number of spares"),
    (
        project_rules.jobset_restarts_as_one,
        "JobSet",
        ("spec", "failurePolicy", "restartStrategy"),
        "Recreate",
        "must be BlockingRecreate",
    ),
    (
        project_rules.rendezvous_service,
        "Service",
        ("spec", "publishNotReadyAddresses"),
        False,
        "must publishNotReadyAddresses",
    ),
    (
        project_rules.disruption_budget_is_a_number,
        "PodDisruptionBudget",
        ("spec", "minAvailable"),
        "60%",
        "must be a whole number",
    ),
    (
        project_rules.network_policy_denies_the_rest,
        "NetworkPolicy",
        ("spec", "policyTypes"),
        ["Ingress"],
        "must be Ingress and Egress",
    ),
]


def whole(kind, shipped, render, changed):
    """An object of that kind as it is rendered."""
    if kind in OWN:
        return OWN[kind]
    if kind in ("Job", "Service"):
        indexed = render(changed("p5-2node", job=SHAPES["indexed"][0]))
        return indexed.all(kind)[-1]
    return shipped("p5-2node").only(kind)


def changed_at(document, path, value):
    """A copy with another value at the path."""
    broken = inner = copy.deepcopy(document)
    for key in path[:-1]:
        inner = inner[key]
    if value is REMOVED:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value(inner[path[-1]]) if callable(value) else value
    return broken


@pytest.mark.parametrize(
    ("rule", "kind", "path", "value", "problem"),
    BREACHES,
    ids=[f"{rule.__name__}-{number}" for number, (rule, *_) in enumerate(BREACHES)],
)
def test_a_broken_manifest_is_refused(shipped, render, changed, rule, kind, path, value, problem):
    document = whole(kind, shipped, render, changed)
    assert list(rules.broken(document)) == []
    found = list(rules.broken(changed_at(document, path, value)))
    assert [line for line in found if problem in line], found


def test_every_rule_has_a_manifest_that_breaks_it():
    tables = [
        table
        for module in (server_rules, server_pod_rules, project_rules)
        for name, value in vars(module).items()
        if name.endswith("_RULES")
        for table in (value.values() if isinstance(value, dict) else [value])
    ]
    rules_there = {rule for table in tables for rule in table}
    assert {rule for rule, *_ in BREACHES} == rules_there


def test_a_render_that_breaks_a_rule_is_one_line_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(placement, "_tolerations", list)
    out = tmp_path / "out"
    assert k8s_main.main(["--deployment", "deployments/p5-2node.yaml", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: 0001-llama-8b.k8s.yaml: JobSet llama-8b: a pod tolerates the taint nvidia.com/gpu")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []

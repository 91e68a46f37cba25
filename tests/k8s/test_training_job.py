"""What the manifests of a training job must say, each for a reason that once cost somebody a run."""

import json

import pytest

import training.config
from k8s import launcher, storage

NOT_RETRIABLE = [training.config.EXIT_BAD_CONFIG, training.config.EXIT_NO_RESTART]


def argument(container, name):
    """Value of `--name=value` among a container's arguments."""
    (value,) = [word.partition("=")[2] for word in container["args"] if word.startswith(f"--{name}=")]
    return value


# Shape of the job


def test_workers_are_active_nodes_and_spares(manifests):
    job, spec = manifests.deployment.job, manifests.job("worker")
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == job.node_count + job.spare_count
    assert spec["successPolicy"] == {"rules": [{"succeededCount": job.node_count}]}
    assert spec["maxFailedIndexes"] == job.spare_count
    assert spec["backoffLimitPerIndex"] == job.backoff_limit_per_index


def test_the_rendezvous_admits_more_nodes_than_there_are_pods(manifests):
    for name in ("worker", "control"):
        low, high = argument(manifests.container(name), "nnodes").split(":")
        assert int(low) == manifests.deployment.job.node_count
        assert int(high) >= manifests.deployment.job.pod_count + 1


def test_control_is_one_pod_with_one_try(manifests):
    spec = manifests.job("control")
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (1, 1, 0)


def test_no_index_ever_has_two_pods(manifests):
    assert [manifests.job(name)["podReplacementPolicy"] for name in ("control", "worker")] == ["Failed", "Failed"]


def test_workers_wait_until_the_store_accepts_connections(manifests):
    _, worker = manifests.only("JobSet")["spec"]["replicatedJobs"]
    assert worker["dependsOn"] == [{"name": "control", "status": "Ready"}]
    probe, (port,) = manifests.container("control")["readinessProbe"], manifests.container("control")["ports"]
    assert probe["tcpSocket"] == {"port": port["name"]}
    assert port["containerPort"] == manifests.deployment.job.rendezvous.port


# Exit codes and restarts


def test_bad_config_and_no_restart_end_the_job_and_so_the_jobset(manifests):
    for name in ("control", "worker"):
        rule = manifests.job(name)["podFailurePolicy"]["rules"][0]
        (container,) = manifests.pod(name)["containers"]
        assert rule == {
            "action": "FailJob",
            "onExitCodes": {"containerName": container["name"], "operator": "In", "values": NOT_RETRIABLE},
        }
    (rule,) = manifests.only("JobSet")["spec"]["failurePolicy"]["rules"]
    assert rule == {"name": "noRestart", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}


def test_a_disrupted_worker_is_not_charged(manifests):
    assert manifests.job("worker")["podFailurePolicy"]["rules"][1:] == [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    ]


def test_a_lost_store_is_charged_so_that_the_jobset_restarts(manifests):
    assert len(manifests.job("control")["podFailurePolicy"]["rules"]) == 1


def test_a_new_generation_starts_when_the_old_one_is_gone(manifests):
    policy = manifests.only("JobSet")["spec"]["failurePolicy"]
    assert policy["restartStrategy"] == "BlockingRecreate"
    assert policy["maxRestarts"] == manifests.deployment.train.restarts.job.max_restarts


def test_the_jobset_succeeds_with_its_workers(manifests):
    assert manifests.only("JobSet")["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["worker"]}


def test_every_pod_runs_under_the_supervisor_and_never_restarts_in_place(manifests):
    for name in ("control", "worker"):
        assert manifests.pod(name)["restartPolicy"] == "Never"
        assert manifests.container(name)["command"] == ["python", "-m", "training.supervisor"]


def test_only_workers_are_held_to_the_done_marker(manifests):
    assert argument(manifests.container("worker"), "run-directory") == manifests.deployment.train.run_directory
    assert manifests.container("control")["args"][0] == "--"


def test_timeouts_nest_inside_the_grace_period(manifests):
    worker = manifests.container("worker")
    workers_stop, term = int(argument(worker, "workers-stop-timeout")), int(argument(worker, "term-timeout"))
    assert workers_stop < term < manifests.pod("worker")["terminationGracePeriodSeconds"]
    assert "lifecycle" not in worker  # a preStop hook would eat the same budget


def test_no_probe_kills_a_trainer(manifests):
    assert not {"livenessProbe", "startupProbe", "readinessProbe"} & manifests.container("worker").keys()


# Rendezvous


def test_all_pods_name_one_endpoint_by_dns(shipped, render, changed):
    for manifests in (shipped("p5-2node"), render(changed("p5-2node", job={"node_count": 4, "spare_count": 0}))):
        jobset = manifests.only("JobSet")
        name = jobset["metadata"]["name"]
        endpoints = {argument(manifests.container(job), "rdzv-endpoint") for job in ("control", "worker")}
        assert endpoints == {f"{name}-control-0-0.{name}:29500"}
        assert jobset["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}


def test_the_rendezvous_id_is_the_jobs_name(manifests):
    ids = {argument(manifests.container(job), "rdzv-id") for job in ("control", "worker")}
    assert ids == {manifests.deployment.job.name}


def test_a_worker_tells_its_own_address_and_its_index(manifests):
    fields = {
        variable["name"]: variable["valueFrom"]["fieldRef"]["fieldPath"]
        for variable in manifests.container("worker")["env"]
        if "valueFrom" in variable
    }
    assert argument(manifests.container("worker"), "local-addr") == "$(POD_IP)"
    assert fields == {
        "POD_IP": "status.podIP",
        "NODE_NAME": "spec.nodeName",
        "GROUP_RANK": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
    }


def test_a_worker_never_hosts_the_store_and_waits_for_slow_nodes(manifests):
    conf = dict(pair.split("=") for pair in argument(manifests.container("worker"), "rdzv-conf").split(","))
    assert conf["is_host"] == "0"
    assert {"join_timeout", "store_connect_wait_seconds"} <= conf.keys()


# Resources and placement


def test_a_p5_worker_takes_every_gpu_and_efa_device(shipped):
    resources = shipped("p5-2node").container("worker")["resources"]
    assert resources["limits"] == {
        "cpu": "180",
        "memory": "1792Gi",
        "nvidia.com/gpu": 8,
        "vpc.amazonaws.com/efa": 32,
        "hugepages-2Mi": "5120Mi",
    }


def test_every_container_has_requests_equal_to_its_limits(manifests):
    for name in ("control", "worker"):
        pod = manifests.pod(name)
        for container in (*pod["containers"], *pod.get("initContainers", [])):
            assert container["resources"]["requests"] == container["resources"]["limits"]
            assert {"cpu", "memory"} <= container["resources"]["limits"].keys()


def test_shared_memory_fits_into_the_memory_limit_twice(manifests):
    (shm,) = [volume for volume in manifests.pod("worker")["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"
    limit = manifests.container("worker")["resources"]["limits"]["memory"]
    assert 2 * int(shm["emptyDir"]["sizeLimit"].removesuffix("Gi")) <= int(limit.removesuffix("Gi"))


def test_gpu_workers_get_a_node_each_of_the_right_type(shipped):
    pod = shipped("p5-2node").pod("worker")
    assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5.48xlarge"}
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    labels = shipped("p5-2node").job("worker")["template"]["metadata"]["labels"]
    assert apart["labelSelector"]["matchLabels"].items() <= labels.items()


def test_the_network_layers_are_a_preference(shipped):
    affinity = shipped("p5-2node").pod("worker")["affinity"]["podAffinity"]
    assert list(affinity) == ["preferredDuringSchedulingIgnoredDuringExecution"]


def test_gpu_workers_tolerate_the_gpu_taint_and_leave_a_lost_node_soon(shipped):
    tolerations = {toleration["key"]: toleration for toleration in shipped("p5-2node").pod("worker")["tolerations"]}
    assert tolerations["nvidia.com/gpu"]["effect"] == "NoSchedule"
    for condition in ("not-ready", "unreachable"):
        assert tolerations[f"node.kubernetes.io/{condition}"]["tolerationSeconds"] == 30


def test_the_store_stays_off_gpu_nodes(shipped):
    pod = shipped("p5-2node").pod("control")
    assert pod["nodeSelector"] == {"node-role": "system"}
    assert "tolerations" not in pod


def test_cpu_workers_ask_for_no_device_and_run_anywhere(shipped):
    pod = shipped("local").pod("worker")
    assert set(pod["containers"][0]["resources"]["limits"]) == {"cpu", "memory"}
    assert not {"tolerations", "affinity", "nodeSelector"} & pod.keys()
    assert "nodeSelector" not in shipped("local").pod("control")


# Environment


def test_a_worker_has_the_environment_that_the_drills_run(manifests):
    expected = launcher.worker_environment(manifests.deployment)
    assert expected.items() <= manifests.environment("worker").items()


def test_nccl_keeps_off_the_pod_identity_link(shipped):
    assert "pod-id-link" in shipped("p5-2node").environment("worker")["NCCL_SOCKET_IFNAME"]


@pytest.mark.parametrize("enabled", [True, False])
def test_nvls_is_off_only_for_in_process_restart(render, changed, enabled):
    manifests = render(changed("p5-2node", train={"restarts": {"in_process": {"enabled": enabled}}}))
    assert ("NCCL_NVLS_ENABLE" in manifests.environment("worker")) is enabled


# Security


def test_pods_hold_no_credentials_and_no_privileges(manifests):
    for name in ("control", "worker"):
        pod, container = manifests.pod(name), manifests.container(name)
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    assert manifests.only("ServiceAccount")["automountServiceAccountToken"] is False


def test_no_pod_reaches_into_its_node(manifests):
    for name in ("control", "worker"):
        pod = manifests.pod(name)
        assert not {"hostNetwork", "hostIPC", "hostPID"} & pod.keys()
        assert not [volume for volume in pod["volumes"] if "hostPath" in volume]


def test_the_root_step_only_makes_the_runs_directories(manifests):
    (step,) = manifests.pod("worker")["initContainers"]
    train = manifests.deployment.train
    assert step["command"] == ["install", "--directory", "--owner=1000", "--group=1000"]
    assert step["args"] == [train.run_directory, train.checkpoint.directory]
    assert step["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "DAC_OVERRIDE", "FOWNER"]}


def test_root_is_possible_where_a_node_needs_it(render, changed):
    security = render(changed("local", job={"run_as_user": 0})).pod("worker")["securityContext"]
    assert (security["runAsUser"], security["runAsNonRoot"]) == (0, False)


def test_every_image_is_pinned_by_digest(manifests):
    for name in ("control", "worker"):
        pod = manifests.pod(name)
        images = {container["image"] for container in (*pod["containers"], *pod.get("initContainers", []))}
        assert images == {manifests.deployment.job.image}


# Settings, storage, policies


def test_the_pod_reads_the_settings_that_the_deployment_says(manifests):
    config_map, site = manifests.only("ConfigMap"), launcher.cluster_site(manifests.deployment)
    (text,) = config_map["data"].values()
    assert training.config.TrainConfig.model_validate(json.loads(text)) == manifests.deployment.train
    mounts = {mount["name"]: mount["mountPath"] for mount in manifests.container("worker")["volumeMounts"]}
    assert (
        argument(manifests.container("worker"), "config") == f"{mounts['train-config']}/train.json" == site.train_json
    )


def test_changed_settings_are_a_new_config_map(shipped, render, changed):
    before, after = shipped("local"), render(changed("local", train={"seed": 7}))
    assert before.only("ConfigMap")["immutable"] is True
    names = [manifests.only("ConfigMap")["metadata"]["name"] for manifests in (before, after)]
    assert names[0] != names[1]
    for manifests, name in zip((before, after), names, strict=True):
        (volume,) = [volume for volume in manifests.pod("worker")["volumes"] if volume["name"] == "train-config"]
        assert volume["configMap"]["name"] == name


def test_workers_mount_the_shared_claim(manifests):
    (volume,) = [volume for volume in manifests.pod("worker")["volumes"] if volume["name"] == "fsx"]
    assert volume["persistentVolumeClaim"] == {"claimName": "fsx-training"}


def test_with_a_cluster_section_the_claim_is_the_one_that_cdk_installs(shipped):
    claim = shipped("p5-2node").only("PersistentVolumeClaim")
    assert claim == storage.fsx_claim(namespace="training", capacity_gib=4800)


def test_with_a_cluster_section_deleting_the_manifests_can_not_take_namespace_or_volume_along(shipped):
    assert not {document["kind"] for document in shipped("p5-2node").documents} & {"Namespace", "PersistentVolume"}


def test_without_one_the_claim_uses_the_default_storage_class(shipped):
    claim = shipped("local").only("PersistentVolumeClaim")
    assert claim["metadata"]["name"] == "fsx-training"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert not {"storageClassName", "volumeName"} & claim["spec"].keys()
    assert shipped("local").only("Namespace")["metadata"]["name"] == "training"


def test_the_disruption_budget_keeps_the_active_nodes(manifests):
    budget = manifests.only("PodDisruptionBudget")["spec"]
    assert budget["minAvailable"] == manifests.deployment.job.node_count
    labels = manifests.job("worker")["template"]["metadata"]["labels"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    control = manifests.job("control")["template"]["metadata"]["labels"]
    assert not budget["selector"]["matchLabels"].items() <= control.items()


def test_the_network_policy_lets_the_jobs_pods_talk_and_resolve_names(manifests):
    policy = manifests.only("NetworkPolicy")["spec"]
    peers = policy["ingress"][0]["from"][0]["podSelector"]
    assert policy["podSelector"] == peers == policy["egress"][0]["to"][0]["podSelector"]
    assert "ports" not in policy["ingress"][0]
    assert {(port["protocol"], port["port"]) for port in policy["egress"][1]["ports"]} == {("UDP", 53), ("TCP", 53)}
    for name in ("control", "worker"):
        labels = manifests.job(name)["template"]["metadata"]["labels"]
        assert peers["matchLabels"].items() <= labels.items()

"""The two kinds of pod of a job: workers, one per node, and the control pod that owns the rendezvous store."""

from typing import Any

from cdk8s_plus_33 import k8s as kube

from config import names
from config.deployment import DeploymentConfig
from config.job import JobConfig
from k8s import launcher, policies
from k8s.resources import fixed, worker_resources

WORKER_CONTAINER = "trainer"
CONTROL_CONTAINER = "control"

_TMP = "tmp"
_SHM = "shm"
_FSX = "fsx"
_TRAIN_CONFIG = "train-config"
_PORT_NAME = "rdzv"
# Set by the Job controller on every pod of an Indexed Job.
_COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
# EKS's network topology: layer 3 is the switch next to the node on p5. Preferred only: a required layer would keep a
# lost node's replacement Pending.
_NETWORK_LAYERS = {"topology.k8s.aws/network-node-layer-3": 100, "topology.k8s.aws/network-node-layer-2": 50}
_LOST_NODE_SECONDS = 30  # Kubernetes' default is 300: a spare waits for nothing, but the replacement would
_CONTROL_GRACE_SECONDS = 30  # nvrx-control keeps its store for 3 s, so that launchers can read how the job ended


def worker_pod(deployment: DeploymentConfig, *, train_config_map: str) -> kube.PodTemplateSpec:
    """One node of the job: the supervisor runs ft_launcher, which runs one rank per GPU."""
    job, on_gpu = deployment.job, deployment.job.instance is not None
    shm_gib = worker_resources(job).shm_gib
    return kube.PodTemplateSpec(
        metadata=_metadata(job, policies.WORKER),
        spec=_pod_spec(
            job,
            termination_grace_period_seconds=deployment.train.restarts.termination_grace_period_seconds,
            node_selector={"node.kubernetes.io/instance-type": job.instance.name} if job.instance else None,
            tolerations=_tolerations() if on_gpu else None,
            affinity=_affinity(job) if on_gpu else None,
            init_containers=[_directories_container(deployment)],
            containers=[_worker_container(deployment)],
            volumes=[
                kube.Volume(
                    name=_FSX,
                    persistent_volume_claim=kube.PersistentVolumeClaimVolumeSource(claim_name=names.FSX_CLAIM),
                ),
                kube.Volume(name=_TRAIN_CONFIG, config_map=kube.ConfigMapVolumeSource(name=train_config_map)),
                # A hostPath /dev/shm would leak from pod to pod, and no Pod Security Standard allows it.
                kube.Volume(
                    name=_SHM,
                    empty_dir=kube.EmptyDirVolumeSource(
                        medium="Memory", size_limit=kube.Quantity.from_string(f"{shm_gib}Gi")
                    ),
                ),
                kube.Volume(name=_TMP, empty_dir=kube.EmptyDirVolumeSource()),
            ],
        ),
    )


def control_pod(deployment: DeploymentConfig) -> kube.PodTemplateSpec:
    """The rendezvous store, on a system node: no fault of a GPU node takes it along."""
    job = deployment.job
    command = launcher.control_command(deployment, launcher.cluster_site(deployment))
    container = kube.Container(
        name=CONTROL_CONTAINER,
        image=job.image,
        # nvrx-control ends with 0 on SIGTERM: after a drain its Job would count as complete, and never come back.
        command=launcher.SUPERVISOR,
        args=launcher.supervised(command),
        env=_environment({"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"}),
        ports=[kube.ContainerPort(name=_PORT_NAME, container_port=job.rendezvous.port)],
        # The workers' dependsOn waits for it.
        readiness_probe=kube.Probe(
            tcp_socket=kube.TcpSocketAction(port=kube.IntOrString.from_string(_PORT_NAME)), period_seconds=2
        ),
        resources=fixed(cpu="1", memory="2Gi"),
        security_context=_unprivileged(),
        termination_message_policy="FallbackToLogsOnError",
        volume_mounts=[kube.VolumeMount(name=_TMP, mount_path="/tmp")],
    )
    return kube.PodTemplateSpec(
        metadata=_metadata(job, policies.CONTROL),
        spec=_pod_spec(
            job,
            termination_grace_period_seconds=_CONTROL_GRACE_SECONDS,
            node_selector={names.NODE_ROLE_LABEL: names.NODE_ROLE_SYSTEM} if job.instance else None,
            containers=[container],
            volumes=[kube.Volume(name=_TMP, empty_dir=kube.EmptyDirVolumeSource())],
        ),
    )


def _worker_container(deployment: DeploymentConfig) -> kube.Container:
    site = launcher.cluster_site(deployment)
    # No liveness probe: NVRx's rank monitors own hang detection, and a probe's kill would cost the index a retry.
    return kube.Container(
        name=WORKER_CONTAINER,
        image=deployment.job.image,
        command=launcher.SUPERVISOR,
        args=launcher.supervised(
            launcher.worker_command(deployment, site), run_directory=launcher.run_directory(deployment, site)
        ),
        env=[
            _from_field("POD_IP", "status.podIP"),
            _from_field("NODE_NAME", "spec.nodeName"),
            # NVRx sorts nodes by it; two pods of one number at a time end the rendezvous (kubernetes.md, probe J).
            _from_field("GROUP_RANK", _COMPLETION_INDEX),
            *_environment(launcher.worker_environment(deployment)),
        ],
        resources=worker_resources(deployment.job).requirements(),
        security_context=_unprivileged(),
        termination_message_policy="FallbackToLogsOnError",
        volume_mounts=[
            kube.VolumeMount(name=_FSX, mount_path=names.FSX_MOUNT),
            kube.VolumeMount(name=_TRAIN_CONFIG, mount_path=names.TRAIN_CONFIG_MOUNT, read_only=True),
            kube.VolumeMount(name=_SHM, mount_path="/dev/shm"),
            kube.VolumeMount(name=_TMP, mount_path="/tmp"),
        ],
    )


def _directories_container(deployment: DeploymentConfig) -> kube.Container:
    """Makes the run's directories and gives them to the trainer's user: the root of a new FSx belongs to root.

    fsGroup does not: the driver leaves a ReadWriteMany volume's owner alone (aws-fsx-csi-driver, fsGroupPolicy).
    """
    user, train = deployment.job.run_as_user, deployment.train
    return kube.Container(
        name="directories",
        image=deployment.job.image,
        command=["install", "--directory", f"--owner={user}", f"--group={user}"],
        args=[train.run_directory, train.checkpoint.directory],
        resources=fixed(cpu="1", memory="256Mi"),
        security_context=kube.SecurityContext(
            run_as_user=0,
            run_as_non_root=False,
            allow_privilege_escalation=False,
            read_only_root_filesystem=True,
            # All within the baseline profile: give directories away, also those that another user owns.
            capabilities=kube.Capabilities(drop=["ALL"], add=["CHOWN", "DAC_OVERRIDE", "FOWNER"]),
        ),
        volume_mounts=[kube.VolumeMount(name=_FSX, mount_path=names.FSX_MOUNT)],
    )


def _metadata(job: JobConfig, component: str) -> kube.ObjectMeta:
    return kube.ObjectMeta(
        labels=policies.labels(job, component),
        annotations={
            "karpenter.sh/do-not-disrupt": "true",
            "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        },
    )


def _pod_spec(job: JobConfig, **fields: Any) -> kube.PodSpec:
    """A pod's spec: what both kinds share, and the given fields."""
    return kube.PodSpec(
        # podFailurePolicy and backoffLimitPerIndex need Never, and JobSet's webhook would fill in OnFailure.
        restart_policy="Never",
        service_account_name=job.name,
        automount_service_account_token=False,
        enable_service_links=False,  # else every Service of the namespace adds variables to the environment
        security_context=kube.PodSecurityContext(
            run_as_user=job.run_as_user,
            run_as_group=job.run_as_user,
            run_as_non_root=job.run_as_user != 0,
            seccomp_profile=kube.SeccompProfile(type="RuntimeDefault"),
        ),
        **fields,
    )


def _unprivileged() -> kube.SecurityContext:
    # No IPC_LOCK: an added capability is not effective for a user other than root. Pinned memory is bounded by the
    # container runtime's memlock limit, which the GPU AMI lifts.
    return kube.SecurityContext(
        allow_privilege_escalation=False,
        read_only_root_filesystem=True,
        capabilities=kube.Capabilities(drop=["ALL"]),
    )


def _environment(variables: dict[str, str]) -> list[kube.EnvVar]:
    # The root file system is read-only: caches below the home directory (Triton, torch) go to the one writable place.
    return [kube.EnvVar(name=name, value=value) for name, value in (variables | {"HOME": "/tmp"}).items()]


def _from_field(name: str, field_path: str) -> kube.EnvVar:
    return kube.EnvVar(
        name=name, value_from=kube.EnvVarSource(field_ref=kube.ObjectFieldSelector(field_path=field_path))
    )


def _tolerations() -> list[kube.Toleration]:
    lost_node = [
        kube.Toleration(
            key=f"node.kubernetes.io/{condition}",
            operator="Exists",
            effect="NoExecute",
            toleration_seconds=_LOST_NODE_SECONDS,
        )
        for condition in ("not-ready", "unreachable")
    ]
    return [kube.Toleration(key=names.GPU_TAINT_KEY, operator="Exists", effect="NoSchedule"), *lost_node]


def _affinity(job: JobConfig) -> kube.Affinity:
    """One worker per node, and workers close to each other in the network."""

    def near(topology_key: str) -> kube.PodAffinityTerm:
        return kube.PodAffinityTerm(
            topology_key=topology_key,
            label_selector=kube.LabelSelector(match_labels=policies.labels(job, policies.WORKER)),
        )

    return kube.Affinity(
        pod_anti_affinity=kube.PodAntiAffinity(
            required_during_scheduling_ignored_during_execution=[near("kubernetes.io/hostname")]
        ),
        pod_affinity=kube.PodAffinity(
            preferred_during_scheduling_ignored_during_execution=[
                kube.WeightedPodAffinityTerm(weight=weight, pod_affinity_term=near(layer))
                for layer, weight in _NETWORK_LAYERS.items()
            ]
        ),
    )

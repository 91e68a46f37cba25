"""The `job:` section's rules."""

import re

import pytest
from pydantic import ValidationError

from config.job import JobConfig
from config.workload import HARMFUL_ENVIRONMENT, OWNED_ENVIRONMENT
from training.config import RestartsConfig

IMAGE = "trainer@sha256:" + "0" * 64


def job(**fields):
    return JobConfig.model_validate({"name": "x", "node_count": 2, "nproc_per_node": 1, "image": IMAGE, **fields})


def test_ranks_are_gpus_where_there_is_an_instance_type():
    gpu = job(nproc_per_node=None, instance_type="p5.48xlarge", spare_count=1)
    assert (gpu.ranks_per_node, gpu.world_size, gpu.pod_count) == (8, 16, 3)
    assert job(nproc_per_node=3).world_size == 6


def test_the_rendezvous_has_room_for_every_pod_and_every_tolerated_event():
    assert job(spare_count=2, rendezvous={"unhealthy_events_tolerated": 5}).max_nodes == 9


@pytest.mark.parametrize(
    "image",
    [
        IMAGE,
        "localhost:5000/trainer@sha256:" + "a" * 64,
        "123456789012.dkr.ecr.us-west-2.amazonaws.com/llama/trainer-base@sha256:" + "0f" * 32,
    ],
)
def test_an_image_pinned_by_digest_is_accepted(image):
    assert job(image=image).image == image


@pytest.mark.parametrize(
    "image",
    ["trainer", "trainer:v1", "trainer@sha256:", "trainer@sha256:" + "0" * 63, "a b@sha256:" + "0" * 64, "@" + IMAGE],
)
def test_an_image_that_can_move_is_refused(image):
    with pytest.raises(ValidationError, match="pinned by digest"):
        job(image=image)


@pytest.mark.parametrize("name", ["Upper", "1st", "a" * 64, "a_b", "-a", "a-", ""])
@pytest.mark.parametrize("field", ["name", "namespace"])
def test_names_are_dns_labels(field, name):
    with pytest.raises(ValidationError, match=field):
        job(**{field: name})


def test_an_unknown_instance_type_names_the_known_ones():
    with pytest.raises(ValidationError, match=r"known: .*p5\.48xlarge"):
        job(instance_type="p9.huge")


def test_ranks_that_contradict_the_gpus_are_refused():
    with pytest.raises(ValidationError, match="leave it out"):
        job(instance_type="p5.48xlarge", nproc_per_node=4)
    with pytest.raises(ValidationError, match="nproc_per_node is needed"):
        job(nproc_per_node=None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("node_count", 0),
        ("spare_count", -1),
        ("backoff_limit_per_index", -1),
        ("run_as_user", -1),
        ("run_as_user", 70_000),
        ("rendezvous", {"port": 80}),
        ("rendezvous", {"join_timeout_seconds": 0}),
        ("rendezvous", {"mode": "external"}),
        ("no_such_key", 1),
    ],
)
def test_values_out_of_range_are_refused(field, value):
    with pytest.raises(ValidationError, match=field):
        job(**{field: value})


FSX = {
    "file_system_id": "fs-0123456789abcdef0",
    "dns_name": "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com",
    "mount_name": "abcdefgh",
    "capacity_gib": 4800,
}


def test_an_existing_file_system_is_named_by_all_four_of_its_values():
    assert job(storage=FSX).storage.mount_name == "abcdefgh"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("file_system_id", "vol-0123456789abcdef0"),
        ("dns_name", "fs-0123456789abcdef0.efs.us-west-2.amazonaws.com"),
        ("dns_name", "fs-aaaaaaaaaaaaaaaaa.fsx.us-west-2.amazonaws.com"),
        ("mount_name", "abc/def"),
        ("mount_name", "ninechars"),
        ("capacity_gib", 0),
    ],
)
def test_a_file_system_that_cannot_be_one_is_refused(field, value):
    with pytest.raises(ValidationError, match=field):
        job(storage=FSX | {field: value})


# Names


@pytest.mark.parametrize(("nodes", "longest"), [(2, 44), (16, 44), (2000, 42)])
def test_a_name_leaves_room_for_what_the_controllers_add(nodes, longest):
    assert job(name="a" * longest, node_count=nodes)
    with pytest.raises(ValidationError, match=rf"has 64 characters, a DNS label 63; shorten it to {longest}"):
        job(name="a" * (longest + 1), node_count=nodes)


# Rendezvous and timeouts


def test_spares_with_the_embedded_store_are_refused():
    assert job(rendezvous={"mode": "embedded"}).spare_count == 0
    with pytest.raises(ValidationError, match="spare_count 1 with rendezvous.mode embedded.*set it to 0"):
        job(rendezvous={"mode": "embedded"}, spare_count=1)


@pytest.mark.parametrize("last_call", [60, 61])
def test_the_last_call_comes_before_the_join_times_out(last_call):
    with pytest.raises(ValidationError, match=f"last_call_timeout_seconds {last_call} must be below join_timeout"):
        job(rendezvous={"join_timeout_seconds": 60, "last_call_timeout_seconds": last_call})


def test_kueue_must_wait_longer_than_the_rendezvous():
    kueue = {"local_queue": "research", "recovery_timeout_seconds": 1801}
    assert job(kueue=kueue).kueue.recovery_timeout_seconds == 1801
    with pytest.raises(ValidationError, match="recovery_timeout_seconds 1800 must be above rendezvous.join_timeout"):
        job(kueue=kueue | {"recovery_timeout_seconds": 1800})


def test_the_grace_period_is_above_the_launchers_term_timeout():
    restarts = RestartsConfig()
    assert job().grace_period_seconds(restarts) == 180
    assert job(termination_grace_period_seconds=151).grace_period_seconds(restarts) == 151
    with pytest.raises(
        ValueError, match="termination_grace_period_seconds 150 must be above .*term_timeout_seconds 150"
    ):
        job(termination_grace_period_seconds=150).grace_period_seconds(restarts)


# Environment


@pytest.mark.parametrize("name", [*HARMFUL_ENVIRONMENT, *OWNED_ENVIRONMENT])
def test_a_harmful_or_owned_variable_is_refused_with_its_reason(name):
    reason = re.escape((HARMFUL_ENVIRONMENT | OWNED_ENVIRONMENT)[name])
    given = name.replace("*", "JOB_ID")
    with pytest.raises(ValidationError, match=f"{given} is refused: {reason}; remove it"):
        job(environment={given: "1"})


@pytest.mark.parametrize("name", ["PATH", "LD_PRELOAD", "nccl_debug", "NCCL DEBUG", "MY_VARIABLE", ""])
def test_a_variable_off_the_allow_list_is_refused(name):
    with pytest.raises(ValidationError, match="is not on the allow-list; a variable begins with one of NCCL_"):
        job(environment={name: "1"})


@pytest.mark.parametrize("name", ["TORCH_HUB_TOKEN", "NCCL_SECRET", "AWS_SECRET_ACCESS_KEY"])
def test_a_secret_does_not_belong_into_a_manifest(name):
    with pytest.raises(ValidationError, match=f"{name} looks like a secret"):
        job(environment={name: "x"})


@pytest.mark.parametrize("value", ["a\nb", "\x80", "\0"])
def test_control_characters_in_a_value_are_refused(value):
    with pytest.raises(ValidationError, match="NCCL_DEBUG: .* has control characters"):
        job(environment={"NCCL_DEBUG": value})


def test_tuning_of_the_libraries_is_allowed():
    environment = {"NCCL_DEBUG": "INFO", "FI_LOG_LEVEL": "warn", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert job(environment=environment).environment == environment


# The rest


@pytest.mark.parametrize("pattern", ["-rf", "", "$(HOME)"])
def test_a_pattern_that_is_no_pattern_is_refused(pattern):
    with pytest.raises(ValidationError, match="would be read as an option or a variable"):
        job(prepare_data={"input_directory": "/fsx/data/raw", "exclude": [pattern]})


def test_a_quota_of_devices_needs_devices():
    with pytest.raises(ValidationError, match="resource_quota caps GPUs and EFA devices"):
        job(resource_quota=True)

"""The `job:` section's rules."""

import pytest
from pydantic import ValidationError

from config.job import JobConfig

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

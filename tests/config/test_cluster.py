"""A wrong cluster section: one line that names the field, the value, the rule and the fix."""

import pytest
from pydantic import ValidationError

from config.cluster import ClusterConfig
from training.config import describe_errors

GOOD = {
    "region": "us-west-2",
    "availability_zone": "us-west-2a",
    "second_availability_zone": "us-west-2b",
}


def problem(**changes):
    """The one line that a user would see."""
    with pytest.raises(ValidationError) as caught:
        ClusterConfig.model_validate(GOOD | changes)
    (line,) = describe_errors(caught.value).splitlines()
    return line


def test_the_smallest_section_is_on_demand_private_and_kept():
    config = ClusterConfig.model_validate(GOOD)
    assert config.capacity.kind == "on_demand"
    assert config.endpoint_public_cidrs == ()
    assert config.storage.retain_data is True


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"region": "us-west-9"}, ["region: ", "'us-west-9'", "unknown region", "choose one of"]),
        (
            {"availability_zone": "us-east-1a"},
            ["availability_zone us-east-1a", "no zone of region us-west-2", "choose one such as us-west-2a"],
        ),
        (
            {"second_availability_zone": "us-west-2a"},
            ["second_availability_zone us-west-2a", "is the GPU zone", "choose another"],
        ),
        ({"vpc_cidr": "10.0.0.0/24"}, ["vpc_cidr: ", "10.0.0.0/24", "from /16 to /20", "10.0.0.0/16"]),
        ({"vpc_cidr": "8.0.0.0/16"}, ["vpc_cidr: ", "8.0.0.0/16", "private range"]),
        ({"vpc_cidr": "10.0.0.1/16"}, ["vpc_cidr: ", "10.0.0.1/16", "no IPv4 network", "first address"]),
        (
            {"endpoint_public_cidrs": ["0.0.0.0/0"]},
            ["endpoint_public_cidrs: ", "0.0.0.0/0", "opens the API server to everyone", "list your own"],
        ),
        ({"kubernetes_version": "1.33"}, ["kubernetes_version: ", "'1.36'", "'1.33'"]),
        (
            {"ami_release_version": "1.35.0-20261101"},
            ["ami_release_version 1.35.0-20261101", "Kubernetes 1.36", "write it like 1.36.0-20261101"],
        ),
        ({"root_volume_gib": 10}, ["root_volume_gib: ", "50", "given 10"]),
        (
            {"capacity": {"kind": "reserved"}},
            ["capacity: ", "'reserved'", "'on_demand'", "'odcr'", "'capacity_block'", "'spot'"],
        ),
        ({"capacity": {"kind": "capacity_block"}}, ["capacity.capacity_block.reservation_id: ", "required"]),
        (
            {"capacity": {"kind": "odcr", "reservation_id": "0123"}},
            ["capacity.odcr.reservation_id: ", "'0123'", "cr- and 8 to 17", "describe-capacity-reservations"],
        ),
        (
            {
                "capacity": {
                    "kind": "odcr",
                    "capacityReservationId": "cr-0123456789abcdef0",
                    "reservation_id": "cr-01234567",
                }
            },
            ["capacity.odcr.capacityReservationId: ", "unknown key"],
        ),
        (
            {"capacity": {"kind": "on_demand", "reservation_id": "cr-01234567"}},
            ["reservation_id cr-01234567", "never run in"],
        ),
        ({"storage": {"capacity_gib": 3600}}, ["storage.capacity_gib: ", "3600", "multiples of 2400", "choose 4800"]),
        ({"storage": {"capacity_gib": 1000}}, ["storage.capacity_gib: ", "1000", "choose 2400"]),
        ({"storage": {"throughput_mb_per_tib": 300}}, ["storage.throughput_mb_per_tib: ", "125, 250, 500", "300"]),
        ({"storage": {"metadata_iops": 1501}}, ["storage.metadata_iops: ", "1501", "choose 3000"]),
        ({"storage": {"metadata_iops": 500_000}}, ["storage.metadata_iops: ", "500000", "choose 192000"]),
        ({"storage": {"import_path": "s3://bucket"}}, ["storage.import_path: ", "unknown key"]),
    ],
    ids=lambda value: "-".join(f"{k}" for k in value) if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_one_line_with_field_value_rule_and_fix(changes, words):
    line = problem(**changes)
    assert [word for word in words if word not in line] == [], line


@pytest.mark.parametrize("capacity", [1200, 2400, 4800, 24_000])
def test_sizes_that_fsx_offers_are_accepted(capacity):
    assert ClusterConfig.model_validate(GOOD | {"storage": {"capacity_gib": capacity}}).storage.capacity_gib == capacity


@pytest.mark.parametrize(("vpc", "subnet"), [("10.0.0.0/16", "10.0.128.0/17"), ("172.16.0.0/20", "172.16.8.0/21")])
def test_the_gpu_subnet_is_the_upper_half_of_the_vpc(vpc, subnet):
    assert ClusterConfig.model_validate(GOOD | {"vpc_cidr": vpc}).gpu_subnet_cidr == subnet

"""`python -m config.cost`: the bill by line, from a dated table, and what has no price named instead of guessed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from config import cost, prices
from config.deployment import DeploymentConfig, load

ROOT = Path(__file__).parents[2]


@pytest.fixture
def deployment():
    return load(ROOT / "deployments/p5-2node.yaml")


def changed(**cluster):
    document = yaml.safe_load((ROOT / "deployments/p5-2node.yaml").read_text())
    document["cluster"] |= cluster
    return DeploymentConfig.model_validate({"name": "p5-2node", **document})


def by_name(deployment, part):
    found = [item for item in cost.items(deployment) if part in item.name]
    assert len(found) == 1, [item.name for item in cost.items(deployment)]
    return found[0]


def test_the_gpu_nodes_are_counted_with_their_spares(deployment):
    nodes = by_name(deployment, "p5.48xlarge")
    assert nodes.quantity == 3
    assert nodes.price is not None
    assert nodes.usd_per_hour == pytest.approx(3 * nodes.price.usd_per_hour)


def test_every_price_says_where_and_when_and_a_weak_one_says_why():
    assert len(prices.PRICES) > 10
    for row in prices.PRICES:
        assert row.usd_per_hour > 0
        assert len(row.source.title) > 10
        assert row.source.url.startswith("https://")
        assert row.source.date[:2] == "20"
        assert row.source.quotes_aws or row.source.note
    assert len({(row.item, region) for row in prices.PRICES for region in row.regions}) == sum(
        len(row.regions) for row in prices.PRICES
    ), "one price for each"


def test_what_has_no_price_is_said_and_not_counted():
    spot = changed(capacity={"kind": "spot"})
    nodes = by_name(spot, "p5.48xlarge")
    assert nodes.price is None
    assert nodes.usd_per_hour is None


def test_metadata_iops_that_are_bought_are_a_line_without_a_price(deployment):
    assert not any("metadata" in item.name for item in cost.items(deployment))
    bought = changed(storage={"metadata_iops": 6000})
    assert by_name(bought, "metadata").price is None
    assert "FSx metadata, 6000 IOPS" in cost.report(bought)
    assert "WITHOUT the 1 above that have no price" in cost.report(bought)


def test_root_volumes_are_those_that_the_launch_templates_ask_for(deployment):
    """Two system nodes with 50 GiB, three GPU nodes with the file's."""
    assert by_name(deployment, "EBS").quantity == 3 * 100 + 2 * 50
    assert by_name(changed(root_volume_gib=200), "EBS").quantity == 3 * 200 + 2 * 50


def test_without_a_way_out_endpoints_take_the_place_of_the_nat_gateway():
    closed = changed(
        network={"egress": "none", "mirror_registry": "123456789012.dkr.ecr.us-west-2.amazonaws.com/mirror"}
    )
    names = " ".join(item.name for item in cost.items(closed))
    assert "NAT" not in names
    assert "endpoint" in names


def test_the_endpoints_are_as_many_as_the_network_stack_makes():
    from stacks.network import ENDPOINTS

    assert len(ENDPOINTS) == cost.ENDPOINT_COUNT


def test_the_command_prints_hour_month_date_and_what_is_left_out():
    done = subprocess.run(
        [sys.executable, "-m", "config.cost", "deployments/p5-2node.yaml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "p5.48xlarge" in done.stdout
    assert "NAT" in done.stdout
    assert "month" in done.stdout
    assert "https://www.zacfukuda.com/blog/aws-nat-gateway-vs-vpc-endpoint" in done.stdout
    assert "2026" in done.stdout or "2025" in done.stdout


def test_without_a_cluster_there_is_nothing_to_pay_for():
    assert cost.items(load(ROOT / "deployments/local.yaml")) == []


def test_a_capacity_block_is_said_to_be_paid_when_it_is_booked(deployment):
    assert cost.UPFRONT in cost.report(load(ROOT / "deployments/p5-capacity-block.yaml"))
    assert cost.UPFRONT not in cost.report(deployment)


def test_the_command_has_a_form_for_machines(deployment, capsys):
    assert cost.main([str(ROOT / "deployments/p5-2node.yaml"), "--json"]) == 0
    bill = json.loads(capsys.readouterr().out)
    assert bill["region"] == "us-west-2"
    assert bill["complete"] is True
    assert bill["usd_per_hour"] == pytest.approx(sum(line["usd_per_hour"] for line in bill["lines"]))
    assert all(line["url"] and line["date"] for line in bill["lines"])


def test_the_form_for_machines_says_where_a_price_is_missing():
    bill = cost.summary(changed(capacity={"kind": "spot"}))
    assert bill["complete"] is False
    assert [line["url"] for line in bill["lines"] if line["usd_per_hour"] is None] == [None]

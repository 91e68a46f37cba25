"""What a deployment costs at list price, per hour and month: `python -m config.cost FILE [--json]`.

Only what runs around the clock by the deployment file itself. An item without a price is named, never guessed.
--json prints {deployment, region, lines, usd_per_hour, complete}; each line is {name, quantity, usd_per_hour, title,
url, date, quotes_aws, note}, the last six null without a price. `complete` is false where the sum lacks a line.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from config.cluster import SYSTEM_ROOT_GIB, CapacityBlock, ClusterConfig, Spot
from config.deployment import DeploymentConfig, load
from config.prices import HOURS_PER_MONTH, Price, Source, price

# Interface endpoints without a way out (stacks/network.py, ENDPOINTS: a test compares), each in both zones.
ENDPOINT_COUNT = 15
ZONE_COUNT = 2

NOT_COUNTED = (
    "traffic (NAT, between zones, to the internet), S3, ECR, KMS, logs, metrics, alarms, backups of FSx and what "
    "it may take for metadata IOPS that it scales itself, image builds, tax, and discounts"
)
UPFRONT = (
    "a Capacity Block is paid in full when it is booked, at that day's price, and for all its days whether used or not"
)


@dataclass(frozen=True)
class Item:
    """One line: how many of what, and its price where there is one."""

    name: str
    quantity: int
    price: Price | None

    @property
    def usd_per_hour(self) -> float | None:
        """None without a price."""
        return None if self.price is None else self.quantity * self.price.usd_per_hour


def items(deployment: DeploymentConfig) -> list[Item]:
    """Every line of the bill that runs by the hour; none without a cluster section."""
    return [] if deployment.cluster is None else list(_items(deployment, deployment.cluster))


def _items(deployment: DeploymentConfig, cluster: ClusterConfig) -> Iterator[Item]:
    job, region = deployment.job, cluster.region
    yield Item(
        f"{job.pod_count} x {job.instance_type} ({cluster.capacity.kind})",
        job.pod_count,
        price(f"{_market(cluster)} {job.instance_type}", region),
    )
    system = cluster.system_nodes
    yield Item(
        f"{system.node_count} x {system.instance_type} (system)",
        system.node_count,
        price(f"on_demand {system.instance_type}", region),
    )
    yield Item("EKS control plane", 1, price("eks cluster", region))
    if cluster.network.egress == "nat":
        yield Item("NAT gateway", 1, price("nat gateway", region))
    else:
        yield Item(
            f"{ENDPOINT_COUNT} endpoints in {ZONE_COUNT} zones",
            ENDPOINT_COUNT * ZONE_COUNT,
            price("vpc endpoint", region),
        )
    storage = cluster.storage
    yield Item(
        f"FSx for Lustre, {storage.capacity_gib} GiB at {storage.throughput_mb_per_tib} MB/s per TiB",
        storage.capacity_gib,
        price(f"fsx {storage.throughput_mb_per_tib}", region),
    )
    if storage.metadata_iops is not None:
        yield Item(f"FSx metadata, {storage.metadata_iops} IOPS", storage.metadata_iops, price("fsx iops", region))
    root_gib = job.pod_count * cluster.root_volume_gib + system.node_count * SYSTEM_ROOT_GIB
    yield Item(f"EBS root volumes, {root_gib} GiB of gp3", root_gib, price("gp3", region))


def _market(cluster: ClusterConfig) -> str:
    """Which list price of an instance applies: an ODCR is billed like on-demand; spot has no list price."""
    match cluster.capacity:
        case CapacityBlock():
            return "capacity_block"
        case Spot():
            return "spot"
        case _:
            return "on_demand"


def report(deployment: DeploymentConfig) -> str:
    """The bill as text."""
    cluster = deployment.cluster
    if cluster is None:
        return f"{deployment.name}: no cluster section, so nothing of it is billed by AWS"
    lines = [
        f"{deployment.name} in {cluster.region}: list prices in USD, each as of its date",
        f"  {'':52}{'hour':>10}{'month':>14}",
    ]
    bill = items(deployment)
    lines += [_line(item) for item in bill]
    known = [item.usd_per_hour for item in bill if item.usd_per_hour is not None]
    missing = len(bill) - len(known)
    lines.append(
        _amounts("total" + (f", WITHOUT the {missing} above that have no price" if missing else ""), sum(known))
    )
    if isinstance(cluster.capacity, CapacityBlock):
        lines.append(f"  {UPFRONT}")
    lines.append("sources:")
    for row in dict.fromkeys(item.price for item in bill if item.price is not None):
        source = row.source
        remark = f"; {source.note}" if source.note else ""
        doubt = "" if source.quotes_aws else "; UNVERIFIED"
        lines.append(f"  {row.item}: {source.title}, {source.date}{doubt}{remark}\n    {source.url}")
    lines.append(f"not counted: {NOT_COUNTED}")
    lines.append("none was read live, on AWS's pages: check today's at https://calculator.aws before you deploy")
    return "\n".join(lines)


def summary(deployment: DeploymentConfig) -> dict[str, Any]:
    """The bill for machines."""
    bill = items(deployment)
    known = [item.usd_per_hour for item in bill if item.usd_per_hour is not None]
    return {
        "deployment": deployment.name,
        "region": None if deployment.cluster is None else deployment.cluster.region,
        "lines": [
            {
                "name": item.name,
                "quantity": item.quantity,
                "usd_per_hour": item.usd_per_hour,
                **{field.name: item.price and getattr(item.price.source, field.name) for field in fields(Source)},
            }
            for item in bill
        ],
        "usd_per_hour": sum(known),
        "complete": len(known) == len(bill),
    }


def _line(item: Item) -> str:
    if item.usd_per_hour is None:
        return f"  {item.name:<52}{'no price known':>24}"
    sure = item.price is not None and item.price.source.quotes_aws
    return _amounts(item.name, item.usd_per_hour, "" if sure else "  unverified")


def _amounts(name: str, usd_per_hour: float, remark: str = "") -> str:
    return f"  {name:<52}{usd_per_hour:>10,.2f}{usd_per_hour * HOURS_PER_MONTH:>14,.2f}{remark}"


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="config.cost", description="list price of a deployment, per hour and month")
    parser.add_argument("file", type=Path, help="deployment file")
    parser.add_argument("--json", action="store_true", help="the bill as one object on stdout")
    arguments = parser.parse_args(argv)
    try:
        deployment = load(arguments.file)
        print(json.dumps(summary(deployment), indent=2) if arguments.json else report(deployment))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

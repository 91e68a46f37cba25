"""List prices in USD, each with where and when it was read. Prices change: a row says what it was, not what it is.

This project read no row on AWS's own pages. `quotes_aws` is True where a public text gives AWS's figure and says when
it was taken, and False where the origin is weaker: the note says how. What is not here has no price.
"""

from dataclasses import dataclass

# The source of the GPU rows gives one price for all three. That the other rows' us-east-1 price holds in all three too
# is our assumption.
US_REGIONS = ("us-east-1", "us-east-2", "us-west-2")
HOURS_PER_MONTH = 730  # as AWS's pricing calculator counts


@dataclass(frozen=True)
class Price:
    """USD an hour: of one instance, cluster, gateway or endpoint, or of one GiB of a file system."""

    item: str
    regions: tuple[str, ...]
    usd_per_hour: float
    source: str
    date: str
    quotes_aws: bool = True
    note: str = ""


_EC2_FEED = "aws.amazon.com/ec2/pricing/on-demand, feed of 2026-09-25 as written down in a public repository"
_BLOCKS = "aws.amazon.com/ec2/capacityblocks/pricing, a copy that names 2025-01-01 as its next update"
_FSX_2022 = "dev.classmethod.jp, table of FSx for Lustre Persistent 2 prices in ap-northeast-1"
_FSX_SCALED = "the row of 125 MB/s per TiB, times the ratio to it in the table of ap-northeast-1 below"
_SCALED = "computed, not read"
_OLD = "two years old; blocks are re-priced every few months"

PRICES = (
    Price("on_demand p5.48xlarge", US_REGIONS, 55.04, _EC2_FEED, "2026-09-25"),
    Price("on_demand p5.4xlarge", US_REGIONS, 6.88, _EC2_FEED, "2026-09-25"),
    Price("on_demand p5en.48xlarge", US_REGIONS, 63.296, _EC2_FEED, "2026-09-25"),
    Price("on_demand p6-b200.48xlarge", US_REGIONS, 113.9328, _EC2_FEED, "2026-09-25"),
    Price("capacity_block p5.48xlarge", ("us-east-1", "us-east-2"), 39.33, _BLOCKS, "2024-12", False, _OLD),
    Price(
        "on_demand m7i.xlarge",
        US_REGIONS,
        0.2016,
        "c3x.dev, m5 vs m6i vs m7i (us-east-1)",
        "2026",
        False,
        "an undated blog",
    ),
    Price(
        "eks cluster", US_REGIONS, 0.10, "cloudburn.io, EKS pricing (us-east-1, AWS's page of March 2026)", "2026-03"
    ),
    Price("nat gateway", US_REGIONS, 0.045, "zacfukuda.com, NAT gateway vs VPC endpoint (us-east-1)", "2026-06-01"),
    Price("vpc endpoint", US_REGIONS, 0.010, "zacfukuda.com, NAT gateway vs VPC endpoint (us-east-1)", "2026-06-01"),
    Price(
        "fsx 125",
        US_REGIONS,
        0.145 / HOURS_PER_MONTH,
        "c3x.dev, aws_fsx_lustre_file_system: 0.145 per GB-month",
        "2026",
        False,
        "a tool's rounded figure",
    ),
    *(
        Price(f"fsx {throughput}", US_REGIONS, 0.145 * ratio / HOURS_PER_MONTH, _FSX_SCALED, "2026", False, _SCALED)
        for throughput, ratio in ((250, 1.85 / 1.24), (500, 3.10 / 1.24), (1000, 5.58 / 1.24))
    ),
    # Hourly prices of 4.8 TiB; the table gives no price per GB.
    Price("fsx 125", ("ap-northeast-1",), 1.24 / 4800, _FSX_2022, "2022-09-03", False, "four years old"),
    Price("fsx 250", ("ap-northeast-1",), 1.85 / 4800, _FSX_2022, "2022-09-03", False, "four years old"),
    Price("fsx 500", ("ap-northeast-1",), 3.10 / 4800, _FSX_2022, "2022-09-03", False, "four years old"),
    Price("fsx 1000", ("ap-northeast-1",), 5.58 / 4800, _FSX_2022, "2022-09-03", False, "four years old"),
)


def price(item: str, region: str) -> Price | None:
    """The row of an item in a region; None where nobody could be found who states it."""
    return next((row for row in PRICES if row.item == item and region in row.regions), None)

"""List prices in USD, each with where it is stated and when. Prices change: a row says what it was, not what it is.

None was read live: this project had no way to AWS's pages while it was written, only to stored copies of public ones.
`quotes_aws` is True where such a text gives AWS's own figure and says when it was taken, and False where the origin is
weaker: the note says how. What is not here has no price.
"""

from dataclasses import dataclass

# The source of the GPU rows gives one price for all three. That the other rows' us-east-1 price holds in all three too
# is our assumption.
US_REGIONS = ("us-east-1", "us-east-2", "us-west-2")
HOURS_PER_MONTH = 730  # as AWS's pricing calculator counts


@dataclass(frozen=True)
class Source:
    """Where a price is stated, as of when, and how far that is AWS's own word."""

    title: str
    url: str
    date: str
    quotes_aws: bool = True
    note: str = ""


@dataclass(frozen=True)
class Price:
    """USD an hour: of one instance, cluster, gateway or endpoint, or of one GiB of a file system or volume."""

    item: str
    regions: tuple[str, ...]
    usd_per_hour: float
    source: Source


_EC2 = Source(
    "EC2's price feed, as written down in a public repository whose address was not kept",
    "https://aws.amazon.com/ec2/pricing/on-demand/",
    "2026-09-25",
)
_BLOCKS = Source(
    "a copy of AWS's page that names 2025-01-01 as its next update",
    "https://aws.amazon.com/ec2/capacityblocks/pricing/",
    "2024-12",
    quotes_aws=False,
    note="two years old; blocks are re-priced every few months",
)
_M7I = Source(
    "m5 vs m6i vs m7i, us-east-1",
    "https://c3x.dev/blog/m5-vs-m6i-vs-m7i-cost-performance",
    "2026",
    quotes_aws=False,
    note="an undated blog",
)
_EKS = Source("EKS pricing, AWS's page for us-east-1", "https://cloudburn.io/blog/amazon-eks-pricing", "2026-03")
_VPC = Source(
    "NAT gateway vs VPC endpoint, us-east-1",
    "https://www.zacfukuda.com/blog/aws-nat-gateway-vs-vpc-endpoint",
    "2026-06-01",
)
_EBS = Source(
    "AWS's own notes on EBS, 0.08 per GB-month in us-east-1",
    "https://github.com/aws/agent-toolkit-for-aws/blob/main/skills/core-skills/aws-billing-and-cost-management/"
    "references/ebs-optimization.md",
    "2026",
    note="AWS calls its figures approximate, as of early 2026",
)
_FSX = Source(
    "FSx for Lustre at 125 MB/s per TiB, 0.145 per GB-month",
    "https://c3x.dev/resources/aws/aws_fsx_lustre_file_system/",
    "2026",
    quotes_aws=False,
    note="a tool's rounded figure",
)
_FSX_2022 = Source(
    "dev.classmethod.jp, a table of Persistent 2 prices in ap-northeast-1; the article's own address was not kept",
    "https://dev.classmethod.jp/",
    "2022-09-03",
    quotes_aws=False,
    note="four years old",
)
_FSX_SCALED = Source(
    "the row of 125 MB/s per TiB, times the ratio to it in the table of ap-northeast-1",
    _FSX.url,
    "2026",
    quotes_aws=False,
    note="computed, not read",
)

# Hourly, of 4.8 TiB in ap-northeast-1, by MB/s per TiB; the table gives no price per GB.
_FSX_2022_HOURLY = {125: 1.24, 250: 1.85, 500: 3.10, 1000: 5.58}

PRICES = (
    Price("on_demand p5.48xlarge", US_REGIONS, 55.04, _EC2),
    Price("on_demand p5.4xlarge", US_REGIONS, 6.88, _EC2),
    Price("on_demand p5en.48xlarge", US_REGIONS, 63.296, _EC2),
    Price("on_demand p6-b200.48xlarge", US_REGIONS, 113.9328, _EC2),
    Price("capacity_block p5.48xlarge", ("us-east-1", "us-east-2"), 39.33, _BLOCKS),
    Price("capacity_block p4d.24xlarge", ("us-east-2", "us-west-2"), 14.75, _BLOCKS),
    Price("on_demand m7i.xlarge", US_REGIONS, 0.2016, _M7I),
    Price("eks cluster", US_REGIONS, 0.10, _EKS),
    Price("nat gateway", US_REGIONS, 0.045, _VPC),
    Price("vpc endpoint", US_REGIONS, 0.010, _VPC),
    Price("gp3", US_REGIONS, 0.08 / HOURS_PER_MONTH, _EBS),
    Price("fsx 125", US_REGIONS, 0.145 / HOURS_PER_MONTH, _FSX),
    *(
        Price(
            f"fsx {throughput}",
            US_REGIONS,
            0.145 * _FSX_2022_HOURLY[throughput] / _FSX_2022_HOURLY[125] / HOURS_PER_MONTH,
            _FSX_SCALED,
        )
        for throughput in (250, 500, 1000)
    ),
    *(
        Price(f"fsx {throughput}", ("ap-northeast-1",), hourly / 4800, _FSX_2022)
        for throughput, hourly in _FSX_2022_HOURLY.items()
    ),
)


def price(item: str, region: str) -> Price | None:
    """The row of an item in a region; None where nobody could be found who states it."""
    return next((row for row in PRICES if row.item == item and region in row.regions), None)

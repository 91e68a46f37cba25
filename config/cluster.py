"""The `cluster:` section: what CloudFormation builds around the job."""

import re
from collections.abc import Iterable, Iterator
from ipaddress import AddressValueError, IPv4Network, NetmaskValueError
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from training.config import Config, PositiveInt

# Registry accounts of EKS's own images by region (EKS user guide, "View Amazon container image registries for EKS
# add-ons"): the EFA device plugin's chart names us-west-2 only. One row more is what a new region needs.
EKS_IMAGE_ACCOUNTS: dict[str, str] = dict.fromkeys(
    (
        "ap-northeast-1",
        "ap-northeast-2",
        "ap-northeast-3",
        "ap-south-1",
        "ap-southeast-1",
        "ap-southeast-2",
        "ca-central-1",
        "eu-central-1",
        "eu-north-1",
        "eu-west-1",
        "eu-west-2",
        "eu-west-3",
        "sa-east-1",
        "us-east-1",
        "us-east-2",
        "us-west-1",
        "us-west-2",
    ),
    "602401143452",
)

# Where CloudFormation has no AWS::Budgets::Budget (its registry, as cfn-lint 1.58 ships it).
REGIONS_WITHOUT_BUDGETS = ("ap-northeast-3", "eu-north-1")

# FSx for Lustre, PERSISTENT_2 on SSD (AWS::FSx::FileSystem: StorageCapacity, PerUnitStorageThroughput,
# MetadataConfiguration). CloudFormation finds a wrong one only after minutes (terraform-provider-aws #24341).
FSX_CAPACITY_STEP_GIB = 2400
FSX_MIN_CAPACITY_GIB = 1200
FSX_METADATA_IOPS = (1500, 3000, 6000, *range(12_000, 192_001, 12_000))
# With EFA the capacity is a multiple of this, by throughput (FSx user guide, "Managing storage capacity").
FSX_EFA_CAPACITY_STEP_GIB = {125: 38_400, 250: 19_200, 500: 9_600, 1000: 4_800}
FSX_MAX_BACKUP_DAYS = 90

# EC2 user guide, "Capacity Blocks for ML": 1 to 64 instances a block.
CAPACITY_BLOCK_MAX_NODES = 64
# Root volumes of the system nodes.
SYSTEM_ROOT_GIB = 50
# One whole interface's worth, which the VPC CNI keeps warm on every node; EC2 keeps five addresses of every subnet.
WARM_ADDRESSES_PER_NODE = 50
AWS_RESERVED_ADDRESSES = 5

# Widest and narrowest range that EC2 gives a VPC is /16 to /28; half of a /20 is the /21 that the GPU subnet needs.
_VPC_PREFIX_RANGE = (16, 20)

_ECR_PREFIX = r"\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(/[a-z0-9]+([._-][a-z0-9]+)*)*"

ReservationId = Annotated[str, Field(description="EC2 capacity reservation, cr-...")]


def raise_together(problems: Iterable[str]) -> None:
    """Raise one ValueError with a line per problem, if there is one: whoever mends one sees the others too."""
    lines = list(problems)
    if lines:
        raise ValueError("\n".join(lines))


class _Reserved(Config):
    """What the two kinds of reservation share: the id of the reservation."""

    reservation_id: ReservationId

    @field_validator("reservation_id")
    @classmethod
    def _shape_of_id(cls, value: str) -> str:
        # An empty or mis-typed id reaches EC2 as an open launch, outside the reservation (eksctl #8320, #8542).
        if not re.fullmatch(r"cr-[0-9a-f]{8,17}", value):
            raise ValueError(
                "must be cr- and 8 to 17 hexadecimal digits; copy it from `aws ec2 describe-capacity-reservations`"
            )
        return value


class _Unreserved(Config):
    """What the two kinds without a reservation share: nobody means to pay for one and not to use it."""

    @model_validator(mode="before")
    @classmethod
    def _no_reservation(cls, data: Any) -> Any:
        if isinstance(data, dict) and "reservation_id" in data:
            raise ValueError(
                f"reservation_id {data['reservation_id']}: {data.get('kind', 'on_demand')} instances never run in a "
                "reservation, which is paid for all the same; remove it, or set kind to odcr or capacity_block"
            )
        return data


class OnDemand(_Unreserved):
    """Pay as you go, in a cluster placement group of the deployment's own."""

    kind: Literal["on_demand"] = "on_demand"


class Spot(_Unreserved):
    """Spare capacity that EC2 may take back with two minutes' notice; any free host of the zone, no placement group."""

    kind: Literal["spot"]


class OnDemandCapacityReservation(_Reserved):
    """An on-demand capacity reservation (ODCR) that you already pay for."""

    kind: Literal["odcr"]
    placement_group: str | None = Field(
        default=None,
        description="the cluster placement group that the reservation was created in, if it was created in one",
    )


class CapacityBlock(_Reserved):
    """A Capacity Block for ML: nodes for a booked time span, already placed in one UltraCluster."""

    kind: Literal["capacity_block"]
    started: bool = Field(
        default=False,
        description="set once the block's start time has passed: before it every launch fails, so no node is asked for",
    )


Capacity = Annotated[
    OnDemand | Spot | OnDemandCapacityReservation | CapacityBlock,
    Field(discriminator="kind", description="how the GPU nodes are bought; everything that depends on it follows"),
]


class StorageConfig(Config):
    """FSx for Lustre, PERSISTENT_2 on SSD, in the GPU zone."""

    capacity_gib: PositiveInt = Field(default=4800, description="1200, 2400 or a multiple of 2400")
    throughput_mb_per_tib: Literal[125, 250, 500, 1000] = Field(
        default=500,
        description="MB/s per TiB of capacity; with 4800 GiB, 500 is 2.3 GB/s for checkpoints and data together",
    )
    metadata_iops: PositiveInt | None = Field(
        default=None,
        description="1500, 3000, 6000 or a multiple of 12000 up to 192000; left out, FSx scales it with capacity",
    )
    retain_data: bool = Field(
        default=True,
        description="keep file system, bucket, key and images when the stacks go, and refuse to delete their stacks",
    )
    data_repository: bool = Field(
        default=True,
        description="an S3 bucket: its data/ appears under /fsx/data, and /fsx/runs is copied to its runs/",
    )
    backup_retention_days: Annotated[int, Field(ge=0, le=FSX_MAX_BACKUP_DAYS)] = Field(
        default=0, description="daily backups of FSx, kept this long; 0 is none. Only without data_repository"
    )
    efa: bool = Field(
        default=False,
        description="file data over EFA: only at creation, with larger capacities, and with set-up on every node",
    )

    @field_validator("capacity_gib")
    @classmethod
    def _capacity_step(cls, value: int) -> int:
        if value != FSX_MIN_CAPACITY_GIB and value % FSX_CAPACITY_STEP_GIB:
            above = -(-value // FSX_CAPACITY_STEP_GIB) * FSX_CAPACITY_STEP_GIB
            raise ValueError(f"FSx offers 1200, 2400 and multiples of 2400 GiB; choose {above}")
        return value

    @field_validator("metadata_iops")
    @classmethod
    def _metadata_step(cls, value: int | None) -> int | None:
        if value is not None and value not in FSX_METADATA_IOPS:
            higher = [step for step in FSX_METADATA_IOPS if step > value]
            fix = higher[0] if higher else FSX_METADATA_IOPS[-1]
            raise ValueError(f"FSx offers 1500, 3000, 6000 and multiples of 12000 up to 192000; choose {fix}")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> "StorageConfig":
        raise_together(self._contradictions())
        return self

    def _contradictions(self) -> Iterator[str]:
        # "File system backups aren't supported on file systems that are linked to an S3 data repository" (FSx guide).
        if self.data_repository and self.backup_retention_days:
            yield (
                f"backup_retention_days {self.backup_retention_days}: FSx backs up no file system that is linked to "
                "S3; set it to 0, or data_repository to false"
            )
        step = FSX_EFA_CAPACITY_STEP_GIB[self.throughput_mb_per_tib]
        if self.efa and self.capacity_gib % step:
            yield (
                f"capacity_gib {self.capacity_gib}: with efa and {self.throughput_mb_per_tib} MB/s per TiB FSx offers "
                f"multiples of {step} GiB; choose {-(-self.capacity_gib // step) * step}, or efa: false"
            )


class SystemNodesConfig(Config):
    """The small CPU nodes that run controllers, CoreDNS and the rendezvous, away from the GPU nodes' faults."""

    instance_type: str = "m7i.xlarge"
    node_count: PositiveInt = 2

    @field_validator("instance_type")
    @classmethod
    def _x86(cls, value: str) -> str:
        # The group's AMI is AL2023_x86_64_STANDARD: on Graviton EKS answers AmiTypeDoesNotMatchInstanceArchitecture.
        family = re.fullmatch(r"([a-z]+\d+[a-z0-9-]*)\.[a-z0-9-]+", value)
        if not family:
            raise ValueError("is no EC2 instance type; write it like m7i.xlarge")
        if re.fullmatch(r"a1|[a-z]+\d+[a-z]*g[a-z]*", family[1]):  # a g after the number: m7g, c7gn, x2gd, im4gn
            raise ValueError("is a Graviton type, and the system nodes' AMI is x86-64; choose one such as m7i.xlarge")
        return value


class NetworkConfig(Config):
    """How the private subnets reach the rest of the world."""

    egress: Literal["nat", "none"] = Field(
        default="nat", description="nat: one NAT gateway; none: no way out, an endpoint for every AWS service in use"
    )
    mirror_registry: str | None = Field(
        default=None,
        description="with egress none: your ECR registry (and a prefix) that holds copies of charts and their images",
    )

    @field_validator("mirror_registry")
    @classmethod
    def _private_ecr(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(_ECR_PREFIX, value):
            raise ValueError("must be an ECR registry, such as 123456789012.dkr.ecr.us-west-2.amazonaws.com/mirror")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> "NetworkConfig":
        # Without a copy within reach, the first chart fails after 25 minutes of deploy.
        if (self.egress == "none") != (self.mirror_registry is not None):
            raise ValueError(
                f"egress {self.egress} with mirror_registry {self.mirror_registry}: the registry is needed with egress "
                "none, where nothing comes from the internet, and only there; set both or neither"
            )
        return self


class AddonsConfig(Config):
    """What is installed beside the necessary; versions stand in stacks/helm_releases.py."""

    dcgm_exporter: bool = Field(default=True, description="GPU metrics for Prometheus, the Xid counter among them")
    kueue: bool = Field(default=False, description="queues for several teams' jobs; one job alone needs none")


class ObservabilityConfig(Config):
    """Metrics, alarms and what the account may cost."""

    metrics: Literal["cloudwatch", "prometheus", "none"] = Field(
        default="cloudwatch",
        description="cloudwatch: Container Insights with GPU metrics; prometheus: Amazon Managed Prometheus with its "
        "own scraper; each with the alarms on them",
    )
    alarm_email: str | None = Field(default=None, description="who is told; AWS asks this address to confirm first")
    monthly_budget_usd: PositiveInt | None = Field(
        default=None, description="a mail at 80% spent and when 100% is forecast: of the whole account; left out, none"
    )

    @field_validator("alarm_email")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[^@\s]+@[^@\s]+\.[^@\s]+", value):
            raise ValueError("is no e-mail address; write it like ops@example.com")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> "ObservabilityConfig":
        if self.monthly_budget_usd is not None and self.alarm_email is None:
            raise ValueError(
                f"monthly_budget_usd {self.monthly_budget_usd} tells nobody without alarm_email; set that too"
            )
        return self


class ClusterConfig(Config):
    """One EKS cluster in one region, with its GPU nodes in one availability zone."""

    region: str
    availability_zone: str = Field(description="GPU nodes, FSx and EFA traffic live in this one zone")
    second_availability_zone: str = Field(description="EKS wants its control plane in two zones; no GPU node goes here")
    vpc_cidr: str = Field(default="10.0.0.0/16", description="/16 to /20; the GPU subnet is its upper half")
    kubernetes_version: Literal["1.36"] = Field(
        default="1.36",
        description="a version in EKS standard support, with a row of add-on versions in stacks/addons.py",
    )
    ami_release_version: str | None = Field(
        default=None,
        description="pins the GPU nodes' AMI, such as 1.36.0-20261101; left out, EKS takes the newest at creation",
    )
    endpoint_public_cidrs: tuple[str, ...] = Field(
        default=(), description="networks that may reach the API server from the internet; left out, only the VPC may"
    )
    capacity: Capacity = OnDemand()
    storage: StorageConfig = StorageConfig()
    system_nodes: SystemNodesConfig = SystemNodesConfig()
    network: NetworkConfig = NetworkConfig()
    addons: AddonsConfig = AddonsConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    root_volume_gib: Annotated[int, Field(ge=50, le=16_384)] = Field(
        default=100, description="the GPU nodes' EBS root; images and scratch live on the instance's own NVMe"
    )

    @field_validator("region")
    @classmethod
    def _known_region(cls, value: str) -> str:
        if value not in EKS_IMAGE_ACCOUNTS:
            raise ValueError(f"unknown region; choose one of {', '.join(sorted(EKS_IMAGE_ACCOUNTS))}")
        return value

    @field_validator("vpc_cidr")
    @classmethod
    def _vpc_range(cls, value: str) -> str:
        network = _network(value)
        low, high = _VPC_PREFIX_RANGE
        if not network.is_private or not low <= network.prefixlen <= high:
            raise ValueError(f"must be a private range from /{low} to /{high}; write for example 10.0.0.0/16")
        return value

    @field_validator("endpoint_public_cidrs")
    @classmethod
    def _narrow_allow_list(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for cidr in value:
            if _network(cidr).prefixlen == 0:
                raise ValueError(
                    f"{cidr} opens the API server to everyone; list your own networks, such as 198.51.100.7/32"
                )
        return value

    @model_validator(mode="after")
    def _check_together(self) -> "ClusterConfig":
        raise_together(self._contradictions())
        return self

    def _contradictions(self) -> Iterator[str]:
        for field in ("availability_zone", "second_availability_zone"):
            zone = getattr(self, field)
            if not re.fullmatch(re.escape(self.region) + "[a-z]", zone):
                yield f"{field} {zone} is no zone of region {self.region}; choose one such as {self.region}a"
        if self.availability_zone == self.second_availability_zone:
            yield (
                f"second_availability_zone {self.second_availability_zone} is the GPU zone; "
                "EKS needs two, choose another"
            )
        mirror = self.network.mirror_registry
        if mirror is not None and f".ecr.{self.region}." not in mirror:
            yield (
                f"network.mirror_registry {mirror} is in another region, which no endpoint of {self.region} reaches; "
                "copy charts and images into this one"
            )
        budget = self.observability.monthly_budget_usd
        if budget is not None and self.region in REGIONS_WITHOUT_BUDGETS:
            yield (
                f"observability.monthly_budget_usd {budget}: CloudFormation makes no budget in {self.region}; leave it "
                "out, and make one for the account in the console"
            )
        if self.observability.metrics == "prometheus" and not self.addons.dcgm_exporter:
            yield (
                "observability.metrics prometheus reads the GPUs from dcgm-exporter; set addons.dcgm_exporter to true"
            )
        release = self.ami_release_version
        if release is not None and not re.fullmatch(re.escape(self.kubernetes_version) + r"\.\d+-\d{8}", release):
            yield (
                f"ami_release_version {release} is no release of Kubernetes {self.kubernetes_version}; "
                f"write it like {self.kubernetes_version}.0-20261101"
            )

    def job_problems(self, pod_count: int) -> Iterator[str]:
        """Why this cluster can't hold that many GPU nodes, if it can't."""
        if isinstance(self.capacity, CapacityBlock) and pod_count > CAPACITY_BLOCK_MAX_NODES:
            yield (
                f"job.node_count + job.spare_count is {pod_count}, a Capacity Block has {CAPACITY_BLOCK_MAX_NODES} "
                "instances at most; lower them or choose another cluster.capacity.kind"
            )
        addresses = IPv4Network(self.gpu_subnet_cidr).num_addresses - AWS_RESERVED_ADDRESSES
        needed = pod_count * WARM_ADDRESSES_PER_NODE
        if needed > addresses:
            yield (
                f"job.node_count + job.spare_count is {pod_count}, which needs {needed} addresses; the GPU subnet "
                f"{self.gpu_subnet_cidr} has {addresses}; widen cluster.vpc_cidr"
            )

    @property
    def gpu_subnet_cidr(self) -> str:
        """The upper half of the VPC: /21 at least, since the VPC CNI keeps up to 50 warm addresses on every node."""
        return str(list(IPv4Network(self.vpc_cidr).subnets(prefixlen_diff=1))[1])

    @property
    def eks_image_registry(self) -> str:
        """Host of the region's registry for EKS's own images."""
        return f"{EKS_IMAGE_ACCOUNTS[self.region]}.dkr.ecr.{self.region}.amazonaws.com"


def _network(cidr: str) -> IPv4Network:
    try:
        return IPv4Network(cidr)
    except (AddressValueError, NetmaskValueError, ValueError) as error:
        raise ValueError(
            f"{cidr} is no IPv4 network ({error}); write the network's first address and a /prefix"
        ) from error

"""What FSx for Lustre refuses, mostly after minutes of creating, and what it takes and then does not do."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from config.cluster import (
    FSX_CAPACITY_STEP_GIB,
    FSX_EFA_CAPACITY_STEP_GIB,
    FSX_METADATA_IOPS,
    FSX_MIN_CAPACITY_GIB,
)
from config.finding import Finding
from config.rules.network import open_to_itself, permissions
from config.rules.node_group import node_groups
from config.rules.template import Resource, Templates, is_literal, reference

_FILE_SYSTEM = (
    "https://docs.aws.amazon.com/AWSCloudFormation/latest/UserGuide/"
    "aws-properties-fsx-filesystem-lustreconfiguration.html"
)
_SIZES = "https://docs.aws.amazon.com/fsx/latest/LustreGuide/increase-storage-capacity.html"
_LATE_SIZES = "https://github.com/hashicorp/terraform-provider-aws/issues/24341"
_VERSION = "https://github.com/kubernetes-sigs/aws-fsx-csi-driver/issues/437"
_METADATA = "https://github.com/aws/aws-parallelcluster/issues/7616"
_EFA_IGNORED = "https://github.com/awslabs/awsome-distributed-ai/pull/1124"
_ASSOCIATIONS = (
    "https://docs.aws.amazon.com/AWSCloudFormation/latest/UserGuide/aws-resource-fsx-datarepositoryassociation.html"
)
_SECURITY_GROUPS = "https://docs.aws.amazon.com/fsx/latest/LustreGuide/limit-access-security-groups.html"
_RULES_FIRST = "https://github.com/bottlerocket-os/bottlerocket/issues/3459"
_ONE_ZONE = "https://github.com/aws/containers-roadmap/issues/2204"

_LUSTRE_VERSION = "2.15"
_LUSTRE_PORTS = ((988, 988), (1018, 1023))
_OLD_REPOSITORY_FIELDS = ("AutoImportPolicy", "ImportPath", "ExportPath", "ImportedFileChunkSize")


@dataclass(frozen=True)
class FileSystem:
    """One FSx for Lustre file system."""

    templates: Templates
    resource: Resource

    @property
    def lustre(self) -> dict[str, Any]:
        """LustreConfiguration."""
        return self.resource.properties.get("LustreConfiguration", {})

    @property
    def efa(self) -> bool:
        """Whether file data goes over EFA."""
        return self.lustre.get("EfaEnabled") is True

    @property
    def security_groups(self) -> list[str]:
        """Keys of its security groups that stand in these templates."""
        keys = [reference(item)[0] for item in self.resource.properties.get("SecurityGroupIds", [])]
        found = [self.templates.resources.get(key or "") for key in keys]
        return [group.key for group in found if group is not None and group.type == "AWS::EC2::SecurityGroup"]

    def at(self, field: str) -> str:
        """Path of a field of LustreConfiguration, for a finding."""
        return self.resource.at(f"LustreConfiguration.{field}")


def persistent_2(fs: FileSystem) -> Iterator[Finding]:
    """The only kind with metadata configuration and EFA; on others FSx has been seen to drop the flag silently."""
    kind = fs.lustre.get("DeploymentType")
    if is_literal(kind) and kind != "PERSISTENT_2":
        yield Finding(
            fs.at("DeploymentType"),
            str(kind),
            "EFA and metadata configuration exist on PERSISTENT_2 only" + ("; EfaEnabled is ignored" if fs.efa else ""),
            "set PERSISTENT_2",
            _EFA_IGNORED,
        )


def version(fs: FileSystem) -> Iterator[Finding]:
    """2.10, the service's default, fails to mount on Amazon Linux 2023; 2.12 has no metadata configuration."""
    given = fs.resource.properties.get("FileSystemTypeVersion")
    if is_literal(given) and given != _LUSTRE_VERSION:
        yield Finding(
            fs.resource.at("FileSystemTypeVersion"),
            str(given),
            "Amazon Linux 2023 mounts Lustre 2.15; 2.10, the default, fails with Invalid argument",
            f'set "{_LUSTRE_VERSION}"',
            _VERSION,
        )


def throughput(fs: FileSystem) -> Iterator[Finding]:
    """Four steps."""
    given = fs.lustre.get("PerUnitStorageThroughput")
    if not is_literal(given) or fs.lustre.get("DeploymentType") != "PERSISTENT_2":
        return
    if given not in FSX_EFA_CAPACITY_STEP_GIB:
        yield Finding(
            fs.at("PerUnitStorageThroughput"),
            str(given),
            "PERSISTENT_2 on SSD offers 125, 250, 500 and 1000 MB/s per TiB",
            "choose one of them",
            _FILE_SYSTEM,
        )


def capacity(fs: FileSystem) -> Iterator[Finding]:
    """1200, 2400 and multiples; far coarser with EFA, by throughput."""
    given = fs.resource.properties.get("StorageCapacity")
    if not isinstance(given, int):
        return
    path = fs.resource.at("StorageCapacity")
    speed = fs.lustre.get("PerUnitStorageThroughput")
    step = FSX_EFA_CAPACITY_STEP_GIB.get(speed) if isinstance(speed, int) else None
    if given < FSX_MIN_CAPACITY_GIB or (given != FSX_MIN_CAPACITY_GIB and given % FSX_CAPACITY_STEP_GIB):
        above = max(-(-given // FSX_CAPACITY_STEP_GIB), 1) * FSX_CAPACITY_STEP_GIB
        yield Finding(
            path, str(given), "FSx offers 1200, 2400 and multiples of 2400 GiB", f"choose {above}", _LATE_SIZES
        )
    elif fs.efa and step is not None and given % step:
        yield Finding(
            path,
            f"{given} at {speed} MB/s per TiB with EFA",
            f"with EFA and {speed} MB/s per TiB the capacity is a multiple of {step} GiB",
            f"choose {-(-given // step) * step}, or leave EfaEnabled out",
            _SIZES,
        )


def metadata(fs: FileSystem) -> Iterator[Finding]:
    """Only at creation, and EFA wants it."""
    given = fs.lustre.get("MetadataConfiguration")
    if given is None:
        yield Finding(
            fs.at("MetadataConfiguration"),
            "none",
            "metadata configuration can't be added later" + (", and EFA requires it" if fs.efa else ""),
            "set {Mode: AUTOMATIC}",
            _METADATA,
        )
        return
    iops, mode = given.get("Iops"), given.get("Mode")
    if not is_literal(iops) or not is_literal(mode):
        return
    if iops is not None and iops not in FSX_METADATA_IOPS:
        higher = [step for step in FSX_METADATA_IOPS if step > iops]
        yield Finding(
            fs.at("MetadataConfiguration.Iops"),
            str(iops),
            "FSx offers 1500, 3000, 6000 and multiples of 12000 up to 192000",
            f"choose {higher[0] if higher else FSX_METADATA_IOPS[-1]}",
            _FILE_SYSTEM,
        )
    if (mode == "USER_PROVISIONED") != (iops is not None):
        yield Finding(
            fs.at("MetadataConfiguration.Mode"),
            f"{mode} with Iops {iops}",
            "USER_PROVISIONED has Iops, AUTOMATIC has none",
            "set both or neither",
            _FILE_SYSTEM,
        )


def no_old_repository_fields(fs: FileSystem) -> Iterator[Finding]:
    """PERSISTENT_2 is linked to S3 by a resource of its own."""
    for field in _OLD_REPOSITORY_FIELDS:
        if field in fs.lustre and fs.lustre.get("DeploymentType") == "PERSISTENT_2":
            yield Finding(
                fs.at(field),
                str(fs.lustre[field]),
                f"PERSISTENT_2 takes no {field}",
                "remove it; link the bucket with AWS::FSx::DataRepositoryAssociation",
                _ASSOCIATIONS,
            )


def no_backup_of_linked(fs: FileSystem) -> Iterator[Finding]:
    """FSx backs up no file system that is linked to S3."""
    links = [
        link
        for link in fs.templates.of_type("AWS::FSx::DataRepositoryAssociation")
        if reference(link.properties.get("FileSystemId"))[0] == fs.resource.key
    ]
    days = fs.lustre.get("AutomaticBackupRetentionDays", 0)
    if links and days and is_literal(days):
        yield Finding(
            fs.at("AutomaticBackupRetentionDays"),
            str(days),
            "a file system that is linked to S3 has no backups",
            "set 0, or remove the data repository associations",
            "https://docs.aws.amazon.com/fsx/latest/LustreGuide/using-backups-fsx.html",
        )


def beside_the_gpu_nodes(fs: FileSystem) -> Iterator[Finding]:
    """One subnet, and that of the EFA nodes: over EFA only the same zone reaches it, else each byte is billed."""
    subnets = fs.resource.properties.get("SubnetIds", [])
    wanted = [s for g in node_groups(fs.templates) if g.has_efa for s in g.group.properties.get("Subnets", [])]
    here, there = ({fs.templates.zone(subnet) for subnet in group} for group in (subnets, wanted))
    elsewhere = here and there and None not in here | there and not here & there
    if len(subnets) != 1 or elsewhere:
        yield Finding(
            fs.resource.at("SubnetIds"),
            ", ".join(subnets) or "none",
            "FSx for Lustre has one subnet, in the zone of the nodes that mount it",
            "name the GPU nodes' subnet",
            _ONE_ZONE,
        )


def security_group(fs: FileSystem) -> Iterator[Finding]:
    """FSx checks its own group when it creates the file system."""
    for key in fs.security_groups:
        if fs.efa and not open_to_itself(fs.templates, key):
            yield Finding(
                key,
                "no rule for all traffic from and to itself",
                "a file system with EFA needs a group with all traffic in and out, to itself and to its clients",
                "add SecurityGroupIngress and SecurityGroupEgress with IpProtocol -1 to itself",
                _SECURITY_GROUPS,
            )
        for direction in ("Ingress", "Egress"):
            missing = [ports for ports in _LUSTRE_PORTS if not _allows(fs.templates, key, direction, ports)]
            # A group without egress rules of its own allows all outbound traffic.
            if not missing or fs.efa or (direction == "Egress" and not _has_egress(fs.templates, key)):
                continue
            yield Finding(
                key,
                f"no {direction.lower()} for TCP {', '.join(f'{low}-{high}' for low, high in missing)} with itself",
                "Lustre's servers and clients talk over TCP 988 and 1018-1023, both ways",
                f"add SecurityGroup{direction} for these ports with the group itself and with the nodes' group",
                _SECURITY_GROUPS,
            )


def _allows(templates: Templates, group: str, direction: str, ports: tuple[int, int]) -> bool:
    return any(
        rule.peer == group and rule.ports[0] <= ports[0] and rule.ports[1] >= ports[1]
        for rule in permissions(templates, group, direction)
    )


def _has_egress(templates: Templates, group: str) -> bool:
    return bool(templates.resources[group].properties.get("SecurityGroupEgress")) or bool(
        permissions(templates, group, "Egress")
    )


def rules_before_file_system(fs: FileSystem) -> Iterator[Finding]:
    """Rules that come later do not reach the data servers; in another stack they always come first."""
    stack = fs.resource.key.partition("/")[0]
    groups = set(fs.security_groups)
    for kind in ("AWS::EC2::SecurityGroupIngress", "AWS::EC2::SecurityGroupEgress"):
        for rule in fs.templates.of_type(kind):
            here = rule.key.startswith(f"{stack}/") and reference(rule.properties.get("GroupId"))[0] in groups
            if here and rule.key not in fs.resource.depends_on:
                yield Finding(
                    fs.resource.at("DependsOn"),
                    f"not {rule.key}",
                    "rules added after the file system do not reach its data servers",
                    f"add DependsOn {rule.key.partition('/')[2]}, or move the security group to an earlier stack",
                    _RULES_FIRST,
                )


RULES: tuple[Callable[[FileSystem], Iterator[Finding]], ...] = (
    persistent_2,
    version,
    throughput,
    capacity,
    metadata,
    no_old_repository_fields,
    no_backup_of_linked,
    beside_the_gpu_nodes,
    security_group,
    rules_before_file_system,
)


def file_systems(templates: Templates) -> Iterator[FileSystem]:
    """Every file system that is Lustre."""
    for resource in templates.of_type("AWS::FSx::FileSystem"):
        if resource.properties.get("FileSystemType") == "LUSTRE":
            yield FileSystem(templates, resource)

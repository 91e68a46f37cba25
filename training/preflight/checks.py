"""What one node can say about itself: shared memory, locked memory, huge pages, EFA devices, the mount, versions."""

import importlib.metadata
import mmap
import os
import platform
import resource
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from training.self_test import NCCL_BROKEN
from training.train import NVRX_VERSION

_MIB = 1 << 20
_COMMAND_SECONDS = 60
_BLOCK = 4 * _MIB


@dataclass(frozen=True)
class Check:
    """One check's outcome; `detail` says why it failed, with the fix, or why it was skipped."""

    name: str
    status: Literal["pass", "fail", "skip"]
    detail: str
    values: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For the node's line."""
        return asdict(self)


def passed(name: str, detail: str, **values: Any) -> Check:
    """The check found what it wants."""
    return Check(name, "pass", detail, values)


def failed(name: str, detail: str, **values: Any) -> Check:
    """The node is not fit."""
    return Check(name, "fail", detail, values)


def skipped(name: str, reason: str, **values: Any) -> Check:
    """What the check is about is not asked for, or not there to be asked."""
    return Check(name, "skip", reason, values)


def shared_memory(directory: Path, *, min_mib: int) -> Check:
    """Room for staged checkpoints and NCCL's buffers."""
    status = os.statvfs(directory)
    size, free = (blocks * status.f_frsize // _MIB for blocks in (status.f_blocks, status.f_bavail))
    values = {"size_mib": size, "free_mib": free, "min_mib": min_mib}
    if size < min_mib:
        return failed("shm", f"{directory} has {size} MiB, {min_mib} are needed; enlarge the shm volume", **values)
    return passed("shm", f"{directory}: {size} MiB, {free} free", **values)


def locked_memory(*, needed: bool) -> Check:
    """EFA registers memory, which counts as locked; a pod inherits the limit of the container runtime."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    shown = "unlimited" if unlimited else f"{soft // 1024} KiB"
    values = {"soft": None if unlimited else soft, "hard": None if hard == resource.RLIM_INFINITY else hard}
    if not needed:
        return skipped("memlock", f"no EFA expected ({shown})", **values)
    if not unlimited:
        return failed(
            "memlock",
            f"limit is {shown}: libfabric would fail with -12; set LimitMEMLOCK=infinity of containerd",
            **values,
        )
    return passed("memlock", shown, **values)


def huge_pages(*, expect_mib: int) -> Check:
    """What EFA's queues are put into, by mapping it: the pod's own limit counts, not what the node has."""
    if expect_mib == 0:
        return skipped("hugepages", "none expected")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_HUGETLB
    try:
        mmap.mmap(-1, expect_mib * _MIB, flags=flags).close()
    except OSError as error:
        return failed(
            "hugepages",
            f"{expect_mib} MiB of 2 MiB pages cannot be mapped ({error.strerror}); request hugepages-2Mi, and have the "
            "node set vm.nr_hugepages",
            expect_mib=expect_mib,
        )
    return passed("hugepages", f"{expect_mib} MiB mapped", expect_mib=expect_mib)


_MAP_HUGETLB = 0x40000  # Linux; Python names it from 3.13 on


def efa_devices(*, expect: int, sysfs: Path = Path("/sys/class/infiniband")) -> Check:
    """As many as the kernel shows, and as many as libfabric can use: a missing one means plain TCP, unnoticed."""
    if expect == 0:
        return skipped("efa", "none expected")
    devices = sorted(entry.name for entry in sysfs.glob("*") if (entry / "device/driver").resolve().name == "efa")
    values: dict[str, Any] = {"devices": devices, "expect": expect}
    if len(devices) != expect:
        return failed(
            "efa",
            f"{len(devices)} EFA devices in {sysfs}, {expect} expected; request vpc.amazonaws.com/efa and look at the "
            "EFA device plugin on this node",
            **values,
        )
    listing = _run(["fi_info", "-p", "efa", "-t", "FI_EP_RDM"])
    if listing is None:
        return failed(
            "efa", "fi_info finds no provider or is not installed; libfabric cannot use the devices", **values
        )
    domains = {line.split()[1] for line in listing.splitlines() if line.strip().startswith("domain:")}
    values["domains"] = sorted(domains)
    if len(domains) != expect:
        return failed("efa", f"libfabric sees {len(domains)} EFA domains, {expect} expected", **values)
    return passed("efa", f"{expect} devices, all usable by libfabric", **values)


def mount(
    directory: Path, *, file_mib: int, min_write_mib_s: float, min_read_mib_s: float, filesystem: str | None, name: str
) -> Check:
    """Write a file, fsync it, read it back from the server and compare; the bandwidth of both."""
    kind = filesystem_of(directory)
    values: dict[str, Any] = {"directory": str(directory), "filesystem": kind, "file_mib": file_mib}
    if filesystem is not None and kind != filesystem:
        return failed("mount", f"{directory} is on {kind}, {filesystem} expected; is the claim mounted?", **values)
    path = directory / f".preflight-{name}"
    try:
        try:
            write_s, read_s, same = _write_and_read(path, file_mib)
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        return failed(
            "mount",
            f"{directory} cannot be used ({error.strerror}); check the claim and the directory's owner",
            **values,
        )
    values |= {"write_mib_s": round(file_mib / write_s, 1), "read_mib_s": round(file_mib / read_s, 1)}
    shown = f"{directory} ({kind}): write {values['write_mib_s']} MiB/s, read {values['read_mib_s']} MiB/s"
    if not same:
        return failed("mount", f"{directory}: what was read is not what was written; replace the file system", **values)
    if values["write_mib_s"] < min_write_mib_s or values["read_mib_s"] < min_read_mib_s:
        return failed("mount", f"{shown}; {min_write_mib_s:g} and {min_read_mib_s:g} are needed", **values)
    return passed("mount", shown, **values)


def _write_and_read(path: Path, file_mib: int) -> tuple[float, float, bool]:
    """Seconds to write with fsync and to read back past the page cache, and whether both are the same bytes."""
    block = os.urandom(_BLOCK)
    count = max(1, file_mib * _MIB // _BLOCK)
    started = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for _ in range(count):
            file.write(block)
        os.fsync(file.fileno())
    wrote = time.monotonic()
    same = True
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # a hint: tmpfs, for one, has nothing to drop
        for _ in range(count):
            same &= file.read(_BLOCK) == block
    return max(wrote - started, 1e-9), max(time.monotonic() - wrote, 1e-9), same


def filesystem_of(directory: Path) -> str:
    """Type of the file system that holds `directory`."""
    found, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        point, type_ = line.split()[1:3]
        if Path(point) in (directory.resolve(), *directory.resolve().parents) and len(point) >= len(found):
            found, kind = point, type_
    return kind


def versions(*, driver: str | None) -> Check:
    """Everything that must be the same on all nodes, and what is known to break."""
    import torch
    import torch.cuda.nccl

    cuda = torch.version.cuda
    nccl = torch.cuda.nccl.version() if cuda and torch.distributed.is_nccl_available() else None
    values = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "nvrx": importlib.metadata.version("nvidia-resiliency-ext"),
        "driver": driver,
        "libfabric": _first_line(_run(["fi_info", "--version"])),
        "kernel": platform.release(),
    }
    if values["nvrx"] != NVRX_VERSION:
        return failed("versions", f"nvidia-resiliency-ext {values['nvrx']}, {NVRX_VERSION} is needed", **values)
    if nccl and NCCL_BROKEN[0] <= nccl <= NCCL_BROKEN[1]:
        return failed("versions", f"NCCL {values['nccl']} crashes on abort (2.28.3 to 2.28.8); take another", **values)
    return passed("versions", ", ".join(f"{name} {value}" for name, value in values.items() if value), **values)


def guarded(name: str, check: Callable[[], Check]) -> Check:
    """A check that breaks is a check that failed: the others still have something to say."""
    try:
        return check()
    except (OSError, RuntimeError, ValueError) as error:
        return failed(name, f"broke: {type(error).__name__}: {error}")


def _run(command: list[str]) -> str | None:
    """The command's output, or None if it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _first_line(text: str | None) -> str | None:
    return text.splitlines()[0] if text else None

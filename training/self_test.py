"""Says which versions this image is made of, and fails on a wrong one: `python -m training.self_test`.

Three places, each checking what the one before it does and more: `cpu` is a developer's machine, `image` a container
without a GPU (the build runs it there before it pushes), `node` a container on a GPU node with EFA.
"""

import argparse
import ctypes
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from training.train import NVRX_VERSION

PLACES = ("cpu", "image", "node")
TORCH_VERSION = "2.13.0"
# What EFA installer 1.47.0 holds; the Dockerfile names that one.
LIBFABRIC_VERSION = "2.4"
OFI_NCCL_VERSION = "1.18.0"
# Aborting a communicator crashes in these (NVRx 0.5.0 release notes): no in-process restart.
NCCL_BROKEN = ((2, 28, 3), (2, 28, 8))
# The oldest driver of CUDA 13 (CUDA toolkit release notes, table 3).
DRIVER_MAJOR = 580

LIBFABRIC = Path("/opt/amazon/efa/lib/libfabric.so.1")
OFI_NCCL = Path("/opt/amazon/ofi-nccl/lib")
INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Check:
    """One line: what it is of, how its version is found, and what is wrong with one, in words, or None.

    `read` may raise OSError, ImportError or RuntimeError where the thing is missing or broken; that is wrong as well.
    """

    name: str
    place: str
    read: Callable[[], str]
    wrong: Callable[[str], str | None]


def main(argv: list[str] | None = None) -> int:
    """Print every version; returns 1 when one is wrong."""
    parser = argparse.ArgumentParser(prog="self_test", description="versions of this image, and whether they fit")
    parser.add_argument("--on", choices=PLACES, default="image", help="what is here to be checked (default: image)")
    place = parser.parse_args(argv).on
    errors = []
    for check in checks(place):
        if PLACES.index(check.place) > PLACES.index(place):
            print(f"{check.name:<13} skipped: needs --on {check.place}")
            continue
        found, error = _run(check)
        print(f"{check.name:<13} {found}")
        if error is not None:
            errors.append(f"error: {check.name} {found}: {error}")
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


def checks(place: str) -> tuple[Check, ...]:
    """Every check, in the order in which they are printed. On `cpu`, Python may be any that bootstrap.py takes."""
    python = _at_least((3, 11)) if place == "cpu" else _series("3.12")
    return (
        Check("python", "cpu", platform.python_version, python),
        Check("torch", "cpu", _torch, _exactly(TORCH_VERSION)),
        Check("NVRx", "cpu", lambda: metadata.version("nvidia-resiliency-ext"), _exactly(NVRX_VERSION)),
        Check("CUDA", "image", _cuda, _series("13")),
        Check("NCCL", "image", _nccl, _nccl_aborts),
        Check("libfabric", "image", _libfabric, _exactly(LIBFABRIC_VERSION)),
        Check("aws-ofi-nccl", "image", _ofi_nccl, _exactly(OFI_NCCL_VERSION)),
        Check("driver", "node", _driver, _at_least((DRIVER_MAJOR,))),
        Check("GPUs", "node", _gpus, _at_least((1,))),
        Check("EFA devices", "node", _efa_devices, _at_least((1,))),
    )


def _run(check: Check) -> tuple[str, str | None]:
    try:
        found = check.read()
    except (OSError, ImportError, RuntimeError) as error:
        return "missing", " ".join(str(error).split())
    return found, check.wrong(found)


def _exactly(wanted: str) -> Callable[[str], str | None]:
    """This version; what follows a + (torch's build) does not count."""

    def wrong(found: str) -> str | None:
        return None if found.partition("+")[0] == wanted else f"this image is made for {wanted}; build it again"

    return wrong


def _series(wanted: str) -> Callable[[str], str | None]:
    """Every version that begins like this: "13" is 13.0 as well as 13.2."""

    def wrong(found: str) -> str | None:
        return None if found.startswith(f"{wanted}.") else f"this image is made for {wanted}; build it again"

    return wrong


def _at_least(wanted: tuple[int, ...]) -> Callable[[str], str | None]:
    def wrong(found: str) -> str | None:
        return None if _numbers(found) >= wanted else f"needs {'.'.join(map(str, wanted))} or newer"

    return wrong


def _nccl_aborts(found: str) -> str | None:
    first, last = NCCL_BROKEN
    if first <= _numbers(found) <= last:
        return "2.28.3 to 2.28.8 crash when a communicator is aborted, which in-process restart does; use a newer one"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))


def _torch() -> str:
    import torch

    return torch.__version__


def _cuda() -> str:
    import torch

    if torch.version.cuda is None:
        raise RuntimeError("torch is a build for CPU; install the one for CUDA")
    return torch.version.cuda


def _nccl() -> str:
    import torch
    from torch.cuda import nccl

    if not torch.distributed.is_nccl_available():
        raise RuntimeError("torch is a build without NCCL; install the one for CUDA")
    return ".".join(str(number) for number in nccl.version())


def _libfabric() -> str:
    # fi_version(3): the major number in the upper, the minor one in the lower half.
    version = ctypes.CDLL(str(LIBFABRIC)).fi_version
    version.restype = ctypes.c_uint32
    return f"{version() >> 16}.{version() & 0xFFFF}"


def _ofi_nccl() -> str:
    """The plugin has no call for it, and needs a GPU to be loaded: it logs its version, so the text is in the file."""
    libraries = sorted(OFI_NCCL.glob("libnccl-net*.so"))
    if not libraries:
        raise OSError(f"no libnccl-net*.so in {OFI_NCCL}")
    found = re.search(rb"aws-ofi-nccl (\d+\.\d+\.\d+)", libraries[0].read_bytes())
    if found is None:
        raise RuntimeError(f"{libraries[0]} does not say its version")
    return found[1].decode()


def _driver() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        raise RuntimeError(f"the NVIDIA driver does not answer ({error})") from error


def _gpus() -> str:
    import torch

    return str(torch.cuda.device_count())


def _efa_devices() -> str:
    return str(len(list(INFINIBAND.iterdir())))


if __name__ == "__main__":
    sys.exit(main())

"""All that differs between a CUDA GPU and a CPU: which device, its memory, its peak, its generator's state."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

# Dense bf16 matrix peak in FLOP/s per GPU, without sparsity (NVIDIA's data sheets), by a part of the device's name.
# The first match counts, so the longer name comes first.
_PEAK_FLOPS = {
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}


@dataclass(frozen=True)
class DeviceLimits:
    """What a device can do at most; None where it is not known."""

    name: str
    peak_flops: float | None
    memory_bytes: int | None


def choose_device(local_rank: int) -> torch.device:
    """This rank's GPU where there are any, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def limits(device: torch.device) -> DeviceLimits:
    """Name, bf16 peak and memory of `device`. A CPU has no peak here: MFU is not stated for it."""
    if device.type != "cuda":
        return DeviceLimits("CPU", None, None)
    properties = torch.cuda.get_device_properties(device)
    return DeviceLimits(properties.name, peak_flops(properties.name), properties.total_memory)


def peak_flops(name: str) -> float | None:
    """Dense bf16 FLOP/s of the GPU with this name; None for one that is not in the table."""
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


def backend(device: torch.device) -> str:
    """Process group backend: NCCL for GPU tensors, gloo for CPU tensors.

    gloo is there on GPU hosts too: the checkpoint's small agreements go over it and never wait for the GPU stream.
    """
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_peak_bytes(device: torch.device) -> int:
    """Most memory that tensors took on the GPU since the last reset; on a CPU the process's largest resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not getrusage's maximum, which a process starts with from the one that it was forked off.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def reset_memory_peak(device: torch.device) -> None:
    """Start counting the peak anew; a CPU process's can't be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def random_state(device: torch.device) -> torch.Tensor | None:
    """The state of the GPU's generator; None on a CPU, whose generator is torch's own."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(state: torch.Tensor) -> None:
    """Put the current GPU's generator into a state that `random_state` took."""
    torch.cuda.set_rng_state(state)


def check_compiler(device: torch.device) -> None:
    """Raise ValueError unless inductor can build what it makes for `device`: there must be a C compiler."""
    if device.type == "cuda" and not any(map(shutil.which, ("gcc", "clang"))):
        raise ValueError(
            "parallelism.compile: inductor needs a C compiler, and this image has none; build it for this deployment "
            "(`make image`, or --build-arg COMPILER_PACKAGES), or unset parallelism.compile"
        )


def check_float8(device: torch.device) -> None:
    """Raise ValueError unless float8 training works on `device`: torchao is there, and the GPU is H100 or newer."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        raise ValueError(
            f"parallelism.float8 needs an H100 or newer GPU, this is {limits(device).name}; unset parallelism.float8"
        )
    try:
        import torchao.float8  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"parallelism.float8 needs torchao, which can't be imported ({error}); "
            "install the image's requirements or unset parallelism.float8"
        ) from error

"""Staging: copies of a rank's tensors in shared host memory, taken while the next forward and backward run.

Two buffers per rank, each as large as its state. One holds the newest complete copy, the memory tier and the source of
the files that the writer process writes; the other takes the next copy.
"""

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from training.checkpoint.layout import local_part
from training.checkpoint.state import Tensors

_ALIGNMENT = 64
_SHARED_MEMORY = "/dev/shm"  # where Linux keeps what processes share; a pod's own, sized by its manifest


@dataclass(frozen=True)
class Place:
    """Where in a block a tensor lies; offset and size in bytes."""

    offset: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def tensors_in(block: torch.Tensor, places: Mapping[str, Place]) -> Tensors:
    """The tensors in a block of bytes, sharing its memory.

    Each with a storage of its own: torch.save writes the whole storage of a tensor, here the whole block for each.
    """
    memory = block.numpy()
    return {
        name: torch.from_numpy(memory[place.offset : place.offset + place.size]).view(place.dtype).view(place.shape)
        for name, place in places.items()
    }


@dataclass(eq=False)  # a buffer equals itself only
class Buffer:
    """One copy of a rank's tensors, by name, in one block of shared memory.

    `step` is the step whose values it holds, None while they are incomplete.
    """

    block: torch.Tensor
    places: dict[str, "Place"]
    tensors: Tensors
    step: int | None = None
    manifest: dict[str, Any] = field(default_factory=dict)


class StagingBuffers:
    """Both buffers of one process; allocated once, since a copy into warm pages is several times faster.

    `like` gives names, shapes and types; `check_room` comes first.
    """

    def __init__(self, like: Mapping[str, torch.Tensor], *, device: torch.device) -> None:
        parts = {name: local_part(tensor) for name, tensor in like.items()}
        self._device = device
        size = _size(parts)
        self.buffers = (self._allocate(parts, size), self._allocate(parts, size))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _allocate(self, parts: Mapping[str, torch.Tensor], size: int) -> Buffer:
        block = torch.empty(size, dtype=torch.uint8).share_memory_()
        block.zero_()  # touches every page: the first save costs what the tenth does
        if self._device.type == "cuda":  # pinned: the copy is a DMA that leaves the host's cores alone
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostRegister(block.data_ptr(), size, 0))
        places, offset = {}, 0
        for name, part in parts.items():
            places[name] = Place(offset, part.nbytes, part.dtype, tuple(part.shape))
            offset += _aligned(part.nbytes)
        return Buffer(block, places, tensors_in(block, places))

    def holding(self, step: int) -> Buffer | None:
        """The buffer with a complete copy of `step`."""
        return next((buffer for buffer in self.buffers if buffer.step == step), None)

    def free(self, *, read: Collection[Buffer]) -> Buffer | None:
        """The buffer for the next copy: not in `read`, the older before the newer; None when both are being read."""
        idle = [buffer for buffer in self.buffers if buffer not in read]
        return min(idle, key=lambda buffer: -1 if buffer.step is None else buffer.step, default=None)

    def mark(self) -> Any:
        """The moment whose values a copy is to hold; on a GPU the work queued so far must have happened."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self._device).record_event()

    def copy(self, tensors: Tensors, buffer: Buffer, *, after: Any) -> None:
        """Copy into `buffer`; runs in a thread of its own while the main one trains. Blocks until it is done."""
        targets = [buffer.tensors[name] for name in tensors]
        sources = list(tensors.values())
        if self._stream is None:
            torch._foreach_copy_(targets, sources)
            return
        assert after is not None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            torch._foreach_copy_(targets, sources, non_blocking=True)
            self._stream.record_event().synchronize()


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGNMENT) * _ALIGNMENT


def _size(parts: Mapping[str, torch.Tensor]) -> int:
    return sum(_aligned(part.nbytes) for part in parts.values())


def check_room(parts: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless two copies fit into shared memory: going on would end in SIGBUS.

    Not a promise, since every rank of a host looks for itself; the manifest's size is computed for all of them.
    """
    needed = 2 * _size(parts)
    room = os.statvfs(_SHARED_MEMORY)
    free = room.f_bavail * room.f_frsize
    if needed > free:
        raise ValueError(
            f"staging checkpoints needs {needed / 2**20:.0f} MiB of shared memory on this rank and {_SHARED_MEMORY} "
            f"has {free / 2**20:.0f} MiB left; raise job.shm_gib, or shard over more ranks"
        )

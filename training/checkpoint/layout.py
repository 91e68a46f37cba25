"""How one rank holds its part of a tensor: what a shard needs beside its bytes to be put back in its place."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class TensorLayout:
    """One rank's part of one tensor. A plain tensor has no placements and no mesh, and its part is the whole.

    `dtype` is torch's name without the module ("bfloat16"); `placements` are written as DTensor writes them, one for
    each dimension of the mesh ("S(0)" sharded by rows, "R" replicated).
    """

    dtype: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    placements: tuple[str, ...]
    mesh_shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return getattr(torch, self.dtype)

    @property
    def local_bytes(self) -> int:
        """Bytes of this rank's part."""
        return torch.Size(self.local_shape).numel() * self.torch_dtype.itemsize

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "TensorLayout":
        """The layout that `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            layout = cls(
                dtype=str(value["dtype"]),
                global_shape=tuple(int(size) for size in value["global_shape"]),
                local_shape=tuple(int(size) for size in value["local_shape"]),
                placements=tuple(str(placement) for placement in value["placements"]),
                mesh_shape=tuple(int(size) for size in value["mesh_shape"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a tensor layout: {value!r}") from error
        if not isinstance(getattr(torch, layout.dtype, None), torch.dtype):
            raise ValueError(f"not a tensor layout: torch has no dtype {layout.dtype!r}")
        return layout


def tensor_layout(tensor: torch.Tensor) -> TensorLayout:
    """The layout of a DTensor's local part, or of a plain tensor."""
    sharded = isinstance(tensor, DTensor)
    return TensorLayout(
        dtype=str(tensor.dtype).removeprefix("torch."),
        global_shape=tuple(tensor.shape),
        local_shape=tuple(local_part(tensor).shape),
        placements=tuple(str(placement) for placement in tensor.placements) if sharded else (),
        mesh_shape=tuple(tensor.device_mesh.shape) if sharded else (),
    )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `tensor`: the same memory, without history."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def layouts_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorLayout]:
    """Each tensor's layout, by name."""
    return {name: tensor_layout(tensor) for name, tensor in tensors.items()}

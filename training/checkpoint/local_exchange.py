"""What NVRx's replication sends between ranks: one rank's shards in plain CPU memory, over gloo."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import GroupWrapper

from training.checkpoint.local_file import Header

_MESSAGE_BYTES = 256 << 20  # a shard of many GB goes in messages, each of which may take the group's timeout


class ShardId(NamedTuple):
    """One rank's part of one save, wherever it lies: NVRx's checkpoint id with the save in place of the session."""

    step: int
    rank: int
    save_id: str


class ShardState(TensorAwareStateDict):
    """One rank's shards as NVRx handles them: `header` is the hollow part, `pieces` are rows of bytes.

    NVRx's BasicTensorAwareStateDict insists on CUDA tensors, and a DTensor can't be replicated (c10d.broadcast_ has no
    sharding strategy). Here the shards are plain CPU memory that the caller has staged, and their layout is in the
    header. Bytes instead of typed tensors: every dtype can be sent, and what was read from a file is one piece.
    """

    def __init__(self, header: Header, pieces: Sequence[torch.Tensor], digest: str = "") -> None:
        self.header = header
        self.digest = digest
        self._pieces: list[torch.Tensor] | None = list(pieces)

    @property
    def shard_id(self) -> ShardId:
        """Which part of which save this is."""
        return ShardId(self.header.step, self.header.rank, self.header.save_id)

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        """The pieces."""
        assert self._pieces is not None, "hollow"
        return self._pieces

    @property
    def is_hollow(self) -> bool:
        """Whether the pieces have been taken out."""
        return self._pieces is None

    def pop_tensors(self) -> list[torch.Tensor]:
        """Take the pieces out, which leaves what is small enough to be sent as an object."""
        assert self._pieces is not None, "hollow"
        pieces, self._pieces = self._pieces, None
        return pieces

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put pieces back."""
        self._pieces = list(tensor_data)

    def init_tensors(self) -> None:
        """Make room for the bytes to come."""
        self._pieces = [torch.empty(self.header.payload_bytes, dtype=torch.uint8)]

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:  # noqa: ARG002
        """Nothing to do: they are there. NVRx would copy without waiting and write what has arrived by then."""
        assert all(piece.device.type == "cpu" for piece in self.tensors)

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Nothing to do: the caller copies them into its own, already sharded, tensors."""


class CpuGroup(GroupWrapper):
    """A gloo group whose members send each other state dicts.

    NVRx 0.7.0 sends `tensor.cuda()` and receives into `device="cuda"`, whatever the group's backend: no retrieval
    without a GPU, and none over gloo with one.
    """

    def isend_state_dict(self, state_dict: TensorAwareStateDict, dst: int) -> dict[str, float]:
        """Send the hollow part, then the pieces."""
        assert isinstance(state_dict, ShardState)
        pieces = state_dict.pop_tensors()
        self.send_object(state_dict, dst)
        state_dict.insert_tensors(pieces)
        for message in _messages(pieces):
            dist.send(message, dst, group=self.group)
        return {"data_sent": sum(piece.nbytes for piece in pieces)}

    def irecv_state_dict(self, src: int) -> tuple[TensorAwareStateDict, dict[str, int]]:
        """Receive what `isend_state_dict` sent."""
        state: object = self.recv_object(src)  # pyright: ignore[reportGeneralTypeIssues]
        assert isinstance(state, ShardState)
        state.init_tensors()
        for message in _messages(state.tensors):
            dist.recv(message, src, group=self.group)
        return state, {"data_recv": sum(piece.nbytes for piece in state.tensors)}


def _messages(pieces: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    return (message for piece in pieces for message in piece.split(_MESSAGE_BYTES) if message.numel())

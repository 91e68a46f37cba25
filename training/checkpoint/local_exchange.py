"""What NVRx's replication sends between ranks: one rank's shards in plain CPU memory, over gloo."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import GroupWrapper

from training.checkpoint.local_file import Header, new_room

_MESSAGE_BYTES = 256 << 20  # a shard of many GB goes in messages, each of which may take the group's timeout


class ShardId(NamedTuple):
    """One rank's part of one save, wherever it lies: NVRx's checkpoint id with the save in place of the session."""

    step: int
    rank: int
    save_id: str


class ShardState(TensorAwareStateDict):
    """One rank's shards as NVRx handles them: `header` is the hollow part, the tensors are a row of bytes per shard.

    NVRx's BasicTensorAwareStateDict insists on CUDA tensors, and a DTensor can't be replicated (c10d.broadcast_ has no
    sharding strategy). Here the shards are plain CPU memory that the caller has staged, and their layout is in the
    header. Bytes instead of typed tensors: every dtype can be sent.
    """

    def __init__(self, header: Header, rows: Iterable[torch.Tensor], digest: str = "") -> None:
        self.header = header
        self.digest = digest
        self._rows: list[torch.Tensor] | None = list(rows)

    @property
    def shard_id(self) -> ShardId:
        """Which part of which save this is."""
        return ShardId(self.header.step, self.header.rank, self.header.save_id)

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        """The rows."""
        assert self._rows is not None, "hollow"
        return self._rows

    @property
    def is_hollow(self) -> bool:
        """Whether the rows have been taken out."""
        return self._rows is None

    def pop_tensors(self) -> list[torch.Tensor]:
        """Take the rows out, which leaves what is small enough to be sent as an object."""
        assert self._rows is not None, "hollow"
        rows, self._rows = self._rows, None
        return rows

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put rows back."""
        self._rows = list(tensor_data)

    def init_tensors(self) -> None:
        """Make room for the bytes to come."""
        self._rows = new_room(self.header)

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:  # noqa: ARG002
        """Nothing to do: they are there. NVRx would copy without waiting and write what has arrived by then."""
        assert all(row.device.type == "cpu" for row in self.tensors)

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Nothing to do: the caller copies them into its own, already sharded, tensors."""


class CpuGroup(GroupWrapper):
    """A gloo group whose members exchange ShardStates.

    NVRx 0.7.0 sends `tensor.cuda()` and receives into `device="cuda"`, whatever the group's backend: no retrieval
    without a GPU, and none over gloo with one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.room: Callable[[Header], list[torch.Tensor]] = new_room  # where what is received goes
        self._copies: dict[int, list[torch.Tensor]] = {}

    def all_gather_batch(
        self,
        my_tensors: list[torch.Tensor],
        target_device: object = None,  # noqa: ARG002
    ) -> list[list[torch.Tensor]]:
        """Everybody's rows; the others' in memory that the next call uses again.

        NVRx allocates it for every save, and the kernel then clears as many pages as the peer has shards: here that
        took several times as long as sending and writing them. The price is host memory of one shard, kept.
        """
        all_sizes = self.all_gather_object([row.numel() for row in my_tensors])
        everybody = []
        for rank, sizes in zip(self.ranks, all_sizes, strict=True):
            mine = rank == self.my_global_rank
            rows = my_tensors if mine else self._copy_of(rank, sizes)
            for message in _messages(rows):
                dist.broadcast(message, src=rank, group=self.group)
            everybody.append(list(rows))
        return everybody

    def _copy_of(self, rank: int, sizes: list[int]) -> list[torch.Tensor]:
        rows = self._copies.get(rank)
        if rows is None or [row.numel() for row in rows] != sizes:
            rows = self._copies[rank] = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        return rows

    def isend_state_dict(self, state_dict: TensorAwareStateDict, dst: int) -> dict[str, float]:
        """Send the hollow part, then the rows."""
        assert isinstance(state_dict, ShardState)
        rows = state_dict.pop_tensors()
        # torch's own: NVRx's copy of it, for older versions, warns about the device with every object.
        dist.send_object_list([state_dict], dst, group=self.group, device=torch.device("cpu"))
        state_dict.insert_tensors(rows)
        for message in _messages(rows):
            dist.send(message, dst, group=self.group)
        return {"data_sent": sum(row.nbytes for row in rows)}

    def irecv_state_dict(self, src: int) -> tuple[TensorAwareStateDict, dict[str, int]]:
        """Receive what `isend_state_dict` sent, into `room`."""
        received: list[Any] = [None]
        dist.recv_object_list(received, src, group=self.group, device=torch.device("cpu"))
        (state,) = received
        assert isinstance(state, ShardState)
        state.insert_tensors(self.room(state.header))
        for message in _messages(state.tensors):
            dist.recv(message, src, group=self.group)
        return state, {"data_recv": sum(row.nbytes for row in state.tensors)}


def _messages(rows: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    return (message for row in rows for message in row.split(_MESSAGE_BYTES) if message.numel())

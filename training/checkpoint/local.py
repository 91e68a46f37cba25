"""The local tier: every rank's shards on its node's own disk or memory, and a copy on a peer node.

It survives the death of every process and, with a copy, the loss of any one node. At every instant the newest complete
save can be loaded: files are written beside it, agreed on by all ranks, and only then is it removed. So each node
needs room for two saves of its ranks, and twice that with copies.
"""

import contextlib
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import parse_group_sequence
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

from training.checkpoint.layout import TensorLayout, tensor_layout
from training.checkpoint.local_file import (
    Header,
    LocalCheckpointError,
    as_bytes,
    new_room,
    payload_order,
    shards_from,
)
from training.checkpoint.local_manager import CpuGroup, LocalManager, ShardId, ShardState

__all__ = ["LocalCheckpointError", "LocalTier"]

_SESSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class LocalTier:
    """One attempt's local checkpoints. Every method but `close` is collective, one call at a time.

    `replicas`: 0 keeps shards on the own node only, 1 also on a peer node. `directory` is this node's; ranks of one
    node, or all ranks, may share it. All traffic is on gloo groups of the tier's own, so a background thread may save
    while training goes on. A peer that dies or does not answer within `timeout` ends the call with LocalCheckpointError
    and the tier, for the ranks are no longer at the same place. The next attempt builds a new one.

    Raises:
        ValueError: replication does not fit the ranks, or the session is no plain name; before anything is touched.
        LocalCheckpointError: a rank can't use its directory; on every rank.
    """

    def __init__(
        self,
        *,
        directory: Path,
        session: str,
        rank: int,
        world_size: int,
        ranks_per_node: int,
        replicas: int,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        _check_arguments(session, world_size, ranks_per_node, replicas)
        assert (rank, world_size) == (dist.get_rank(), dist.get_world_size()), "ranks are the default group's"
        self._session, self._rank, self._world_size, self._timeout = session, rank, world_size, timeout
        self._pruned = False
        self._broken: str | None = None
        self._groups: list[dist.ProcessGroup] = []
        self._join_group(range(world_size))
        replication = self._pair_up(ranks_per_node) if replicas else None
        world = CpuGroup(self._groups[0])
        self._manager = LocalManager(directory, session=session, rank=rank, world=world, replication=replication)
        problem = None
        try:
            self._manager.prepare()
        except OSError as error:
            problem = f"{directory} can't be used for local checkpoints: {error.strerror or error}"
        with self._peers("starting the local tier"):
            # Also the barrier that keeps a quick rank from saving while another still clears what was cut off.
            problems = self._manager.gather_problems(problem)
        if problems:
            self.close()
            raise LocalCheckpointError("; ".join(problems))

    def _pair_up(self, ranks_per_node: int) -> CliqueReplicationStrategy:
        # NVRx's from_replication_params would build the groups with the default group's backend and timeout, and its
        # default jump is the number of GPUs at import time. Every rank must build every group, in the same order.
        for ranks in parse_group_sequence(ranks_per_node, 2, self._world_size):
            self._join_group(ranks)
        return CliqueReplicationStrategy(CpuGroup(self._groups[1]))

    def _join_group(self, ranks: Sequence[int]) -> None:
        group = dist.new_group(list(ranks), backend="gloo", timeout=self._timeout)
        if isinstance(group, dist.ProcessGroup):  # else this rank is no member
            self._groups.append(group)

    @property
    def refused(self) -> tuple[str, ...]:
        """Files that the last search or load did not take, each with its reason; the same on every rank."""
        return tuple(self._manager.refused)

    def save(
        self,
        *,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        layouts: Mapping[str, TensorLayout],
        manifest: Mapping[str, Any],
    ) -> int:
        """Write this rank's shards, and a peer's copy; complete everywhere when it returns. Returns bytes written.

        `tensors` are CPU memory that nobody changes meanwhile; they are read in place, once to be sent and once to be
        written. `manifest` goes through JSON.

        Raises:
            LocalCheckpointError: it could not be written on some rank, which is named; on every rank, and the save
                before it stays. Or a peer did not answer.
        """
        with self._peers(f"saving step {step} locally"):
            if not self._pruned:  # what earlier attempts did not complete would pile up over a series of crashes
                self._prune()
            header, problem = self._describe(step, tensors, layouts, manifest)
            # Also the barrier between removing and writing: ranks clear the whole node, a quick neighbour's files too.
            save_id = self._agree(step, problem)
            header = replace(header, save_id=save_id)
            return self._manager.save_state(ShardState(header, _rows(header, tensors)))

    def _describe(
        self, step: int, tensors: Mapping[str, torch.Tensor], layouts: Mapping[str, TensorLayout], manifest: Any
    ) -> tuple[Header, str | None]:
        """The header of this rank's file, without the save's id, and what is wrong with the arguments."""
        ordered = payload_order(dict(layouts)) if layouts.keys() == tensors.keys() else {}
        header = Header(self._session, step, self._rank, self._world_size, "", ordered, dict(manifest))
        if len(ordered) != len(tensors):
            return header, f"tensors and layouts differ: {', '.join(sorted(layouts.keys() ^ tensors.keys()))}"
        for name, layout in ordered.items():
            plain = tensor_layout(tensors[name])
            if (plain.dtype, plain.local_shape) != (layout.dtype, layout.local_shape):
                return header, f"{name} is {plain.dtype} {plain.local_shape}, its layout says otherwise: {layout}"
            if tensors[name].device.type != "cpu" or plain.placements:
                return header, f"{name} is not plain CPU memory"
        try:
            header.encode()
        except (TypeError, ValueError) as error:
            return header, f"the manifest can't be written as JSON: {error}"
        return header, None

    def _agree(self, step: int, problem: str | None) -> str:
        """One id for all ranks' files of this save, or LocalCheckpointError on all of them.

        It keeps a step that is saved again, after a rollback, apart from what the first time left: shards of two
        histories must never be taken for one checkpoint. Later saves sort later.
        """
        proposal = f"{time.time_ns():016x}{secrets.token_hex(4)}"
        answers = self._manager.world.all_gather_object((step, problem, proposal))
        problems = [f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(answers) if text]
        if not problems and len({answer[0] for answer in answers}) > 1:
            problems = [f"the ranks are at different steps: {[answer[0] for answer in answers]}"]
        if problems:
            raise LocalCheckpointError(f"saving step {step} locally failed: {'; '.join(problems)}")
        return answers[0][2]

    def _prune(self) -> None:
        complete = self._manager.find_steps(world_size=self._world_size)
        newest = max(complete, default=None)
        self._manager.keep_only(None if newest is None else ShardId(newest, self._rank, complete[newest]))
        self._pruned = True

    def restorable_steps(self) -> frozenset[int]:
        """Steps that every rank can restore, from its own file or a copy; the same answer on every rank.

        Headers and sizes are verified here, the bytes by `load`.
        """
        with self._peers("looking for local checkpoints"):
            return frozenset(self._manager.find_steps(world_size=self._world_size))

    def load(
        self,
        step: int,
        *,
        into: Mapping[str, torch.Tensor] | None = None,
        expected: Mapping[str, TensorLayout] | None = None,
    ) -> tuple[dict[str, torch.Tensor], dict[str, TensorLayout], dict[str, Any]]:
        """This rank's shards, their layouts and the manifest of a restorable step, with every byte verified.

        `into` is CPU memory to read them into and to return, such as the staging buffers: several times faster than
        new memory, whose pages the kernel has to clear first. A damaged file is replaced by the copy; `refused` then
        names it.

        Raises:
            LocalCheckpointError: a rank has no intact file left, or holds other layouts than `expected` or `into`; on
                every rank, naming file and reason. What `into` holds is then undefined; an older step or another tier
                may be tried.
        """
        with self._peers(f"loading local step {step}"):
            complete = self._manager.find_steps(world_size=self._world_size)
            steps = self._manager.world.all_gather_object(step)
            if len(set(steps)) > 1:
                raise LocalCheckpointError(f"the ranks would load different steps: {steps}")
            if step not in complete:  # the same on every rank
                reasons = "".join(f"; {reason}" for reason in self.refused)
                raise LocalCheckpointError(f"no complete local checkpoint of step {step}{reasons}")
            state = self._manager.load_state(
                step,
                complete[step],
                room=lambda header: new_room(header) if into is None or _misfit(header, into) else _rows(header, into),
                check=lambda header: _difference(header, expected) or _misfit(header, into),
            )
            header = state.header
            return shards_from(header, state.tensors), header.layouts, header.manifest

    def close(self) -> None:
        """Give the process groups back. Not collective; also after an abort has ended them."""
        for group in self._groups:
            with contextlib.suppress(ValueError, RuntimeError):
                dist.destroy_process_group(group)
        self._groups = []

    @contextlib.contextmanager
    def _peers(self, doing: str) -> Iterator[None]:
        """Turn a peer's silence or death into LocalCheckpointError, and stay away from the groups afterwards."""
        if self._broken is not None:
            raise LocalCheckpointError(f"{doing}: the local tier has ended, since {self._broken}")
        try:
            yield
        except LocalCheckpointError:
            raise
        except RuntimeError as error:  # torch's errors of process groups are RuntimeErrors
            reason = str(error).strip().splitlines()[0]
            self._broken = f"a peer is gone or did not answer within {self._timeout.total_seconds():g} s ({reason})"
            raise LocalCheckpointError(f"{doing} failed: {self._broken}") from error


def _check_arguments(session: str, world_size: int, ranks_per_node: int, replicas: int) -> None:
    if not _SESSION.fullmatch(session):
        raise ValueError(f"session {session!r}: a name of letters, digits, '.', '_' and '-' is needed")
    if replicas not in (0, 1):
        raise ValueError(f"replicas {replicas}: 0 (own node only) or 1 (a copy on a peer node)")
    if ranks_per_node < 1 or world_size % ranks_per_node:
        raise ValueError(f"{world_size} ranks do not fill nodes of {ranks_per_node}; use a multiple")
    nodes = world_size // ranks_per_node
    if replicas and nodes % 2:
        raise ValueError(
            f"replicas 1 with {nodes} node{'s' if nodes > 1 else ''} ({world_size} ranks, {ranks_per_node} per node): "
            f"nodes keep copies for each other in pairs; use an even number of nodes, or replicas 0"
        )


def _difference(header: Header, expected: Mapping[str, TensorLayout] | None) -> str | None:
    """How the layouts that were saved differ from those of this run."""
    if expected is None or header.layouts == expected:
        return None
    for name in sorted(header.layouts.keys() | expected.keys()):
        if header.layouts.get(name) != expected.get(name):
            return f"{name} was saved as {header.layouts.get(name)}, this run has {expected.get(name)}"
    return None


def _misfit(header: Header, into: Mapping[str, torch.Tensor] | None) -> str | None:
    """Why the shards can't be read into that memory."""
    if into is None:
        return None
    if header.layouts.keys() != into.keys():
        return f"saved or given alone: {', '.join(sorted(header.layouts.keys() ^ into.keys()))}"
    for name, layout in header.layouts.items():
        given = into[name]
        if (given.dtype, tuple(given.shape)) != (layout.torch_dtype, layout.local_shape):
            return f"{name} was saved as {layout}, the memory for it is {given.dtype} {tuple(given.shape)}"
        if given.device.type != "cpu" or not given.is_contiguous():
            return f"the memory for {name} is not contiguous CPU memory"
    return None


def _rows(header: Header, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [as_bytes(tensors[name]) for name in header.layouts]

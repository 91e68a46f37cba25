"""NVRx's local checkpoint manager and replication, with the parts replaced that fail on CPU tensors or lose data.

Kept from NVRx 0.7.0: the manager's place in the directory tree and its checkpoint ids, how a state dict is split into
a hollow part and tensors, the replication to a peer, the plan by which ranks get what they miss, and its execution.
Each replaced method says what is wrong with the original; `tests/training/checkpoint/test_local_upstream.py` shows it.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
    CliqueReplicationStrategy,
    NoReplicasAvailableError,
)

from training.checkpoint import local_file
from training.checkpoint.local_exchange import CpuGroup, ShardId, ShardState
from training.checkpoint.local_file import DIRTY, Header, LocalCheckpointError, new_room


class LocalManager(LocalCheckpointManager):
    """One rank's local checkpoints: `<directory>/<session>/<rank>/`, also of the rank that it keeps a copy for.

    `world` is a group of all ranks, `replication` works in this rank's pair; None keeps no copies. Methods are
    collective unless they say otherwise. NVRx's `save`, `find_latest` and `load` are replaced because they use the
    default process group, which the training thread uses at the same time, and let one rank's failure hang the others.
    """

    def __init__(
        self,
        directory: Path,
        *,
        session: str,
        rank: int,
        world: CpuGroup,
        replication: CliqueReplicationStrategy | None,
    ) -> None:
        super().__init__(directory, session, replication)
        self._rank = rank
        self.world = world
        # Retrieval is from anywhere, not only from the pair: the file may lie where its rank used to be.
        # Any: NVRx's annotations call its ids str; they are tuples there too.
        self._retrieval: Any = CliqueReplicationStrategy(world)
        self._paths: dict[ShardId, list[Path]] = {}
        self.refused: list[str] = []  # what the last search and load did not take, and why; the same on every rank

    def prepare(self) -> None:
        """Make this rank's directory and remove what a killed save left. Not collective; OSError.

        NVRx refuses for ever to save a step whose `.dirty` file is there: SameMachineReplicationException, and the job
        crashes at the same step after each restart.
        """
        self.local_ckpt_dir.mkdir(parents=True, exist_ok=True)
        for path in self._node_files():
            if path.name.endswith(DIRTY):
                path.unlink(missing_ok=True)

    def save_state(self, state: ShardState) -> int:
        """Write the state and its copy, then remove older ones; LocalCheckpointError on every rank if any failed.

        Returns the bytes that this rank wrote.
        """
        states = [state] if self.repl_strategy is None else self._replicate(state)
        size, digests, problem = 0, {}, None
        try:
            for one in states:
                one_size, digests[one.header.rank] = self._save(one, one.shard_id)
                size += one_size
        except OSError as error:
            problem = f"{self.local_ckpt_dir} can't be written: {error.strerror or error}"
        # Also the barrier before anything older goes: from here on every rank knows that every rank has its files.
        answers = self.world.all_gather_object((problem, digests))
        problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
        problems += [] if problems else _differing([digests for _, digests in answers])
        if problems:
            self._cleanup_failed_save(state.shard_id)
            raise LocalCheckpointError(f"saving step {state.header.step} locally failed: {'; '.join(problems)}")
        self.keep_only(state.shard_id)
        return size

    def _replicate(self, state: ShardState) -> list[ShardState]:
        assert self.repl_strategy is not None
        states, _ = self.repl_strategy.replicate(state, "")  # the ids are in the headers
        return [one for one in states if isinstance(one, ShardState)]

    def _save(self, state_dict: ShardState, ckpt_id: ShardId) -> tuple[int, str]:  # pyright: ignore
        """Write one file. NVRx's has no checksum, and torch.save would write the whole storage behind a view."""
        self.local_ckpt_dir.mkdir(parents=True, exist_ok=True)  # somebody may have cleared the disk
        return local_file.write(self._local_ckpt_path_from_id(ckpt_id), state_dict.header, state_dict.tensors)

    def find_steps(self, *, world_size: int) -> dict[int, str]:
        """The steps that every rank can get, each with the id of its save; the same answer on every rank."""
        self._paths, problems = self._search(world_size)
        answers = self.world.all_gather_object((list(self._paths), problems))
        self.globally_available_ids = [ids for ids, _ in answers]
        self.refused = sorted({problem for _, problems in answers for problem in problems})
        ranks: dict[tuple[int, str], set[int]] = {}
        for shard_id in (shard_id for ids in self.globally_available_ids for shard_id in ids):
            ranks.setdefault((shard_id.step, shard_id.save_id), set()).add(shard_id.rank)
        # Sorted: of two complete saves of one step (killed before the older was removed) the later one is taken.
        return {step: save_id for (step, save_id), owners in sorted(ranks.items()) if len(owners) == world_size}

    def _search(self, world_size: int) -> tuple[dict[ShardId, list[Path]], list[str]]:
        """What this rank can read, its own directory first, and what it would not take.

        NVRx looks into `<session>/<rank>` only: after a rank has moved to another node, its files there are invisible.
        """
        found: dict[ShardId, list[Path]] = {}
        problems = []
        try:
            paths = [path for path in self._node_files() if not path.name.endswith(DIRTY)]
        except OSError as error:
            return {}, [f"{self.local_ckpt_dir.parent} can't be read: {error.strerror or error}"]
        for path in paths:
            try:
                header = local_file.read_header(path)
            except LocalCheckpointError as error:
                problems.append(str(error))
                continue
            if (header.session, header.world_size) != (self.session_id, world_size):
                problems.append(
                    f"{path} is of session {header.session!r} with {header.world_size} ranks, "
                    f"not of {self.session_id!r} with {world_size}"
                )
                continue
            found.setdefault(ShardId(header.step, header.rank, header.save_id), []).append(path)
        return found, problems

    def load_state(
        self,
        step: int,
        save_id: str,
        *,
        room: Callable[[Header], list[torch.Tensor]],
        check: Callable[[Header], str | None],
    ) -> ShardState:
        """This rank's shards of a save that `find_steps` named, from the first place where they are intact.

        `room` gives the memory for them; `check` says what is wrong with a header, if anything. LocalCheckpointError
        on every rank if any goes without.
        """
        wanted = ShardId(step, self.rank, save_id)
        verified: dict[ShardId, ShardState] = {}
        self.world.room = room
        try:
            plan = self._plan(wanted)
            while not self._all_verified(plan, verified):
                plan = self._plan(wanted)
            state = self._retrieval.retrieve_execute(plan, verified)[wanted]
        finally:
            self.world.room = new_room  # the caller's memory, perhaps a whole model, must not be held here
        problem = check(state.header)
        # Over the network too: what arrived is held against the checksum of what was read.
        if problem is None and wanted not in verified and local_file.payload_digest(state.tensors) != state.digest:
            problem = "what another rank sent did not arrive as it was read"
        problems = self.gather_problems(problem)
        if problems:
            raise LocalCheckpointError(f"local checkpoint of step {step} can't be used: {'; '.join(problems)}")
        return state

    def _plan(self, wanted: ShardId) -> Any:
        try:
            return self._retrieval.retrieve_plan(self.globally_available_ids, [wanted])
        except NoReplicasAvailableError as error:  # every rank plans with the same facts, so every rank is here
            reasons = "; ".join(self.refused) or "its files are gone"
            raise LocalCheckpointError(f"local checkpoint of step {wanted.step} can't be read: {reasons}") from error

    def _all_verified(self, plan: Any, verified: dict[ShardId, ShardState]) -> bool:
        """Read what this rank is to give, before anybody waits for it; False, everywhere, if any file was damaged.

        NVRx reads after planning: a rank that can't read raises, and the one it should have sent to waits for ever.
        """
        problems: list[str] = []
        damaged = []
        for shard_id in plan.required_ids() - verified.keys():
            state = self._load(shard_id, problems)
            if state is None:
                damaged.append(shard_id)
            else:
                verified[shard_id] = state
        answers = self.world.all_gather_object((damaged, problems))
        for rank, (gone, reasons) in enumerate(answers):
            self.globally_available_ids[rank] = [one for one in self.globally_available_ids[rank] if one not in gone]
            self.refused += reasons
        return not any(gone for gone, _ in answers)

    def _load(self, ckpt_id: ShardId, problems: list[str]) -> ShardState | None:  # pyright: ignore
        """The first intact file with this id, None if there is none. NVRx unpickles whatever is there."""
        for path in self._paths[ckpt_id]:
            try:
                # Only this rank's own shards go where its caller wants them; what it reads for others does not.
                header, rows, digest = local_file.read(path, self.world.room if ckpt_id.rank == self.rank else new_room)
            except LocalCheckpointError as error:
                problems.append(str(error))
            else:
                return ShardState(header, rows, digest)
        return None

    def keep_only(self, shard_id: ShardId | None) -> None:
        """Remove every save of this node but one, also of ranks that have moved away. Not collective.

        A file that can't be removed is no failure: it is not in the way, until a full disk fails a save by name.
        """
        with contextlib.suppress(OSError):
            for path in self._node_files():
                if shard_id is None or not self._is_of(path, shard_id):
                    path.unlink(missing_ok=True)

    def gather_problems(self, problem: str | None) -> list[str]:
        """Every rank's problem, each with its rank; the same list everywhere."""
        return [f"rank {rank}: {text}" for rank, text in enumerate(self.world.all_gather_object(problem)) if text]

    def _cleanup_failed_save(self, iteration: ShardId) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Remove what this rank wrote of a save that is not complete. Not collective."""
        with contextlib.suppress(OSError):
            for path in self.local_ckpt_dir.iterdir():
                if self._is_of(path, iteration):
                    path.unlink(missing_ok=True)

    def _local_ckpt_path_from_id(self, ckpt_id: ShardId, is_dirty: bool = False) -> Path:  # noqa: ARG002
        return self.local_ckpt_dir / local_file.file_name(ckpt_id.step, ckpt_id.save_id, ckpt_id.rank)

    def _is_of(self, path: Path, shard_id: ShardId) -> bool:
        named = local_file.parse_name(path.name)
        return named is not None and named[:2] == (shard_id.step, shard_id.save_id)

    def _node_files(self) -> list[Path]:
        """Every rank's files of this session on this node, this rank's own first."""
        paths = self.local_ckpt_dir.parent.glob("*/step-*.rank-*")
        return sorted(paths, key=lambda path: (path.parent != self.local_ckpt_dir, path))


def _differing(all_digests: list[dict[int, str]]) -> list[str]:
    """Shards whose copy is not what their own rank wrote: changed while being saved, or on the way."""
    return [
        f"rank {holder}'s copy of rank {owner}'s shards differs from what rank {owner} wrote"
        for holder, digests in enumerate(all_digests)
        for owner, digest in digests.items()
        if digest != all_digests[owner][owner]
    ]

"""Brings one attempt's state back: from the newest step that every rank can restore, out of the cheapest tier.

Collective throughout: what only one rank can know is agreed on before it is acted on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from training.checkpoint import durable
from training.checkpoint.layout import layouts_of, local_part
from training.checkpoint.local import LocalCheckpointError, LocalTier
from training.checkpoint.restore import Candidate, Tier, candidates
from training.checkpoint.saver import Saver, wait_for
from training.checkpoint.state import Tensors
from training.config import CheckpointConfig


class CheckpointError(RuntimeError):
    """No usable checkpoint, or too many failed saves: the run can't go on. Raised by every rank alike."""


@dataclass(frozen=True)
class Restored:
    """Where the run goes on: `step` is the last one whose result is in the tensors, 0 for a fresh start."""

    step: int
    tier: Tier | None
    manifest: dict[str, Any]
    moment: Tensors | None
    damaged: tuple[str, ...] = ()


class Restorer:
    """One attempt's way back. Afterwards `local` is the local tier, `last_committed` the newest durable step."""

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        saver: Saver,
        live: Tensors,
        moment: Callable[[], Tensors],
        ranks_per_node: int,
        ping: Callable[[], None],
    ) -> None:
        self._config = config
        self._directory = Path(config.directory)
        self._saver = saver
        self._live = live
        self._moment = moment
        self._ranks_per_node = ranks_per_node
        self._ping = ping
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self.local: LocalTier | None = None
        self.no_local: str | None = None
        self.last_committed: int | None = None

    def restore(self, check: Callable[[dict[str, Any]], None]) -> Restored:
        """Bring the newest step that every rank can restore into the live tensors.

        `check` raises ValueError for the manifest of another run.

        Raises:
            CheckpointError: there are checkpoints, but none can be used. Starting over silently would throw work away.
            ValueError: from `check`, or shared memory is too small for staging.
        """
        staged = self._saver.staged() if self._config.memory else {}
        in_flight = self._saver.in_flight
        answers: list[Any] = [None] * self._world_size
        known = (sorted(staged), None if in_flight is None else (in_flight.step, in_flight.committed is None))
        dist.all_gather_object(answers, (*known, self._saver.plan is not None))
        adopted = answers[0][1] if all(answer[1] == answers[0][1] for answer in answers) else None
        self._saver.settle_replication()
        durable_steps, run_id, tracked = self._look(keep=in_flight.path if adopted and in_flight else None)
        self.last_committed = max(durable_steps, default=None)
        self._connect_local_tier(run_id)
        local = self.local.restorable_steps() if self.local is not None else frozenset()
        restored = self._try_all(
            candidates(memory=[answer[0] for answer in answers], local=local, durable=durable_steps), check, tracked
        )
        if not all(answer[2] for answer in answers):
            self._saver.plan = None
        self._take_over(restored, adopted)
        return restored

    def _look(self, *, keep: Path | None) -> tuple[list[int], str, int | None]:
        """Committed steps, run id and the tracker's step; rank 0 looks and clears what was cut off, all follow."""

        def look() -> tuple[list[int], str, int | None]:
            durable.clear_leftovers(self._directory, keep=keep)
            steps, tracked = durable.committed_steps(self._directory), durable.tracked_step(self._directory)
            return steps, durable.run_id(self._directory, fresh=not steps and tracked is None), tracked

        answer, problem = self._on_rank_0(look)
        if problem is not None:
            raise CheckpointError(problem)
        return answer

    def _on_rank_0(self, work: Callable[[], Any]) -> tuple[Any, str | None]:
        """One rank does it and tells all, its failure too: listings of a shared volume may differ between hosts."""
        answer: list[Any] = [None, None]
        if self._rank == 0:
            try:
                answer[0] = work()
            except (OSError, ValueError) as error:
                answer[1] = str(error)
        dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
        return answer[0], answer[1]

    def _connect_local_tier(self, run_id: str) -> None:
        settings = self._config.local
        if settings is None:
            return
        try:
            self.local = LocalTier(
                directory=Path(settings.directory),
                session=run_id,
                rank=self._rank,
                world_size=self._world_size,
                ranks_per_node=self._ranks_per_node,
                replicas=settings.replicas,
            )
        except LocalCheckpointError as error:  # a node's disk is broken, as every rank is told: not worth the run
            self.no_local = f"no local copies: {error}"

    def _try_all(self, order: list[Candidate], check: Callable[..., None], tracked: int | None) -> Restored:
        problems: list[str] = []
        for candidate in order:
            restored = self._try(candidate, check, problems)
            if restored is not None:
                return restored
        if problems:
            raise CheckpointError(
                f"no good checkpoint is left in {self._directory}: {'; '.join(problems)}; restore one of them from a "
                "backup, or choose another checkpoint.directory to start over"
            )
        if tracked is not None:
            raise CheckpointError(
                f"{self._directory / durable.TRACKER} says step {tracked}, but {self._directory} holds no checkpoint; "
                f"restore it, or remove {durable.TRACKER} to start over"
            )
        return Restored(0, None, {}, None)

    def _try(self, candidate: Candidate, check: Callable[..., None], problems: list[str]) -> Restored | None:
        """The candidate's step in the live tensors, or None with what is wrong with it added to `problems`."""
        try:
            match candidate.tier:
                case "memory":
                    manifest, moment = self._from_memory(candidate.step, check)
                case "local":
                    manifest, moment = self._from_local(candidate.step, check)
                case "durable":
                    manifest, moment = self._from_durable(candidate.step, check)
        except (durable.DamagedCheckpointError, LocalCheckpointError) as error:  # agreed on by every rank
            problems.append(str(error))
            return None
        return Restored(candidate.step, candidate.tier, manifest, moment, tuple(problems))

    def _from_memory(self, step: int, check: Callable[..., None]) -> tuple[dict[str, Any], Tensors]:
        buffer = self._saver.buffers().holding(step)
        assert buffer is not None, "all ranks hold it"
        check(buffer.manifest)
        return buffer.manifest, self._take(buffer.tensors)

    def _take(self, tensors: Tensors) -> Tensors:
        """Copy staged shards into the live tensors; returns the rest, the moment's."""
        torch._foreach_copy_([local_part(tensor) for tensor in self._live.values()], [tensors[n] for n in self._live])
        return {name: tensor.clone() for name, tensor in tensors.items() if name not in self._live}

    def _from_local(self, step: int, check: Callable[..., None]) -> tuple[dict[str, Any], Tensors]:
        assert self.local is not None
        into = self._moment() | {name: local_part(tensor) for name, tensor in self._live.items()}
        on_host = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in into.values())
        if not on_host:  # read into warm pinned memory, and copied from there
            self._saver.prepare(into)
            in_flight = self._saver.in_flight
            buffer = self._saver.buffers(self._ping).free(read=[] if in_flight is None else [in_flight.buffer])
            assert buffer is not None, "there are two, and a replication has been settled"
            buffer.step = None  # from here on it doesn't hold the step that it was staged for
            into = buffer.tensors
        tensors, _, manifest = self.local.load(step, into=into, expected=layouts_of(self._live | self._moment()))
        check(manifest)
        if on_host:
            return manifest, {name: tensor for name, tensor in tensors.items() if name not in self._live}
        return manifest, self._take(tensors)

    def _from_durable(self, step: int, check: Callable[..., None]) -> tuple[dict[str, Any], Tensors | None]:
        path = durable.checkpoint_path(self._directory, step)
        manifest, problem = self._on_rank_0(lambda: durable.read_manifest(path))
        if problem is None:
            check(manifest)
            moment = self._moment() if manifest["world_size"] == self._world_size else {}
            problem = self._load_verified(path, manifest, {**self._live, **moment})
            if problem is None:
                return manifest, moment or None  # kept per rank: they belong to a world of that size
        if self._rank == 0:
            durable.set_aside(self._directory, step)
        raise durable.DamagedCheckpointError(problem)

    def _load_verified(self, path: Path, manifest: dict[str, Any], state: Tensors) -> str | None:
        """Load while the checksums are verified beside it, each rank its share; what is wrong, on every rank alike."""
        mine = sorted(manifest["files"])[self._rank :: self._world_size] if self._config.verify else []

        def verify() -> list[str]:
            foreign = durable.foreign_files(path, manifest) if self._rank == 0 else []
            return foreign + durable.damage(path, manifest, mine)

        verified = self._saver.verify(verify)
        failure = None
        try:
            dcp.load(state, checkpoint_id=str(path))
        except CheckpointException as error:  # raised on every rank; what is wrong is said by file below
            failure = f"{path} cannot be loaded ({' '.join(str(error).split())[:200]})"
        found: list[list[str]] = [[] for _ in range(self._world_size)]
        dist.all_gather_object(found, wait_for(verified, self._ping))
        lines = [line for rank_lines in found for line in rank_lines]
        return "; ".join(lines) if lines else failure

    def _take_over(self, restored: Restored, adopted: Any) -> None:
        """After a restart: go on with the save in flight if it is of the restored step, or forget it."""
        save = self._saver.in_flight
        if save is not None and (adopted is None or adopted[0] != restored.step):
            self._saver.abandon()

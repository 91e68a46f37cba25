"""Saves and restores one training attempt's state over three tiers: memory, local and durable.

A save costs the training thread next to nothing: the tensors are copied while the next forward and backward run
(`before_update` joins the copy before the optimizer changes them), files are written and committed behind that.
Every method is collective, and every rank leaves it the same way: what only one rank can know is agreed on first.
"""

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from training.checkpoint import durable
from training.checkpoint.layout import TensorLayout, local_part, tensor_layout
from training.checkpoint.local import LocalCheckpointError, LocalTier
from training.checkpoint.restore import Candidate, Tier, candidates
from training.checkpoint.saver import Save, Saver, wait_for
from training.checkpoint.state import Tensors
from training.checkpoint.writer import Written, plan_writes
from training.config import CheckpointConfig

_DONE, _GOING_ON, _FAILED = 1, 0, -1
_POLL_SECONDS = 0.01


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


@dataclass
class Outcome:
    """What became of saves: for the event log. Steps and texts are the same on every rank."""

    committed: list[dict[str, Any]] = field(default_factory=list)
    replicated: list[int] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)


class Checkpointer:
    """One attempt's checkpoints.

    Args:
        live: the tensors that training updates in place, by checkpoint name, in the same order on every rank.
        moment: gives the small per-rank tensors that change all the time (generators' states), the same names
            each time; no other rank has those names.
        ping: called again and again while something is waited for: slow storage is no hang. How long it may take is
            for the rank monitor's checkpointing section to say.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        saver: Saver,
        live: Tensors,
        moment: Callable[[], Tensors],
        attempt: str,
        ranks_per_node: int = 1,
        ping: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._directory = Path(config.directory)
        self._saver = saver
        self._live = live
        self._moment = moment
        self._attempt = attempt
        self._ranks_per_node = ranks_per_node
        self._ping = ping
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._replicating: Save | None = None
        self._local: LocalTier | None = None
        self._staging: Save | None = None
        self._saves = 0
        self._last_committed: int | None = None
        self.outcome = Outcome()

    # -- restore ---------------------------------------------------------------------------------------------------

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
        self._last_committed = max(durable_steps, default=None)
        self._connect_local_tier(run_id)
        local = self._local.restorable_steps() if self._local is not None else frozenset()
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

        return self._on_rank_0(look)

    def _on_rank_0(self, work: Callable[[], Any]) -> Any:
        """One rank does it and tells all, its failure too: listings of a shared volume may differ between hosts."""
        answer: list[Any] = [None, None]
        if self._rank == 0:
            try:
                answer[0] = work()
            except (OSError, ValueError) as error:
                answer[1] = str(error)
        dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
        if answer[1] is not None:
            raise CheckpointError(answer[1])
        return answer[0]

    def _connect_local_tier(self, run_id: str) -> None:
        settings = self._config.local
        if settings is None:
            return
        try:
            self._local = LocalTier(
                directory=Path(settings.directory),
                session=run_id,
                rank=self._rank,
                world_size=self._world_size,
                ranks_per_node=self._ranks_per_node,
                replicas=settings.replicas,
            )
        except LocalCheckpointError as error:  # a node's disk is broken, as every rank is told: not worth the run
            self.outcome.failed.append({"step": 0, "reason": f"no local copies: {error}"})

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
        assert self._local is not None
        into = self._moment() | {name: local_part(tensor) for name, tensor in self._live.items()}
        on_host = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in into.values())
        if not on_host:  # read into warm pinned memory, and copied from there
            self._saver.prepare(into)
            into = self._saver.buffers(self._ping).buffers[0].tensors
        tensors, _, manifest = self._local.load(step, into=into, expected=self._layouts())
        check(manifest)
        if on_host:
            return manifest, {name: tensor for name, tensor in tensors.items() if name not in self._live}
        return manifest, self._take(tensors)

    def _layouts(self) -> dict[str, TensorLayout]:
        return {name: tensor_layout(tensor) for name, tensor in {**self._live, **self._moment()}.items()}

    def _from_durable(self, step: int, check: Callable[..., None]) -> tuple[dict[str, Any], Tensors | None]:
        path = durable.checkpoint_path(self._directory, step)
        manifest, problem = self._agreed_manifest(path)
        if problem is None:
            check(manifest)
            moment = self._moment() if manifest["world_size"] == self._world_size else {}
            problem = self._load_verified(path, manifest, {**self._live, **moment})
            if problem is None:
                return manifest, moment or None  # kept per rank: they belong to a world of that size
        if self._rank == 0:
            durable.set_aside(self._directory, step)
        raise durable.DamagedCheckpointError(problem)

    def _agreed_manifest(self, path: Path) -> tuple[dict[str, Any], str | None]:
        answer: list[Any] = [{}, None]
        if self._rank == 0:
            try:
                answer[0] = durable.read_manifest(path)
            except durable.DamagedCheckpointError as error:
                answer[1] = str(error)
        dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
        return answer[0], answer[1]

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
        if self._saver.has_buffers:
            for buffer in self._saver.buffers().buffers:
                buffer.busy = self._saver.in_flight is not None and self._saver.in_flight.buffer is buffer

    def get_ready(self, restored: Restored) -> None:
        """After a restore: warm buffers and writer, agree on who writes what, and save what only memory holds.

        Loading the writer's libraries takes seconds of CPU, which the way back to training needs first.

        Raises:
            ValueError: the host's shared memory is too small for staging.
        """
        self._saver.prepare({**self._live, **self._moment()})
        if self._saver.plan is None:
            self._saver.plan = self._plan()
        lost = restored.tier == "memory" and self._due(restored.step, self._config.interval_steps)
        if lost and self._saver.in_flight is None and restored.step != self._last_committed:
            buffer = self._saver.buffers().holding(restored.step)
            assert buffer is not None, "it was just restored from it"
            self._write(Save(restored.step, time.time(), buffer.manifest, buffer, _done()))

    def _plan(self) -> Any:
        with tempfile.TemporaryDirectory() as scratch:
            return plan_writes({**self._live, **self._moment()}, Path(scratch))

    # -- save ------------------------------------------------------------------------------------------------------

    def save(self, step: int, manifest: dict[str, Any], *, last: bool = False) -> None:
        """Start the saves that are due after `step`; the live tensors must not change before `before_update`."""
        config = self._config
        to_durable = last or self._due(step, config.interval_steps)
        to_local = config.local is not None and self._due(step, config.local.interval_steps)
        to_memory = config.memory_interval_steps is not None and self._due(step, config.memory_interval_steps)
        if not (to_durable or to_local or to_memory):
            return
        if to_durable and self._saver.in_flight is not None:
            if config.when_behind == "wait" or last:
                self.wait()
            else:
                self.outcome.failed.append({"step": step, "reason": "skipped, the save before it is not written yet"})
                to_durable = False
        to_local = to_local and self._replicating is None
        buffer = self._saver.buffers(self._ping).free()
        if buffer is None or not (to_durable or to_local or to_memory):
            return
        full = {"world_size": self._world_size, **manifest}
        save = self._saver.stage(self._live, self._moment(), step=step, manifest=full, buffer=buffer)
        self._staging = save
        if to_durable:
            self._write(save)
        if to_local and self._local is not None:
            save.buffer.busy = True
            self._saver.replicate(save, self._local, self._layouts())
            self._replicating = save
        if config.mode == "sync":
            self.wait()

    @staticmethod
    def _due(step: int, interval: int) -> bool:
        return step > 0 and step % interval == 0

    def _write(self, save: Save) -> None:
        self._saves += 1
        path = durable.writing_path(self._directory, save.step, f"{self._attempt}-{self._saves}")
        save.buffer.busy = True
        self._saver.write(save, path, timeout_seconds=self._config.save_timeout_seconds)
        self._saver.in_flight = save

    def before_update(self) -> None:
        """Wait for the copy that still reads the live tensors; comes before every optimizer step."""
        if self._staging is not None:
            wait_for(self._staging.copied, self._ping)
            self._staging = None

    @property
    def saving(self) -> Save | None:
        """The durable save in flight; the same on every rank."""
        return self._saver.in_flight

    def poll(self) -> None:
        """Notice, without waiting, what became of the saves in flight, and commit what every rank has written.

        Raises:
            CheckpointError: `max_failed_saves` durable saves in a row have failed.
        """
        if self._saver.in_flight is None and self._replicating is None:
            return
        durable_progress, local_progress = self._agreed_progress()
        if self._replicating is not None and local_progress != _GOING_ON:
            self._end_replication()
        if self._saver.in_flight is None:
            return
        if durable_progress == _FAILED:
            self._fail(self._saver.in_flight)
        elif durable_progress == _DONE:
            self._advance(self._saver.in_flight)

    def wait(self) -> None:
        """Like `poll`, but does not return before no durable save is in flight."""
        while self._saver.in_flight is not None:
            self.poll()
            if self._saver.in_flight is not None:
                self._ping()
                time.sleep(_POLL_SECONDS)

    def _agreed_progress(self) -> tuple[int, int]:
        answer = torch.tensor([self._durable_progress(), self._local_progress()], dtype=torch.int32)
        dist.all_reduce(answer, op=dist.ReduceOp.MIN)
        return int(answer[0]), int(answer[1])

    def _durable_progress(self) -> int:
        save = self._saver.in_flight
        if save is None:
            return _GOING_ON
        assert save.written is not None
        if self._saver.problem(save, timeout_seconds=self._config.save_timeout_seconds) is not None:
            return _FAILED
        if save.committed is not None:
            return _GOING_ON if not save.committed.done() else _FAILED if save.committed.exception() else _DONE
        return _DONE if save.written.done() or save.gathered else _GOING_ON

    def _local_progress(self) -> int:
        save = self._replicating
        if save is None or save.local is None:
            return _GOING_ON
        return _DONE if save.local.done() else _GOING_ON

    def _end_replication(self) -> None:
        save = self._replicating
        assert save is not None
        assert save.local is not None
        error = save.local.exception()
        reasons: list[Any] = [None] * self._world_size
        dist.all_gather_object(reasons, None if error is None else str(error) or type(error).__name__)
        found = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None]
        if found:  # the durable tier stands behind it: training goes on
            self.outcome.failed.append({"step": save.step, "reason": f"local copy: {'; '.join(found)}"})
        else:
            self.outcome.replicated.append(save.step)
        self._replicating = None
        save.buffer.busy = self._saver.in_flight is not None and self._saver.in_flight.buffer is save.buffer

    def _advance(self, save: Save) -> None:
        """Every rank has written: rank 0 commits behind the training; when it has, the save is done."""
        if save.committed is None:
            assert save.written is not None
            written = save.written.result()
            gathered: list[Any] | None = [None] * self._world_size if self._rank == 0 else None
            dist.gather_object(written, gathered, dst=0)
            save.committed = self._saver.commit(lambda: self._commit(save, gathered)) if gathered else _done(0)
            return
        size = torch.tensor([save.committed.result()], dtype=torch.int64)
        dist.broadcast(size, src=0)
        self._release(save)
        self._saver.failed_saves = 0
        self._last_committed = save.step
        self.outcome.committed.append({"step": save.step, "started_t": save.started_t, "size_bytes": int(size)})

    def _commit(self, save: Save, gathered: list[Written]) -> int:
        plan = self._saver.plan
        assert plan is not None
        assert plan.metadata is not None
        assert save.path is not None
        size = durable.commit(
            self._directory,
            save.path,
            step=save.step,
            manifest=save.manifest,
            metadata=plan.metadata,
            written=gathered,
            attempt=self._attempt,
        )
        durable.prune(
            self._directory,
            keep_latest=self._config.keep_latest,
            keep_every_steps=self._config.keep_every_steps,
            attempt=self._attempt,
        )
        return size

    def _release(self, save: Save) -> None:
        self._saver.in_flight = None
        save.buffer.busy = self._replicating is not None and self._replicating.buffer is save.buffer

    def _fail(self, save: Save) -> None:
        """A rank could not write, or rank 0 not commit: the save is lost on every rank, its worker replaced."""
        error = save.committed.exception() if save.committed is not None and save.committed.done() else None
        reason = self._saver.problem(save, timeout_seconds=self._config.save_timeout_seconds)
        reasons: list[Any] = [None] * self._world_size
        dist.all_gather_object(reasons, str(error) if error is not None else reason)
        text = "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None)
        assert save.written is not None
        if save.written.done():  # the worker has said so itself, or is replaced at the next save
            self._release(save)
        else:
            self._saver.abandon()
            self._release(save)
        self._saver.failed_saves += 1
        self.outcome.failed.append({"step": save.step, "reason": text})
        if self._saver.failed_saves >= self._config.max_failed_saves:
            good = f"step {self._last_committed}" if self._last_committed is not None else "none"
            raise CheckpointError(
                f"{self._saver.failed_saves} saves in a row failed, the last of step {save.step} ({text}); the newest "
                f"good checkpoint is {good}; mend the storage and start the job again"
            )

    def drain(self) -> Outcome:
        """What became of saves since the last call."""
        outcome, self.outcome = self.outcome, Outcome()
        return outcome

    def close(self) -> None:
        """Let go of this attempt's connections."""
        if self._local is not None:
            self._local.close()


def _done(value: Any = None) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future

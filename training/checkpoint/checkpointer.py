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
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from training.checkpoint import durable
from training.checkpoint.layout import TensorLayout, layouts_of
from training.checkpoint.local import LocalTier
from training.checkpoint.restorer import CheckpointError, Restored, Restorer
from training.checkpoint.saver import Save, Saver, wait_for
from training.checkpoint.staging import Buffer
from training.checkpoint.state import Tensors
from training.checkpoint.writer import Written, plan_writes
from training.config import CheckpointConfig

_DONE, _GOING_ON, _FAILED = 1, 0, -1
_POLL_SECONDS = 0.01


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
        on_commit: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._config = config
        self._directory = Path(config.directory)
        self._saver = saver
        self._live = live
        self._moment = moment
        self._attempt = attempt
        self._ranks_per_node = ranks_per_node
        self._ping = ping
        self._on_commit = on_commit
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._replicating: Save | None = None
        self._local: LocalTier | None = None
        self._staging: Save | None = None
        self._saves = 0
        self._last_committed: int | None = None
        self.outcome = Outcome()

    def restore(self, check: Callable[[dict[str, Any]], None]) -> Restored:
        """Bring the newest step that every rank can restore into the live tensors (training/checkpoint/restorer.py)."""
        restorer = Restorer(
            self._config,
            saver=self._saver,
            live=self._live,
            moment=self._moment,
            ranks_per_node=self._ranks_per_node,
            ping=self._ping,
        )
        restored = restorer.restore(check)
        self._local, self._last_committed = restorer.local, restorer.last_committed
        if restorer.no_local is not None:
            self.outcome.failed.append({"step": 0, "reason": restorer.no_local})
        return restored

    def get_ready(self, restored: Restored, *, last: bool = False) -> None:
        """After a restore: warm buffers and writer, agree on who writes what, and save what only memory holds.

        `last` says that the restored step is the run's last one, which is saved whatever the interval.

        Loading the writer's libraries takes seconds of CPU, which the way back to training needs first.

        Raises:
            ValueError: the host's shared memory is too small for staging.
        """
        self._saver.prepare({**self._live, **self._moment()})
        if self._saver.plan is None:
            self._saver.plan = self._plan()
        due = last or self._due(restored.step, self._config.interval_steps)
        if (
            restored.tier == "memory"
            and due
            and self._saver.in_flight is None
            and restored.step != self._last_committed
        ):
            buffer = self._saver.buffers().holding(restored.step)
            assert buffer is not None, "it was just restored from it"
            self._write(Save(restored.step, time.time(), buffer.manifest, buffer, _done()))

    def _plan(self) -> Any:
        with tempfile.TemporaryDirectory() as scratch:
            return plan_writes({**self._live, **self._moment()}, Path(scratch))

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
        buffer = self._saver.buffers(self._ping).free(read=self._read())
        if buffer is None or not (to_durable or to_local or to_memory):
            return
        full = {"step": step, "world_size": self._world_size, **manifest}
        save = self._saver.stage(self._live, self._moment(), step=step, manifest=full, buffer=buffer)
        self._staging = save
        if to_durable:
            self._write(save)
        if to_local and self._local is not None:
            self._saver.replicate(save, self._local, self._layouts)
            self._replicating = save
        if config.mode == "sync":
            self.wait()

    def _read(self) -> list[Buffer]:
        """Buffers that the writer process or a replication still reads."""
        return [save.buffer for save in (self._saver.in_flight, self._replicating) if save is not None]

    @cached_property
    def _layouts(self) -> dict[str, TensorLayout]:
        """Of every tensor; the same all through an attempt."""
        return layouts_of(self._live | self._moment())

    @staticmethod
    def _due(step: int, interval: int) -> bool:
        return step > 0 and step % interval == 0

    def _write(self, save: Save) -> None:
        self._saves += 1
        path = durable.writing_path(self._directory, save.step, f"{self._attempt}-{self._saves}")
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
        return _DONE if save.written.done() else _GOING_ON

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
        text = self._agreed_reasons(None if error is None else str(error) or type(error).__name__)
        if text:  # the durable tier stands behind it: training goes on
            self.outcome.failed.append({"step": save.step, "reason": f"local copy: {text}"})
        else:
            self.outcome.replicated.append(save.step)
        self._replicating = None

    def _agreed_reasons(self, reason: str | None) -> str:
        """What went wrong, rank by rank; empty when nothing did."""
        reasons: list[Any] = [None] * self._world_size
        dist.all_gather_object(reasons, reason)
        return "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None)

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
        self._saver.in_flight = None
        self._saver.failed_saves = 0
        self._last_committed = save.step
        self.outcome.committed.append({"step": save.step, "started_t": save.started_t, "size_bytes": int(size)})

    def _commit(self, save: Save, gathered: list[Written]) -> int:
        plan = self._saver.plan
        assert plan is not None
        assert plan.metadata is not None
        assert save.path is not None
        self._on_commit(save.step)
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

    def _fail(self, save: Save) -> None:
        """A rank could not write, or rank 0 not commit: the save is lost on every rank, its worker replaced."""
        error = save.committed.exception() if save.committed is not None and save.committed.done() else None
        reason = self._saver.problem(save, timeout_seconds=self._config.save_timeout_seconds)
        text = self._agreed_reasons(str(error) if error is not None else reason)
        assert save.written is not None
        if save.written.done():  # the worker has said so itself, or is replaced at the next save
            self._saver.in_flight = None
        else:
            self._saver.abandon()
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

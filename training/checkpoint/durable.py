"""Durable checkpoints on shared storage: written in the background, visible only once committed.

    <directory>/step-00000040/            a committed checkpoint: DCP files, .metadata and manifest.json
    <directory>/.writing-step-...         a save in flight or cut off; never read, removed at the next restore
    <directory>/latest_step.txt           the tracker: the last committed step, for NVRx's progress check

The commit is one rename of the whole directory, made by rank 0 after every rank's files and the metadata are on
storage. A save cut off at any instant before it leaves the previous checkpoint untouched.
"""

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import _is_wrapped_exception

from training.checkpoint.writer import BackgroundWriter, CheckpointWriterError, PendingSave
from training.config import CheckpointConfig

MANIFEST = "manifest.json"
TRACKER = "latest_step.txt"
_STEP = re.compile(r"step-(\d{8,})")
_WRITING = ".writing-"
_DELETING = ".deleting-"


class CheckpointError(RuntimeError):
    """A save could not be written or no usable checkpoint was found; raised by every rank alike."""


@dataclass(frozen=True)
class Committed:
    """A save that has become a checkpoint."""

    step: int
    started_t: float
    size_bytes: int


@dataclass
class _InFlight:
    step: int
    started_t: float
    path: Path
    manifest: dict[str, Any]
    pending: PendingSave


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where a step's committed checkpoint lies."""
    return directory / f"step-{step:08d}"


def committed_steps(directory: Path) -> list[int]:
    """Steps with a committed checkpoint, ascending.

    A directory without manifest and metadata does not count, nor one with another name, such as a person's copy.
    """
    return sorted(
        int(match[1])
        for path in directory.glob("step-*")
        if (match := _STEP.fullmatch(path.name)) and (path / MANIFEST).is_file() and (path / ".metadata").is_file()
    )


class DurableCheckpointer:
    """Saves and restores one training attempt's state. Every method is collective.

    `ping` is called again and again while a save is waited for: slow storage is no hang. How long it may take is for
    the rank monitor's checkpointing section to say.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        writer: BackgroundWriter,
        attempt: str,
        ping: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory = Path(config.directory)
        self._keep_latest = config.keep_latest
        self._writer = writer
        self._attempt = attempt
        self._ping = ping
        self._in_flight: _InFlight | None = None
        self._rank = dist.get_rank()

    @property
    def saving(self) -> bool:
        """Whether a save is in flight; the same on every rank."""
        return self._in_flight is not None

    def save(self, state: dict[str, Any], *, step: int, manifest: dict[str, Any]) -> None:
        """Stage `state` and start writing it; it may be modified once this returns. Waits for a save in flight."""
        self.wait()
        started_t = time.time()
        # The attempt is in the name: files of an earlier attempt at this step, or of a writer that outlived its
        # trainer on another node, can never end up in this one.
        path = self._directory / f"{_WRITING}step-{step:08d}-{self._attempt}"
        pending = self._writer.schedule(state, path, ping=self._ping)
        self._in_flight = _InFlight(step, started_t, path, {"step": step, **manifest}, pending)

    def poll(self) -> Committed | None:
        """Commit the save in flight if every rank's files are written; None when there is nothing new."""
        if self._in_flight is None:
            return None
        progress = self._agreed_progress(self._in_flight.pending)
        if progress < 0:
            raise CheckpointError(f"saving step {self._in_flight.step} failed: a background checkpoint writer died")
        return self._commit(self._in_flight) if progress > 0 else None

    def wait(self) -> Committed | None:
        """Like `poll`, but does not return before the save in flight is committed."""
        while self._in_flight is not None:
            committed = self.poll()
            if committed is not None:
                return committed
            self._ping()
            time.sleep(0.02)
        return None

    def _agreed_progress(self, pending: PendingSave) -> int:
        """-1 when any rank's writer died, 1 when all are done, else 0; the same answer on every rank."""
        try:
            self._writer.poll()
            progress = int(pending.results is not None)
        except CheckpointWriterError:
            progress = -1
        answer = torch.tensor([progress], dtype=torch.int32)
        dist.all_reduce(answer, op=dist.ReduceOp.MIN)
        return int(answer.item())

    def _commit(self, save: _InFlight) -> Committed:
        all_results = save.pending.collective.gather_object(save.pending.results)
        problem, size_bytes = None, 0
        if self._rank == 0:
            try:
                size_bytes = self._write_commit(save, all_results)
            except (OSError, CheckpointError) as error:
                problem = str(error)
        # Rank 0 alone knows whether the commit worked; every rank must leave this function the same way.
        outcome: list[Any] = [problem, size_bytes]
        dist.broadcast_object_list(outcome, src=0, device=torch.device("cpu"))
        self._in_flight = None
        self._writer.forget()
        if outcome[0] is not None:
            raise CheckpointError(f"saving step {save.step} failed: {outcome[0]}")
        return Committed(save.step, save.started_t, outcome[1])

    def _write_commit(self, save: _InFlight, all_results: list[Any]) -> int:
        failures = [
            f"rank {rank}: {result[0]}" for rank, result in enumerate(all_results) if _is_wrapped_exception(result)
        ]
        if failures:
            raise CheckpointError("; ".join(failures))
        save.pending.storage_writer.finish(save.pending.metadata, all_results)
        files = {path.name: path.stat().st_size for path in sorted(save.path.iterdir())}
        _write_durably(save.path / MANIFEST, json.dumps({**save.manifest, "files": files}, indent=1))
        target = checkpoint_path(self._directory, save.step)
        if target.exists():  # re-saved after a rollback past it: the old one must not be mixed with the new
            self._discard(target)
        save.path.rename(target)
        _sync_directory(self._directory)
        _write_durably(self._directory / TRACKER, f"{save.step}\n")
        for step in committed_steps(self._directory)[: -self._keep_latest]:
            self._discard(checkpoint_path(self._directory, step))
        return sum(files.values())

    def _discard(self, path: Path) -> None:
        """Take a checkpoint out of sight at once, and delete its files in the background."""
        hidden = path.with_name(f"{_DELETING}{path.name}-{self._attempt}")
        path.rename(hidden)
        threading.Thread(target=shutil.rmtree, args=(hidden,), kwargs={"ignore_errors": True}, daemon=True).start()

    def newest(self) -> dict[str, Any] | None:
        """The manifest of the newest committed checkpoint; None for a fresh start. Clears what was cut off.

        Raises:
            CheckpointError: the tracker names a step, but no checkpoint is there, or the newest is damaged. Starting
                over, or going back to an older one, silently would throw work away.
        """
        answer: list[Any] = [None, None]
        if self._rank == 0:  # one rank looks, all follow: directory listings of a shared volume may differ
            try:
                answer[0] = self._find_newest()
            except (OSError, ValueError, CheckpointError) as error:
                answer[1] = str(error)
        dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
        if answer[1] is not None:
            raise CheckpointError(answer[1])
        return answer[0]

    def _find_newest(self) -> dict[str, Any] | None:
        self._directory.mkdir(parents=True, exist_ok=True)
        for leftover in (*self._directory.glob(f"{_WRITING}*"), *self._directory.glob(f"{_DELETING}*")):
            shutil.rmtree(leftover, ignore_errors=True)
        steps = committed_steps(self._directory)
        tracker = self._directory / TRACKER
        if not steps:
            if tracker.exists():
                raise CheckpointError(
                    f"{tracker} says step {tracker.read_text().strip()}, but {self._directory} holds no checkpoint; "
                    f"restore it, or remove {TRACKER} to start over"
                )
            return None
        try:
            return _read_manifest(checkpoint_path(self._directory, steps[-1]))
        except ValueError as error:
            older = f"go on from step {steps[-2]}" if len(steps) > 1 else f"start over (then {TRACKER} too)"
            raise CheckpointError(f"{error}; restore that checkpoint, or remove it to {older}") from error

    def load(self, state: dict[str, Any], *, step: int) -> None:
        """Read a committed step into the tensors of `state`, resharding if the mesh differs."""
        dcp.load(state, checkpoint_id=str(checkpoint_path(self._directory, step)))


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`; ValueError when it, or a file that it lists, is not as written.

    Sizes only: reading terabytes for a checksum would delay every restart.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = dict[str, int](manifest["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / MANIFEST} is damaged") from error
    for name, size in files.items():
        found = (path / name).stat().st_size if (path / name).exists() else 0
        if found != size:
            raise ValueError(f"{path / name} is damaged: it has {found} bytes, {size} were written")
    return manifest


def _write_durably(path: Path, text: str) -> None:
    """Write a small file so that a reader or a crash sees all of it or nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

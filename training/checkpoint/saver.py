"""What of checkpointing lives as long as the process: staging buffers, writer, their threads and the save in flight.

In-process restarts keep it all: the staged copies are the memory tier, and a save in flight goes on.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from training.checkpoint.layout import TensorLayout, local_part
from training.checkpoint.staging import Buffer, StagingBuffers, check_room
from training.checkpoint.state import Tensors
from training.checkpoint.writer import BackgroundWriter, OpenFile, WritePlan, Written, open_binary

if TYPE_CHECKING:
    from training.checkpoint.local import LocalTier

# Beyond the writer's own deadline, for what can hang before and after it, such as mkdir on a dead mount.
_DEADLINE_MARGIN_SECONDS = 5.0


@dataclass
class Save:
    """One step's copy on its way to the tiers, as this rank sees it."""

    step: int
    started_t: float
    manifest: dict[str, Any]
    buffer: Buffer
    copied: "Future[None]"
    path: Path | None = None
    written: "Future[Written] | None" = None
    local: "Future[int] | None" = None
    committed: "Future[int] | None" = None


class Saver:
    """One rank's buffers, threads and writer. `open_file` replaces `open` in the writer process, for tests."""

    def __init__(self, *, rank: int, device: torch.device, open_file: OpenFile = open_binary) -> None:
        self._device = device
        self.writer = BackgroundWriter(rank=rank, open_file=open_file)
        self._copying = Lane("checkpoint-copy")
        self._writing = Lane("checkpoint-write")
        self._replicating = Lane("checkpoint-replicate")
        self._buffers: Future[StagingBuffers] | None = None
        self.plan: WritePlan | None = None
        self.in_flight: Save | None = None
        self.failed_saves = 0

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Allocate and warm buffers and writer in the background, where that is not done yet.

        Raises:
            ValueError: the host's shared memory is too small.
        """
        if self._buffers is None:
            parts = {name: torch.empty_like(local_part(tensor), device="meta") for name, tensor in tensors.items()}
            check_room(parts)
            self._buffers = self._copying.submit(lambda: StagingBuffers(parts, device=self._device))
        # In a thread that stays: the kernel ends the worker with the thread that started it (training/lifetime.py).
        self._writing.submit(self.writer.start)

    def buffers(self, ping: Callable[[], None] = lambda: None) -> StagingBuffers:
        """The staging buffers, once they are allocated."""
        assert self._buffers is not None, "prepare comes first"
        return wait_for(self._buffers, ping)

    def staged(self) -> dict[int, Buffer]:
        """Complete copies by step: the memory tier, empty in a new process."""
        if self._buffers is None:
            return {}
        wait_for(self._copying.submit(_nothing))  # a copy that still runs, of the attempt before
        return {buffer.step: buffer for buffer in self.buffers().buffers if buffer.step is not None}

    def stage(self, live: Tensors, moment: Tensors, *, step: int, manifest: dict[str, Any], buffer: Buffer) -> Save:
        """Start copying `live`, which must not change before `copied` is done, and copy `moment` at once."""
        buffers = self.buffers()
        buffer.step = None
        for name, tensor in moment.items():
            buffer.tensors[name].copy_(tensor)
        after = buffers.mark()

        def copy() -> None:
            buffers.copy({name: local_part(tensor) for name, tensor in live.items()}, buffer, after=after)
            buffer.manifest, buffer.step = manifest, step

        return Save(step, time.time(), manifest, buffer, self._copying.submit(copy))

    def write(self, save: Save, path: Path, *, timeout_seconds: float) -> None:
        """Start writing a save's durable files, once they are copied."""
        assert self.plan is not None
        plan = self.plan

        def write() -> Written:
            save.copied.result()
            return self.writer.write(plan, save.buffer, path, timeout_seconds=timeout_seconds)

        save.path = path
        save.written = self._writing.submit(write)

    def replicate(self, save: Save, tier: "LocalTier", layouts: Mapping[str, TensorLayout]) -> None:
        """Start writing a save's copies on this node's disk and its peer's."""

        def replicate() -> int:
            save.copied.result()
            return tier.save(step=save.step, tensors=save.buffer.tensors, layouts=layouts, manifest=save.manifest)

        save.local = self._replicating.submit(replicate)

    def commit(self, work: Callable[[], int]) -> "Future[int]":
        """Run a commit's storage work behind the training."""
        return self._writing.submit(work)

    def verify(self, work: Callable[[], list[str]]) -> "Future[list[str]]":
        """Run a verification beside the loading."""
        return self._copying.submit(work)

    def settle_replication(self) -> None:
        """Before a new attempt: its predecessor's replication has ended, for its connections were cut.

        Raises:
            RuntimeError: it hangs; its buffer can't be used again, and only new processes help.
        """
        lane = self._replicating.renewed(patience_seconds=5.0)
        if lane is not self._replicating:
            raise RuntimeError("the replication of a local checkpoint hangs")

    def problem(self, save: Save, *, timeout_seconds: float) -> str | None:
        """Why this rank's durable write has failed; None while it has not."""
        assert save.written is not None
        for work in (save.copied, save.written):
            if work.done() and (error := work.exception()) is not None:
                return str(error) or type(error).__name__
        waited = time.time() - save.started_t
        if not save.written.done() and waited > timeout_seconds + _DEADLINE_MARGIN_SECONDS:
            return f"nothing was written within {waited:.0f} s"
        return None

    def abandon(self) -> None:
        """Give up the save in flight, wherever it hangs: a new worker and, where a thread is stuck, a new thread."""
        self.in_flight = None
        self.writer.kill()
        self._writing = self._writing.renewed()
        self._writing.submit(self.writer.start)

    def close(self, *, abort: bool = False) -> None:
        """End worker and threads."""
        if not abort and self._buffers is not None:
            self._writing.submit(_nothing).result(timeout=60)
        self.writer.kill()


def wait_for(work: "Future[Any]", ping: Callable[[], None] = lambda: None) -> Any:
    """The result of background work; pings while it waits, for slow storage is no hang."""
    while True:
        try:
            return work.result(timeout=0.05)
        except TimeoutError:
            if work.done():
                raise
            ping()


def _nothing() -> None:
    """For the end of what is queued before it."""


class Lane:
    """A daemon thread that does one thing after the other, and never keeps the process from ending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any]) -> "Future[Any]":
        """Do `work` after what was submitted before."""
        future: Future[Any] = Future()
        self._work.put((future, work))
        return future

    def renewed(self, *, patience_seconds: float = 1.0) -> "Lane":
        """This lane once it is idle, or another in its place when it is stuck."""
        try:
            self.submit(_nothing).result(timeout=patience_seconds)
        except TimeoutError:
            return Lane(self._name)
        return self

    def _run(self) -> None:
        while True:
            future, work = self._work.get()
            try:
                future.set_result(work())
            except BaseException as error:  # whatever it was belongs to the one who waits for the result
                future.set_exception(error)
            del future, work

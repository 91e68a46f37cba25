"""NVRx's background checkpoint writer: a worker process that writes staged tensors to storage, watched and replaceable.

NVRx 0.7.0 as its examples use it waits for ever for a worker that died, keeps an aborted save's results for the next
one, and copies on the training thread (trainer.md, pitfalls 1, 3 and 9). Here each save has a pipe of its own for its
results, nothing is handed over with a wait, and the tensors come staged already.
"""

import itertools
import os
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import xxhash
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import save_state_dict_async_plan
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from training.checkpoint.staging import Buffer, Place, tensors_in
from training.checkpoint.state import Tensors
from training.lifetime import deaf_to_sigterm, die_with_parent, leave_process_group

OpenFile = Callable[[str, str], BinaryIO]
_POLL_SECONDS = 0.01
_KILL_SECONDS = 5.0


def open_binary(path: str, mode: str) -> BinaryIO:
    """The default `OpenFile`."""
    return cast(BinaryIO, Path(path).open(mode))


class CheckpointWriterError(RuntimeError):
    """The background writer died, hung or could not write; this save is lost, training may go on."""


@dataclass(frozen=True)
class FileSum:
    """Size and checksum of one written file."""

    size: int
    xxh3_128: str


@dataclass(frozen=True)
class Written:
    """What one rank wrote: DCP's write results and the files' sums by name."""

    results: list[Any]
    sums: dict[str, FileSum]


@dataclass(frozen=True)
class WritePlan:
    """Which tensors this rank writes, and on rank 0 the metadata of the whole checkpoint.

    Made once, since the state's structure never changes: planning is collective and would cost more than the copy.
    """

    plan: SavePlan
    metadata: Metadata | None


class StagedWriter(FileSystemWriterAsync):
    """NVRx's DCP writer for tensors that are in shared memory already; upstream would copy them once more."""

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:  # noqa: ARG002  DCP's signature
        """Called at the end of planning, on every rank with its own part of the plan."""
        self.plan = plan


def plan_writes(state: Tensors, scratch: Path) -> WritePlan:
    """Agree on who writes what. Collective; `scratch` is a directory that DCP wants and nothing is written to."""
    writer = StagedWriter(scratch)
    _, metadata, _ = save_state_dict_async_plan(state, writer)
    return WritePlan(writer.plan, metadata)


class BackgroundWriter:
    """Owns the worker process. At most one write at a time; used from one thread at a time.

    `open_file` opens each file in the worker; it is sent along with every write.
    """

    def __init__(self, *, rank: int, open_file: OpenFile = open_binary) -> None:
        self._rank = rank
        self.open_file = open_file
        self._queue: AsyncCallsQueue | None = None

    def start(self) -> None:
        """Start the worker, unless it lives; it loads its libraries in the background."""
        if self._queue is not None and self._process().is_alive():
            return
        self.kill()
        with deaf_to_sigterm():
            AsyncCallsQueue.warmup_persistent_caller(self._rank, cpu_shm_mode=True)
        self._queue = AsyncCallsQueue(cpu_shm_mode=True)
        self._queue.schedule_async_request(AsyncRequest(_prepare_worker, (os.getpid(),), []))

    def write(self, plan: WritePlan, buffer: Buffer, path: Path, *, timeout_seconds: float) -> Written:
        """Write this rank's part of a checkpoint into the directory `path`; blocks until it is on storage.

        Raises:
            CheckpointWriterError: the worker died, could not write, or did not finish in time.
        """
        self.start()
        assert self._queue is not None
        path.mkdir(parents=True, exist_ok=True)
        task = _WriteFiles(path, plan.plan, buffer.block, buffer.places, self._rank, _SummingOpen(self.open_file))
        receiving, sending = Pipe(duplex=False)
        with receiving, sending:
            # No preload_fn: NVRx would wait for the worker to run it, without a look at the worker's health.
            self._queue.schedule_async_request(AsyncRequest(_write_and_report, (task, sending), []))
            outcome = self._receive(receiving, deadline=time.monotonic() + timeout_seconds)
        if isinstance(outcome, str):
            raise CheckpointWriterError(outcome)
        return outcome

    def _receive(self, receiving: Any, *, deadline: float) -> "Written | str":
        while not receiving.poll(_POLL_SECONDS):
            if not self._process().is_alive():
                raise CheckpointWriterError("the background writer died")
            if time.monotonic() > deadline:
                self.kill()
                raise CheckpointWriterError("the background writer made no end in time and was killed")
        outcome = receiving.recv()
        self._forget_calls()
        return outcome

    def _forget_calls(self) -> None:
        """Take the finished calls out of NVRx's list, which would grow."""
        assert self._queue is not None
        self._queue.maybe_finalize_async_calls(blocking=False, no_dist=True)

    def _process(self) -> Any:
        assert self._queue is not None
        return self._queue._get_async_caller().process

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker, None before `start`."""
        return None if self._queue is None else self._process().pid

    def kill(self) -> None:
        """End the worker at once; a write in another thread then ends with an error."""
        if self._queue is None:
            return
        calls, self._queue = self._queue, None
        caller: Any = calls._get_async_caller()
        # SIGKILL, not NVRx's SIGTERM with 30 s of patience: a worker that hangs in a dead mount takes no signal
        # politely, and shared memory on the host has no handles to give back.
        caller.process.kill()
        caller.process.join(timeout=_KILL_SECONDS)
        caller.process = None  # else NVRx's __del__ would wait for ever until the dead worker takes its farewell
        calls.async_calls.clear()


@dataclass(frozen=True)
class _WriteFiles:
    """Picklable task for the worker: NVRx's way from a plan and its tensors to files, here without a copy."""

    path: Path
    plan: SavePlan
    block: torch.Tensor  # in shared memory: only its descriptor travels
    places: dict[str, Place]
    rank: int
    open_file: "_SummingOpen"

    def __call__(self, results: "queue.Queue[Any]") -> None:
        tensors = tensors_in(self.block, self.places)
        staged = (self.plan.items, [tensors[item.index.fqn] for item in self.plan.items])
        # As FileSystemWriterAsync.get_save_function_and_args packs it: no cache, no separate files, one writing thread.
        packed = (None, (None, staged, None, None, 1, self.plan.storage_data))
        buckets = FileSystemWriterAsync.preload_tensors((str(self.path), packed), non_blocking=False)
        FileSystemWriterAsync.write_preloaded_data_multithread(
            [_StorageWriterTransforms()], False, self.open_file, self.rank, buckets, cast(Any, results)
        )


def _write_and_report(task: _WriteFiles, sending: Connection) -> None:
    """In the worker: write, then send `Written`, or the reason why not, back over this save's own pipe."""
    _sums.clear()
    results: queue.Queue[Any] = queue.Queue()
    try:
        task(results)
        outcome = results.get_nowait()
    except Exception as error:  # the worker must report whatever happened and live on for the next save
        outcome = error
    with sending:
        if isinstance(outcome, Exception):
            sending.send(f"{type(outcome).__name__}: {outcome}")
        else:
            sending.send(Written(list(itertools.chain.from_iterable(outcome.values())), dict(_sums)))


_sums: dict[str, FileSum] = {}  # of the worker process: what the present save has written


class _SummingOpen:
    """Picklable `open` that sums what is written; NVRx calls it in the worker for every file."""

    def __init__(self, open_file: OpenFile) -> None:
        self._open_file = open_file

    def __call__(self, path: str, mode: str) -> "_SummingFile":
        return _SummingFile(self._open_file(path, mode), Path(path).name)


class _SummingFile:
    """The part of a binary file that DCP uses, with a checksum over every byte handed to it.

    Over what was meant, not over what arrived: a write that storage cut short is then found by its sum.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name = file, name
        self._sum, self._size = xxhash.xxh3_128(), 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._sum.update(view)
        self._size += len(view)
        self._file.write(view)
        return len(view)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def __enter__(self) -> "_SummingFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        _sums[self._name] = FileSum(self._size, self._sum.hexdigest())


def sum_file(path: Path, *, chunk_bytes: int = 8 << 20) -> FileSum:
    """Size and checksum of a file as it is on storage."""
    digest, size = xxhash.xxh3_128(), 0
    buffer = memoryview(bytearray(chunk_bytes))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileSum(size, digest.hexdigest())


def _prepare_worker(trainer_pid: int) -> None:
    """First task of the worker process. That this function is found here has loaded all that saving needs.

    A SIGTERM to the trainer's group must not end what the last save needs; the trainer's end does.
    """
    die_with_parent()
    leave_process_group()
    if os.getppid() != trainer_pid:  # it died while this process was loading: the kernel tells of later deaths only
        os._exit(1)

"""NVRx's background checkpoint writer, kept alive across in-process restarts and never outliving its trainer."""

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

from nvidia_resiliency_ext.checkpointing.async_ckpt import filesystem_async
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import save_state_dict_async_plan

from training.lifetime import deaf_to_sigterm, die_with_parent, leave_process_group


class CheckpointWriterError(RuntimeError):
    """The background writer died; this save is lost, training may go on after a restart."""


@dataclass
class PendingSave:
    """One save on its way to storage, as this rank sees it. `results` is set once this rank's files are written."""

    storage_writer: FileSystemWriterAsync
    metadata: Any
    collective: Any
    results: Any = field(default=None)

    def collect(self) -> None:
        """Take this rank's write results; called by NVRx's queue when the worker has written the files."""
        self.results = self.storage_writer.retrieve_write_results()


class BackgroundWriter:
    """Owns the worker process and the results queue; at most one save is in flight.

    The tensors are staged into shared host memory (`use_cpu_shm_for_gpu_tensors`) on GPU hosts too: handing GPU
    memory to another process needs pidfd_getfd, which an unprivileged pod is refused (pytorch #165685). The staging
    buffers are allocated once (`use_cached_data_structure`): a copy into warm pages is several times faster.
    """

    def __init__(self, *, rank: int) -> None:
        self._rank = rank
        self._pending: PendingSave | None = None
        self._queue: AsyncCallsQueue | None = None

    def get_ready(self, *, patience_seconds: float = 30.0) -> None:
        """Start the worker, which then loads its libraries in the background; after an in-process restart, let a
        save in flight end and drop its result.

        A living worker is kept, since starting one costs seconds. One that is dead or does not end in time is
        replaced with its results queue: a result left in there would be taken for the next save's (trainer.md,
        pitfall 1).
        """
        deadline = time.monotonic() + patience_seconds
        try:
            while self._queue is not None and self._queue.get_num_unfinalized_calls():
                self.poll()
                if time.monotonic() > deadline:
                    raise CheckpointWriterError("the background checkpoint writer is stuck")
                time.sleep(0.01)
            self.check_alive()
        except CheckpointWriterError:
            self.close(abort=True)
        self.forget()
        if self._queue is None:
            with deaf_to_sigterm():
                self._start()

    def _start(self) -> None:
        # NVRx makes its results queue on first use; made here instead so that its manager process dies with us.
        self._manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
        self._manager.start(initializer=_live_as_long_as_the_trainer)
        filesystem_async._results_queue = self._manager.Queue()
        # A warm worker: the first save costs what the tenth does. Its first task is to load what saving needs, and
        # to tie its life to ours, for the queue that it reads never closes when the trainer is killed.
        AsyncCallsQueue.warmup_persistent_caller(self._rank, cpu_shm_mode=True)
        self._queue = AsyncCallsQueue(cpu_shm_mode=True)
        self._queue.schedule_async_request(AsyncRequest(_prepare_worker, (), []))

    def schedule(self, state: dict[str, Any], path: Path, *, ping: Callable[[], None]) -> PendingSave:
        """Stage `state` and start writing it under `path`; returns once it may be modified again.

        Collective: every rank plans together. The caller must have seen the previous save end. `ping` is called while
        the worker still loads its libraries.
        """
        assert self._pending is None, "a save is in flight"
        assert self._queue is not None, "get_ready comes first"
        # The worker stages, and NVRx waits for that without a look at the worker and without running any Python: on a
        # busy host a worker that still loads would be taken for a hang of this rank.
        while self._queue.get_num_unfinalized_calls():
            self.poll()
            self.check_alive()
            ping()
            time.sleep(0.01)
        self.check_alive()
        storage_writer = FileSystemWriterAsync(
            path, thread_count=1, use_cpu_shm_for_gpu_tensors=True, use_cached_data_structure=True
        )
        storage_writer, metadata, collective = save_state_dict_async_plan(state, storage_writer)
        write, preload, arguments = storage_writer.get_save_function_and_args()
        assert write is not None
        assert preload is not None, "every rank has at least its own random state to write"
        pending = PendingSave(storage_writer, metadata, collective)
        self._queue.schedule_async_request(AsyncRequest(write, tuple(arguments), [pending.collect], preload_fn=preload))
        self._pending = pending
        return pending

    def poll(self) -> None:
        """Notice, without waiting, that this rank's files are written.

        Raises:
            CheckpointWriterError: the worker died before it finished.
        """
        if self._queue is not None:
            self._queue.maybe_finalize_async_calls(blocking=False, no_dist=True)
        if self._pending is not None and self._pending.results is None:
            self.check_alive()

    def forget(self) -> None:
        """The save in flight has been committed or given up."""
        self._pending = None

    def check_alive(self) -> None:
        """Raise CheckpointWriterError when worker or results queue is gone; NVRx itself would wait for ever.

        The worker does not notice the queue's end before its next save, dies of it while NVRx hands it that save, and
        leaves NVRx waiting.
        """
        if self._queue is None:
            return
        results_queue = self._manager._process  # pyright: ignore[reportAttributeAccessIssue]  set by start()
        for process in (self._queue._get_async_caller().process, results_queue):
            if process is None or not process.is_alive():
                raise CheckpointWriterError("the background checkpoint writer died")

    def close(self, *, abort: bool = False) -> None:
        """End the worker and the results queue; with `abort` at once, else after the save in flight."""
        if self._queue is None:
            return
        if not abort:
            self.get_ready()
        self._queue.close(abort=abort)
        self._queue = None
        self._manager.shutdown()
        filesystem_async._results_queue = None


def _prepare_worker() -> None:
    """First task of the worker process. That this function is found here has loaded all that saving needs."""
    _live_as_long_as_the_trainer()


def _live_as_long_as_the_trainer() -> None:
    """A SIGTERM to the trainer's group must not end what the last save needs; the trainer's end does."""
    die_with_parent()
    leave_process_group()

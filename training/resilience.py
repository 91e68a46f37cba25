"""The restart layers around the training function: NVRx in-process restart, and ft_launcher's rank monitor.

In-process restart ends the training function on every rank and enters it again in the same processes. In-job restart
replaces the processes: ft_launcher does that when one dies, or when a section or heartbeat of the rank monitor is
overdue.
"""

import datetime
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from nvidia_resiliency_ext.fault_tolerance import (
    RankMonitorClient,
    WorkloadAction,
    WorkloadControlRequest,
)
from nvidia_resiliency_ext.inprocess import CallWrapper, Compose, Wrapper
from nvidia_resiliency_ext.inprocess.abort import Abort, AbortTorchDistributed
from nvidia_resiliency_ext.inprocess.health_check import CudaHealthCheck
from nvidia_resiliency_ext.inprocess.initialize import Initialize, RetryController
from nvidia_resiliency_ext.inprocess.nested_restarter import (
    NestedRestarterAborted,
    NestedRestarterFinalized,
    NestedRestarterHandlingCompleted,
    NestedRestarterHandlingStarting,
)
from nvidia_resiliency_ext.inprocess.state import State  # its frozen twin is made at run time
from nvidia_resiliency_ext.inprocess.store import TCPStore

from training.config import RestartsConfig
from training.events import EventLog

TrainFunction = Callable[[CallWrapper | None], int]


class RankMonitor:
    """This rank's line to ft_launcher's hang detection. Does nothing when not started by ft_launcher."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._client: RankMonitorClient | None = None

    def connect(self) -> None:
        """(Re)connect. A new connection also closes sections that an interrupted attempt left open.

        `end_all_sections` would be the call for that, but sends nothing in NVRx 0.7.0 (trainer.md, section 2.3).
        """
        if not self._enabled:
            return
        if self._client is not None:
            self._client.shutdown_workload_monitoring()
        self._client = RankMonitorClient()
        self._client.init_workload_monitoring()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """A stretch of work with a deadline of its own: setup, step or checkpointing. Never nest them.

        Not closed when it is left by an exception: the deadline then goes on until the restart reconnects.
        """
        if self._client is not None:
            self._client.start_section(name)
        yield
        if self._client is not None:
            self._client.end_section(name)

    def heartbeat(self) -> None:
        """Tell the launcher that this rank makes progress."""
        if self._client is not None:
            self._client.send_heartbeat()

    def stop_job(self, reason: str) -> None:
        """Ask the launcher to end the job on all nodes instead of restarting: no restart can mend this."""
        if self._client is not None:
            self._client.send_workload_control_request(
                WorkloadControlRequest(action=WorkloadAction.ShutdownWorkload, description=reason)
            )

    def close(self) -> None:
        """Disconnect: nothing is monitored from here on."""
        if self._client is not None:
            self._client.shutdown_workload_monitoring()
            self._client = None


class AbortGloo(Abort):
    """Unblock ranks that wait in a gloo collective, by shutting down gloo's TCP connections.

    NVRx aborts NCCL only; gloo would wait for its own timeout and could end the job meanwhile. Each of this
    process's TCP connections is shut down but those of the stores, which the restart itself needs, and of PeerWatch.
    """

    def __init__(self, kept_ports: frozenset[int]) -> None:
        self._kept_ports = kept_ports

    def __call__(self, state: State) -> State:
        """Called by the Wrapper's monitor thread while the main thread may be blocked."""
        for connection in _own_tcp_connections():
            with connection:
                try:
                    ports = {connection.getsockname()[1], connection.getpeername()[1]}
                    if not ports & self._kept_ports:
                        connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # not connected (a listener), or closed meanwhile
        return state


def _own_tcp_connections() -> Iterator[socket.socket]:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            duplicate = os.dup(int(entry.name))
        except OSError:
            continue  # the descriptor of this very listing, or closed meanwhile
        try:
            candidate = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)  # a file or a pipe
            continue
        if candidate.family in (socket.AF_INET, socket.AF_INET6) and candidate.type == socket.SOCK_STREAM:
            yield candidate
        else:
            candidate.close()


class RestartStore(TCPStore):
    """The in-process layer's store, mended for the loss of a whole node.

    NVRx 0.7.0 enters the termination barrier on behalf of a silent rank with that rank's number as bytes
    (`StoreMixin.get_initial_ranks`). Every other rank then fails on it as it leaves, and hangs until the hard timeout,
    since its watchdog thread runs on.
    """

    def termination_barrier(self, ranks: Iterable[int | bytes], **arguments: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As NVRx's, for ranks in either form."""
        super().termination_barrier(ranks=[int(rank) for rank in ranks], **arguments)


class RecordAbort(Abort):
    """Write the `abort` event: from here on this rank knows that the attempt is over."""

    def __init__(self, events: EventLog) -> None:
        self._events = events

    def __call__(self, state: State) -> State:
        """Called by the Wrapper's monitor thread."""
        self._events.write("abort")
        return state


class CountIteration(Initialize):
    """Stamp the events with the in-process restart count."""

    def __init__(self, events: EventLog) -> None:
        self._events = events

    def __call__(self, state: State) -> State:
        """Called before each entry of the training function."""
        self._events.iteration = state.iteration
        return state


def wrap_in_process(
    train: TrainFunction,
    *,
    restarts: RestartsConfig,
    events: EventLog,
    world_size: int,
    device: torch.device,
    store_host: str,
    store_port: int,
    kept_ports: frozenset[int],
) -> Callable[[], int]:
    """Wrap `train` for in-process restart by NVRx, or leave it as it is when that layer is off.

    A restart keeps the world size: when a process is gone, min_world_size has every rank leave, and ft_launcher
    starts all of them again, with a spare where a node was lost. Fewer ranks would be another training run.
    """
    settings = restarts.in_process
    if not settings.enabled:
        return lambda: train(None)

    def entry(call_wrapper: CallWrapper = None) -> int:  # pyright: ignore[reportArgumentType]
        return train(call_wrapper)

    wrapper = Wrapper(
        store_factory=RestartStore,
        store_kwargs={"host_name": store_host, "port": store_port},
        initialize=Compose(
            CountIteration(events),
            RetryController(max_iterations=settings.max_restarts + 1, min_world_size=world_size),
            NestedRestarterHandlingCompleted(),
        ),
        # Compose runs the last one first: the launcher is told, the time is noted, blocked ranks are freed, and
        # only then are the process groups destroyed.
        abort=Compose(
            AbortTorchDistributed(),
            AbortGloo(kept_ports | {store_port}),
            RecordAbort(events),
            NestedRestarterHandlingStarting(),
        ),
        health_check=CudaHealthCheck() if device.type == "cuda" else None,
        completion=NestedRestarterFinalized(),
        terminate=NestedRestarterAborted(),
        monitor_thread_interval=_seconds(settings.monitor_interval_seconds),
        monitor_process_interval=_seconds(settings.monitor_interval_seconds),
        heartbeat_interval=_seconds(settings.monitor_interval_seconds),
        progress_watchdog_interval=_seconds(settings.monitor_interval_seconds),
        soft_timeout=_seconds(settings.soft_timeout_seconds),
        hard_timeout=_seconds(settings.hard_timeout_seconds),
        heartbeat_timeout=_seconds(settings.heartbeat_timeout_seconds),
        barrier_timeout=_seconds(settings.barrier_timeout_seconds),
        completion_timeout=_seconds(settings.barrier_timeout_seconds),
        last_call_wait=_seconds(settings.last_call_wait_seconds),
    )
    return wrapper(entry)  # pyright: ignore[reportReturnType]  NVRx fills in the parameter


def _seconds(value: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=value)

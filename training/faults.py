"""Faults on purpose: struck once in the job's life, recorded before they strike, off unless configured."""

import ctypes
import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, cast

from training.config_faults import CLUSTER_KINDS, START_MOMENTS, STORAGE_KINDS, FaultKind, FaultSpec, Moment
from training.events import EventLog

if TYPE_CHECKING:  # torch is imported late: a fault may strike before it
    from torch import nn

    from training.checkpoint.saver import Saver

# A fault that the drill's cluster has to do is asked for in a file; it comes within its next look.
_REQUEST_SECONDS = 60.0
_ASYNC_SECONDS = 30.0
_FILL_BYTES = 16 << 20


class InjectedFaultError(RuntimeError):
    """The exception that a fault raises."""


@dataclass(frozen=True)
class Targets:
    """What faults of this attempt can reach for, once it is there."""

    model: "nn.Module"
    saver: "Saver"
    checkpoint_directory: Path


class FaultInjector:
    """Strikes this rank's faults when it reaches their moment.

    A fault leaves a marker file in the run directory, made before it strikes, so that a replayed step, a restarted
    process or another node taking over the rank does not strike it again.
    """

    def __init__(
        self, faults: tuple[FaultSpec, ...], *, run_directory: Path, rank: int, node: int, events: EventLog
    ) -> None:
        self._faults = [(index, fault) for index, fault in enumerate(faults) if fault.rank == rank]
        self._node = node
        self._markers = run_directory / "faults"
        self._events = events
        self.targets: Targets | None = None

    def at(self, moment: Moment, step: int = 0) -> None:
        """Strike what is due at this moment of `step`, if anything; may not return."""
        for index, fault in self._faults:
            if fault.moment is moment and self._is_due(index, fault, step) and self._claim(index):
                self._events.write("fault", kind=fault.kind, step=fault.step, moment=moment)
                self._strike(index, fault)

    def due(self, moment: Moment, step: int) -> bool:
        """Whether `at` would strike now; for moments that have to be waited for."""
        return any(
            fault.moment is moment and fault.step == step and not self._marker(index).exists()
            for index, fault in self._faults
        )

    def _is_due(self, index: int, fault: FaultSpec, step: int) -> bool:
        if fault.moment not in START_MOMENTS:
            return fault.step == step
        self._markers.mkdir(parents=True, exist_ok=True)
        with (self._markers / f"{index}.starts").open("ab") as starts:  # one byte for each start that came by
            before = starts.tell()
            starts.write(b".")
        return before == fault.step

    def _marker(self, index: int) -> Path:
        return self._markers / f"{index}.fired"

    def _claim(self, index: int) -> bool:
        self._markers.mkdir(parents=True, exist_ok=True)
        try:
            self._marker(index).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _strike(self, index: int, fault: FaultSpec) -> None:
        if fault.kind in CLUSTER_KINDS:
            _ask_cluster(self._markers / f"{index}.request", fault, self._node)
        elif fault.kind in STORAGE_KINDS:
            writer = self._reach().saver.writer
            writer.open_file = FaultyFiles(fault.kind, fault.seconds, self._markers / f"{index}.struck")
        else:
            strike: Callable[[FaultSpec, FaultInjector], None] = _STRIKES[fault.kind]
            strike(fault, self)

    def _reach(self) -> Targets:
        assert self.targets is not None, "such faults strike in steps only, which come after the model"
        return self.targets


def _raise(fault: FaultSpec, _: FaultInjector) -> NoReturn:
    raise InjectedFaultError(f"injected fault {fault}")


def _raise_from_thread(fault: FaultSpec, _: FaultInjector) -> None:
    """Python raises it in the struck thread, between two of its instructions."""
    thread = threading.get_ident()
    error = type(f"{fault.kind} at {fault.moment}", (InjectedFaultError,), {})
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    threading.Timer(0.05, raise_in, (ctypes.c_ulong(thread), ctypes.py_object(error))).start()
    deadline = time.monotonic() + _ASYNC_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.01)


def _raise_from_signal(fault: FaultSpec, _: FaultInjector) -> None:
    def handler(_signum: int, _frame: object) -> NoReturn:
        raise InjectedFaultError(f"injected fault {fault}")

    signal.signal(signal.SIGUSR1, handler)
    os.kill(os.getpid(), signal.SIGUSR1)


def _hang(_fault: FaultSpec, _: FaultInjector) -> NoReturn:
    while True:
        time.sleep(1)


def _hang_with_gil(_fault: FaultSpec, _: FaultInjector) -> NoReturn:
    sleep = ctypes.PyDLL(None).sleep  # unlike CDLL's, such a call keeps the interpreter's lock
    while True:
        sleep(1_000_000)


def _signal(signum: signal.Signals) -> Callable[[FaultSpec, FaultInjector], None]:
    def strike(_fault: FaultSpec, _: FaultInjector) -> None:
        os.kill(os.getpid(), signum)

    return strike


def _segfault(_fault: FaultSpec, _: FaultInjector) -> None:
    ctypes.string_at(0)


def _abort(_fault: FaultSpec, _: FaultInjector) -> NoReturn:
    os.abort()


def _run_out_of_memory(_fault: FaultSpec, _: FaultInjector) -> NoReturn:
    """Have the kernel's out-of-memory killer end this process: in a memory cgroup of its own, else in the pod's."""
    _enter_tight_cgroup()
    hoard: list[bytearray] = []
    while True:
        hoard.append(bytearray(b"x") * _FILL_BYTES)


def memory_limit_can_be_set() -> bool:
    """Whether `out_of_memory` can strike here: a memory cgroup may be made, or this process's own is limited."""
    return _cgroup_parent() is not None or _own_limit() is not None


def _cgroup_parent() -> Path | None:
    """This process's memory cgroup (version 1), if it may have children."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        parent = Path("/sys/fs/cgroup/memory") / path.lstrip("/")
        if "memory" in controllers.split(",") and os.access(parent, os.W_OK):
            return parent
    return None


def _own_limit() -> int | None:
    """The memory limit in bytes that a container was given (cgroup version 2), if any."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _enter_tight_cgroup() -> None:
    parent = _cgroup_parent()
    if parent is None:
        if _own_limit() is None:
            raise InjectedFaultError("out_of_memory would take the whole host's memory: there is no limit here")
        return
    group = parent / f"fault-{os.getpid()}"
    group.mkdir()
    # Only what is allocated from here on is charged to it.
    (group / "memory.limit_in_bytes").write_text(str(4 * _FILL_BYTES))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _mismatch(_fault: FaultSpec, _: FaultInjector) -> None:
    """A collective that the other ranks do not call, as code that branches by rank would."""
    import torch
    import torch.distributed as dist

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.all_reduce(torch.zeros(7, device=device))


def _slow(fault: FaultSpec, _: FaultInjector) -> None:
    time.sleep(fault.seconds)


def _nan_gradient(_fault: FaultSpec, injector: FaultInjector) -> None:
    for parameter in injector._reach().model.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(float("nan"))


def _corrupt_checkpoint(_fault: FaultSpec, injector: FaultInjector) -> None:
    """Flip one bit in the newest committed checkpoint's largest file, and die: a restart would load it."""
    from training.checkpoint import durable

    directory = injector._reach().checkpoint_directory
    steps = durable.committed_steps(directory)
    if steps:
        files = [path for path in durable.checkpoint_path(directory, steps[-1]).iterdir() if path.suffix == ".distcp"]
        largest = max(files, key=lambda path: path.stat().st_size)
        with largest.open("r+b") as file:
            file.seek(largest.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_writer(_fault: FaultSpec, injector: FaultInjector) -> None:
    pid = injector._reach().saver.writer.worker_pid
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


def _kill_launcher(_fault: FaultSpec, _: FaultInjector) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(_REQUEST_SECONDS)  # this process dies with it


def _gpu_error(_fault: FaultSpec, _: FaultInjector) -> None:
    """A failed device assertion: the context is lost, as after an Xid."""
    import torch

    values, out_of_range = torch.ones(1, device="cuda"), torch.ones(1, dtype=torch.int64, device="cuda")
    values[out_of_range] = 0
    torch.cuda.synchronize()


def _gpu_hang(_fault: FaultSpec, _: FaultInjector) -> None:
    import torch

    torch.cuda._sleep(1 << 62)


_STRIKES: dict[FaultKind, Callable[[FaultSpec, FaultInjector], Any]] = {
    FaultKind.EXCEPTION: _raise,
    FaultKind.ASYNC_EXCEPTION: _raise_from_thread,
    FaultKind.SIGNAL_EXCEPTION: _raise_from_signal,
    FaultKind.HANG: _hang,
    FaultKind.HANG_GIL: _hang_with_gil,
    FaultKind.SIGSTOP: _signal(signal.SIGSTOP),
    FaultKind.SIGKILL: _signal(signal.SIGKILL),
    FaultKind.SIGTERM: _signal(signal.SIGTERM),
    FaultKind.SIGINT: _signal(signal.SIGINT),
    FaultKind.SEGFAULT: _segfault,
    FaultKind.ABORT: _abort,
    FaultKind.OUT_OF_MEMORY: _run_out_of_memory,
    FaultKind.COLLECTIVE_MISMATCH: _mismatch,
    FaultKind.SLOW: _slow,
    FaultKind.NAN_GRADIENT: _nan_gradient,
    FaultKind.CORRUPT_CHECKPOINT: _corrupt_checkpoint,
    FaultKind.WRITER_DEATH: _kill_writer,
    FaultKind.LAUNCHER_DEATH: _kill_launcher,
    FaultKind.GPU_ERROR: _gpu_error,
    FaultKind.GPU_HANG: _gpu_hang,
}


def _ask_cluster(request: Path, fault: FaultSpec, node: int) -> None:
    """Leave the wish where the drill's cluster looks; of what kills `node`, this process hears no more."""
    half_written = request.with_suffix(".part")
    half_written.write_text(json.dumps({"kind": fault.kind, "node": node}))
    half_written.rename(request)
    if fault.kind is not FaultKind.CONTROL_DEATH:
        time.sleep(_REQUEST_SECONDS)


class FaultyFiles:
    """Opens the writer's files so that the next save's first write meets full, broken or stuck storage; then no more.

    Goes to the writer's process with the save.
    """

    def __init__(self, kind: FaultKind, seconds: float, struck: Path) -> None:
        self._kind, self._seconds, self._struck = kind, seconds, struck

    def __call__(self, path: str, mode: str) -> BinaryIO:
        """As `open` for binary files."""
        file = cast(BinaryIO, Path(path).open(mode))  # noqa: SIM115  DCP closes it
        return file if self._struck.exists() else cast(BinaryIO, _FaultyFile(file, self))

    def strike(self) -> None:
        """What happens at a write."""
        if self._struck.exists():
            return
        self._struck.touch()
        match self._kind:
            case FaultKind.STORAGE_FULL:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case FaultKind.STORAGE_ERROR:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            case _:
                time.sleep(self._seconds)


class _FaultyFile:
    def __init__(self, file: BinaryIO, faults: FaultyFiles) -> None:
        self._file, self._faults = file, faults

    def write(self, data: Any) -> int:
        self._faults.strike()
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

"""Faults on purpose: struck once in the job's life, recorded before they strike, off unless configured."""

import os
import signal
from pathlib import Path

from training.config import FaultSpec
from training.events import EventLog


class InjectedFaultError(RuntimeError):
    """The exception that an `exception` fault raises."""


class FaultInjector:
    """Strikes this rank's faults when it reaches their step.

    A fault leaves a marker file in the run directory, made before it strikes, so that a replayed step, a restarted
    process or another node taking over the rank does not strike it again.
    """

    def __init__(self, faults: tuple[FaultSpec, ...], *, run_directory: Path, rank: int, events: EventLog) -> None:
        self._faults = [(index, fault) for index, fault in enumerate(faults) if fault.rank == rank]
        self._markers = run_directory / "faults"
        self._events = events

    def strike(self, step: int) -> None:
        """Strike what is due at `step`, if anything; may not return."""
        for index, fault in self._faults:
            if fault.step == step and self._claim(index):
                self._events.write("fault", kind=fault.kind, step=step)
                _strike(fault)

    def _claim(self, index: int) -> bool:
        self._markers.mkdir(parents=True, exist_ok=True)
        try:
            (self._markers / f"{index}.fired").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _strike(fault: FaultSpec) -> None:
    match fault.kind:
        case "exception":
            raise InjectedFaultError(f"injected fault {fault}")
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)

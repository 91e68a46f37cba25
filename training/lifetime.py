"""Ties between processes that the kernel keeps: die with the parent, adopt orphans (Linux prctl).

Standard library only: a process that imports this starts at once.
"""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Have the kernel send this process `signum` when the thread that started it ends, however that happens."""
    _prctl(_PR_SET_PDEATHSIG, signum)


@contextmanager
def deaf_to_sigterm() -> Iterator[None]:
    """Processes started inside hold back a SIGTERM until they call `leave_process_group`."""
    resource_tracker.ensure_running()  # its start would unblock SIGTERM again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_process_group() -> None:
    """Have signals to the parent's process group, such as a launcher's SIGTERM, pass this process by.

    One that came while this process was starting is dropped too, unless the parent itself sent it.
    """
    os.setpgid(0, 0)
    held_back = signal.sigtimedwait({signal.SIGTERM}, 0)
    if held_back is not None and held_back.si_pid == os.getppid():
        raise SystemExit(128 + signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def adopt_orphans(*, adopt: bool = True) -> None:
    """Make orphaned descendants children of this process instead of init's, so that it can find and end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")

"""Ties between processes that the kernel keeps: die with the parent, adopt orphans (Linux prctl).

Standard library only: a process that imports this starts at once.
"""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Have the kernel send this process `signum` when the thread that started it ends, however that happens."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def adopt_orphans(*, adopt: bool = True) -> None:
    """Make orphaned descendants children of this process instead of init's, so that it can find and end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")

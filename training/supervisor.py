"""PID 1 of a pod: runs one command, passes signals on, leaves no process behind, and turns its end into an exit code.

`python -m training.supervisor [--run-directory DIR] [--termination-log FILE] -- COMMAND...`

Kubernetes takes exit code 0 for "this index is done for good", even when the pod was told to stop (kubernetes #118310,
#120182), and `ft_launcher` ends with 0 when its ranks obey a SIGTERM. So 0 is passed on only when the run itself says
that it is complete. With a run directory the code is, first match wins:

    0     the command ended with 0 and the trainer wrote the done marker
    2     the command ended with 2: bad arguments or settings
    93    the command ended with 93, or the trainer wrote the no-restart marker
    143   the supervisor was told to stop by SIGTERM (by another signal: 128 and its number), or the command ended with
          0 without the done marker
    128+n signal n killed the command
    else  the command's own code

Without one (the rendezvous store) there are no markers: 0 is passed on unless the supervisor was told to stop.

Before a stop signal is passed on, the file that SUPERVISOR_STOP_FILE names to the command comes into being: a rank that
gets SIGTERM saves if it is there, and ends at once if not, for then it is its launcher that wants the place.

The command's standard error passes through here, so that the termination message can quote its last error. Standard
library only, so that it listens to signals within a few hundredths of a second.
"""

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from training.lifetime import adopt_orphans

# Equal to training/config.py's, which needs pydantic; a test compares them.
EXIT_BAD_CONFIG = 2
EXIT_NO_RESTART = 93
EXIT_SIGTERM = 143
DONE_MARKER = "done"
NO_RESTART_MARKER = "no-restart"
STOP_FILE_VARIABLE = "SUPERVISOR_STOP_FILE"

EXIT_NOT_STARTED = 127  # as a shell says for a command that is not there

# Rank 0 writes the done marker after the last barrier, so another node's launcher can end a moment earlier.
DONE_WAIT_SECONDS = 5.0
# A process in uninterruptible sleep (a hung mount) can't be killed; the container's end takes it.
KILL_WAIT_SECONDS = 10.0

# The kubelet cuts a termination message off at 4096 bytes.
_QUOTE_CHARACTERS = 1500
_KEPT_BYTES = 16_384
# ft_launcher 0.7.0 ends with 1 and one of these when it would have restarted its ranks but may not any more: on the
# node whose rank failed, and on the others.
_RESTARTS_USED_UP = ("Some rank(s) exited with non-zero exit code", "TerminalWorkerGroupFailure")

# Those that end ft_launcher; and those that tell a process something.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_FORWARDED = (*_STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)


@dataclass
class Ending:
    """How the command ended: its exit code (128+n for signal n) and the first stop signal that came in, if any."""

    code: int
    killed_by: signal.Signals | None = None
    stopped_by: signal.Signals | None = None


class LastWords:
    """Passes the command's standard error on to ours, and remembers its end."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        self._kept = b""
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def _pass_on(self) -> None:
        while block := os.read(self._read_end, 65_536):
            self._kept = (self._kept + block)[-_KEPT_BYTES:]
            with suppress(OSError):  # nobody reads ours: go on, or the command would block
                while block:
                    block = block[os.write(sys.stderr.fileno(), block) :]

    def text(self) -> str:
        """The end of what was said. Call it when no writer is left, or almost."""
        with suppress(OSError):
            os.close(self.write_end)
        self._thread.join(timeout=1.0)
        return self._kept.decode(errors="replace")


@dataclass
class Markers:
    """The run's files that tell how it ended. One that is unchanged since our start tells of an earlier attempt."""

    directory: Path
    _at_start: dict[str, tuple[int, int] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._at_start = {name: self._version(name) for name in (DONE_MARKER, NO_RESTART_MARKER)}

    def written(self, name: str) -> bool:
        """Whether the marker was written since we started."""
        version = self._version(name)
        return version is not None and version != self._at_start[name]

    def reason(self, name: str) -> str:
        """What the trainer wrote into the marker: one line, or nothing."""
        with suppress(OSError):
            return " ".join((self.directory / name).read_text(errors="replace").split())[:_QUOTE_CHARACTERS]
        return ""

    def _version(self, name: str) -> tuple[int, int] | None:
        # Inode and time, compared for equality only: no clock of another node is trusted.
        try:
            status = (self.directory / name).stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns


def main(argv: list[str] | None = None) -> int:
    """Run the command to its end; returns the exit code for Kubernetes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited SIG_IGN would have the kernel reap our child
    arguments = parse_arguments(argv)
    adopt_orphans()  # as they come to PID 1: a drill runs us as an ordinary process
    markers = Markers(arguments.run_directory) if arguments.run_directory else None
    last_words = LastWords()
    # Not in the run directory: another pod's stop is not ours.
    stop_file = Path(os.environ.get("TMPDIR", "/tmp"), f"stop-requested-{os.getpid()}")
    stop_file.unlink(missing_ok=True)
    try:
        # A process group of its own: what it leaves behind is found by the group, even after a double fork.
        pid = os.posix_spawnp(
            arguments.command[0],
            arguments.command,
            {**os.environ, STOP_FILE_VARIABLE: str(stop_file)},
            file_actions=[(os.POSIX_SPAWN_DUP2, last_words.write_end, 2)],
            setpgroup=0,
            setsigmask=(),
        )
    except OSError as error:
        _report(f"cannot start {arguments.command[0]} ({error.strerror})", arguments.termination_log)
        return EXIT_NOT_STARTED
    ending = _wait(pid, stop_file)
    left_behind = _kill_rest(pid)
    stop_file.unlink(missing_ok=True)
    code, reason = exit_code(ending, markers)
    said = last_words.text()
    if ending.stopped_by is None and code not in (0, EXIT_SIGTERM):
        reason += _explain(code, said)
    trail = f"; killed {left_behind} process(es) that it left behind" if left_behind else ""
    _report(f"exit {code}: {Path(arguments.command[0]).name} {reason}{trail}", arguments.termination_log)
    return code


def exit_code(ending: Ending, markers: Markers | None) -> tuple[int, str]:
    """Kubernetes' exit code for an ending, and the reason in words."""
    if markers is None:
        done, no_restart = ending.code == 0 and ending.stopped_by is None, False
    else:
        done = ending.code == 0 and _done(markers, wait=ending.stopped_by is None)
        no_restart = markers.written(NO_RESTART_MARKER)
    if done:
        return 0, "is complete"
    if ending.code == EXIT_BAD_CONFIG:
        return EXIT_BAD_CONFIG, "refused its arguments or settings"
    if no_restart:
        why = markers.reason(NO_RESTART_MARKER) if markers else ""
        return EXIT_NO_RESTART, f"must not be restarted (ended with {ending.code}){f': {why}' if why else ''}"
    if ending.code == EXIT_NO_RESTART:
        return EXIT_NO_RESTART, f"must not be restarted (ended with {ending.code})"
    if ending.stopped_by is not None:
        return 128 + ending.stopped_by, f"was stopped by {ending.stopped_by.name} (ended with {ending.code})"
    if ending.code == 0:
        return EXIT_SIGTERM, "ended with 0 but the run is not complete"
    if ending.killed_by is not None:
        return ending.code, f"was killed by {ending.killed_by.name}"
    return ending.code, f"failed with {ending.code}"


def _explain(code: int, said: str) -> str:
    """Why a command failed, from the end of what it said."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if not lines:
        return ""
    # Warnings of processes that end later may follow the error.
    quoted = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])
    used_up = code == 1 and any(sign in said for sign in _RESTARTS_USED_UP)
    return f"{': its restarts are used up' if used_up else ''}; last error: {quoted[:_QUOTE_CHARACTERS]}"


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The supervisor's own options; everything from the command on is the command's."""
    parser = argparse.ArgumentParser(prog="training.supervisor", description="PID 1 of a training pod")
    parser.add_argument("--run-directory", type=Path, help="where the trainer writes its done and no-restart markers")
    parser.add_argument("--termination-log", type=Path, default=Path("/dev/termination-log"))
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: the command and its arguments")
    arguments = parser.parse_args(argv)
    if arguments.command[:1] == ["--"]:
        del arguments.command[0]
    if not arguments.command:
        parser.error("no command given; write it after --")
    return arguments


def _wait(pid: int, stop_file: Path) -> Ending:
    """Pass signals on to the command and reap every child, until the command itself has ended."""
    stopped_by = None
    while True:
        received = signal.sigwait({*_FORWARDED, signal.SIGCHLD})
        if received in _FORWARDED:
            if received in _STOP_SIGNALS:
                stopped_by = stopped_by or signal.Signals(received)
                with suppress(OSError):
                    stop_file.touch()
            with suppress(ProcessLookupError):
                os.kill(pid, received)
            continue
        # One SIGCHLD can stand for several children.
        for ended, status in _reap():
            if ended == pid:
                code = os.waitstatus_to_exitcode(status)
                if code < 0:
                    return Ending(128 - code, signal.Signals(-code), stopped_by)
                return Ending(code, None, stopped_by)


def _reap() -> Iterator[tuple[int, int]]:
    """The (pid, wait status) of every child that has ended."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, status


def _kill_rest(group: int) -> int:
    """Kill what the command left behind: its process group, and orphans as they come to us; returns how many."""
    killed: set[int] = set()
    deadline = time.monotonic() + KILL_WAIT_SECONDS
    while time.monotonic() < deadline:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        for _ in _reap():
            pass
        children = _children()
        if not children:
            break
        for child in children:  # killing one may orphan its own children: they turn up in the next round
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        killed |= children
        time.sleep(0.01)
    return len(killed)


def _children() -> set[int]:
    """Our present children, ended ones that were not reaped yet included."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            # pid (name) state ppid ...; the name may hold spaces and brackets
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                found.add(int(entry.name))
    return found


def _done(markers: Markers, *, wait: bool) -> bool:
    """Whether the run is complete; waits for a marker that is on its way, unless we were told to stop."""
    deadline = time.monotonic() + (DONE_WAIT_SECONDS if wait else 0)
    while not markers.written(DONE_MARKER):
        if markers.written(NO_RESTART_MARKER) or time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def _report(message: str, termination_log: Path) -> None:
    """Say it on standard error, and where `kubectl describe pod` shows it. Only the kubelet creates that file."""
    print(f"supervisor: {message}", file=sys.stderr, flush=True)
    if termination_log.exists():
        with suppress(OSError):
            termination_log.write_text(message + "\n")


if __name__ == "__main__":
    sys.exit(main())

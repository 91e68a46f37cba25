"""A cluster on one machine: nvrx-control and one supervised ft_launcher per "node", each an address of its own.

Commands, environment and settings come from `k8s.launcher`, the code that renders the manifests.
"""

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from config.deployment import DeploymentConfig
from k8s import launcher
from k8s.launcher import Site
from training.lifetime import adopt_orphans, die_with_parent

_REPOSITORY = Path(__file__).resolve().parent.parent
# A process in uninterruptible sleep (a hung mount) can't be killed: it is not waited for any longer than this.
_STOP_SECONDS = 20
# What a node's processes may inherit from the person's own environment.
_INHERITED = ("PATH", "HOME", "LANG")


@dataclass(frozen=True)
class NodeExit:
    """How one node's launcher ended."""

    node: int
    exit_code: int


class LocalCluster:
    """Runs one job. Use as a context manager: nothing that it started outlives the `with` block."""

    def __init__(self, deployment: DeploymentConfig, *, shared_directory: Path, port: int | None = None) -> None:
        self._deployment = deployment
        self._shared = shared_directory
        self._port = port if port is not None else free_port()
        self._has_control = deployment.job.rendezvous.mode == "control"
        self._nodes: list[subprocess.Popen[bytes]] = []
        self.logs = shared_directory / "logs"
        self._pods = Pods(self.logs)
        self.started_t = 0.0

    def site(self, node: int) -> Site:
        """Node's site: 127.0.0.2 for node 0 and so on, each with the shared directory."""
        return Site(
            # Where the store is: in the control pod, or in node 0.
            rendezvous_host="127.0.0.1" if self._has_control else _address(0),
            rendezvous_port=self._port,
            local_address=_address(node),
            shared_directory=str(self._shared),
            train_json=str(self._shared / "train.json"),
        )

    def __enter__(self) -> "LocalCluster":
        self._pods.open()
        Path(self.site(0).train_json).write_text(launcher.train_json(self._deployment, self.site(0)))
        self.started_t = time.time()
        try:
            if self._has_control:
                control = launcher.supervised(launcher.control_command(self._deployment, self.site(0)))
                self._pods.start("control", [*launcher.SUPERVISOR, *control], {})
            for node in range(self._deployment.job.pod_count):
                self._nodes.append(self._start_node(node))
        except BaseException:
            self.stop()
            raise
        return self

    def _start_node(self, node: int) -> subprocess.Popen[bytes]:
        environment = {
            **launcher.worker_environment(self._deployment),
            "GROUP_RANK": str(node),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        site = self.site(node)
        command = launcher.supervised(
            launcher.worker_command(self._deployment, site),
            run_directory=launcher.run_directory(self._deployment, site),
        )
        return self._pods.start(f"node-{node}", [*launcher.SUPERVISOR, *command], environment)

    def exited(self) -> list[NodeExit]:
        """Nodes whose launcher has ended."""
        return [
            NodeExit(node, process.returncode) for node, process in enumerate(self._nodes) if process.poll() is not None
        ]

    def running(self) -> bool:
        """Whether any node's launcher still runs."""
        return len(self.exited()) < len(self._nodes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process that this cluster started, and what those started in turn."""
        self._pods.close()


class Pods:
    """Pods as processes of this machine: each a supervisor in a session of its own, and all that it starts."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._others: set[psutil.Process] = set()

    def open(self) -> None:
        """Get ready to start pods."""
        # Orphans of a killed launcher become our children instead of init's, so that they can be found and ended.
        adopt_orphans()
        self._others = set(psutil.Process().children(recursive=True))  # a library's own, such as jsii's kernel
        self._logs.mkdir(parents=True, exist_ok=True)
        # Sockets and scratch of the launchers, which a killed one leaves behind. Not in a folder of the run, whose path
        # may be too long for a Unix socket's name.
        self._scratch = tempfile.TemporaryDirectory(prefix="drill-", ignore_cleanup_errors=True)

    def start(self, name: str, command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a pod; its output is appended to `logs/<name>.log`."""
        assert self._scratch is not None, "open() comes first"
        inherited = {key: os.environ[key] for key in _INHERITED if key in os.environ}
        scripts = str(Path(sys.executable).parent)
        inherited["TMPDIR"] = self._scratch.name
        inherited["PATH"] = f"{scripts}{os.pathsep}{inherited.get('PATH', os.defpath)}"
        with (self._logs / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=_REPOSITORY,
                env={**inherited, **environment},
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, signal.SIGTERM),  # noqa: PLW1509  no threads here
            )

    def kill(self, pod: subprocess.Popen[bytes]) -> None:
        """End a pod as the loss of its node does: every process of it at once, without a word."""
        processes = tree(pod.pid)
        for process in processes:  # first stopped, so that none sees another one's end
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        for process in {*processes, *tree(pod.pid)}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        pod.wait()

    def close(self) -> None:
        """End every process that was started, and what those started in turn."""
        deadline = time.monotonic() + _STOP_SECONDS
        # Killing a process may orphan its children, which then turn up here: hence until none is left.
        while (alive := self._alive()) and time.monotonic() < deadline:
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(alive, timeout=1)
        adopt_orphans(adopt=False)  # what orphans whom from here on is not ours to reap
        if self._scratch is not None:
            self._scratch.cleanup()

    def _alive(self) -> list[psutil.Process]:
        return [process for process in psutil.Process().children(recursive=True) if process not in self._others]


def tree(pid: int) -> list[psutil.Process]:
    """A process and all its descendants; none if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _address(node: int) -> str:
    return f"127.0.0.{node + 2}"


def free_port() -> int:
    """A TCP port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check_port(port: int) -> None:
    """Raise ValueError when `port` is none or is taken."""
    if not 0 < port < 1 << 16:
        raise ValueError(f"--port {port} is no TCP port; choose one from 1 to 65535 or leave --port out")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError as error:
            raise ValueError(
                f"--port {port} is taken ({error.strerror}); choose another or leave --port out"
            ) from error

"""A cluster on one machine: nvrx-control and one supervised ft_launcher per "node", each an address of its own.

Commands, environment and settings come from `k8s.launcher`, the code that renders the manifests.
"""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from config.deployment import DeploymentConfig
from drills.network import Network
from k8s import launcher
from k8s.launcher import Site
from training.config import EXIT_BAD_CONFIG, EXIT_NO_RESTART, EXIT_OK
from training.config_faults import FaultKind
from training.lifetime import adopt_orphans, die_with_parent

_REPOSITORY = Path(__file__).resolve().parent.parent
# A process in uninterruptible sleep (a hung mount) can't be killed: it is not waited for any longer than this.
_STOP_SECONDS = 20
# With these a pod has ended for good: done, or what the manifests' pod failure policy ends the job for.
_FINAL_CODES = (EXIT_OK, EXIT_BAD_CONFIG, EXIT_NO_RESTART)
# After that a node without network counts as lost, and its pod is replaced; on a cluster it takes minutes.
_NODE_LOST_SECONDS = 10.0
# What a node's processes may inherit from the person's own environment.
_INHERITED = ("PATH", "HOME", "LANG")


@dataclass(frozen=True)
class NodeExit:
    """How one node's launcher ended."""

    node: int
    exit_code: int


class LocalCluster:
    """Runs one job. Use as a context manager: nothing that it started outlives the `with` block.

    `look` plays Kubernetes: it does to nodes what the run's faults ask for, replaces pods as the manifests' Jobs would,
    and starts a new generation where the JobSet would.
    """

    def __init__(
        self,
        deployment: DeploymentConfig,
        *,
        shared_directory: Path,
        port: int | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._deployment = deployment
        self._shared = shared_directory
        self._port = port if port is not None else free_port()
        self._say = say
        self._has_control = deployment.job.rendezvous.mode == "control"
        self._control: subprocess.Popen[bytes] | None = None
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._ended: dict[int, NodeExit] = {}
        self._failures: Counter[int] = Counter()
        self._generations = 0
        self._gone: set[int] = set()
        self._cut_off: dict[int, float] = {}
        self._network = Network(deployment.job.pod_count) if _loses_network(deployment) else None
        self.logs = shared_directory / "logs"
        self._pods = Pods(self.logs)
        self.started_t = 0.0
        self.failure: str | None = None  # why the job has failed for good, if it has

    def site(self, node: int) -> Site:
        """Node's site: an address of its own, and the shared directory."""
        return Site(
            # Where the store is: in the control pod, or in node 0.
            rendezvous_host=self._address(None if self._has_control else 0),
            rendezvous_port=self._port,
            local_address=self._address(node),
            shared_directory=str(self._shared),
            train_json=str(self._shared / "train.json"),
        )

    def _address(self, node: int | None) -> str:
        """Of a node, or of the control pod: 127.0.0.2 for node 0 and so on, or one on the drill's own network."""
        network = "127.0.0" if self._network is None else self._network.prefix
        return f"{network}.{1 if node is None else node + 2}"

    def __enter__(self) -> "LocalCluster":
        self._pods.open()
        try:
            if self._network is not None:
                self._network.open()
            Path(self.site(0).train_json).write_text(launcher.train_json(self._deployment, self.site(0)))
            self.started_t = time.time()
            self._start_all()
        except BaseException:
            self.stop()
            raise
        return self

    def _start_all(self) -> None:
        if self._has_control:
            control = launcher.supervised(launcher.control_command(self._deployment, self.site(0)))
            self._control = self._start("control", None, [*launcher.SUPERVISOR, *control], {})
        self._nodes = [self._start_node(node) for node in range(self._deployment.job.pod_count)]

    def _start_node(self, node: int) -> subprocess.Popen[bytes]:
        environment = {
            **launcher.worker_environment(self._deployment),
            "GROUP_RANK": str(node),
            "GLOO_SOCKET_IFNAME": "lo" if self._network is None else self._network.interface,
        }
        site = self.site(node)
        command = launcher.supervised(
            launcher.worker_command(self._deployment, site),
            run_directory=launcher.run_directory(self._deployment, site),
        )
        return self._start(f"node-{node}", node, [*launcher.SUPERVISOR, *command], environment)

    def _start(
        self, name: str, node: int | None, command: list[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        inside = [] if self._network is None else self._network.inside(node)
        return self._pods.start(name, [*inside, *command], environment)

    def look(self) -> None:
        """Do what faults ask for, and what Kubernetes would do about pods that have ended. Call it often."""
        for request in sorted(Path(self._run_directory()).glob("faults/*.request")):
            self._strike(**json.loads(request.read_text()))
            request.unlink()
        if self._control is not None and self._control.poll() is not None and self.running():
            self._new_generation("the rendezvous store is gone")
            return
        for node in [node for node, lost_t in self._cut_off.items() if time.monotonic() >= lost_t]:
            del self._cut_off[node]
            self._pods.kill(self._nodes[node])
        for node, pod in enumerate(self._nodes):
            if pod.poll() is not None and node not in self._ended:
                self._replace(node, pod.returncode)

    def _run_directory(self) -> str:
        return launcher.run_directory(self._deployment, self.site(0))

    def _strike(self, kind: str, node: int) -> None:
        match kind:
            case FaultKind.NODE_DEATH:
                self._gone.add(node)
                self._pods.kill(self._nodes[node])
            case FaultKind.CONTROL_DEATH:
                self._pods.kill(self._control if self._control is not None else self._nodes[0])
            case FaultKind.NETWORK_LOSS:
                assert self._network is not None
                self._network.cut(node)
                # Until then nobody but the other nodes knows: the pod lives on.
                self._cut_off[node] = time.monotonic() + _NODE_LOST_SECONDS

    def _replace(self, node: int, code: int) -> None:
        """As the workers' Job does: a new pod for the index, as long as its back-off limit lasts."""
        job = self._deployment.job
        if code in _FINAL_CODES:
            self._ended[node] = NodeExit(node, code)
            if code != EXIT_OK:
                self._fail(f"node {node} ended with {code}, which no restart mends")
            return
        if node in self._gone and len(self._gone) <= job.spare_count:  # a spare is there; a new node takes minutes
            self._ended[node] = NodeExit(node, code)
            return
        self._gone.discard(node)
        self._failures[node] += 1
        if self._failures[node] <= job.backoff_limit_per_index:
            self._say(f"node {node} ended with {code}: a new pod takes its place")
            if self._network is not None:
                self._network.mend(node)
            self._nodes[node] = self._start_node(node)
            return
        self._ended[node] = NodeExit(node, code)
        if sum(exit_.exit_code != EXIT_OK for exit_ in self._ended.values()) > job.spare_count:
            self._new_generation(f"node {node} has failed {self._failures[node]} times")

    def _new_generation(self, reason: str) -> None:
        """As the JobSet does: every pod goes, and all are created again."""
        if self._generations == self._deployment.train.restarts.job.max_restarts:
            self._fail(f"{reason}, and no generation is left")
            return
        self._generations += 1
        self._say(f"{reason}: generation {self._generations + 1} of all pods")
        for pod in [*self._nodes, *([self._control] if self._control is not None else [])]:
            self._pods.kill(pod)
        for state in (self._ended, self._failures, self._gone, self._cut_off):
            state.clear()
        self._start_all()

    def _fail(self, reason: str) -> None:
        self._say(f"the job has failed: {reason}")
        self.failure = reason
        for node, pod in enumerate(self._nodes):
            self._pods.kill(pod)
            self._ended.setdefault(node, NodeExit(node, pod.returncode))

    def exited(self) -> list[NodeExit]:
        """Nodes that have ended for good."""
        return list(self._ended.values())

    def running(self) -> bool:
        """Whether any node is still wanted."""
        return len(self._ended) < len(self._nodes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process that this cluster started, and what those started in turn."""
        self._pods.close()
        if self._network is not None:
            self._network.close()


def _loses_network(deployment: DeploymentConfig) -> bool:
    return any(fault.kind is FaultKind.NETWORK_LOSS for fault in deployment.train.faults)


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

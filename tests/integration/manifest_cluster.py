"""Runs the pods of rendered manifests as processes of this machine: no cluster, no image, but their very commands.

What a cluster would give is put in its place: pod addresses are loopback ones (127.0.0.2 for index 0 and so on), the
store's DNS name is 127.0.0.1, volumes are folders. Nothing is known here of how the commands are made.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

from drills.local_cluster import Pods, free_port, tree
from training.events import read_events

REPOSITORY = Path(__file__).resolve().parents[2]
COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def render(deployment: Path, out: Path) -> dict[str, list[dict]]:
    """The deployment's objects by kind, from the files that `kubectl apply` would take."""
    command = [sys.executable, "-m", "k8s.main", "--deployment", str(deployment), "--out", str(out)]
    done = subprocess.run(command, cwd=REPOSITORY, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    objects: dict[str, list[dict]] = {}
    for file in sorted(out.iterdir()):
        for document in yaml.safe_load_all(file.read_text()):
            objects.setdefault(document["kind"], []).append(document)
    return objects


class ManifestCluster:
    """The JobSet's pods. Use as a context manager: nothing that it started outlives the `with` block."""

    def __init__(self, objects: dict[str, list[dict]], folder: Path) -> None:
        jobs = objects["JobSet"][0]["spec"]["replicatedJobs"]
        self.jobs = {job["name"]: job["template"]["spec"] for job in jobs}
        self._config_maps = {item["metadata"]["name"]: item["data"] for item in objects.get("ConfigMap", [])}
        self._folder = folder
        self._store = self._find_store()
        self.fsx = folder / "fsx"
        self.logs = folder / "logs"
        self._pods = Pods(self.logs)
        self.pods: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "ManifestCluster":
        self._pods.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._pods.close()

    def _find_store(self) -> tuple[str, str]:
        """The endpoint in the workers' arguments, and the local one in its place."""
        text = " ".join(self._container("worker")["args"])
        found = re.search(r"--rdzv-endpoint=(\S+):(\d+)", text)
        assert found is not None, text
        return f"{found[1]}:{found[2]}", f"127.0.0.1:{free_port()}"

    def _container(self, job: str) -> dict:
        return self._pod_spec(job)["containers"][0]

    def _pod_spec(self, job: str) -> dict:
        return self.jobs[job]["template"]["spec"]

    def start_all(self) -> None:
        """As the JobSet controller does: the store, and then all workers."""
        self.start("control", 0)
        for index in range(self.jobs["worker"]["completions"]):
            self.start("worker", index)

    def start(self, job: str, index: int) -> None:
        """Create the pod of one index, as the Job controller does at first and when the old one is gone."""
        name = f"{job}-{index}"
        assert name not in self.pods or self.pods[name].poll() is not None, "never two pods of one index"
        mounts = self._mounts(job, index)
        for container in self._pod_spec(job).get("initContainers", []):
            if os.geteuid() == 0:  # they give folders to the trainer's user
                command = self._command(container, job, index, mounts)
                subprocess.run(command, check=True, capture_output=True)
        container = self._container(job)
        command = self._command(container, job, index, mounts)
        # The kubelet's file, at a place of its own: an option of the supervisor, whose own arguments come first.
        message = self.termination_log(job, index)
        message.parent.mkdir(exist_ok=True)
        message.write_text("")
        command.insert(len(container["command"]), f"--termination-log={message}")
        environment = self._environment(container, index) | {"GLOO_SOCKET_IFNAME": "lo"}
        self.pods[name] = self._pods.start(name, command, environment)

    def termination_log(self, job: str, index: int) -> Path:
        """Where the pod leaves its last message."""
        return self._folder / "termination" / f"{job}-{index}"

    def message(self, job: str, index: int) -> str:
        """The pod's last message."""
        return self.termination_log(job, index).read_text().strip()

    def _mounts(self, job: str, index: int) -> dict[str, Path]:
        """Mount paths and the folders in their place; /dev/shm is this machine's, /tmp is TMPDIR."""
        volumes = {volume["name"]: volume for volume in self._pod_spec(job).get("volumes", [])}
        pod = self._pod_spec(job)
        found: dict[str, Path] = {}
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            for mount in container.get("volumeMounts", []):
                volume, path = volumes[mount["name"]], mount["mountPath"]
                if "persistentVolumeClaim" in volume:
                    found[path] = self.fsx
                elif "configMap" in volume:
                    found[path] = self._folder / "config"
                elif path not in ("/dev/shm", "/tmp"):
                    found[path] = self._folder / "scratch" / f"{job}-{index}" / mount["name"]
        for path in found.values():
            path.mkdir(parents=True, exist_ok=True)
        for volume in volumes.values():
            if "configMap" in volume:
                for file, text in self._config_maps[volume["configMap"]["name"]].items():
                    (self._folder / "config" / file).write_text(_moved(text, found))
        return found

    def _command(self, container: dict, job: str, index: int, mounts: dict[str, Path]) -> list[str]:
        environment = self._environment(container, index)
        words = [*container["command"], *container.get("args", [])]
        # As the kubelet expands $(NAME).
        expanded = [re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], word) for word in words]
        return [_moved(word, mounts).replace(*self._store) for word in expanded]

    def _environment(self, container: dict, index: int) -> dict[str, str]:
        fields = {
            "status.podIP": f"127.0.0.{index + 2}",
            "spec.nodeName": f"node-{index}",
            COMPLETION_INDEX: str(index),
        }
        return {
            item["name"]: item["value"] if "value" in item else fields[item["valueFrom"]["fieldRef"]["fieldPath"]]
            for item in container.get("env", [])
        }

    def kill(self, job: str, index: int) -> None:
        """The pod's node is lost, or its container killed: all its processes at once."""
        self._pods.kill(self.pods[f"{job}-{index}"])

    def exit_codes(self, job: str = "worker", seconds: float = 90) -> dict[int, int]:
        """Wait until every pod of the job has ended; their exit codes by index."""
        own = {int(name.rpartition("-")[2]): pod for name, pod in self.pods.items() if name.startswith(f"{job}-")}
        deadline = time.monotonic() + seconds
        for index, pod in own.items():
            try:
                pod.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{job}-{index} has not ended after {seconds:g} s; see {self.logs}") from None
        return {index: pod.returncode for index, pod in own.items()}

    def index_of_rank(self, rank: int) -> int:
        """The worker whose pod runs this rank now."""
        pids = {event["pid"] for event in self.events() if event["event"] == "process_start" and event["rank"] == rank}
        for name, pod in self.pods.items():
            if pids & {process.pid for process in tree(pod.pid) if process.status() != psutil.STATUS_ZOMBIE}:
                return int(name.rpartition("-")[2])
        raise AssertionError(f"no pod runs rank {rank}")

    def events(self) -> list[dict]:
        """The run's events so far."""
        return [event for directory in sorted(self.fsx.glob("runs/*")) for event in read_events(directory)]

    def wait_for(self, condition, what: str, seconds: float = 90):
        """Wait until `condition(events)` gives something; returns it."""
        deadline = time.monotonic() + seconds
        while not (found := condition(self.events())):
            assert time.monotonic() < deadline, f"{what}: not after {seconds:g} s; see {self.logs}"
            time.sleep(0.1)
        return found


def failure_action(job: dict, exit_code: int, *, disrupted: bool = False) -> str:
    """What the Job's pod failure policy makes of a pod's end: the first rule that fits, else Count."""
    for rule in job["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes is not None and exit_code != 0 and (exit_code in codes["values"]) == (codes["operator"] == "In"):
            return rule["action"]
        if disrupted and any(condition["type"] == "DisruptionTarget" for condition in rule.get("onPodConditions", [])):
            return rule["action"]
    return "Count"


def _moved(text: str, mounts: dict[str, Path]) -> str:
    """`text` with every path below a mount in the place of that mount."""
    for path, folder in sorted(mounts.items(), key=lambda item: -len(item[0])):
        text = re.sub(rf"(?<![\w/.-]){re.escape(path)}(?=[/,:\"\s]|$)", str(folder), text)
    return text

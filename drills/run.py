"""One drill: the undisturbed reference, then the same run with faults, then the report that compares them."""

import importlib.metadata
import os
import platform
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from config import names
from config.deployment import DeploymentConfig
from drills.local_cluster import LocalCluster, check_port
from drills.network import Network
from drills.report import build_report, summary_lines, write_report
from training import prepare_data
from training.config import FaultSpec, describe_errors
from training.config_faults import GPU_KINDS, FaultKind
from training.events import read_events
from training.faults import memory_limit_can_be_set

_MARKER = "drill.json"
_BYTES_PER_PARAMETER = 12  # fp32 parameter and two Adam moments
_CORPUS_BYTES = 4_000_000
_LOOK_SECONDS = 0.05
_SHOW_SECONDS = 0.5


class DrillError(RuntimeError):
    """The drill could not be run to its end; the text says where to look."""


@dataclass(frozen=True)
class Finished:
    """A run that is over: its events and when its first process was started."""

    started_t: float
    directory: Path


def with_faults(deployment: DeploymentConfig, faults: tuple[FaultSpec, ...]) -> DeploymentConfig:
    """The deployment with these faults in its training run, checked as if they stood in the file."""
    document = deployment.model_dump(mode="json")
    document["train"]["faults"] = [fault.model_dump() for fault in faults]
    try:
        return DeploymentConfig.model_validate(document)
    except ValidationError as error:
        raise ValueError(describe_errors(error).splitlines()[0]) from error


def check(deployment: DeploymentConfig, out: Path, port: int | None) -> None:
    """Raise ValueError for what would end the drill later: GPUs, a full disk, a folder in use, a taken port."""
    if deployment.job.instance is not None:
        raise ValueError(
            f"deployment {deployment.name} needs {deployment.job.instance.name} nodes; a drill runs a deployment "
            "without job.instance_type, such as deployments/local.yaml"
        )
    if port is not None:
        check_port(port)
    _check_faults(deployment)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / _MARKER).exists():
        raise ValueError(f"--out {out} holds files that are not a drill's; choose an empty folder")
    existing = next(parent for parent in (out.absolute(), *out.absolute().parents) if parent.exists())
    needed = _needed_bytes(deployment)
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ValueError(
            f"--out {out}: {free / 1e6:.0f} MB free, the drill needs {needed / 1e6:.0f} MB; "
            "free some space or choose another disk"
        )


def _check_faults(deployment: DeploymentConfig) -> None:
    kinds = {fault.kind for fault in deployment.train.faults}
    gpu_kinds = sorted(kinds.intersection(GPU_KINDS))
    if gpu_kinds:
        raise ValueError(f"--fault {gpu_kinds[0]} needs a GPU; a drill on this machine runs on CPUs, choose another")
    if FaultKind.OUT_OF_MEMORY in kinds and not memory_limit_can_be_set():
        raise ValueError("--fault out_of_memory needs a memory cgroup, and none may be made here; choose sigkill")
    problem = Network.problem() if FaultKind.NETWORK_LOSS in kinds else None
    if problem is not None:
        raise ValueError(f"--fault {problem}")


def _needed_bytes(deployment: DeploymentConfig) -> int:
    checkpoint = deployment.train.model.num_parameters * _BYTES_PER_PARAMETER
    kept = deployment.train.checkpoint.keep_latest + 2
    return 2 * kept * checkpoint + 3 * _CORPUS_BYTES + 20_000_000


def run_drill(
    deployment: DeploymentConfig, *, faults: tuple[FaultSpec, ...], out: Path, port: int | None, timeout_seconds: float
) -> dict:
    """Run reference and drill, write report.json and report.html, print the summary; returns the report.

    Raises:
        ValueError: a user's mistake; nothing was written.
        DrillError: a run failed; its logs stay under `out`.
    """
    faulted = with_faults(deployment, faults)
    check(faulted, out, port)
    _make_out(out)
    _say("corpus: the Python standard library's source files, as bytes")
    prepare_corpus(deployment, out)
    reference = run_job("reference", deployment, out=out, port=port, timeout_seconds=timeout_seconds)
    run = run_job("run", faulted, out=out, port=port, timeout_seconds=timeout_seconds)
    report, analyses = build_report(
        run_events=read_events(run.directory),
        run_job_start=run.started_t,
        reference_events=read_events(reference.directory),
        reference_job_start=reference.started_t,
        faults=faults,
        deployment_name=deployment.name,
        config=faulted.model_dump(mode="json"),
        versions=_versions(),
    )
    write_report(out, report, *analyses)
    for line in summary_lines(report):
        print(line)
    print(f"report: {out / 'report.html'}")
    return report


def _make_out(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        for leftover in ("run", "reference", "report.json", "report.html"):
            path = out / leftover
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        (out / _MARKER).write_text("{}\n")
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({error.strerror}); choose a folder that you own") from error


def prepare_corpus(deployment: DeploymentConfig, out: Path) -> None:
    """Make the drill's corpus, once for all of its runs."""
    prepare_data.prepare(
        Path(sysconfig.get_paths()["stdlib"]),
        "*.py",
        _corpus(deployment, out),
        tokenizer="bytes",
        max_bytes=_CORPUS_BYTES,
        exclude=("site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"),
    )


def _corpus(deployment: DeploymentConfig, out: Path) -> Path:
    return out / "data" / Path(deployment.train.data.path).name


def link_corpus(deployment: DeploymentConfig, out: Path, shared: Path) -> None:
    """Have one run's shared volume show the corpus at `data.path`, and nothing else of what lies outside it."""
    link = shared / deployment.train.data.path.removeprefix(f"{names.FSX_MOUNT}/")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(_corpus(deployment, out), link.parent))


def run_job(
    label: str,
    deployment: DeploymentConfig,
    *,
    out: Path,
    port: int | None = None,
    timeout_seconds: float,
    show: Callable[[str], None] | None = None,
) -> Finished:
    """Train `deployment` to its end in the folder `out/label`; the corpus lies in `out` (prepare_corpus).

    Raises:
        DrillError: it has not come to its end; its logs stay.
    """
    say = show or _say
    shared = out / label
    shared.mkdir()
    link_corpus(deployment, out, shared)
    say(f"{label}: {deployment.job.pod_count} nodes x {deployment.job.ranks_per_node} rank, logs in {shared / 'logs'}")
    directory = shared / deployment.train.run_directory.removeprefix(f"{names.FSX_MOUNT}/")
    with LocalCluster(deployment, shared_directory=shared.absolute(), port=port, say=say) as cluster:
        _watch(cluster, directory, label=label, deployment=deployment, timeout_seconds=timeout_seconds, say=say)
        failed = [exit_ for exit_ in cluster.exited() if exit_.exit_code != 0] if cluster.failure else []
    reasons = {event["reason"] for event in read_events(directory) if event["event"] == "refused"}
    if reasons:
        raise DrillError(f"{label}: the trainer refused to go on: {'; '.join(sorted(reasons))}")
    if failed:
        log = cluster.logs / f"node-{failed[0].node}.log"
        raise DrillError(
            f"{label}: a launcher ended with exit code {failed[0].exit_code}; see {log}{_hint(cluster.logs)}"
        )
    return Finished(cluster.started_t, directory)


def _hint(logs: Path) -> str:
    text = "".join(path.read_text(errors="replace") for path in logs.glob("*.log"))
    return " (the disk is full: free some space or choose another --out)" if "No space left on device" in text else ""


def _watch(
    cluster: LocalCluster,
    directory: Path,
    *,
    label: str,
    deployment: DeploymentConfig,
    timeout_seconds: float,
    say: Callable[[str], None],
) -> None:
    """Show what happens until every node's launcher has ended, or raise DrillError after `timeout_seconds`."""
    deadline = time.monotonic() + timeout_seconds
    shown, shown_t = 0, 0.0
    while cluster.running():
        if time.monotonic() > deadline:
            raise DrillError(f"{label}: not done after {timeout_seconds:g} s; see {cluster.logs}")
        time.sleep(_LOOK_SECONDS)
        cluster.look()
        if time.monotonic() < shown_t + _SHOW_SECONDS:
            continue
        shown_t = time.monotonic()
        events = read_events(directory)
        for event in events[shown:]:
            line = _describe(event, deployment)
            if line:
                say(f"  {event['t'] - cluster.started_t:6.1f} s  {line}")
        shown = len(events)


def _describe(event: dict, deployment: DeploymentConfig) -> str | None:
    match event["event"]:
        case "process_start":
            return f"rank {event['rank']}: process {event['pid']} started" + (
                f" (in-job restart {event['cycle']})" if event["cycle"] else ""
            )
        case "enter" if event["iteration"]:
            return f"rank {event['rank']}: in-process restart {event['iteration']}"
        case "restored" if event["rank"] == 0:
            return f"training from step {event['step']}" if event["step"] else "training from the start"
        case "fault":
            return f"rank {event['rank']}: FAULT {event['kind']} at {event['moment']}, {event['step']}"
        case "step" if event["rank"] == 0 and event["step"] % deployment.train.checkpoint.interval_steps == 0:
            return f"step {event['step']}/{deployment.train.total_steps}  loss {event['loss']:.4f}"
        case "checkpoint_committed":
            return f"checkpoint of step {event['step']} committed"
        case "complete" if event["rank"] == 0:
            return f"complete at step {event['step']}"
    return None


def _versions() -> dict[str, str]:
    packages = ("torch", "nvidia-resiliency-ext", "numpy", "pydantic")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{package: importlib.metadata.version(package) for package in packages},
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

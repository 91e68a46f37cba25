"""A pod told to stop: every rank of the job saves at the same step, the pod leaves with 143, the others go on."""

import signal
import time
from pathlib import Path

import yaml

from config.deployment import load
from drills.local_cluster import LocalCluster
from drills.run import link_corpus, prepare_corpus
from tests.drills.harness import write_deployment
from training.checkpoint.durable import committed_steps
from training.config import DONE_MARKER, EXIT_SIGTERM, NO_RESTART_MARKER
from training.events import read_events


def wait_for(condition, seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def test_sigterm_to_one_pod_has_every_rank_save_and_the_pod_leave_with_143(tmp_path):
    document = yaml.safe_load(write_deployment(tmp_path / "small.yaml", total_steps=100_000).read_text())
    document["train"]["restarts"]["in_job"]["term_timeout_seconds"] = 90  # of a loaded machine
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(document))
    deployment = load(tmp_path / "small.yaml")
    prepare_corpus(deployment, tmp_path)
    shared = tmp_path / "shared"
    shared.mkdir()
    link_corpus(deployment, tmp_path, shared)
    run_directory: Path = shared / "runs/local"
    with LocalCluster(deployment, shared_directory=shared) as cluster:
        wait_for(lambda: any(event["event"] == "step" for event in _events(run_directory)))
        cluster._nodes[1].send_signal(signal.SIGTERM)
        wait_for(lambda: cluster._nodes[1].poll() is not None)
        code = cluster._nodes[1].returncode
        # A new pod comes, and finds the other launcher at the rendezvous, not in torch's exit barrier.
        cluster.look()
        wait_for(lambda: {rank for rank, _ in _steps(run_directory, "step", cycle=1)} == {0, 1})
    stopped = _steps(run_directory, "stopped", cycle=0)
    logs = "\n".join(path.read_text() for path in sorted(cluster.logs.glob("node-*.log")))
    assert code == EXIT_SIGTERM, logs[-4000:]
    assert {rank for rank, _ in stopped} == {0, 1}, logs[-4000:]
    (step,) = {step for _, step in stopped}
    assert _steps(run_directory, "restored", cycle=1) == stopped, logs[-4000:]
    assert step in committed_steps(run_directory / "checkpoints")
    assert not (run_directory / DONE_MARKER).exists()
    assert not (run_directory / NO_RESTART_MARKER).exists()


def _steps(run_directory: Path, kind: str, *, cycle: int) -> set[tuple[int, int]]:
    """(rank, step) of the events of a kind in a cycle."""
    return {
        (event["rank"], event["step"])
        for event in _events(run_directory)
        if (event["event"], event["cycle"]) == (kind, cycle)
    }


def _events(run_directory: Path) -> list[dict]:
    return read_events(run_directory) if (run_directory / "events").exists() else []

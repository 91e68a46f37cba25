"""The preflight of several nodes, each a real process; what needs GPUs or EFA is skipped by name."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from drills.local_cluster import free_port
from training.config import EXIT_BAD_CONFIG, EXIT_PREFLIGHT_FAILED, EXIT_PREFLIGHT_NOT_RUN

ROOT = Path(__file__).resolve().parents[3]
LATE_CLOCK = (
    "import sys, time; from training.preflight.__main__ import main; sys.exit(main(now=lambda: time.time() - 30))"
)


class Nodes:
    """Starts nodes and keeps what they said."""

    def __init__(self, folder):
        self.mount = folder / "fsx"
        self.mount.mkdir()
        self.results = folder / "results"
        self.port = free_port()
        self.processes = {}

    def start(self, rank, world_size, *options, program=("-m", "training.preflight")):
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "OMP_NUM_THREADS": "1",
        }
        self.processes[rank] = subprocess.Popen(
            [
                sys.executable, *program, "--expect-gpus=0", "--expect-efa=0", f"--mount={self.mount}",
                f"--results={self.results}", "--file-mib=4", "--max-message-mib=1", "--iterations=2", *options,
            ],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def end(self):
        """Exit codes by rank; what was said is in `out` and `err`."""
        said = {rank: process.communicate(timeout=120) for rank, process in self.processes.items()}
        self.out = {rank: text for rank, (text, _) in said.items()}
        self.err = {rank: text for rank, (_, text) in said.items()}
        return {rank: process.returncode for rank, process in self.processes.items()}

    def record(self, rank):
        return json.loads((self.results / f"preflight-{rank:05d}.jsonl").read_text())

    def check(self, rank, name):
        return next(check for check in self.record(rank)["checks"] if check["name"] == name)


@pytest.fixture
def nodes(tmp_path):
    started = Nodes(tmp_path)
    yield started
    for process in started.processes.values():
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_two_fit_nodes_pass_and_the_bandwidth_is_measured(nodes):
    nodes.start(0, 2)
    nodes.start(1, 2)
    assert nodes.end() == {0: 0, 1: 0}
    assert "2 of 2 nodes are fit to train" in nodes.err[0]
    for rank in (0, 1):
        assert nodes.out[rank].splitlines() == [json.dumps(nodes.record(rank), separators=(",", ":"))]
        assert {check["status"] for check in nodes.record(rank)["checks"]} == {"pass", "skip"}
        skipped = {check["name"] for check in nodes.record(rank)["checks"] if check["status"] == "skip"}
        assert skipped == {"gpus", "efa", "memlock", "hugepages"}
        assert all(f"skip {name}" in nodes.err[rank] for name in skipped)
    sweep = nodes.check(0, "all-reduce")["values"]["sweep"]
    assert [row["bytes"] for row in sweep] == [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20]
    # Two ranks: each byte crosses the bus once, so both bandwidths are the same.
    assert all(row["bus_gb_s"] == row["algorithm_gb_s"] > 0 for row in sweep[2:])
    assert nodes.check(1, "mount")["values"]["write_mib_s"] > 0
    assert not list(nodes.mount.iterdir())


def test_every_node_says_what_is_wrong_with_it_and_rank_0_says_it_of_all(nodes):
    nodes.start(0, 3)
    nodes.start(1, 3, "--min-shm-mib=100000000")
    nodes.start(2, 3, program=("-c", LATE_CLOCK))
    assert nodes.end() == {0: 0, 1: EXIT_PREFLIGHT_FAILED, 2: EXIT_PREFLIGHT_FAILED}
    assert nodes.check(1, "shm")["status"] == "fail"
    assert "100000000 are needed" in nodes.check(1, "shm")["detail"]
    assert nodes.check(2, "clock")["status"] == "fail"
    assert -30.5 < nodes.check(2, "clock")["values"]["offset_s"] < -29.5
    assert nodes.check(1, "clock")["status"] == "pass"
    assert "UNFIT rank 1 on" in nodes.err[0]
    assert "UNFIT rank 2 on" in nodes.err[0]
    assert "1 of 3 nodes are fit to train" in nodes.err[0]


def test_the_ranks_that_did_not_come_are_named_in_time(nodes):
    for rank in (0, 2):
        nodes.start(rank, 4, "--peer-timeout-seconds=15")
    assert nodes.end() == {0: EXIT_PREFLIGHT_NOT_RUN, 2: EXIT_PREFLIGHT_NOT_RUN}
    for rank in (0, 2):
        assert nodes.record(rank)["could_not_run"] == "ranks 1, 3 of 4 did not come within 15 s (start)"
        assert "COULD NOT RUN: ranks 1, 3 of 4" in nodes.err[rank]
        assert nodes.check(rank, "mount")["status"] == "pass", "what it knows alone is written all the same"


def test_a_missing_rank_0_is_named_in_time(nodes):
    nodes.start(1, 2, "--peer-timeout-seconds=2")
    assert nodes.end() == {1: EXIT_PREFLIGHT_NOT_RUN}
    assert "rank 0 did not come within 2 s" in nodes.record(1)["could_not_run"]


def test_a_node_that_dies_in_the_midst_is_named(nodes):
    nodes.start(0, 2, "--peer-timeout-seconds=20", "--iterations=1000000")
    nodes.start(1, 2, "--peer-timeout-seconds=20", "--iterations=1000000")
    sweep = wait_for_sweep(nodes.processes[1])
    nodes.processes[1].kill()
    assert nodes.end() == {0: EXIT_PREFLIGHT_NOT_RUN, 1: -signal.SIGKILL}
    assert nodes.record(0)["could_not_run"] == "rank 1 of 2 did not come within 20 s (end)"
    gone, _ = psutil.wait_procs([sweep], timeout=10)
    assert gone or sweep.status() == psutil.STATUS_ZOMBIE, "its all-reduce process went along"


def wait_for_sweep(process):
    """The process that takes part in the all-reduce for this node, once it is there."""
    node, deadline = psutil.Process(process.pid), time.monotonic() + 90
    while True:
        for child in node.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "training.preflight.allreduce" in child.cmdline():
                    return child
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_node_without_its_gpus_fails_and_the_others_skip_the_sweep(nodes):
    nodes.start(0, 2)
    nodes.start(1, 2, "--expect-gpus=8")
    assert nodes.end() == {0: 0, 1: EXIT_PREFLIGHT_FAILED}
    assert "8 GPUs expected" in nodes.check(1, "gpus")["detail"]
    for rank in (0, 1):
        assert nodes.check(rank, "all-reduce")["status"] == "skip"
        assert "rank 1" in nodes.check(rank, "all-reduce")["detail"]


def test_a_single_node_has_nothing_to_reduce(nodes):
    nodes.start(0, 1)
    assert nodes.end() == {0: 0}
    assert nodes.check(0, "all-reduce")["status"] == "skip"
    assert nodes.check(0, "clock")["status"] == "skip"


def test_bandwidth_below_the_wanted_one_fails(nodes):
    nodes.start(0, 2, "--min-bus-gb-s=100000")
    nodes.start(1, 2)
    assert nodes.end() == {0: EXIT_PREFLIGHT_FAILED, 1: 0}
    assert "100000 needed" in nodes.check(0, "all-reduce")["detail"]


def test_results_that_cannot_be_written_are_one_line(nodes, tmp_path):
    (tmp_path / "file").touch()
    nodes.start(0, 1, f"--results={tmp_path / 'file' / 'results'}")
    assert nodes.end() == {0: EXIT_PREFLIGHT_NOT_RUN}
    assert nodes.err[0].startswith("preflight: could not run:")
    assert len(nodes.err[0].splitlines()) == 1


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", None), ("RANK", "2"), ("RANK", "x")])
def test_a_wrong_environment_is_one_line(name, value, tmp_path):
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "2", name: value}
    finished = run(tmp_path, environment={key: text for key, text in environment.items() if text is not None})
    assert finished.returncode == EXIT_PREFLIGHT_NOT_RUN
    assert finished.stderr.startswith("preflight: could not run:")
    assert name in finished.stderr
    assert len(finished.stderr.splitlines()) == 1


def test_wrong_arguments_are_a_bad_config(tmp_path):
    assert run(tmp_path, "--expect-gpus=-1").returncode == EXIT_BAD_CONFIG


def run(tmp_path, *options, environment=None):
    command = [sys.executable, "-m", "training.preflight", "--expect-gpus=0", "--expect-efa=0"]
    return subprocess.run(
        [*command, f"--mount={tmp_path}", f"--results={tmp_path}", *options],
        cwd=ROOT,
        env=environment or {},
        capture_output=True,
        text=True,
        check=False,
    )

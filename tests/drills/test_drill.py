"""The drill for real: nvrx-control, ft_launcher, FSDP ranks, an exception and a SIGKILL."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.drills.harness import REPOSITORY, drill_command, run_drill_cli, write_deployment
from training.events import read_events

INTERVAL = 4


@pytest.fixture(scope="module")
def drill(deployment_file, tmp_path_factory):
    """One drill with an exception on rank 1 and a SIGKILL of rank 0; its output folder and what it printed."""
    out = tmp_path_factory.mktemp("drill") / "out"
    finished = run_drill_cli(deployment_file, out, "--fault", "exception@6:rank1", "--fault", "sigkill@11:rank0")
    assert finished.returncode == 0, finished.stderr + finished.stdout
    return out, finished


@pytest.fixture(scope="module")
def report(drill):
    return json.loads((drill[0] / "report.json").read_text())


def test_both_faults_fired_and_each_layer_healed_its_own(report):
    assert [(fault["kind"], fault["rank"], fault["step"], fault["fired"]) for fault in report["faults"]] == [
        ("exception", 1, 6, True),
        ("sigkill", 0, 11, True),
    ]
    assert [fault["layer"] for fault in report["faults"]] == ["in_process", "in_job"]


def test_the_parameters_are_bit_for_bit_those_of_the_undisturbed_run(report):
    assert report["bitwise_equal"] is True
    assert report["run"]["params_sha256"] == report["reference"]["params_sha256"]
    assert len(report["run"]["params_sha256"]) == 64
    assert report["run"]["steps"] == report["reference"]["steps"] == 16
    assert report["run"]["final_loss"] == report["reference"]["final_loss"]


def test_no_sample_was_skipped_or_repeated(report):
    assert report["samples"]["skipped"] == 0
    assert report["samples"]["repeated"] == 0


def test_steps_lost_are_at_most_the_checkpoint_interval(report):
    for fault in report["faults"]:
        assert 0 <= fault["steps_lost"] <= INTERVAL


def test_an_exception_keeps_the_processes_and_a_kill_replaces_them(drill):
    events = read_events(drill[0] / "run" / "runs" / "local")
    starts = [event for event in events if event["event"] == "process_start"]
    assert sorted((event["rank"], event["cycle"]) for event in starts) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    reentered = [event for event in events if event["event"] == "enter" and event["iteration"] == 1]
    assert {event["pid"] for event in reentered} == {event["pid"] for event in starts if event["cycle"] == 0}


def test_the_time_spent_adds_up(report):
    goodput = report["goodput"]
    assert abs(goodput["unaccounted_fraction"]) < 0.1
    assert goodput["useful_s"] > 0
    assert goodput["restart_s"] > 0


def test_the_summary_names_the_report_and_the_page_needs_no_network(drill):
    out, finished = drill
    assert str(out / "report.html") in finished.stdout
    page = (out / "report.html").read_text()
    assert "<svg" in page
    assert 'src="http' not in page
    assert 'href="http' not in page


def test_no_process_outlives_the_drill(drill):
    assert processes_with_files_under(drill[0]) == []


def test_ctrl_c_ends_every_process_and_says_so(deployment_file, tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(
        drill_command(deployment_file, out), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: any(event["event"] == "step" for event in read_events(out / "reference" / "runs" / "local")))
    assert len(processes_with_files_under(out)) >= 4, "control, two launchers and their ranks hold their logs open"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "interrupted: every process of the drill has been ended"
    assert "Traceback" not in stderr
    assert processes_with_files_under(out) == []


def test_a_trainer_that_refuses_ends_the_job_at_once_with_its_reason(tmp_path):
    deployment = write_deployment(tmp_path / "one.yaml")
    out = tmp_path / "out"
    # A tracker without a checkpoint, as a half-restored volume has: no restart can mend that.
    process = subprocess.Popen(
        drill_command(deployment, out), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for((out / "reference" / "train.json").exists)
    checkpoints = out / "reference" / "runs" / "local" / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    (checkpoints / "latest_step.txt").write_text("40\n")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "the trainer refused to go on" in stderr.splitlines()[-1]
    assert "says step 40, but" in stderr.splitlines()[-1]
    assert not (out / "report.json").exists()


def wait_for(condition, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def processes_with_files_under(folder) -> list[psutil.Process]:
    """Every process of the drill has its log, or the run's event log, open; the daemonized monitors included."""
    found = []
    for process in psutil.process_iter():
        try:
            targets = [str(entry.readlink()) for entry in Path(f"/proc/{process.pid}/fd").iterdir()]
        except OSError:
            continue  # ended meanwhile
        if process.pid != os.getpid() and any(target.startswith(str(folder)) for target in targets):
            found.append(process)
    return found

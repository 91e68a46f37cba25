"""A rank's wish to stop: SIGTERM with the supervisor's file, the deadline by the clock."""

import datetime
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training.config import TrainConfig
from training.stopping import StopReason, StopRequest

ROOT = Path(__file__).resolve().parents[2]


def config(run_directory: Path, **changes) -> TrainConfig:
    values = {
        "run_name": "t",
        "model": "debug-3m",
        "run_directory": str(run_directory),
        "data": {"path": "/none"},
        "total_steps": 5,
        "seq_len": 8,
        "micro_batch_size": 1,
        "global_batch_size": 1,
        "checkpoint": {"directory": "/none", "interval_steps": 1},
    }
    return TrainConfig.model_validate({**values, **changes})


@pytest.fixture
def _handler_restored():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_handler_restored")
def test_sigterm_with_the_supervisors_file_is_a_wish(tmp_path):
    stop = StopRequest(config(tmp_path), tmp_path / "stop")
    stop.listen()
    (tmp_path / "stop").touch()
    assert stop.reason is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.reason is StopReason.SIGTERM


@pytest.mark.parametrize("stop_file", ["None", "pathlib.Path('/nowhere')"])
def test_sigterm_without_the_file_ends_the_process_at_once(tmp_path, stop_file):
    (tmp_path / "train.json").write_text(config(tmp_path).model_dump_json())
    code = (
        "import pathlib, sys, time; from training.config import load_train_json; from training.stopping import *\n"
        f"StopRequest(load_train_json(pathlib.Path(sys.argv[1])), {stop_file}).listen()\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "train.json")], cwd=ROOT, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM


@pytest.mark.parametrize(("ahead", "reason"), [(1000, None), (200, StopReason.DEADLINE), (-5, StopReason.DEADLINE)])
def test_the_deadline_counts_from_its_margin_on(tmp_path, ahead, reason):
    at = datetime.datetime.fromtimestamp(time.time() + ahead, datetime.UTC)
    assert StopRequest(config(tmp_path, stop_at=at, stop_margin_seconds=300)).reason is reason


def test_without_a_deadline_there_is_none(tmp_path):
    assert StopRequest(config(tmp_path)).reason is None

"""Parts of the trainer that need no job: schedule and random state."""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from training.config import EXIT_BAD_CONFIG, NO_RESTART_MARKER, ScheduleConfig
from training.trainer import random_state_tensors, restore_random_state, schedule_ratio, seed_random_state


def test_the_schedule_warms_up_linearly_and_ends_at_its_minimum():
    schedule = ScheduleConfig(warmup_steps=10, min_ratio=0.1)
    assert schedule_ratio(schedule, 1, 100) == pytest.approx(0.1)
    assert schedule_ratio(schedule, 10, 100) == 1.0
    assert schedule_ratio(schedule, 55, 100) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert schedule_ratio(schedule, 100, 100) == pytest.approx(0.1)


def test_the_schedule_works_when_the_whole_run_is_warm_up_or_there_is_none():
    assert schedule_ratio(ScheduleConfig(warmup_steps=5), 5, 5) == 1.0
    assert schedule_ratio(ScheduleConfig(warmup_steps=0, min_ratio=0), 4, 4) == pytest.approx(0.0)


def draws() -> list:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]


@pytest.mark.parametrize("already_drawn", [0, 1])
def test_every_generator_goes_on_where_it_was_saved(already_drawn):
    seed_random_state(3, rank=1)
    for _ in range(already_drawn):  # an odd number of Gaussian draws leaves one cached
        draws()
    state = random_state_tensors(torch.device("cpu"))
    expected = draws()
    seed_random_state(4, rank=0)
    restore_random_state(state)
    assert draws() == expected


def test_the_saved_random_state_has_a_fixed_shape_whatever_was_drawn():
    before = {name: tensor.shape for name, tensor in random_state_tensors(torch.device("cpu")).items()}
    draws()
    assert {name: tensor.shape for name, tensor in random_state_tensors(torch.device("cpu")).items()} == before


def test_ranks_draw_different_numbers():
    seed_random_state(3, rank=0)
    first = draws()
    seed_random_state(3, rank=1)
    assert all(one != other for one, other in zip(first, draws(), strict=True))


def test_settings_that_do_not_fit_the_job_leave_the_marker_that_stops_restarts(tmp_path):
    document = {
        "run_name": "t",
        "model": "debug-3m",
        "run_directory": str(tmp_path / "run"),
        "data": {"path": "/none"},
        "total_steps": 1,
        "seq_len": 8,
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "checkpoint": {"directory": str(tmp_path / "c"), "interval_steps": 1},
    }
    (tmp_path / "train.json").write_text(json.dumps(document))
    finished = subprocess.run(
        [sys.executable, "-m", "training.train", "--config", str(tmp_path / "train.json")],
        env={**os.environ, "WORLD_SIZE": "3", "RANK": "0"},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == EXIT_BAD_CONFIG
    assert finished.stderr.splitlines()[-1].startswith("error: global_batch_size 4 is not a multiple of")
    assert "choose a multiple of 3" in (tmp_path / "run" / NO_RESTART_MARKER).read_text()

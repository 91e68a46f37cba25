"""The benchmark runs on a CPU, and on a GPU where there is one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DEBUG = ["--model", "debug-3m", "--seq-len", "64", "--steps", "2", "--param-dtype", "float32"]


def benchmark(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *launcher, "-m", "training.benchmark", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_debug_model_is_measured_on_a_cpu():
    finished = benchmark(*DEBUG, "--accumulate", "2", "--json")
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    assert [one["name"] for one in report["results"]] == ["forward", "forward + backward", "optimizer step"]
    assert all(one["seconds"] > 0 and one["tokens_per_second"] > 0 for one in report["results"])
    if report["device"]["peak_flops"] is None:
        assert {one["mfu"] for one in report["results"]} == {None}


def test_a_wrong_choice_is_refused_in_one_line():
    finished = benchmark("--model", "llama-9")
    assert finished.returncode == 2
    assert "error: model: unknown model preset 'llama-9'" in finished.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_float8_is_refused_by_name_without_a_gpu():
    finished = benchmark(*DEBUG[:-2], "--float8", "rowwise", "--compile", "inductor")
    assert finished.returncode == 2
    assert "parallelism.float8 needs an H100 or newer GPU, this is CPU; unset" in finished.stderr


@pytest.mark.gpu(1)
def test_a_1b_model_trains_on_one_gpu_within_its_limits():
    finished = benchmark("--seq-len", "4096", "--steps", "5", "--loss-chunk-tokens", "1024", "--json")
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    step = report["results"][-1]
    assert step["memory_peak_bytes"] < report["device"]["memory_bytes"]
    assert step["mfu"] is None or 0.05 < step["mfu"] < 1


@pytest.mark.gpu(1)
def test_float8_trains_on_one_gpu():
    options = ["--float8", "rowwise", "--compile", "inductor", "--loss-chunk-tokens", "1024", "--json"]
    finished = benchmark("--seq-len", "2048", "--steps", "3", *options)
    assert finished.returncode == 0, finished.stderr

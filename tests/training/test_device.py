"""What a device or an image can't serve is said in one line, with the way out."""

import pytest
import torch

from training import device as devices


def test_inductor_on_a_gpu_wants_a_compiler_and_names_the_ways_to_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    gpu = torch.device("cuda")
    with pytest.raises(ValueError, match=r"needs a C compiler.*`make image`.*or unset parallelism.compile"):
        devices.check_compiler(gpu)
    devices.check_compiler(torch.device("cpu"))  # there inductor looks for itself, for g++
    compiler = tmp_path / "gcc"
    compiler.touch(mode=0o755)
    devices.check_compiler(gpu)


def test_float8_on_a_cpu_is_refused():
    with pytest.raises(ValueError, match=r"parallelism.float8 needs an H100 or newer GPU, this is CPU"):
        devices.check_float8(torch.device("cpu"))

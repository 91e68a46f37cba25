"""The image's self-test: run as a process here, and against stand-ins for what only the image or a GPU node has."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from training import self_test

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "training/Dockerfile").read_text()


def run(*arguments):
    command = [sys.executable, "-m", "training.self_test", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=120)


def test_here_it_prints_what_it_finds_and_names_what_only_an_image_or_a_gpu_node_has():
    done = run("--on", "cpu")
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.replace("EFA devices", "EFA-devices").splitlines())
    assert lines["torch"] == torch.__version__
    assert lines["NVRx"] == "0.7.0"
    skipped = {name: text for name, text in lines.items() if text.startswith("skipped")}
    assert skipped == dict.fromkeys(("CUDA", "NCCL", "libfabric", "aws-ofi-nccl"), "skipped: needs --on image") | (
        dict.fromkeys(("driver", "GPUs", "EFA-devices"), "skipped: needs --on node")
    )


@pytest.mark.skipif(self_test.LIBFABRIC.exists(), reason="this machine has EFA's libfabric")
def test_as_an_image_this_machine_fails_with_one_line_for_each_thing_that_is_not_there():
    done = run()
    assert done.returncode == 1
    errors = done.stderr.splitlines()
    assert all(line.startswith("error: ") for line in errors)
    (libfabric,) = [line for line in errors if line.startswith("error: libfabric missing: ")]
    assert "/opt/amazon/efa/lib/libfabric.so.1" in libfabric
    (plugin,) = [line for line in errors if line.startswith("error: aws-ofi-nccl missing: ")]
    assert "no libnccl-net*.so in /opt/amazon/ofi-nccl/lib" in plugin


def test_a_wrong_version_is_one_line_and_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(self_test, "TORCH_VERSION", "2.12.0")
    assert self_test.main(["--on", "cpu"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: torch {torch.__version__}: this image is made for 2.12.0; build it again"


def check(name, place="image"):
    (found,) = [check for check in self_test.checks(place) if check.name == name]
    return found


@pytest.mark.parametrize(
    ("name", "place", "good", "bad"),
    [
        ("python", "image", ["3.12.3"], ["3.11.7", "3.13.0", "3.1.2"]),
        ("python", "cpu", ["3.11.7", "3.13.0"], ["3.10.9"]),
        ("torch", "image", ["2.13.0", "2.13.0+cu130"], ["2.13.1", "2.12.0", "2.13.0.dev1"]),
        ("NVRx", "image", ["0.7.0"], ["0.4.1", "0.7.1"]),
        ("CUDA", "image", ["13.0", "13.2"], ["12.8", "1.3", "130.0"]),
        ("NCCL", "image", ["2.28.2", "2.28.9", "2.29.7", "2.30.1"], ["2.28.3", "2.28.5", "2.28.8"]),
        ("libfabric", "image", ["2.4"], ["2.3", "1.22", "2.40"]),
        ("aws-ofi-nccl", "image", ["1.18.0"], ["1.16.1", "1.18.1"]),
        ("driver", "node", ["580.95.05", "595.1"], ["570.172.08", "99.0"]),
        ("GPUs", "node", ["8", "1"], ["0"]),
        ("EFA devices", "node", ["32"], ["0"]),
    ],
)
def test_each_check_takes_the_right_versions_and_refuses_the_wrong_ones(name, place, good, bad):
    rule = check(name, place).wrong
    assert [version for version in good if rule(version) is not None] == []
    assert [version for version in bad if rule(version) is None] == []


def test_libfabrics_version_is_asked_of_the_library(tmp_path, monkeypatch):
    source, library = tmp_path / "fabric.c", tmp_path / "libfabric.so.1"
    source.write_text("unsigned int fi_version(void) { return (2u << 16) | 4u; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    monkeypatch.setattr(self_test, "LIBFABRIC", library)
    assert check("libfabric").read() == "2.4"


def test_the_plugins_version_is_found_in_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(self_test, "OFI_NCCL", tmp_path)
    plugin = tmp_path / "libnccl-net-ofi.so"
    plugin.write_bytes(b"\x7fELF\0\0Initializing aws-ofi-nccl 1.18.0\0\0")
    assert check("aws-ofi-nccl").read() == "1.18.0"
    plugin.write_bytes(b"\x7fELF")
    with pytest.raises(RuntimeError, match="does not say its version"):
        check("aws-ofi-nccl").read()


def test_efa_devices_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(self_test, "INFINIBAND", tmp_path)
    (tmp_path / "rdmap79s0").mkdir()
    (tmp_path / "rdmap80s0").mkdir()
    assert check("EFA devices", "node").read() == "2"


def test_it_wants_the_torch_that_the_requirements_pin_and_the_efa_installer_that_the_dockerfile_names():
    assert f"torch=={self_test.TORCH_VERSION}\n" in (ROOT / "training/requirements.txt").read_text()
    (installer,) = re.findall(r"EFA installer (\S+) holds", (ROOT / "training/self_test.py").read_text())
    assert f"ARG EFA_INSTALLER={installer}\n" in DOCKERFILE

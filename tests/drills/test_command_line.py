"""A user's mistakes: one line that says what to do, exit code 2, nothing left behind."""

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from config.deployment import load
from drills.__main__ import main as drills_main
from drills.run import check
from k8s.drill import parse_fault
from tests.drills.harness import REPOSITORY, drill_command, run_drill_cli


def one_line_error(deployment: Path, out: Path, *arguments: str) -> str:
    finished = run_drill_cli(deployment, out, *arguments)
    assert finished.returncode == 2, finished.stderr
    assert len(finished.stderr.strip().splitlines()) == 1, finished.stderr
    assert finished.stderr.startswith("error: ")
    return finished.stderr.strip()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sigkill", "must be KIND@STEP:rankN[:MOMENT], for example sigkill@25:rank0"),
        ("sigkill@x:rank0", "must be KIND@STEP:rankN"),
        ("sigkill@5:0", "must be KIND@STEP:rankN"),
        ("meteor@5:rank0", "kind: Input should be 'exception', 'async_exception'"),
        ("sigkill@0:rank0", "step 0 is none; steps count from 1"),
    ],
)
def test_a_wrong_fault_spelling_says_how_it_is_spelt(text, message):
    with pytest.raises(ValueError, match="--fault") as caught:
        parse_fault(text)
    assert message in str(caught.value)


def test_a_fault_is_parsed():
    fault = parse_fault("sigkill@42:rank0")
    assert (fault.kind, fault.step, fault.rank) == ("sigkill", 42, 0)
    assert str(fault) == "sigkill@42:rank0"
    assert str(parse_fault("hang@0:rank1:import")) == "hang@0:rank1:import"


def test_faults_that_this_machine_can_not_strike_are_refused(deployment_file, tmp_path):
    assert "needs a GPU" in one_line_error(deployment_file, tmp_path / "out", "--fault", "gpu_error@3:rank0")


def test_a_fault_that_can_not_happen_is_refused(deployment_file, tmp_path):
    assert "comes after the last step 16" in one_line_error(
        deployment_file, tmp_path / "out", "--fault", "sigkill@17:rank0"
    )
    assert "ranks are 0 to 1" in one_line_error(deployment_file, tmp_path / "out", "--fault", "sigkill@3:rank2")
    assert not (tmp_path / "out").exists()


def test_an_unknown_key_names_its_path_and_file(tmp_path):
    document = yaml.safe_load((REPOSITORY / "deployments" / "local.yaml").read_text())
    document["train"]["learning_rat"] = 1
    (tmp_path / "typo.yaml").write_text(yaml.safe_dump(document))
    error = one_line_error(tmp_path / "typo.yaml", tmp_path / "out")
    assert "typo.yaml: train.learning_rat: unknown key" in error


def test_a_missing_deployment_file_is_named(tmp_path):
    assert "none.yaml: cannot be read" in one_line_error(tmp_path / "none.yaml", tmp_path / "out")


def test_a_taken_port_is_named(deployment_file, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = one_line_error(deployment_file, tmp_path / "out", "--port", str(port))
    assert f"--port {port} is taken" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("port", [0, 65536, -1])
def test_a_number_that_is_no_port_is_named(deployment_file, tmp_path, port):
    with pytest.raises(ValueError, match=f"--port {port} is no TCP port; choose one from 1 to 65535"):
        check(load(deployment_file), tmp_path / "out", port)


def test_an_unwritable_folder_is_named(deployment_file, tmp_path):
    (tmp_path / "file").touch()  # permissions do not stop root, a file in the way does
    error = one_line_error(deployment_file, tmp_path / "file" / "out")
    assert "file/out: cannot be written (Not a directory); choose a folder that you own" in error


def test_a_folder_with_other_files_is_left_alone(deployment_file, tmp_path):
    (tmp_path / "thesis.txt").write_text("do not lose me")
    assert "holds files that are not a drill's" in one_line_error(deployment_file, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_full_disk_is_noticed_before_anything_is_written(deployment_file, tmp_path, monkeypatch):
    # The disk's own answer is replaced: filling a real one is not something a test may do.
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10**9, 10**9, 1_000_000))
    with pytest.raises(ValueError, match=r"1 MB free, the drill needs \d+ MB; free some space"):
        check(load(deployment_file), tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_ctrl_c_while_the_libraries_still_load_is_no_traceback(deployment_file, tmp_path):
    # A finder that is asked first stops at the first of the drill's own imports, which take seconds.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\n"
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'drills.run':\n"
        "            print('loading', flush=True)\n"
        "            time.sleep(60)\n"
        "sys.meta_path.insert(0, Slow())\n"
    )
    process = subprocess.Popen(
        drill_command(deployment_file, tmp_path / "out"),
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert stderr == "interrupted: every process of the drill has been ended\n"


def test_a_disk_that_fails_in_the_midst_of_a_drill_is_one_line(deployment_file, tmp_path, monkeypatch, capsys):
    def fail(_directory):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path / "out" / "run"))

    monkeypatch.setattr("drills.run._make_out", fail)
    monkeypatch.setattr(sys, "argv", ["drills", *drill_command(deployment_file, tmp_path / "out")[3:]])
    assert drills_main() == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'out' / 'run'}: Input/output error\n"


def test_a_deployment_that_needs_gpus_is_refused(tmp_path):
    error = one_line_error(REPOSITORY / "deployments" / "p5-2node.yaml", tmp_path / "out")
    assert "needs p5.48xlarge nodes" in error


@pytest.mark.parametrize("timeout", ["nan", "-1", "0", "inf"])
def test_a_timeout_that_is_no_time_is_refused(deployment_file, tmp_path, timeout):
    finished = run_drill_cli(deployment_file, tmp_path / "out", f"--timeout={timeout}")
    assert finished.returncode == 2
    assert f"{timeout} is no number of seconds above 0" in finished.stderr

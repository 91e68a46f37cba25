"""Set-up: what is missing is said in one line, before anything is made."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bootstrap

ROOT = Path(__file__).resolve().parent.parent


def run_bootstrap(path: Path, *, code: str = "import bootstrap; bootstrap.main()") -> str:
    """bootstrap.main() in a copy of the file alone, with `path` as the whole PATH; its one line of error."""
    finished = subprocess.run(
        [sys.executable, "-c", code],
        cwd=path,
        env={"PATH": str(path), "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 2, finished.stderr
    assert finished.stderr.startswith("error: ")
    assert finished.stderr.count("\n") == 1
    assert not (path / ".venv").exists()
    return finished.stderr


@pytest.fixture
def checkout(tmp_path) -> Path:
    (tmp_path / "bootstrap.py").write_bytes((ROOT / "bootstrap.py").read_bytes())
    return tmp_path


def tool(folder: Path, name: str, prints: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\necho {prints}\n")
    (folder / name).chmod(0o755)


def test_a_missing_node_is_named_with_the_version_that_is_needed(checkout):
    assert "node is not on PATH: the CDK CLI needs Node 20 or newer with npm; install them" in run_bootstrap(checkout)


def test_a_missing_npm_is_named(checkout):
    tool(checkout, "node", "v22.1.0")
    assert "npm is not on PATH" in run_bootstrap(checkout)


def test_an_old_node_is_named_with_its_version(checkout):
    tool(checkout, "node", "v18.20.4")
    tool(checkout, "npm", "10.0.0")
    assert "Node v18.20.4 is too old" in run_bootstrap(checkout)


def test_an_old_python_is_named_with_its_version_and_the_way_to_choose_another(checkout):
    code = "import sys; sys.version_info = (3, 9, 1); import bootstrap; bootstrap.main()"
    error = run_bootstrap(checkout, code=code)
    assert "Python 3.9 is too old: 3.11 or newer is needed" in error
    assert "make PYTHON=/path/to/python3.12 setup" in error


def test_a_real_old_python_can_at_least_read_the_script(checkout):
    candidates = (shutil.which(f"python3.{minor}") for minor in (6, 7, 8, 9, 10))
    # pyenv puts names on PATH that only say how to choose a version.
    old = [path for path in candidates if path and subprocess.run([path, "-c", ""], check=False).returncode == 0]
    if not old:
        pytest.skip("no Python older than 3.11 on PATH")
    finished = subprocess.run([old[0], str(checkout / "bootstrap.py")], capture_output=True, text=True, check=False)
    assert finished.returncode == 2
    assert "is too old" in finished.stderr


def test_the_installed_nvrx_is_the_one_version_we_target():
    assert bootstrap.nvrx_version() == "0.7.0"


def test_every_requirement_is_pinned_exactly():
    for name in ("requirements.txt", "requirements-dev.txt", "training/requirements.txt"):
        lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
        assert lines
        assert [line for line in lines if "==" not in line] == [], name


def test_the_image_names_the_nvrx_that_is_tested():
    assert "nvidia-resiliency-ext==0.7.0" in (ROOT / "training" / "Dockerfile").read_text()

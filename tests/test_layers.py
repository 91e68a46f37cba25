"""The layers at run time: import-linter reads the source and misses an import hidden in a package's __init__."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "numpy", "nvidia_resiliency_ext", "aws_cdk", "cdk8s", "cdk8s_plus_33", "jsii")
OURS = ("app", "stacks", "k8s", "config", "drills", "training")


def loaded_by(module: str) -> set[str]:
    """Top-level names of HEAVY and OURS that importing `module` in a fresh interpreter loads."""
    code = f"import {module}, sys, json; print(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    finished = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(finished.stdout)) & {*HEAVY, *OURS}


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("training.config", {"training"}),
        ("training.train", {"training"}),  # torch comes once the settings have been read
        ("training.lifetime", {"training"}),
        ("training.supervisor", {"training"}),
        ("training.trainer", {"training", "torch", "numpy", "nvidia_resiliency_ext"}),
        ("config.deployment", {"config", "training"}),
        ("k8s.launcher", {"k8s", "config", "training"}),
        ("drills.__main__", {"drills", "k8s", "config", "training", "numpy"}),
    ],
)
def test_a_module_loads_its_own_layers_only(module, allowed):
    assert loaded_by(module) <= allowed


def test_every_init_file_is_empty():
    packages = [ROOT / name for name in OURS if (ROOT / name).is_dir()]
    files = [file for package in packages for file in package.rglob("__init__.py")]
    assert len(files) >= 6
    assert [file for file in files if file.read_text()] == []


def test_only_the_entry_points_read_the_environment():
    allowed = {
        "app.py",
        "training/train.py",
        "training/supervisor.py",
        "training/preflight/__main__.py",
        "drills/local_cluster.py",
    }
    sources = [
        ROOT / "app.py",
        *(file for name in OURS if (ROOT / name).is_dir() for file in (ROOT / name).rglob("*.py")),
    ]
    readers = {
        str(file.relative_to(ROOT))
        for file in sources
        if any(word in file.read_text() for word in ("os.environ", "os.getenv"))
    }
    assert readers <= allowed

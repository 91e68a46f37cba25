"""A deployment small enough for tests, and the drill's command line."""

import subprocess
import sys
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]


def write_deployment(path: Path, **train) -> Path:
    """deployments/local.yaml with fewer and smaller steps."""
    document = yaml.safe_load((REPOSITORY / "deployments" / "local.yaml").read_text())
    document["train"] |= {"total_steps": 16, "seq_len": 64, "micro_batch_size": 1, "global_batch_size": 4} | train
    document["train"]["checkpoint"]["interval_steps"] = 4
    path.write_text(yaml.safe_dump(document))
    return path


def drill_command(deployment: Path, out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "drills", "run", "--deployment", str(deployment), "--out", str(out), *arguments]


def run_drill_cli(deployment: Path, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        drill_command(deployment, out, *arguments),
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

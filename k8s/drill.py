"""Drills and benchmarks as pairs of jobs on a real cluster: the same job twice, one thing changed.

Both runs of a pair write below one directory of the shared volume, which `python -m drills report` reads. They need the
same nodes, so they are applied one after the other: each has a folder of its own.
"""

import re
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from config.deployment import DeploymentConfig
from training.config import FaultSpec, describe_errors

DRILL = "drill"
CHECKPOINT_BENCHMARK = "checkpoint-benchmark"

_FAULT = re.compile(r"^(?P<kind>[a-z_]+)@(?P<step>\d+):rank(?P<rank>\d+)(:(?P<moment>[a-z_]+))?$")


@dataclass(frozen=True)
class Pair:
    """Two deployments by the name of their run, and the directory that holds what both leave behind."""

    results: str
    runs: dict[str, DeploymentConfig]


def parse_fault(text: str) -> FaultSpec:
    """Parse KIND@STEP:rankN[:MOMENT] (training/config_faults.py).

    Raises:
        ValueError: wrong spelling, an unknown kind or moment, or two that do not go together.
    """
    match = _FAULT.match(text)
    if match is None:
        raise ValueError(f"--fault {text}: must be KIND@STEP:rankN[:MOMENT], for example sigkill@25:rank0")
    try:
        return FaultSpec.model_validate({key: value for key, value in match.groupdict().items() if value is not None})
    except ValidationError as error:
        raise ValueError(f"--fault {text}: {describe_errors(error).splitlines()[0]}") from error


def fault_drill(deployment: DeploymentConfig, faults: tuple[FaultSpec, ...], *, steps: int | None = None) -> Pair:
    """`reference` undisturbed, `run` with the faults.

    Raises:
        ValueError: the schedule does not fit the run, or a name becomes too long.
    """
    schedule = [fault.model_dump() for fault in faults]
    return _pair(deployment, DRILL, {"reference": {}, "run": {"faults": schedule}}, steps)


def checkpoint_benchmark(deployment: DeploymentConfig, *, steps: int | None = None) -> Pair:
    """`async` and `sync` checkpoints.

    Raises:
        ValueError: a name becomes too long.
    """
    checkpoint = deployment.train.checkpoint.model_dump(mode="json")
    changes = {mode: {"checkpoint": checkpoint | {"mode": mode}} for mode in ("async", "sync")}
    return _pair(deployment, CHECKPOINT_BENCHMARK, changes, steps)


def _pair(deployment: DeploymentConfig, label: str, changes: dict[str, dict[str, Any]], steps: int | None) -> Pair:
    results = f"{deployment.train.run_directory}-{label}"
    runs = {name: _changed(deployment, name, f"{results}/{name}", change, steps) for name, change in changes.items()}
    return Pair(results, runs)


def _changed(
    deployment: DeploymentConfig, name: str, directory: str, change: dict[str, Any], steps: int | None
) -> DeploymentConfig:
    """The deployment as a run of its own, checked as if it stood in a file."""
    document = deployment.model_dump(mode="json")
    document["job"]["name"] += f"-{name}"
    train = document["train"] | change
    train["run_directory"] = directory
    train["checkpoint"] = train["checkpoint"] | {"directory": f"{directory}/checkpoints"}
    if steps is not None:
        train["total_steps"] = steps
        train["schedule"] = train["schedule"] | {"warmup_steps": min(steps, train["schedule"]["warmup_steps"])}
    try:
        return DeploymentConfig.model_validate(document | {"train": train})
    except ValidationError as error:
        raise ValueError(describe_errors(error)) from error

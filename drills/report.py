"""The drill's report: what both runs came to, in report.json, in report.html and in a few lines for the terminal."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drills.goodput import RunAnalysis, SamplesDifference, analyse, compare_samples
from drills.intervals import Event
from drills.recovery import FaultOutcome
from drills.report_page import page
from training.config import FaultSpec

_MAX_FAULT_LINES = 4
_MAX_PROBLEM_LINES = 3
_COUNT_WORDS = {1: "once", 2: "twice", 3: "three times"}


def build_report(
    *,
    run_events: list[Event],
    run_job_start: float,
    reference_events: list[Event],
    reference_job_start: float,
    faults: tuple[FaultSpec, ...],
    deployment_name: str,
    config: dict[str, Any],
    versions: dict[str, str],
) -> tuple[dict[str, Any], tuple[RunAnalysis, RunAnalysis]]:
    """The report as it goes into report.json, and the analyses of run and reference that the page also needs.

    Args:
        run_events: of the run with faults, as `training.events.read_events` gives them.
        run_job_start: when its first process was started, Unix seconds.
        reference_events: of the undisturbed run.
        reference_job_start: when its first process was started, Unix seconds.
        faults: those configured for the run.
        deployment_name: the deployment file's name without .yaml.
        config: the resolved deployment, as JSON.
        versions: of what the result depends on, by name.

    Raises:
        ValueError: a run left no events.
    """
    run = analyse(run_events, job_start=run_job_start, faults=faults)
    reference = analyse(reference_events, job_start=reference_job_start)
    samples = compare_samples(run.samples, reference.samples)
    bitwise_equal = run.params_sha256 is not None and run.params_sha256 == reference.params_sha256
    problems = _problems(run, reference, samples)
    report = {
        "deployment": deployment_name,
        "passed": not problems,
        "verdict": _verdict(run.faults, problems),
        "problems": problems,
        "reference": _summary(reference),
        "run": _summary(run),
        "bitwise_equal": bitwise_equal,
        "faults": [fault.as_json() for fault in run.faults],
        "goodput": _goodput(run, reference),
        "samples": {
            "skipped": len(samples.skipped),
            "repeated": len(samples.repeated),
            "skipped_ids": list(samples.skipped),
            "repeated_ids": list(samples.repeated),
            "differing_steps": len(samples.differing_steps),
            "replay_mismatches": run.replay_mismatches,
            "replayed_losses_equal": run.replayed_losses_equal,
        },
        "command": _command(deployment_name, faults),
        "versions": versions,
        "config": config,
    }
    return report, (run, reference)


def write_report(out: Path, report: dict[str, Any], run: RunAnalysis, reference: RunAnalysis) -> None:
    """Write report.json and report.html into the folder `out`; a reader sees the old file or the whole new one."""
    _replace(out / "report.json", json.dumps(report, indent=2) + "\n")
    _replace(out / "report.html", page(report, run, reference))


def summary_lines(report: dict[str, Any]) -> list[str]:
    """The report in at most 15 lines of plain text."""
    reference, run, goodput = report["reference"], report["run"], report["goodput"]
    equal = "equal bit for bit" if report["bitwise_equal"] else "NOT equal"
    rows = [
        ("", "reference", "run", ""),
        ("steps", reference["steps"], run["steps"], ""),
        ("final loss", _or_dash(reference["final_loss"]), _or_dash(run["final_loss"]), ""),
        ("parameters", _short(reference["params_sha256"]), _short(run["params_sha256"]), equal),
        ("wall time", f"{goodput['reference_wall_s']:.1f} s", f"{goodput['wall_s']:.1f} s", ""),
        (
            "goodput",
            f"{goodput['reference_goodput_fraction']:.1%}",
            f"{goodput['goodput_fraction']:.1%}",
            f"{goodput['unaccounted_fraction']:.1%} of the run unaccounted for",
        ),
    ]
    lines = [f"{'PASSED' if report['passed'] else 'FAILED'}: {report['verdict']}"]
    lines += [f"  {name:<12}{left!s:<20}{right!s:<20}{note}".rstrip() for name, left, right, note in rows]
    lines += _fault_lines(report["faults"])
    samples = report["samples"]
    lines.append(f"  {'samples':<12}{samples['skipped']} skipped, {samples['repeated']} repeated")
    # The verdict of a failed drill is its first problem.
    return lines + [f"  also: {problem}" for problem in report["problems"][1 : 1 + _MAX_PROBLEM_LINES]]


def _fault_lines(faults: list[dict[str, Any]]) -> list[str]:
    shown = faults if len(faults) <= _MAX_FAULT_LINES else faults[: _MAX_FAULT_LINES - 1]
    lines = [f"  {'fault':<12}{fault['spec']} ".ljust(40) + _fate(fault) for fault in shown]
    if len(shown) < len(faults):
        lines.append(f"  {'':<12}and {len(faults) - len(shown)} more")
    return lines


def _fate(fault: dict[str, Any]) -> str:
    if not fault["fired"]:
        return "did not fire"
    if fault["layer"] is None:
        return "never recovered"
    if fault["layer"] == "none":
        return "training went on"
    return (
        f"{fault['layer']}: {fault['time_to_recover_s']:.2f} s to recover, {_count(fault['steps_lost'], 'step')} lost"
    )


def _summary(analysis: RunAnalysis) -> dict[str, Any]:
    return {
        "steps": analysis.steps,
        "final_loss": analysis.final_loss if _is_finite(analysis) else None,  # JSON has no NaN
        "params_sha256": analysis.params_sha256,
        "checkpoints": [checkpoint.step for checkpoint in analysis.checkpoints],
    }


def _is_finite(analysis: RunAnalysis) -> bool:
    return analysis.final_loss is not None and math.isfinite(analysis.final_loss)


def _goodput(run: RunAnalysis, reference: RunAnalysis) -> dict[str, float]:
    return {
        "wall_s": run.wall_s,
        **asdict(run.parts),
        "unaccounted_fraction": run.unaccounted_fraction,
        "goodput_fraction": run.goodput_fraction,
        "reference_wall_s": reference.wall_s,
        "reference_goodput_fraction": reference.goodput_fraction,
    }


def _problems(run: RunAnalysis, reference: RunAnalysis, samples: SamplesDifference) -> list[str]:
    """Everything that keeps the drill from proving its point, the gravest first, as plain sentences."""
    problems = [f"in the run, {problem}" for problem in run.problems]
    problems += [f"in the reference, {problem}" for problem in reference.problems]
    if reference.restarts or reference.faults:
        problems.append("the reference was disturbed itself, so it proves nothing; repeat the drill")
    if None not in (run.params_sha256, reference.params_sha256) and run.params_sha256 != reference.params_sha256:
        problems.append("the final parameters differ from those of the undisturbed run")
    if run.final_loss is not None and not _is_finite(run):
        problems.append("the run's final loss is not a finite number")
    if run.steps != reference.steps:
        problems.append(f"the run ended at step {run.steps}, the reference at step {reference.steps}")
    if samples.skipped:
        problems.append(f"the run skipped {_count(len(samples.skipped), 'sample')} that the reference trained on")
    if samples.repeated:
        problems.append(f"the run trained on {_count(len(samples.repeated), 'sample')} more often than the reference")
    if samples.differing_steps and not samples.skipped and not samples.repeated:
        problems.append(f"{_count(len(samples.differing_steps), 'step')} took other samples than in the reference")
    if run.replay_mismatches:
        problems.append(f"{_count(run.replay_mismatches, 'step')} took other samples when executed again")
    if run.replayed_losses_equal is False:
        problems.append("a step that was executed again gave another loss than the first time")
    return problems


def _verdict(faults: tuple[FaultOutcome, ...], problems: list[str]) -> str:
    if problems:
        return problems[0][0].upper() + problems[0][1:]
    if not faults:
        return "No fault was configured; final parameters are bit for bit those of the undisturbed run"
    what = "Killed" if all(fault.kind == "sigkill" for fault in faults) else "Brought down"
    times = _COUNT_WORDS.get(len(faults), f"{len(faults)} times")
    return f"{what} {times}; final parameters are bit for bit those of the undisturbed run"


def _command(deployment_name: str, faults: tuple[FaultSpec, ...]) -> str:
    words = ["python -m drills run", f"--deployment deployments/{deployment_name}.yaml"]
    return " ".join([*words, *(f"--fault {fault}" for fault in faults), "--out DIR"])


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text)
    temporary.replace(path)  # one rename: atomic


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _short(digest: str | None) -> str:
    return digest[:16] if digest else "unknown"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"

"""`python -m drills run ...`: train on a local cluster while faults strike, and report what was lost.

`python -m drills matrix` strikes every kind of fault at every moment; `python -m drills bench-trainer` measures
the trainer itself.
"""

import argparse
import math
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it takes seconds to load
    from drills.matrix import Group


def main() -> int:
    """Parse the command line; returns 0 when the drill passed, 1 when it did not, 2 for a user's mistake."""
    arguments = _parser().parse_args()
    # SIGTERM leaves through the same door as Ctrl-C, so that the processes of the drill are ended either way.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return arguments.function(arguments)
    except KeyboardInterrupt:
        print("interrupted: every process of the drill has been ended", file=sys.stderr)
        return 130


def _bench_trainer(arguments: argparse.Namespace) -> int:
    from drills.bench_trainer import run_benchmark

    bounds = run_benchmark(repetitions=arguments.repetitions, restarts=arguments.restarts)
    return 0 if all(bound.kept for bound in bounds) else 1


def _matrix(arguments: argparse.Namespace) -> int:
    from drills.matrix import full_groups, quick_groups

    groups = [*(quick_groups() if arguments.quick else full_groups())]
    if arguments.only:
        groups = [group for group in groups if any(part in group.name for part in arguments.only)]
    if not groups:
        print(f"error: --only {' '.join(arguments.only)}: no group's name holds it", file=sys.stderr)
        return 2
    return _run_groups(arguments, groups)


def _fuzz(arguments: argparse.Namespace) -> int:
    from drills.matrix import random_groups

    return _run_groups(arguments, [*random_groups(arguments.runs, arguments.seed)])


def _run_groups(arguments: argparse.Namespace, groups: "list[Group]") -> int:
    from config.deployment import load
    from drills.matrix import markdown, run_matrix
    from drills.run import DrillError

    try:
        matrix = run_matrix(load(arguments.deployment), groups, out=arguments.out, say=_say)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except DrillError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    failed = sum(not cell.passed for cell in matrix.cells)
    print(markdown(matrix))
    print(f"{len(matrix.cells)} cells, {failed} failed, {matrix.seconds:.0f} s; {arguments.out / 'matrix.json'}")
    return 0 if matrix.passed else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(arguments: argparse.Namespace) -> int:
    # These take seconds to load: imported here, a Ctrl-C meanwhile is answered like any other.
    from config.deployment import load
    from drills.run import DrillError, run_drill
    from k8s.drill import parse_fault

    try:
        report = run_drill(
            load(arguments.deployment),
            faults=tuple(parse_fault(text) for text in arguments.fault),
            out=arguments.out,
            port=arguments.port,
            timeout_seconds=arguments.timeout,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except DrillError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # in the midst of the drill: what stood in the way at its start is a ValueError
        print(f"error: {error.filename or arguments.out}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0 if report["passed"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m drills", description="fault drills on this machine")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="one drill with given faults")
    run.set_defaults(function=_run)
    run.add_argument("--deployment", type=Path, required=True, help="deployment file, e.g. deployments/local.yaml")
    run.add_argument("--out", type=Path, required=True, help="folder for report.json, report.html, logs and events")
    run.add_argument("--fault", action="append", default=[], metavar="KIND@STEP:rankN", help="may be given repeatedly")
    run.add_argument("--port", type=int, help="rendezvous port (default: a free one)")
    run.add_argument(
        "--timeout", type=_seconds, default=300.0, help="seconds after which a run is given up (default 300)"
    )
    matrix = commands.add_parser("matrix", help="every kind of fault at every moment, with every restart layer")
    matrix.set_defaults(function=_matrix)
    matrix.add_argument("--deployment", type=Path, default=Path("deployments/local.yaml"), help="deployment file")
    matrix.add_argument("--out", type=Path, required=True, help="folder for matrix.json, matrix.md and what failed")
    matrix.add_argument("--quick", action="store_true", help="one of each kind of healing, in a few minutes")
    matrix.add_argument("--only", action="append", default=[], metavar="TEXT", help="groups whose name holds it")
    fuzz = commands.add_parser("fuzz", help="random schedules of faults")
    fuzz.set_defaults(function=_fuzz)
    fuzz.add_argument("--deployment", type=Path, default=Path("deployments/local.yaml"), help="deployment file")
    fuzz.add_argument("--out", type=Path, required=True, help="folder for matrix.json, matrix.md and what failed")
    fuzz.add_argument("--runs", type=int, default=200, help="how many schedules (default 200)")
    fuzz.add_argument("--seed", type=int, required=True, help="the same seed gives the same schedules")
    bench = commands.add_parser("bench-trainer", help="what the trainer costs beyond the bare loop, on the CPU")
    bench.set_defaults(function=_bench_trainer)
    bench.add_argument("--repetitions", type=int, default=40, help="steps of each kind that are measured (default 40)")
    bench.add_argument("--restarts", type=int, default=5, help="restarts of a rank that are measured (default 5)")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value


def _interrupt(_signum: int, _frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

"""Tells whether a set of nodes is fit to train.

`python -m training.preflight --expect-gpus N --expect-efa N --mount DIR --results DIR`

One process per node, which meet by MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE (nodes, not GPUs). Each writes one
JSON line to its standard output and to the results directory; rank 0 says the verdict on all of them on standard error.

    0     every check of this node passed, and what all nodes do together
    94    a check failed
    95    could not be run to its end: a node is missing, or nothing can be written
    2     bad arguments
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from training.config import EXIT_OK, EXIT_PREFLIGHT_FAILED, EXIT_PREFLIGHT_NOT_RUN
from training.preflight import checks
from training.preflight.checks import Check, failed, passed, skipped
from training.preflight.gpus import gpus
from training.preflight.peers import Peers, PeersMissingError, Rendezvous

_GB_S = "GB/s"


def main(argv: list[str] | None = None, *, now: Callable[[], float] = time.time) -> int:
    """Check this node, then all of them together; returns the exit code."""
    arguments = parse_arguments(argv)
    try:
        rendezvous = _rendezvous()
        arguments.results.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"preflight: could not run: {error}", file=sys.stderr)
        return EXIT_PREFLIGHT_NOT_RUN
    found = local_checks(arguments, name=str(rendezvous.rank))
    code, reason = EXIT_OK, None
    try:
        found += _joint_checks(arguments, rendezvous, found, now)
    except PeersMissingError as error:
        code, reason = EXIT_PREFLIGHT_NOT_RUN, str(error)
    if any(check.status == "fail" for check in found):
        code = EXIT_PREFLIGHT_FAILED
    try:
        _write(arguments.results, rendezvous, found, code, reason)
    except OSError as error:
        print(f"preflight: {arguments.results} cannot be written ({error.strerror})", file=sys.stderr)
        return EXIT_PREFLIGHT_NOT_RUN
    return code


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """What is expected of a node; 0 expects nothing and skips the check."""
    parser = argparse.ArgumentParser(prog="training.preflight", description="check the nodes before they train")
    parser.add_argument("--expect-gpus", type=_count, required=True)
    parser.add_argument("--expect-efa", type=_count, required=True)
    parser.add_argument("--mount", type=Path, required=True, help="the shared file system")
    parser.add_argument("--results", type=Path, required=True, help="directory for one JSON line per node")
    parser.add_argument("--expect-filesystem", help="type of --mount, for example lustre")
    parser.add_argument("--expect-hugepages-mib", type=_count, default=0)
    parser.add_argument("--min-shm-mib", type=_count, default=0)
    parser.add_argument("--file-mib", type=_count, default=256, help="size of the file written to --mount")
    parser.add_argument("--min-write-mib-s", type=float, default=0.0)
    parser.add_argument("--min-read-mib-s", type=float, default=0.0)
    parser.add_argument("--max-clock-skew-seconds", type=float, default=1.0)
    parser.add_argument("--max-message-mib", type=_count, help="largest all-reduce; 1024 on GPUs, 4 on CPU")
    parser.add_argument("--iterations", type=_count, default=5, help="of each all-reduce")
    parser.add_argument("--min-bus-gb-s", type=float, default=0.0, help="for the largest all-reduce")
    parser.add_argument("--peer-timeout-seconds", type=float, default=600.0, help="for every node to come")
    return parser.parse_args(argv)


def local_checks(arguments: argparse.Namespace, *, name: str) -> list[Check]:
    """What this node finds out alone."""
    gpu_check, driver = gpus(expect=arguments.expect_gpus)
    return [
        gpu_check,
        checks.guarded("efa", lambda: checks.efa_devices(expect=arguments.expect_efa)),
        checks.guarded("memlock", lambda: checks.locked_memory(needed=arguments.expect_efa > 0)),
        checks.guarded("hugepages", lambda: checks.huge_pages(expect_mib=arguments.expect_hugepages_mib)),
        checks.guarded("shm", lambda: checks.shared_memory(Path("/dev/shm"), min_mib=arguments.min_shm_mib)),
        checks.guarded(
            "mount",
            lambda: checks.mount(
                arguments.mount,
                file_mib=arguments.file_mib,
                min_write_mib_s=arguments.min_write_mib_s,
                min_read_mib_s=arguments.min_read_mib_s,
                filesystem=arguments.expect_filesystem,
                name=name,
            ),
        ),
        checks.guarded("versions", lambda: checks.versions(driver=driver)),
    ]


def _joint_checks(
    arguments: argparse.Namespace, rendezvous: Rendezvous, local: list[Check], now: Callable[[], float]
) -> list[Check]:
    """What the nodes find out together. The same branches on every rank: all decide by the same messages."""
    peers = Peers(rendezvous, wait_seconds=arguments.peer_timeout_seconds)
    message = {
        "gpus_ok": local[0].status != "fail",
        "versions": {key: value for key, value in local[-1].values.items() if key != "kernel"},
    }
    told = [json.loads(text) for text in peers.roll_call("start", json.dumps(message))]
    found = [peers.clock(limit_seconds=arguments.max_clock_skew_seconds, now=now), _same_versions(told, peers.rank)]
    unfit = [rank for rank, other in enumerate(told) if not other["gpus_ok"]]
    if unfit:
        found.append(skipped("all-reduce", f"not all GPUs are there on rank {', '.join(map(str, unfit))}"))
    else:
        found.append(_all_reduce(arguments, rendezvous))
    # Who went away meanwhile is named here; the outcome of all goes to rank 0 for the verdict.
    summary = {"host": platform.node(), "failed": [c.as_json() for c in [*local, *found] if c.status == "fail"]}
    outcomes = [json.loads(text) for text in peers.roll_call("end", json.dumps(summary))]
    if peers.rank == 0:
        _print_verdict(outcomes, found[-1])
    return found


def _same_versions(told: list[dict[str, Any]], rank: int) -> Check:
    own, first = told[rank]["versions"], told[0]["versions"]
    different = [f"{key} {own.get(key)} (rank 0: {value})" for key, value in first.items() if own.get(key) != value]
    if different:
        return failed("same-versions", f"{', '.join(different)}; run one image and one AMI on all nodes")
    return passed("same-versions", "as on rank 0")


def _all_reduce(arguments: argparse.Namespace, rendezvous: Rendezvous) -> Check:
    """Run this node's processes of the sweep to their end."""
    per_node = max(1, arguments.expect_gpus)
    world_size = per_node * rendezvous.world_size
    if world_size == 1:
        return skipped("all-reduce", "one rank has nothing to reduce")
    on_gpu = arguments.expect_gpus > 0
    max_mib = arguments.max_message_mib or (1024 if on_gpu else 4)
    processes = [
        subprocess.Popen(
            [
                sys.executable, "-m", "training.preflight.allreduce",
                f"--host={rendezvous.host}", f"--port={rendezvous.port}",
                f"--rank={rendezvous.rank * per_node + local_rank}", f"--world-size={world_size}",
                f"--local-rank={local_rank}", f"--backend={'nccl' if on_gpu else 'gloo'}",
                f"--max-mib={max_mib}", f"--iterations={arguments.iterations}",
                f"--timeout={arguments.peer_timeout_seconds}",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for local_rank in range(per_node)
    ]  # fmt: skip
    outcomes = _outcomes(processes, seconds=2 * arguments.peer_timeout_seconds)
    errors = [f"rank {outcome['rank']}: {outcome['error']}" for outcome in outcomes if "error" in outcome]
    if errors:
        return failed("all-reduce", "; ".join(errors), ranks=world_size)
    rows = outcomes[0]["sweep"]
    values = {"ranks": world_size, "sweep": rows, "matmul": [outcome["matmul"] for outcome in outcomes]}
    best = rows[-1]["bus_gb_s"]
    if best < arguments.min_bus_gb_s:
        detail = f"bus bandwidth {best:g} {_GB_S} at {max_mib} MiB, {arguments.min_bus_gb_s:g} needed; is EFA in use?"
        return failed("all-reduce", detail, **values)
    return passed("all-reduce", f"{world_size} ranks, bus bandwidth {best:g} {_GB_S} at {max_mib} MiB", **values)


def _outcomes(processes: list[subprocess.Popen[str]], *, seconds: float) -> list[dict[str, Any]]:
    """The JSON line of each process; one that hangs is killed, one that says nothing is an error."""
    deadline = time.monotonic() + seconds
    outcomes = []
    for number, process in enumerate(processes):
        try:
            text, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
        outcome: dict[str, Any] = {"rank": number, "error": f"ended with {process.returncode} and no result"}
        with suppress(ValueError, IndexError):
            outcome = json.loads(text.splitlines()[-1])
        outcomes.append(outcome)
    return outcomes


def _write(results: Path, rendezvous: Rendezvous, found: list[Check], code: int, reason: str | None) -> None:
    record = {
        "t": time.time(),
        "rank": rendezvous.rank,
        "world_size": rendezvous.world_size,
        "host": platform.node(),
        "node": os.environ.get("NODE_NAME"),
        "exit_code": code,
        "could_not_run": reason,
        "checks": [check.as_json() for check in found],
    }
    line = json.dumps(record, separators=(",", ":"))
    print(line, flush=True)
    for check in found:
        if check.status != "pass":
            print(f"preflight: rank {rendezvous.rank}: {check.status} {check.name}: {check.detail}", file=sys.stderr)
    verdict = {EXIT_OK: "PASS", EXIT_PREFLIGHT_FAILED: "FAIL"}.get(code, "COULD NOT RUN")
    print(f"preflight: rank {rendezvous.rank}: {verdict}{f': {reason}' if reason else ''}", file=sys.stderr, flush=True)
    path = results / f"preflight-{rendezvous.rank:05d}.jsonl"
    fresh = path.with_suffix(".tmp")
    fresh.write_text(line + "\n")
    fresh.replace(path)


def _print_verdict(outcomes: list[dict[str, Any]], all_reduce: Check) -> None:
    """Rank 0's word on all nodes, for a person."""
    lines = []
    for row in all_reduce.values.get("sweep", []):
        lines.append(f"{row['bytes']:>12} bytes {row['time_us']:>12.1f} us   bus {row['bus_gb_s']:>9.3f} {_GB_S}")
    unfit = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome["failed"]]
    for rank, outcome in unfit:
        reasons = "; ".join(f"{check['name']}: {check['detail']}" for check in outcome["failed"])
        lines.append(f"UNFIT rank {rank} on {outcome['host']}: {reasons}")
    lines.append(f"{len(outcomes) - len(unfit)} of {len(outcomes)} nodes are fit to train")
    print("\n".join(f"preflight: {line}" for line in lines), file=sys.stderr, flush=True)


def _rendezvous() -> Rendezvous:
    """From the environment, which the Job sets."""
    rank, world_size = _integer("RANK"), _integer("WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK {rank} is not below WORLD_SIZE {world_size}; RANK is the pod's completion index")
    return Rendezvous(host=_variable("MASTER_ADDR"), port=_integer("MASTER_PORT"), rank=rank, world_size=world_size)


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ValueError(f"{name} is not set; set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE")
    return value


def _integer(name: str) -> int:
    try:
        return int(_variable(name))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


if __name__ == "__main__":
    sys.exit(main())

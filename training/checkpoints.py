"""Look at checkpoints: python -m training.checkpoints list|verify|show|prune DIRECTORY.

`list` prints one row for each durable checkpoint (DIRECTORY is `checkpoint.directory`) or local copy (DIRECTORY is
`checkpoint.local.directory` on a node); `verify` does the same after reading every byte, and ends with 1 when something
is damaged; `show` prints one durable checkpoint's manifest; `prune` deletes all but the newest and the milestones.
Safe while a run is writing: nothing but `prune` changes anything, and a save in flight is left alone.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.checkpoint import durable
from training.checkpoint.inspect_local import describe_steps


@dataclass(frozen=True)
class Row:
    """One checkpoint in the table; `problem` is None when nothing is wrong as far as was looked."""

    tier: str
    step: int
    size_bytes: int
    age_seconds: float
    problem: str | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0 fine, 1 damaged or refused, 2 a wrong command line."""
    parser = argparse.ArgumentParser(prog="python -m training.checkpoints", description="look at checkpoints")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("list", "a table; sizes are checked"), ("verify", "a table; every byte is read")):
        command = commands.add_parser(name, help=text)
        command.add_argument("directory", type=Path)
        command.add_argument("--json", action="store_true", help="one JSON object per checkpoint")
    show = commands.add_parser("show", help="what one durable checkpoint says of itself")
    show.add_argument("directory", type=Path)
    show.add_argument("--step", type=int, help="left out, the newest")
    prune = commands.add_parser("prune", help="delete old durable checkpoints")
    prune.add_argument("directory", type=Path)
    prune.add_argument("--keep-latest", type=_positive, required=True)
    prune.add_argument("--keep-every-steps", type=_positive)
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _run(options: argparse.Namespace) -> int:
    directory: Path = options.directory
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is no directory; give a run's checkpoint.directory or checkpoint.local.directory"
        )
    match options.command:
        case "show":
            print(json.dumps(_manifest(directory, options.step), indent=1))
        case "prune":
            deleted = durable.prune(
                directory, keep_latest=options.keep_latest, keep_every_steps=options.keep_every_steps
            )
            print(f"deleted {len(deleted)}: {', '.join(map(str, deleted))}" if deleted else "nothing to delete")
        case _:
            rows = rows_of(directory, verify=options.command == "verify")
            _print(rows, as_json=options.json)
            return int(any(row.problem is not None for row in rows))
    return 0


def _manifest(directory: Path, step: int | None) -> dict[str, Any]:
    steps = durable.committed_steps(directory)
    if not steps or (step is not None and step not in steps):
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise ValueError(f"{directory} holds {wanted}; it has: {', '.join(map(str, steps)) or 'none'}")
    return durable.read_manifest(durable.checkpoint_path(directory, steps[-1] if step is None else step))


def rows_of(directory: Path, *, verify: bool) -> list[Row]:
    """Every durable checkpoint and local copy under `directory`, by tier and step; with `verify` every byte is read."""
    now = time.time()
    rows = [
        _durable_row(durable.checkpoint_path(directory, step), step, verify=verify, now=now)
        for step in durable.committed_steps(directory)
    ]
    for path in sorted(directory.glob("damaged-step-*")):
        rows.append(
            Row("durable", int(path.name[-8:]), _size(path), now - path.stat().st_mtime, "set aside: it was damaged")
        )
    for local in describe_steps(directory, verify=verify):
        rows.append(Row("local", local.step, local.size_bytes, local.age_seconds, local.problem))
    return rows


def _durable_row(path: Path, step: int, *, verify: bool, now: float) -> Row:
    try:
        manifest = durable.read_manifest(path)
        lines = durable.foreign_files(path, manifest)
        lines += durable.damage(path, manifest) if verify else durable.wrong_sizes(path, manifest)
    except durable.DamagedCheckpointError as error:
        lines = [str(error)]
    return Row("durable", step, _size(path), now - path.stat().st_mtime, "; ".join(lines) or None)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())


def _print(rows: list[Row], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps(vars(row)))
        return
    print(f"{'tier':8} {'step':>10} {'size':>12} {'age':>10}  valid")
    for row in rows:
        size, age = f"{row.size_bytes / 2**20:.1f} MiB", f"{row.age_seconds / 60:.0f} min"
        print(f"{row.tier:8} {row.step:>10} {size:>12} {age:>10}  {'yes' if row.problem is None else row.problem}")


if __name__ == "__main__":
    sys.exit(main())

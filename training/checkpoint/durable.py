"""Durable checkpoints on shared storage, as files: committed by one rename, verified by checksum.

    <directory>/step-00000040/            a committed checkpoint: DCP files, .metadata and manifest.json
    <directory>/damaged-step-...          a committed checkpoint that failed its verification; kept for a person to see
    <directory>/.writing-step-...         a save in flight or cut off; never read, removed at the next restore
    <directory>/latest_step.txt           the tracker: the last committed step, for NVRx's progress check
    <directory>/run_id.txt                written at a fresh start; local copies that name another run are void

Nothing here is collective: one rank does it and tells the others.
"""

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from training.checkpoint.writer import FileSum, StagedWriter, Written, sum_file

MANIFEST = "manifest.json"
METADATA = ".metadata"
TRACKER = "latest_step.txt"
RUN_ID = "run_id.txt"
_STEP = re.compile(r"step-(\d{8,})")
_WRITING = ".writing-"
_DELETING = ".deleting-"
_VERIFY_THREADS = 4


class DamagedCheckpointError(ValueError):
    """A committed checkpoint is not as it was written; the text names the files."""


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where a step's committed checkpoint lies."""
    return directory / f"step-{step:08d}"


def writing_path(directory: Path, step: int, attempt: str) -> Path:
    """Where a step is written before its commit.

    The attempt is in the name: files of an earlier attempt at this step, or of a writer that outlived its trainer on
    another node, can never end up in this one.
    """
    return directory / f"{_WRITING}step-{step:08d}-{attempt}"


def committed_steps(directory: Path) -> list[int]:
    """Steps with a committed checkpoint, ascending.

    A directory without manifest and metadata does not count, nor one with another name, such as a person's copy.
    """
    return sorted(
        int(match[1])
        for path in directory.glob("step-*")
        if (match := _STEP.fullmatch(path.name)) and (path / MANIFEST).is_file() and (path / METADATA).is_file()
    )


def commit(
    directory: Path,
    written_to: Path,
    *,
    step: int,
    manifest: dict[str, Any],
    metadata: Metadata,
    written: list[Written],
    attempt: str,
) -> int:
    """Make the files in `written_to`, of every rank, the checkpoint of `step`; returns its size in bytes.

    The commit is the rename: before it the previous checkpoint is untouched, after it this one is whole.

    Raises:
        OSError: storage refused; nothing is committed.
    """
    StagedWriter(written_to).finish(metadata, [rank.results for rank in written])
    sums = {name: one for rank in written for name, one in rank.sums.items()}
    sums[METADATA] = sum_file(written_to / METADATA)
    files = {name: asdict(one) for name, one in sorted(sums.items())}
    write_durably(written_to / MANIFEST, json.dumps({"step": step, **manifest, "files": files}, indent=1))
    target = checkpoint_path(directory, step)
    if target.exists():  # re-saved after a rollback past it: the old one must not be mixed with the new
        shutil.rmtree(_hide(target, attempt), ignore_errors=True)
    written_to.rename(target)
    _sync_directory(directory)
    write_durably(directory / TRACKER, f"{step}\n")
    return sum(one.size for one in sums.values())


def prune(directory: Path, *, keep_latest: int, keep_every_steps: int | None, attempt: str = "pruned") -> list[int]:
    """Delete all but the newest `keep_latest` checkpoints and those at multiples of `keep_every_steps`; the steps."""
    old = committed_steps(directory)[:-keep_latest]
    doomed = [step for step in old if keep_every_steps is None or step % keep_every_steps]
    for step in doomed:
        shutil.rmtree(_hide(checkpoint_path(directory, step), attempt), ignore_errors=True)
    return doomed


def _hide(path: Path, attempt: str) -> Path:
    """Take a checkpoint out of sight at once; deleting its files takes longer and may be cut off."""
    hidden = path.with_name(f"{_DELETING}{path.name}-{attempt}")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    return hidden


def set_aside(directory: Path, step: int) -> Path:
    """Rename a damaged checkpoint, so that nothing takes it for a good one again; returns its new path."""
    path = checkpoint_path(directory, step)
    target = path.with_name(f"damaged-{path.name}")
    if target.exists():
        shutil.rmtree(target)
    return path.rename(target)


def clear_leftovers(directory: Path, *, keep: Path | None = None) -> None:
    """Remove what cut-off saves and deletions left, all but the save in flight in `keep`."""
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in (*directory.glob(f"{_WRITING}*"), *directory.glob(f"{_DELETING}*")):
        if leftover != keep:
            shutil.rmtree(leftover, ignore_errors=True)


def tracked_step(directory: Path) -> int | None:
    """The step that the tracker names; None without tracker.

    Raises:
        ValueError: the tracker is no number.
    """
    tracker = directory / TRACKER
    if not tracker.exists():
        return None
    text = tracker.read_text().strip()
    if not text.isdecimal():
        raise ValueError(f"{tracker} holds {text!r}, not a step; write the number of the newest step-* directory there")
    return int(text)


def run_id(directory: Path, *, fresh: bool) -> str:
    """What tells this run's copies on a node's disk from those of a run that was started over."""
    path = directory / RUN_ID
    if fresh or not path.exists():
        write_durably(path, uuid.uuid4().hex[:12] + "\n")
    return path.read_text().strip()


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`, its metadata file verified, for that is unpickled first.

    Raises:
        DamagedCheckpointError: manifest or metadata is not as written.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        metadata_sum = FileSum(**manifest["files"][METADATA])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{path / MANIFEST} is damaged ({type(error).__name__})") from error
    problem = _damage_of(path / METADATA, metadata_sum)
    if problem is not None:
        raise DamagedCheckpointError(problem)
    return manifest


def damage(path: Path, manifest: dict[str, Any], names: Iterable[str] | None = None) -> list[str]:
    """What is wrong with these files (all of the manifest's when None) of the checkpoint at `path`: one line each."""
    files: dict[str, dict[str, Any]] = manifest["files"]
    chosen = sorted(files if names is None else names)
    with ThreadPoolExecutor(_VERIFY_THREADS) as pool:
        lines = pool.map(lambda name: _damage_of(path / name, FileSum(**files[name])), chosen)
    return [line for line in lines if line is not None]


def wrong_sizes(path: Path, manifest: dict[str, Any]) -> list[str]:
    """Files of the checkpoint at `path` that are missing or of another size: one line each, without reading them."""
    files: dict[str, dict[str, Any]] = manifest["files"]
    lines = (_damage_of(path / name, FileSum(**files[name]), read=False) for name in sorted(files))
    return [line for line in lines if line is not None]


def _damage_of(path: Path, expected: FileSum, *, read: bool = True) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"{path} is damaged: it has {size} bytes, {expected.size} were written"
        sound = not read or sum_file(path) == expected
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return None if sound else f"{path} is damaged: its checksum is not the one that was written"


def foreign_files(path: Path, manifest: dict[str, Any]) -> list[str]:
    """Files in the checkpoint at `path` that its manifest does not list: one line each."""
    known = {MANIFEST, *manifest["files"]}
    return [f"{file} does not belong to the checkpoint" for file in sorted(path.iterdir()) if file.name not in known]


def write_durably(path: Path, text: str) -> None:
    """Write a small file so that a reader or a crash sees all of it or nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

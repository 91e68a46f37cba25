"""What local checkpoints lie in a node's directory, and which are good: for a person, with no process group."""

import time
from dataclasses import dataclass
from pathlib import Path

from training.checkpoint import local_file
from training.checkpoint.local_file import DIRTY, LocalCheckpointError


@dataclass(frozen=True)
class LocalEntry:
    """One rank's file of one save. `holder` is the rank whose directory it is in; `problem` says why it is no good."""

    path: Path
    session: str
    holder: int
    step: int
    rank: int
    save_id: str
    world_size: int | None  # None: the file does not say
    size_bytes: int
    age_seconds: float
    problem: str | None

    @property
    def is_copy(self) -> bool:
        """Whether the file is kept for another rank."""
        return self.rank != self.holder


@dataclass(frozen=True)
class LocalStep:
    """One save, as far as it lies in the directory. `problem` is None when every rank's shards are there and good.

    A node's directory alone has its own ranks and those it keeps copies for; the rest is on other nodes.
    """

    session: str
    step: int
    save_id: str
    entries: tuple[LocalEntry, ...]
    size_bytes: int
    age_seconds: float
    problem: str | None


def describe(directory: Path, *, verify: bool = False) -> list[LocalEntry]:
    """Every local checkpoint file under `directory`, by session, step, rank and holder.

    Header and size of each are checked; with `verify` also the checksum, which reads all of it.
    """
    now = time.time()
    entries = [
        entry
        for path in directory.glob("*/*/step-*.rank-*")
        if (entry := _entry(path, verify=verify, now=now)) is not None
    ]
    return sorted(entries, key=lambda entry: (entry.session, entry.step, entry.save_id, entry.rank, entry.holder))


def describe_steps(directory: Path, *, verify: bool = False) -> list[LocalStep]:
    """The saves under `directory`, by session and step, each complete or with the reason why not."""
    saves: dict[tuple[str, int, str], list[LocalEntry]] = {}
    for entry in describe(directory, verify=verify):
        saves.setdefault((entry.session, entry.step, entry.save_id), []).append(entry)
    return [
        LocalStep(
            *key,
            entries=tuple(entries),
            size_bytes=sum(entry.size_bytes for entry in entries),
            age_seconds=min(entry.age_seconds for entry in entries),
            problem=_incomplete(entries),
        )
        for key, entries in saves.items()
    ]


def _entry(path: Path, *, verify: bool, now: float) -> LocalEntry | None:
    named = local_file.parse_name(path.name.removesuffix(DIRTY))
    if named is None or not path.parent.name.isdecimal():
        return None
    try:
        status = path.stat()
    except FileNotFoundError:  # a run that is going on has just removed it
        return None
    step, save_id, rank = named
    session, problem, world_size = path.parent.parent.name, None, None
    try:
        header = local_file.verify(path) if verify else local_file.read_header(path)
        world_size = header.world_size
        if (header.session, header.step, header.save_id, header.rank) != (session, step, save_id, rank):
            problem = (
                f"{path} is of session {header.session!r}, step {header.step}, rank {header.rank}, "
                f"not what its place and name say"
            )
    except LocalCheckpointError as error:
        problem = str(error)
    if path.name.endswith(DIRTY):
        problem = f"{path} is still being written, or was cut off"
    return LocalEntry(
        path=path,
        session=session,
        holder=int(path.parent.name),
        step=step,
        rank=rank,
        save_id=save_id,
        world_size=world_size,
        size_bytes=status.st_size,
        age_seconds=max(0.0, now - status.st_mtime),
        problem=problem,
    )


def _incomplete(entries: list[LocalEntry]) -> str | None:
    good = {entry.rank for entry in entries if entry.problem is None}
    world_size = max((entry.world_size or 0 for entry in entries), default=0)
    missing = sorted(set(range(world_size)) - good)
    problems = [entry.problem for entry in entries if entry.problem is not None and entry.rank not in good]
    if missing or not good:
        ranks = f"no good file here of rank {', '.join(map(str, missing))} of {world_size}" if world_size else ""
        return "; ".join(part for part in (ranks, *problems) if part)
    return None

"""Goodput of one run from its event log: where the time went, what the faults cost, what was trained on."""

import struct
from collections import Counter
from dataclasses import dataclass, field, fields

from drills.intervals import KINDS, Event, Interval, partition
from drills.recovery import FaultOutcome, fault_outcomes
from training.config import FaultSpec

SamplesLedger = dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class Parts:
    """Seconds per kind of time; their sum is the wall time. The kinds are told apart in `intervals.partition`."""

    startup_s: float
    useful_s: float
    replayed_s: float
    checkpoint_stall_s: float
    detect_s: float
    restart_s: float
    load_s: float
    unaccounted_s: float


@dataclass(frozen=True)
class Checkpoint:
    """One committed durable checkpoint; Unix seconds."""

    step: int
    committed_t: float
    size_bytes: int


@dataclass(frozen=True)
class LossPoint:
    """One execution of a step on the lowest rank."""

    step: int
    loss: float
    replayed: bool


@dataclass(frozen=True)
class RunAnalysis:
    """What one run's event log says. `parts` is the mean over ranks; every rank's own wall time is the same `wall_s`.

    `steps` is the highest step completed; `params_sha256` is None unless all ranks agree on one. A replay mismatch is a
    step that some rank executed again on other samples than the first time. `replayed_losses_equal` is None when no
    step was executed again, else whether every repetition gave the first one's loss bit for bit.
    """

    job_start: float
    wall_s: float
    parts: Parts
    unaccounted_fraction: float
    rank_parts: dict[int, Parts]
    intervals: dict[int, tuple[Interval, ...]]
    faults: tuple[FaultOutcome, ...]
    checkpoints: tuple[Checkpoint, ...]
    losses: tuple[LossPoint, ...]
    steps: int
    final_loss: float | None
    params_sha256: str | None
    restarts: int
    replay_mismatches: int
    replayed_losses_equal: bool | None
    samples: SamplesLedger = field(repr=False)
    problems: tuple[str, ...]

    @property
    def goodput_fraction(self) -> float:
        """Share of the wall time in which steps ran for the first time."""
        return self.parts.useful_s / self.wall_s


@dataclass(frozen=True)
class SamplesDifference:
    """Run against reference: sample ids with multiplicity, and the steps whose samples differ."""

    skipped: tuple[int, ...]
    repeated: tuple[int, ...]
    differing_steps: tuple[int, ...]


def analyse(events: list[Event], *, job_start: float, faults: tuple[FaultSpec, ...] = ()) -> RunAnalysis:
    """Analyse one run.

    The wall time lasts from `job_start` to the last `complete` event, or to the last event where no rank completed.

    Args:
        events: all ranks', in the order of time, as `training.events.read_events` gives them.
        job_start: when the first process was started, Unix seconds.
        faults: the configured ones; those that the log lacks are reported as not fired.

    Raises:
        ValueError: the log is empty.
    """
    if not events:
        raise ValueError("the run left no events; its processes ended before they could write any, see its logs")
    by_rank = _by_rank(events)
    completes = {rank: own[-1] for rank, own in _of_kind(by_rank, "complete").items() if own}
    job_end = max((event["t"] for event in completes.values()), default=events[-1]["t"])
    wall = job_end - job_start
    strikes = [event["t"] for event in events if event["event"] == "fault"]
    intervals = {rank: partition(own, strikes, job_start=job_start, job_end=job_end) for rank, own in by_rank.items()}
    rank_parts = {rank: _parts(own, wall) for rank, own in intervals.items()}
    parts = _mean(list(rank_parts.values()), wall)
    outcomes = fault_outcomes(by_rank, faults)
    hashes = {event["params_sha256"] for event in completes.values()}
    mismatches, losses_equal = _replays(by_rank)
    return RunAnalysis(
        job_start=job_start,
        wall_s=wall,
        parts=parts,
        unaccounted_fraction=parts.unaccounted_s / wall,
        rank_parts=rank_parts,
        intervals=intervals,
        faults=outcomes,
        checkpoints=tuple(
            Checkpoint(event["step"], event["t"], event["size_bytes"])
            for event in events
            if event["event"] == "checkpoint_committed"
        ),
        losses=_losses(by_rank[min(by_rank)]),
        steps=max((event["step"] for event in events if event["event"] in ("step", "complete")), default=0),
        final_loss=completes[min(completes)]["loss"] if completes else None,
        params_sha256=hashes.pop() if len(hashes) == 1 and len(completes) == len(by_rank) else None,
        restarts=_restarts(by_rank),
        replay_mismatches=mismatches,
        replayed_losses_equal=losses_equal,
        samples=samples_ledger(events),
        problems=_problems(by_rank, completes, outcomes),
    )


def samples_ledger(events: list[Event]) -> SamplesLedger:
    """Per step, the ids of the samples whose gradients are in the final model: the last execution's, in rank order."""
    last = {(event["step"], event["rank"]): event["sample_ids"] for event in events if event["event"] == "step"}
    ledger: dict[int, list[int]] = {}
    for (step, _), sample_ids in sorted(last.items()):
        ledger.setdefault(step, []).extend(sample_ids)
    return {step: tuple(sample_ids) for step, sample_ids in ledger.items()}


def compare_samples(run: SamplesLedger, reference: SamplesLedger) -> SamplesDifference:
    """What the run trained on less often (skipped) or more often (repeated) than the reference."""
    ran = Counter(sample_id for sample_ids in run.values() for sample_id in sample_ids)
    expected = Counter(sample_id for sample_ids in reference.values() for sample_id in sample_ids)
    return SamplesDifference(
        skipped=tuple(sorted((expected - ran).elements())),
        repeated=tuple(sorted((ran - expected).elements())),
        differing_steps=tuple(step for step in sorted({*run, *reference}) if run.get(step) != reference.get(step)),
    )


def _by_rank(events: list[Event]) -> dict[int, list[Event]]:
    """Events of every rank of the world, also of one that never wrote any."""
    world_size = max((event["world_size"] for event in events if event["event"] == "process_start"), default=0)
    by_rank: dict[int, list[Event]] = {
        rank: [] for rank in sorted({*range(world_size), *(event["rank"] for event in events)})
    }
    for event in events:
        by_rank[event["rank"]].append(event)
    return by_rank


def _of_kind(by_rank: dict[int, list[Event]], kind: str) -> dict[int, list[Event]]:
    return {rank: [event for event in events if event["event"] == kind] for rank, events in by_rank.items()}


def _parts(intervals: tuple[Interval, ...], wall: float) -> Parts:
    seconds = {f"{kind}_s": 0.0 for kind in KINDS}
    for interval in intervals:
        seconds[f"{interval.kind}_s"] += interval.end - interval.start
    return _balanced(seconds, wall)


def _mean(ranks: list[Parts], wall: float) -> Parts:
    names = [one.name for one in fields(Parts)]
    return _balanced({name: sum(getattr(parts, name) for parts in ranks) / len(ranks) for name in names}, wall)


def _balanced(seconds: dict[str, float], wall: float) -> Parts:
    """Let the unaccounted part take up the rounding of the sums."""
    named = sum(value for name, value in seconds.items() if name != "unaccounted_s")
    # Never below zero: a run without gaps would otherwise end with a rounding error such as -1e-15 s.
    return Parts(**seconds | {"unaccounted_s": max(0.0, wall - named)})


def _losses(events: list[Event]) -> tuple[LossPoint, ...]:
    seen: set[int] = set()
    points = []
    for event in events:
        if event["event"] == "step":
            points.append(LossPoint(event["step"], event["loss"], event["step"] in seen))
            seen.add(event["step"])
    return tuple(points)


def _replays(by_rank: dict[int, list[Event]]) -> tuple[int, bool | None]:
    """Steps executed again on other samples, and whether all losses of repetitions equal the first's in every bit."""
    mismatched: set[int] = set()
    equal: bool | None = None
    for events in _of_kind(by_rank, "step").values():
        first: dict[int, Event] = {}
        for event in events:
            before = first.setdefault(event["step"], event)
            if before is event:
                continue
            if before["sample_ids"] != event["sample_ids"]:
                mismatched.add(event["step"])
            equal = equal is not False and _bits(before["loss"]) == _bits(event["loss"])
    return len(mismatched), equal


def _bits(value: float) -> bytes:
    return struct.pack("<d", value)  # so that NaN equals itself and 0.0 differs from -0.0


def _restarts(by_rank: dict[int, list[Event]]) -> int:
    """Times the training function was entered after the first, on the rank that entered it most."""
    return max(0, *(len(entries) - 1 for entries in _of_kind(by_rank, "enter").values()))


def _problems(
    by_rank: dict[int, list[Event]], completes: dict[int, Event], outcomes: tuple[FaultOutcome, ...]
) -> tuple[str, ...]:
    problems = [f"rank {rank} never completed" for rank in by_rank if rank not in completes]
    hashes = {event["params_sha256"] for event in completes.values()}
    if len(hashes) > 1:
        problems.append("the ranks' final parameters differ from each other")
    if None in hashes:
        problems.append("no parameter hash was logged; set train.deterministic")
    for outcome in outcomes:
        name = f"fault {outcome.kind} on rank {outcome.rank} in step {outcome.step}"
        if not outcome.fired:
            problems.append(f"{name} did not fire")
        elif outcome.layer is None:
            problems.append(f"{name}: training never recovered")
    return tuple(problems)

"""Where one rank's wall time went: a gapless row of intervals, each of one kind, from the event log alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

Event = dict[str, Any]
Kind = Literal["startup", "useful", "replayed", "checkpoint_stall", "detect", "restart", "load", "unaccounted"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# Wall clocks are slewed while a run lasts: work intervals of one rank may overlap by this much, in seconds.
_CLOCK_TOLERANCE_S = 0.05


@dataclass(frozen=True)
class Interval:
    """A stretch of one rank's time, Unix seconds; `step` where it belongs to one optimizer step."""

    kind: Kind
    start: float
    end: float
    step: int | None = None


@dataclass(frozen=True)
class _Mark:
    """Something that happened at `start`: work up to `end`, or a change of what the rank is busy with."""

    start: float
    change: Literal["work", "strike", "know", "load", "loaded", "done"]
    end: float = 0.0
    kind: Kind = "unaccounted"
    step: int | None = None


def partition(events: list[Event], strikes: list[float], *, job_start: float, job_end: float) -> tuple[Interval, ...]:
    """Split [job_start, job_end] of one rank, without gap or overlap.

    Steps and stalls are what the log says. The time between them is named by what the rank was last told:

    - startup until its first step, load between `restore_start` and `restored`;
    - detect from any rank's strike until this one knows of it (see `knows_at`): a fault stops all ranks;
    - restart from there to the next step, without load;
    - replayed ("lost work"): a step this rank had completed before, and the step in flight when a fault struck, which
      never gets a `step` event: the time from the last thing done to the strike;
    - unaccounted: the rest, among it the time before an interruption that no `fault` event explains.

    Args:
        events: this rank's, in the order of time.
        strikes: when any rank's faults struck, Unix seconds.
        job_start: when the first process was started, Unix seconds.
        job_end: when the last rank was complete, Unix seconds.
    """
    walk = _Walk(job_start, job_end)
    for mark in sorted([*_marks(events), *(_Mark(t, "strike") for t in strikes)], key=lambda mark: mark.start):
        walk.take(mark)
    pieces = walk.finish()
    edges = [job_start, *(edge for piece in pieces for edge in (piece.start, piece.end)), job_end]
    assert edges[::2] == edges[1::2], "intervals of one rank must follow each other without gap or overlap"
    return pieces


class _Walk:
    """Goes through the marks in order; the time up to each goes to the state the rank was in."""

    def __init__(self, job_start: float, job_end: float) -> None:
        self._job_end = job_end
        self._cursor = job_start
        self._work_end = job_start
        self._state: Kind = "startup"
        self._before_load: Kind = "startup"
        self._struck = False  # and this rank does not know it yet
        self._pieces: list[Interval] = []

    def take(self, mark: _Mark) -> None:
        step_in_flight_lost = mark.change == "strike" and self._state == "unaccounted"
        self._fill("replayed" if step_in_flight_lost else self._state, mark.start)
        match mark.change:
            case "work":
                assert mark.start >= self._work_end - _CLOCK_TOLERANCE_S, f"work of one rank overlaps: {mark}"
                self._work_end = mark.end
                self._fill(mark.kind, mark.end, mark.step)
                # A stall may still end on a survivor after the strike; a step that begins after it cannot.
                self._struck = self._struck and mark.kind == "checkpoint_stall"
                self._state = "detect" if self._struck else "unaccounted"
            case "strike":
                self._state, self._struck = "detect", True
            case "know":
                self._state, self._struck = "restart", False
            case "load":
                self._before_load = self._state if self._state in ("startup", "restart") else "restart"
                self._state = "load"
            case "loaded":
                self._state = self._before_load
            case "done":
                self._state = "unaccounted"

    def finish(self) -> tuple[Interval, ...]:
        self._fill(self._state, self._job_end)
        return tuple(self._pieces)

    def _fill(self, kind: Kind, until: float, step: int | None = None) -> None:
        end = min(max(until, self._cursor), self._job_end)
        if end > self._cursor:
            self._pieces.append(Interval(kind, self._cursor, end, step))
            self._cursor = end


def _marks(events: list[Event]) -> Iterator[_Mark]:
    completed: set[int] = set()
    knowing = {id(event) for event, _ in _knowing(events)}
    for event in events:
        match event["event"]:
            case "step":
                kind = "replayed" if event["step"] in completed else "useful"
                completed.add(event["step"])
                yield _Mark(event["started_t"], "work", event["t"], kind, event["step"])
            case "stall":
                yield _Mark(event["started_t"], "work", event["t"], "checkpoint_stall", event["step"])
            case "restore_start":
                yield _Mark(event["t"], "load")
            case "restored":
                yield _Mark(event["t"], "loaded")
            case "complete":
                yield _Mark(event["t"], "done")
        if id(event) in knowing:
            yield _Mark(_known_t(event), "know")


def knows_at(events: list[Event], strike: float) -> float | None:
    """When this rank first knew of a fault that struck at `strike`, None if it never did; Unix seconds.

    That is its `abort` when its process then enters the training function again; else that re-entry; else the creation
    of the process that replaced it. An abort in a process that never comes back is a vain attempt, part of detection.
    """
    return min((t for _, t in _knowing(events) if t >= strike), default=None)


def _knowing(events: list[Event]) -> list[tuple[Event, float]]:
    entered = {(event["pid"], event["iteration"]) for event in events if event["event"] == "enter"}
    starts = [event for event in events if event["event"] == "process_start"]
    aborts = [
        event for event in events if event["event"] == "abort" and (event["pid"], event["iteration"] + 1) in entered
    ]
    entries = [event for event in events if event["event"] == "enter" and event["iteration"] > 0]
    return [(event, _known_t(event)) for event in (*starts[1:], *aborts, *entries)]


def _known_t(event: Event) -> float:
    return event["created_t"] if event["event"] == "process_start" else event["t"]

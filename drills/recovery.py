"""What each fault did: whether it struck, which restart layer healed it, how long that took and what was lost."""

import functools
import itertools
from dataclasses import asdict, dataclass
from typing import Any, Literal

from drills.intervals import Event, knows_at
from training.config_faults import CLUSTER_KINDS, START_MOMENTS, FaultSpec

# "none": training went on without a restart.
Layer = Literal["none", "in_process", "in_job", "job"]


@dataclass(frozen=True)
class Phases:
    """The time to recover of the slowest rank, in parts, seconds."""

    detect_s: float
    restart_s: float
    load_s: float
    first_step_s: float


@dataclass(frozen=True)
class FaultOutcome:
    """One fault, configured or found in the log; what is unknown or never happened is None.

    `time_to_recover_s` runs from the strike to the end of the first step that all ranks have completed after it (to the
    end of the run where no step is left), its `phases` are those of the rank that completed it last. `steps_lost`
    counts the steps completed before the strike that the checkpoint restored for that step did not hold.
    """

    kind: str
    rank: int
    step: int
    moment: str
    fired: bool
    strike_t: float | None = None
    recovered_t: float | None = None
    layer: Layer | None = None
    time_to_recover_s: float | None = None
    steps_lost: int | None = None
    phases: Phases | None = None

    def as_json(self) -> dict[str, Any]:
        """The report's view: no absolute times; `spec` as the command line takes it."""
        spec = FaultSpec.model_validate({key: getattr(self, key) for key in ("kind", "rank", "step", "moment")})
        kept = {key: value for key, value in asdict(self).items() if key not in ("strike_t", "recovered_t")}
        return {"spec": str(spec), **kept}


def where(moment: str, step: int) -> str:
    """Where a fault struck, in words."""
    if moment in START_MOMENTS:
        return f"at {moment} of its start {step + 1}"
    return f"in step {step}, {moment}"


@dataclass(frozen=True)
class _Recovery:
    """How training came back after a strike: the slowest rank's way there, Unix seconds."""

    rank: int
    restore_start: float
    restored: float
    restored_step: int
    first_step_end: float


def fault_outcomes(by_rank: dict[int, list[Event]], faults: tuple[FaultSpec, ...]) -> tuple[FaultOutcome, ...]:
    """Outcomes in the order of striking; those that never struck come last."""
    strikes = sorted(
        (event for events in by_rank.values() for event in events if event["event"] == "fault"),
        key=lambda event: event["t"],
    )
    waiting: list[tuple[str, int, int, str]] = [(fault.kind, fault.rank, fault.step, fault.moment) for fault in faults]
    for event in strikes:
        if _identity(event) in waiting:
            waiting.remove(_identity(event))
    struck = [_outcome(event, strikes, by_rank) for event in strikes]
    return (*struck, *(FaultOutcome(*one, fired=False) for one in waiting))


def _identity(event: Event) -> tuple[str, int, int, str]:
    return event["kind"], event["rank"], event["step"], event["moment"]


def _outcome(fault: Event, strikes: list[Event], by_rank: dict[int, list[Event]]) -> FaultOutcome:
    strike, own = fault["t"], by_rank[fault["rank"]]
    struck = functools.partial(FaultOutcome, *_identity(fault), fired=True, strike_t=strike)
    if _went_on(fault, own):
        return struck(recovered_t=strike, layer="none", time_to_recover_s=0.0, steps_lost=0)
    recovery = _recovery(strike, by_rank)
    if recovery is None:
        return struck()
    knows = knows_at(by_rank[recovery.rank], strike)
    # Restored without a trace of a restart cannot be in a log that the trainer wrote.
    assert knows is not None, fault
    # Steps are collective: when the struck rank entered its step, no rank had completed more than it had.
    position = [event["step"] for event in own if event["event"] in ("step", "restored") and event["t"] <= strike]
    return struck(
        recovered_t=recovery.first_step_end,
        layer=_layer(strike, [event["t"] for event in strikes], recovery.first_step_end, by_rank),
        time_to_recover_s=recovery.first_step_end - strike,
        steps_lost=max(0, (position[-1] if position else 0) - recovery.restored_step),
        phases=Phases(
            detect_s=knows - strike,
            restart_s=recovery.restore_start - knows,
            load_s=recovery.restored - recovery.restore_start,
            first_step_s=recovery.first_step_end - recovery.restored,
        ),
    )


def _went_on(fault: Event, own: list[Event]) -> bool:
    """Whether the struck process came to the end of its attempt's next step all the same."""
    if fault["kind"] in CLUSTER_KINDS:  # it strikes a moment later, from outside
        return False
    done = ("step", "complete")
    later = (event["event"] for event in own if event["t"] > fault["t"])
    same_attempt = itertools.takewhile(lambda event: event not in ("abort", "enter", "process_start"), later)
    return any(event in done for event in same_attempt)


def _recovery(strike: float, by_rank: dict[int, list[Event]]) -> _Recovery | None:
    """The first step that all ranks completed after restoring after `strike`, or None."""
    ways = {rank: _first_steps(events, strike) for rank, events in by_rank.items()}
    common = set.intersection(*(set(way) for way in ways.values()))
    if not common:
        return None
    slowest = [max((way[step] for way in ways.values()), key=lambda one: one.first_step_end) for step in common]
    return min(slowest, key=lambda one: one.first_step_end)


def _first_steps(events: list[Event], strike: float) -> dict[int, _Recovery]:
    """Per step, how this rank first came to complete it after restoring after `strike`."""
    found: dict[int, _Recovery] = {}
    start = restored = None
    for event in events:
        if event["t"] < strike:
            continue
        match event["event"]:
            case "restore_start":
                start, restored = event, None
            case "restored":
                restored = event
            case "step" | "complete" if start is not None and restored is not None:
                way = _Recovery(event["rank"], start["t"], restored["t"], restored["step"], event["t"])
                found.setdefault(event["step"], way)
    return found


def _layer(strike: float, strikes: list[float], recovered: float, by_rank: dict[int, list[Event]]) -> Layer:
    """The outermost layer that acted for this fault: up to the next strike after the first reaction, or to the end."""
    first = min(t for t in (knows_at(events, strike) for events in by_rank.values()) if t is not None)
    until = min((t for t in strikes if first < t < recovered), default=recovered)
    cycles = {
        event["cycle"]
        for events in by_rank.values()
        for event in events
        if event["event"] == "process_start" and strike <= event["created_t"] < until
    }
    if not cycles:
        return "in_process"
    return "job" if 0 in cycles else "in_job"  # a launcher counts its cycles from 0, a new job has new launchers

"""The report's pictures, as inline SVG: timeline, loss curve, bars of time. Colours are the style sheet's classes."""

import math
from dataclasses import dataclass
from itertools import pairwise

from drills.goodput import RunAnalysis
from drills.intervals import KINDS, Interval, Kind
from drills.markup import Markup, element, join
from drills.recovery import FaultOutcome, where

WIDTH = 1040.0
_LEFT, _RIGHT = 92.0, 14.0
_GRID_TOP = 6.0
_LABEL_ROW = 22.0
_CHARACTER = 6.9  # mean width of one at 12 px, generous

NAMES: dict[Kind, str] = {
    "startup": "startup",
    "useful": "useful steps",
    "replayed": "replayed steps",
    "checkpoint_stall": "checkpoint stall",
    "detect": "detecting",
    "restart": "restarting",
    "load": "loading checkpoint",
    "unaccounted": "unaccounted",
}


@dataclass(frozen=True)
class Scale:
    """Values to horizontal or vertical places, linear."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The place of `value`."""
        return self.start + (value - self.low) / ((self.high - self.low) or 1.0) * (self.end - self.start)


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round numbers from `low` to `high`, about `wanted` of them."""
    rough = (high - low) / wanted or 1.0
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough * 0.999)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def timeline(run: RunAnalysis, reference: RunAnalysis) -> Markup:
    """What every rank did, of both runs, on one time axis that starts with each job's first process."""
    scale = Scale(0.0, max(run.wall_s, reference.wall_s), _LEFT, WIDTH - _RIGHT)
    labels, lanes_top = _fault_labels(run, scale)
    run_lanes, run_bottom = _lanes(run, scale, lanes_top, "Run with faults")
    marks, marks_bottom = _recoveries(run, scale, run_bottom)
    reference_lanes, bottom = _lanes(reference, scale, marks_bottom + 26, "Reference, undisturbed")
    lines = [
        element("line", class_="fault-line", x1=x, x2=x, y1=lanes_top - 6, y2=run_bottom)
        for x in (scale(fault.strike_t - run.job_start) for fault in run.faults if fault.strike_t is not None)
    ]
    body = join(_time_axis(scale, _GRID_TOP, bottom + 6), run_lanes, reference_lanes, *lines, labels, marks)
    return _svg(bottom + 44, "Timeline of every rank of the run with faults and of the reference", body)


def _svg(height: float, title: str, body: Markup) -> Markup:
    stripes = element(
        "pattern",
        element("rect", width=5, height=5, class_="k-replayed-base"),
        element("rect", width=1.6, height=5, class_="k-replayed-stripe"),
        id="stripes",
        width=5,
        height=5,
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )
    return element(
        "svg",
        element("title", title),
        element("defs", stripes),
        body,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
    )


def _time_axis(scale: Scale, top: float, bottom: float) -> Markup:
    places = [(value, scale(value)) for value in ticks(scale.low, scale.high, 10)]
    return join(
        *(element("line", class_="grid", x1=x, x2=x, y1=top, y2=bottom) for _, x in places),
        *(
            element("text", f"{value:g}", class_="tick", x=x, y=bottom + 15, text_anchor="middle")
            for value, x in places
        ),
        element(
            "text", "seconds since the job's start", class_="tick", x=WIDTH - _RIGHT, y=bottom + 32, text_anchor="end"
        ),
    )


def _fault_labels(run: RunAnalysis, scale: Scale) -> tuple[Markup, float]:
    """Numbered labels over the lanes, in rows so that none covers another; also where the lanes begin."""
    row_ends: list[float] = []
    placed: list[tuple[int, float, int, FaultOutcome]] = []
    for number, fault in enumerate(run.faults, start=1):
        if fault.strike_t is None:
            continue
        x = scale(fault.strike_t - run.job_start)
        width = 26 + _CHARACTER * len(_fault_text(fault))
        left = x if x + width < WIDTH else x - width
        row = next((index for index, end in enumerate(row_ends) if end < left - 12), len(row_ends))
        row_ends[row:] = [left + width, *row_ends[row + 1 :]]
        placed.append((number, x, row, fault))
    lanes_top = 46 + _LABEL_ROW * len(row_ends)
    return join(*(_fault_label(*one, lanes_top=lanes_top) for one in placed)), lanes_top


def _fault_label(number: int, x: float, row: int, fault: FaultOutcome, *, lanes_top: float) -> Markup:
    y, text = 40 + _LABEL_ROW * row, _fault_text(fault)
    fits = x + 26 + _CHARACTER * len(text) < WIDTH
    return join(
        element("line", class_="fault-line", x1=x, x2=x, y1=y, y2=lanes_top),
        number_mark(number, x, y),
        element(
            "text", text, class_="fault-text", x=x + (13 if fits else -13), y=y + 4, text_anchor=None if fits else "end"
        ),
    )


def number_mark(number: int, x: float, y: float) -> Markup:
    """A fault's number in a disc."""
    return join(
        element("circle", class_="fault-disc", cx=x, cy=y, r=8.5),
        element("text", number, class_="fault-number", x=x, y=y + 4, text_anchor="middle"),
    )


def _fault_text(fault: FaultOutcome) -> str:
    return (
        f"{'SIGKILL' if fault.kind == 'sigkill' else fault.kind} on rank {fault.rank} {where(fault.moment, fault.step)}"
    )


def _lanes(analysis: RunAnalysis, scale: Scale, top: float, title: str) -> tuple[Markup, float]:
    """One bar per rank and the committed checkpoints below; also where they end."""
    pitch = max(8.0, min(34.0, 240.0 / len(analysis.intervals)))
    every = math.ceil(16 / pitch)
    parts = [element("text", title, class_="lane-title", x=0, y=top - 8 if title.startswith("Ref") else 22)]
    for index, (rank, intervals) in enumerate(analysis.intervals.items()):
        y = top + pitch * index
        parts += [
            _bar(interval, rank, analysis.job_start, scale, (y, pitch * 0.82)) for interval in _merged(intervals, scale)
        ]
        if index % every == 0:
            parts.append(element("text", f"rank {rank}", class_="lane-label", x=_LEFT - 10, y=y + pitch / 2 + 1))
    bottom = top + pitch * len(analysis.intervals)
    parts.append(element("text", "committed", class_="lane-label", x=_LEFT - 10, y=bottom + 13))
    last_x = -math.inf
    for checkpoint in analysis.checkpoints:
        x = scale(checkpoint.committed_t - analysis.job_start)
        parts.append(element("path", class_="checkpoint", d=f"M{x:.1f} {bottom - 1:.1f}l4.5 6h-9z"))
        if x - last_x > 18:
            parts.append(element("text", checkpoint.step, class_="tick", x=x, y=bottom + 17, text_anchor="middle"))
            last_x = x
    return join(*parts), bottom + 22


def _merged(intervals: tuple[Interval, ...], scale: Scale) -> list[Interval]:
    """Without pieces too narrow to be seen: a long run must not become a page of millions of bars."""
    per_pixel = (scale.high - scale.low) / (scale.end - scale.start)
    merged: list[Interval] = []
    for interval in intervals:
        before = merged[-1] if merged else None
        narrow = before is not None and min(before.end - before.start, interval.end - interval.start) < per_pixel
        if before is not None and narrow and before.kind in (interval.kind, "unaccounted"):
            merged[-1] = Interval(interval.kind, before.start, interval.end)
        else:
            merged.append(interval)
    return merged


def _bar(interval: Interval, rank: int, job_start: float, scale: Scale, lane: tuple[float, float]) -> Markup:
    y, height = lane
    x, end = scale(interval.start - job_start), scale(interval.end - job_start)
    step = "" if interval.step is None else f", step {interval.step}"
    seconds = interval.end - interval.start
    gap = 0.7 if end - x > 2.5 else 0.0  # keeps single steps apart
    return element(
        "rect",
        element("title", f"rank {rank}: {NAMES[interval.kind]}{step}, {seconds:.3f} s"),
        class_=f"k-{interval.kind}",
        x=x,
        y=y,
        width=end - x - gap,
        height=height,
    )


def _recoveries(run: RunAnalysis, scale: Scale, top: float) -> tuple[Markup, float]:
    """Brackets from each strike to the first step that all ranks have completed again; also where they end."""
    parts, ends = [], []
    for number, fault in enumerate(run.faults, start=1):
        if fault.strike_t is None or fault.recovered_t is None:
            continue
        x, end = scale(fault.strike_t - run.job_start), scale(fault.recovered_t - run.job_start)
        text = f"{number}: {fault.time_to_recover_s:.1f} s to recover"
        width = max(end - x, 12 + _CHARACTER * len(text))
        row = next((index for index, taken in enumerate(ends) if taken < x - 10), len(ends))
        ends[row:] = [x + width, *ends[row + 1 :]]
        y = top + 6 + 24 * row
        parts.append(element("path", class_="bracket", d=f"M{x:.1f} {y:.1f}v5H{end:.1f}v-5"))
        fits = x + width < WIDTH
        parts.append(
            element("text", text, class_="note", x=x if fits else end, y=y + 18, text_anchor=None if fits else "end")
        )
    return join(*parts), top + 12 + 24 * len(ends)


def loss_curve(run: RunAnalysis, reference: RunAnalysis) -> Markup:
    """Loss by step: the run's last executions on top of the reference's, every repetition as a ring."""
    points = [point for point in (*run.losses, *reference.losses) if math.isfinite(point.loss)]
    if not points:
        return element("p", "No step was completed.")
    losses = [point.loss for point in points]
    x = Scale(1, max(2, *(point.step for point in points)), _LEFT - 40, WIDTH - _RIGHT)
    y = Scale(min(losses), max(losses), 236.0, 34.0)
    parts = [_loss_axes(x, y)]
    for analysis, name in ((reference, "loss-reference"), (run, "loss-run")):
        last = {point.step: point.loss for point in analysis.losses if math.isfinite(point.loss)}
        path = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in sorted(last.items()))
        parts.append(element("polyline", class_=name, points=path))
    parts += [
        element("circle", class_="loss-replayed", cx=x(point.step), cy=y(point.loss), r=4)
        for point in run.losses
        if point.replayed and math.isfinite(point.loss)
    ]
    for number, fault in enumerate(run.faults, start=1):
        if fault.fired:
            place = x(min(fault.step, x.high))
            parts += [
                element("line", class_="fault-line", x1=place, x2=place, y1=20, y2=240),
                number_mark(number, place, 14),
            ]
    return _svg(280, "Training loss by step of both runs", join(*parts))


def _loss_axes(x: Scale, y: Scale) -> Markup:
    parts = []
    for value in ticks(y.low, y.high, 5):
        parts.append(element("line", class_="grid", x1=x.start, x2=x.end, y1=y(value), y2=y(value)))
        parts.append(element("text", f"{value:g}", class_="tick", x=x.start - 10, y=y(value) + 4, text_anchor="end"))
    for value in ticks(x.low, x.high, 10):
        parts.append(element("text", f"{value:g}", class_="tick", x=x(value), y=258, text_anchor="middle"))
    parts.append(element("text", "step", class_="tick", x=x.end, y=275, text_anchor="end"))
    return join(*parts)


def goodput_bars(run: RunAnalysis, reference: RunAnalysis) -> Markup:
    """Seconds per kind of both runs as stacked bars on one scale, the mean over ranks."""
    scale = Scale(0.0, max(run.wall_s, reference.wall_s), _LEFT, WIDTH - _RIGHT)
    parts = []
    for index, (name, analysis) in enumerate((("run", run), ("reference", reference))):
        y = 8 + 46 * index
        parts.append(element("text", name, class_="lane-label", x=_LEFT - 10, y=y + 21))
        seconds = [getattr(analysis.parts, f"{kind}_s") for kind in KINDS]
        edges = [sum(seconds[:count]) for count in range(len(seconds) + 1)]
        for kind, (start, end) in zip(KINDS, pairwise(edges), strict=True):
            x, width = scale(start), scale(end) - scale(start)
            tip = element("title", f"{NAMES[kind]}: {end - start:.2f} s")
            parts.append(element("rect", tip, class_=f"k-{kind}", x=x, y=y, width=max(0.0, width - 1), height=34))
            if width > 40:
                label = f"{end - start:.1f} s"
                parts.append(
                    element("text", label, class_=f"on-bar on-{kind}", x=x + width / 2, y=y + 21, text_anchor="middle")
                )
    return _svg(100, "Seconds per kind of time of both runs", join(*parts))

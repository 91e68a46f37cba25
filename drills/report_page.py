"""report.html: one page without outside parts that explains the drill to a reader who does not know the project."""

import json
from pathlib import Path
from typing import Any

from drills import report_charts
from drills.goodput import RunAnalysis
from drills.intervals import KINDS, Kind
from drills.markup import Markup, element
from drills.recovery import where

_NOTHING = "\N{EN DASH}"
_STYLE = Path(__file__).with_name("report.css")

_MEANINGS: dict[Kind, str] = {
    "startup": "From the start of the job to its first step: starting processes, importing libraries, connecting the "
    "ranks, building the model.",
    "useful": "Optimizer steps the first time they were executed. Goodput is this part's share of the wall time.",
    "replayed": "Work done twice: steps executed again because they were newer than the last checkpoint, and the step "
    "that was in flight when a fault struck.",
    "checkpoint_stall": "Training stood still for a checkpoint. Most of the writing happens in the background and is "
    "not in here.",
    "detect": "From a fault's strike until the rank knew of it: it was told to abort, or replaced by a new process.",
    "restart": "From there to the next step: entering the training function again, or a new process and its imports.",
    "load": "Reading the checkpoint back.",
    "unaccounted": "The rest that the event log does not name: gaps between steps, the teardown.",
}
_LAYERS = {
    "none": "none: training went on",
    "in_process": "in-process: the training function was entered again in the living processes",
    "in_job": "in-job: the launcher replaced the processes on the same nodes",
    "job": "job: the whole job was created again",
    None: "nothing: training never recovered",
}


def page(report: dict[str, Any], run: RunAnalysis, reference: RunAnalysis) -> str:
    """The whole document."""
    head = element(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="color-scheme" content="light dark">'),
        element("title", f"Fault drill {report['deployment']}: {'passed' if report['passed'] else 'failed'}"),
        element("style", Markup(_STYLE.read_text())),
    )
    body = element(
        "main",
        _header(report),
        _tiles(report, run),
        _timeline(run, reference),
        _faults(report),
        _parameters(report),
        _samples(report),
        _loss(report, run, reference),
        _goodput(report, run, reference),
        _repeat(report),
    )
    return "<!doctype html>\n" + element("html", head, element("body", body), lang="en") + "\n"


def _header(report: dict[str, Any]) -> Markup:
    passed = report["passed"]
    lede = (
        f"The same training job ({report['run']['steps']} steps, deployment “{report['deployment']}”) ran twice: once "
        "undisturbed, as the reference, and once while faults were struck on purpose. Recovery is right when the "
        "disturbed run ends where the other did: same steps, same samples, same parameters."
    )
    problems = element("ul", *(element("li", problem) for problem in report["problems"]), class_="problems")
    return element(
        "header",
        element("p", element("span", "Passed" if passed else "Failed", class_=f"badge {'good' if passed else 'bad'}"),
                " Fault drill report", class_="eyebrow"),
        element("h1", report["verdict"]),
        element("p", lede, class_="lede"),
        Markup("") if passed else problems,
    )  # fmt: skip


def _tiles(report: dict[str, Any], run: RunAnalysis) -> Markup:
    goodput, samples = report["goodput"], report["samples"]
    recoveries = [fault["time_to_recover_s"] for fault in report["faults"] if fault["time_to_recover_s"] is not None]
    again = sum(point.replayed for point in run.losses)
    known = report["run"]["params_sha256"] and report["reference"]["params_sha256"]
    equal = "identical" if report["bitwise_equal"] else "different" if known else "unknown"
    share = f"of the time was new steps; undisturbed {goodput['reference_goodput_fraction']:.0%}"
    wrong_samples = bool(samples["skipped"] or samples["repeated"])
    tiles = [
        _tile("Final parameters", equal, "every byte, by SHA-256", wrong=equal != "identical"),
        _tile(
            "Samples", f"{samples['skipped']} / {samples['repeated']}", "skipped / repeated in all", wrong=wrong_samples
        ),
        _tile("Slowest recovery", _seconds(max(recoveries, default=None)), "strike until every rank did a step again"),
        _tile("Steps done again", again, "newer than the checkpoint that was loaded"),
        _tile("Goodput", f"{goodput['goodput_fraction']:.0%}", share),
    ]
    return element("section", *tiles, class_="tiles")


def _tile(name: str, value: object, note: str, *, wrong: bool = False) -> Markup:
    return element(
        "div",
        element("p", name, class_="tile-name"),
        element("p", value, class_="tile-value"),
        element("p", note, class_="tile-note"),
        class_="tile wrong" if wrong else "tile",
    )


def _section(title: str, explanation: str, *content: Markup) -> Markup:
    return element("section", element("h2", title), element("p", explanation, class_="about"), *content)


def _figure(picture: Markup) -> Markup:
    return element("div", picture, class_="figure", tabindex="0")


def _legend(*entries: tuple[str, str]) -> Markup:
    items = (element("li", element("i", class_=f"swatch {css}"), text) for css, text in entries)
    return element("ul", *items, class_="legend")


def _timeline(run: RunAnalysis, reference: RunAnalysis) -> Markup:
    kinds = ((f"s-{kind}", report_charts.NAMES[kind]) for kind in KINDS)
    return _section(
        "Timeline",
        "One bar per rank (one training process); both runs on the same time scale. A numbered line marks a fault. "
        "Ranks work in lockstep, so a fault on one stops all.",
        _legend(*kinds, ("s-checkpoint", "checkpoint committed, after step …"), ("s-fault", "fault strikes")),
        _figure(report_charts.timeline(run, reference)),
    )


def _loss(report: dict[str, Any], run: RunAnalysis, reference: RunAnalysis) -> Markup:
    replayed = {
        True: "Every step that was executed again gave the loss of its first execution, bit for bit.",
        False: "A step that was executed again gave another loss than the first time.",
        None: "No step had to be executed again.",
    }[report["samples"]["replayed_losses_equal"]]
    return _section(
        "Loss",
        f"The run's thin line must lie inside the reference's wide one. {replayed}",
        _legend(("s-loss-reference", "reference"), ("s-loss-run", "run with faults"), ("s-ring", "executed again")),
        _figure(report_charts.loss_curve(run, reference)),
    )


def _goodput(report: dict[str, Any], run: RunAnalysis, reference: RunAnalysis) -> Markup:
    rows = [_goodput_row(kind, run, reference) for kind in KINDS]
    total = element(
        "tr",
        element("th", "wall time", scope="row"),
        element("td", "From the start of the first process to the completion of the last rank.", class_="meaning"),
        *(element("td", text, class_="number") for text in (_seconds(run.wall_s), "100%", _seconds(reference.wall_s))),
        class_="total",
    )
    goodput = report["goodput"]
    return _section(
        "Where the time went",
        f"Goodput is the share of the wall time spent on steps that had not been done before: "
        f"{goodput['goodput_fraction']:.1%} here, {goodput['reference_goodput_fraction']:.1%} undisturbed. A drill "
        "packs its start and its faults into a short run: read the seconds, not the share, when you plan a long one. "
        "All numbers are means over the ranks and add up to the wall time.",
        _figure(report_charts.goodput_bars(run, reference)),
        _table(("kind", "what it is", "run", "share", "reference"), [*rows, total], numbers_from=2, css="parts"),
    )


def _goodput_row(kind: Kind, run: RunAnalysis, reference: RunAnalysis) -> Markup:
    mine, other = (getattr(analysis.parts, f"{kind}_s") for analysis in (run, reference))
    return element(
        "tr",
        element("th", element("i", class_=f"swatch s-{kind}"), report_charts.NAMES[kind], scope="row"),
        element("td", _MEANINGS[kind], class_="meaning"),
        *(
            element("td", text, class_="number")
            for text in (_seconds(mine), f"{mine / run.wall_s:.1%}", _seconds(other))
        ),
    )


def _table(headings: tuple[str, ...], rows: list[Markup], *, numbers_from: int, css: str | None = None) -> Markup:
    head = (
        element(
            "th", text, scope="col", class_="number" if index >= numbers_from else "meaning" if index == 1 else None
        )
        for index, text in enumerate(headings)
    )
    table = element("table", element("thead", element("tr", *head)), element("tbody", *rows), class_=css)
    return element("div", table, class_="scroll", tabindex="0")


def _faults(report: dict[str, Any]) -> Markup:
    explanation = (
        "Time to recover runs from the strike to the end of the first step that every rank has completed after it, and "
        "is split as the slowest rank saw it. Steps lost were finished before the strike but newer than the last "
        "committed checkpoint."
    )
    if not report["faults"]:
        return _section("Faults", "No fault was configured for this run.")
    headings = ("", "fault", "healed by", "to recover", "detect", "restart", "load", "first step", "steps lost")
    rows = [_fault_row(number, fault) for number, fault in enumerate(report["faults"], start=1)]
    return _section("Faults", explanation, _table(headings, rows, numbers_from=3))


def _fault_row(number: int, fault: dict[str, Any]) -> Markup:
    phases = fault["phases"] or {}
    seconds = [
        fault["time_to_recover_s"],
        *(phases.get(f"{key}_s") for key in ("detect", "restart", "load", "first_step")),
    ]
    lost = _NOTHING if fault["steps_lost"] is None else fault["steps_lost"]
    layer = _LAYERS[fault["layer"]] if fault["fired"] else "did not fire"
    return element(
        "tr",
        element("td", element("span", number, class_="disc")),
        element("th", f"{fault['kind']} on rank {fault['rank']}, {where(fault['moment'], fault['step'])}", scope="row"),
        element("td", layer, class_="meaning"),
        *(element("td", text, class_="number") for text in (*map(_seconds, seconds), lost)),
    )


def _samples(report: dict[str, Any]) -> Markup:
    samples = report["samples"]
    facts = [
        ("skipped", samples["skipped"], "trained on by the reference, not by the run", samples["skipped_ids"]),
        ("repeated", samples["repeated"], "trained on more often than by the reference", samples["repeated_ids"]),
        ("steps that differ", samples["differing_steps"], "trained on other samples than in the reference", []),
        ("replays that differ", samples["replay_mismatches"], "took other samples when executed again", []),
    ]
    rows = [
        element(
            "tr",
            element("th", name, scope="row"),
            element("td", count, class_="number"),
            element("td", meaning, f": ids {', '.join(map(str, ids[:50]))}" if ids else "", "…" if ids[50:] else ""),
        )
        for name, count, meaning, ids in facts
    ]
    return _section(
        "Samples",
        "Every step logs the ids of the samples it trained on. For each step the last execution counts: an earlier "
        "one was undone by going back to the checkpoint.",
        element("table", element("tbody", *rows), class_="compact"),
    )


def _parameters(report: dict[str, Any]) -> Markup:
    rows = [
        element(
            "tr",
            element("th", name, scope="row"),
            element("td", element("code", report[name]["params_sha256"] or "unknown", class_="hash")),
            element(
                "td",
                _NOTHING if report[name]["final_loss"] is None else repr(report[name]["final_loss"]),
                class_="number",
            ),
        )
        for name in ("run", "reference")
    ]
    known = report["run"]["params_sha256"] and report["reference"]["params_sha256"]
    verdict = "The two are equal." if report["bitwise_equal"] else "The two differ." if known else "One is missing."
    return _section(
        "Final parameters",
        f"SHA-256 over the name and every byte of every parameter after the last step; all ranks must agree. {verdict}",
        _table(("", "SHA-256", "final loss"), rows, numbers_from=2),
    )


def _repeat(report: dict[str, Any]) -> Markup:
    versions = [
        element("tr", element("th", name, scope="row"), element("td", version))
        for name, version in report["versions"].items()
    ]
    return _section(
        "Repeat it",
        "On a machine set up as the README says; DIR is a new folder. The times will differ; on the same hardware and "
        "versions the hashes will not.",
        element("pre", element("code", report["command"])),
        element("details", element("summary", "Versions"), element("table", *versions, class_="compact")),
        element(
            "details",
            element("summary", "Configuration"),
            element("pre", element("code", json.dumps(report["config"], indent=2))),
        ),
    )


def _seconds(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return f"{value:.2f} s" if value < 100 else f"{value:,.0f} s"

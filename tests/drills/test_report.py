import json
import re

import pytest

from drills.report import build_report, summary_lines, write_report
from tests.drills.synthetic_log import SyntheticLog, healed, undisturbed
from training.config import FaultSpec

FAULTS = (FaultSpec(kind="exception", step=25, rank=1), FaultSpec(kind="sigkill", step=42, rank=0))


def reported(run, reference=None, *, faults=FAULTS, **overrides):
    reference = reference or undisturbed()
    arguments = {
        "run_events": run.events,
        "run_job_start": run.start,
        "reference_events": reference.events,
        "reference_job_start": reference.start,
        "faults": faults,
        "deployment_name": "local",
        "config": {"name": "local"},
        "versions": {"python": "3.12.3"},
    }
    return build_report(**arguments | overrides)


def written_page(tmp_path, *args, **overrides):
    report, analyses = reported(*args, **overrides)
    write_report(tmp_path, report, *analyses)
    return (tmp_path / "report.html").read_text()


def steps(log, step):
    return [event for event in log.events if event["event"] == "step" and event["step"] == step]


def test_report_json_has_exactly_the_agreed_keys(tmp_path):
    report, analyses = reported(healed())
    write_report(tmp_path, report, *analyses)
    read = json.loads((tmp_path / "report.json").read_text())

    assert read == report
    assert set(read) == {
        *("deployment", "passed", "verdict", "problems", "reference", "run", "bitwise_equal", "faults", "goodput"),
        *("samples", "command", "versions", "config"),
    }
    for run in ("run", "reference"):
        assert set(read[run]) == {"steps", "final_loss", "params_sha256", "checkpoints"}
    for fault in read["faults"]:
        assert set(fault) == {
            *("spec", "kind", "rank", "step", "moment", "fired", "layer", "time_to_recover_s", "steps_lost", "phases")
        }
        assert set(fault["phases"]) == {"detect_s", "restart_s", "load_s", "first_step_s"}
    assert set(read["goodput"]) == {
        *("wall_s", "useful_s", "replayed_s", "checkpoint_stall_s", "detect_s", "restart_s", "load_s", "startup_s"),
        *("unaccounted_s", "unaccounted_fraction", "goodput_fraction", "reference_wall_s"),
        "reference_goodput_fraction",
    }
    assert set(read["samples"]) == {
        *("skipped", "repeated", "skipped_ids", "repeated_ids", "differing_steps", "replay_mismatches"),
        "replayed_losses_equal",
    }


def test_a_healed_run_passes():
    report, _ = reported(healed())

    assert report["passed"]
    assert report["problems"] == []
    assert report["bitwise_equal"]
    assert (report["samples"]["skipped"], report["samples"]["repeated"]) == (0, 0)
    assert report["verdict"] == "Brought down twice; final parameters are bit for bit those of the undisturbed run"
    assert report["command"].endswith("--fault exception@25:rank1 --fault sigkill@42:rank0 --out DIR")


def test_a_skipped_sample_fails_the_drill():
    run = healed()
    steps(run, 50)[1]["sample_ids"].pop()
    report, _ = reported(run)

    assert not report["passed"]
    assert (report["samples"]["skipped"], report["samples"]["skipped_ids"]) == (1, [50 * 8 + 7])
    assert report["problems"] == ["the run skipped 1 sample that the reference trained on"]


def test_a_repeated_sample_fails_the_drill():
    run = healed()
    steps(run, 50)[0]["sample_ids"].append(8)
    report, _ = reported(run)

    assert (report["samples"]["repeated"], report["samples"]["repeated_ids"]) == (1, [8])
    assert report["problems"] == ["the run trained on 1 sample more often than the reference"]


def test_the_same_samples_in_other_steps_fail_the_drill():
    run = healed()
    one, other = steps(run, 50)[0], steps(run, 51)[0]
    one["sample_ids"], other["sample_ids"] = other["sample_ids"], one["sample_ids"]
    report, _ = reported(run)

    assert report["problems"] == ["2 steps took other samples than in the reference"]


def test_a_step_skipped_altogether_fails_the_drill():
    run = healed()
    run.events = [event for event in run.events if event not in steps(run, 55)]
    report, _ = reported(run)

    assert report["samples"]["skipped"] == 8


def with_other_parameters(run):
    for event in run.events[-2:]:
        event["params_sha256"] = "c" * 64


def with_one_rank_of_other_parameters(run):
    run.events[-1]["params_sha256"] = "c" * 64


def without_hash(run):
    for event in run.events[-2:]:
        event["params_sha256"] = None


def without_completion(run):
    run.events.pop()


def with_diverged_loss(run):
    for event in run.events[-2:]:
        event["loss"] = float("nan")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (with_other_parameters, "the final parameters differ from those of the undisturbed run"),
        (with_one_rank_of_other_parameters, "in the run, the ranks' final parameters differ from each other"),
        (without_hash, "in the run, no parameter hash was logged; set train.deterministic"),
        (without_completion, "in the run, rank 1 never completed"),
        (with_diverged_loss, "the run's final loss is not a finite number"),
    ],
)
def test_what_breaks_the_proof_is_named(change, problem):
    run = healed()
    change(run)
    report, _ = reported(run)

    assert not report["passed"]
    assert problem in report["problems"]
    json.loads(json.dumps(report, allow_nan=False))


def test_a_fault_that_did_not_fire_fails_the_drill():
    report, _ = reported(healed(), faults=(*FAULTS, FaultSpec(kind="sigkill", step=59, rank=1)))

    assert report["faults"][2]["fired"] is False
    assert report["problems"] == ["in the run, fault sigkill on rank 1 in step 59 did not fire"]


def test_a_reference_that_was_disturbed_proves_nothing():
    report, _ = reported(healed(), healed())

    assert "the reference was disturbed itself, so it proves nothing; repeat the drill" in report["problems"]


def test_the_page_shows_the_verdict_both_hashes_and_needs_nothing_from_outside(tmp_path):
    run = healed()
    with_other_parameters(run)
    page = written_page(tmp_path, run)

    assert "The final parameters differ" in page
    assert "a" * 64 in page
    assert "c" * 64 in page
    assert not re.search(r"https?:|<script|<link|<img|@import", page)
    assert page.count("<svg") == 3


def test_text_from_outside_is_escaped_in_the_page(tmp_path):
    hostile = "<script>alert('x')</script>"
    page = written_page(
        tmp_path, healed(), deployment_name=hostile, config={hostile: hostile}, versions={hostile: hostile}
    )

    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 5


def test_old_reports_are_replaced_and_no_partial_file_stays(tmp_path):
    for name in ("report.json", "report.html"):
        (tmp_path / name).write_text("old")
    written_page(tmp_path, healed())

    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]
    assert "old" not in (tmp_path / "report.json").read_text()[:3]


def test_a_run_that_died_before_its_first_step_can_be_reported(tmp_path):
    run = SyntheticLog()
    run.processes()
    page = written_page(tmp_path, run)

    assert "rank 0 never completed" in page


def many_ranks_and_faults():
    run = SyntheticLog(ranks=24)
    run.processes()
    run.restore(0)
    run.steps(1, 60)
    for rank in range(12):
        run.fault("exception", rank=rank, step=61, after=0.001)
    run.abort(detect=0.1)
    run.enter_again(after=0.1)
    run.restore(60)
    run.steps(61, 62)
    run.complete()
    return run


def test_many_ranks_and_faults_keep_within_the_picture_and_the_terminal(tmp_path):
    faults = tuple(FaultSpec(kind="exception", step=61, rank=rank) for rank in range(12))
    run = many_ranks_and_faults()
    page = written_page(tmp_path, run, faults=faults)

    assert page.count("exception on rank") >= 12
    assert len(summary_lines(reported(run, faults=faults)[0])) <= 15


def test_the_summary_is_short_aligned_plain_text():
    lines = summary_lines(reported(healed())[0])

    assert lines[0].startswith("PASSED: Brought down twice")
    assert len(lines) <= 15
    assert any(re.search(r"sigkill@42:rank0 +in_job: 5\.65 s to recover, 1 step lost", line) for line in lines)
    assert all(line.isascii() and line == line.rstrip() for line in lines)


def test_the_summary_of_a_failed_drill_names_the_problems():
    run = healed()
    without_completion(run)
    steps(run, 50)[1]["sample_ids"].pop()
    lines = summary_lines(reported(run)[0])

    assert lines[0] == "FAILED: In the run, rank 1 never completed"
    assert "  also: the run skipped 1 sample that the reference trained on" in lines

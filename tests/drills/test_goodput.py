import json
from dataclasses import asdict
from itertools import pairwise

import pytest

from drills.goodput import analyse, compare_samples, samples_ledger
from tests.drills.synthetic_log import SyntheticLog, healed, undisturbed
from training.config import FaultSpec
from training.events import read_events

EXCEPTION = FaultSpec(kind="exception", step=25, rank=1)
SIGKILL = FaultSpec(kind="sigkill", step=42, rank=0)


def analysis_of(log, *faults):
    return analyse(log.events, job_start=log.start, faults=faults)


def up_to_step(last):
    log = SyntheticLog()
    log.processes()
    log.restore(0)
    log.steps(1, last)
    return log


def finish_from(log, step):
    log.steps(step, log.total_steps)
    log.complete()
    return log


def test_every_kind_of_time_has_its_known_value():
    parts = asdict(analysis_of(healed()).parts)

    assert parts == pytest.approx(
        {
            "startup_s": 0.25 + 0.5 + 2.0 + 0.5,
            "useful_s": 60 * 0.15,
            "replayed_s": 2 * 0.05 + 5 * 0.15,  # two steps in flight, steps 21 to 24 and 41
            "checkpoint_stall_s": 6 * 0.05,
            "detect_s": 0.1 + 1.5,
            "restart_s": (0.3 + 0.125) + (0.5 + 2.5 + 0.5),
            "load_s": 0.02 + 0.15 + 0.5,
            "unaccounted_s": 0.125,
        }
    )


def test_the_parts_of_every_rank_and_their_mean_add_up_to_the_wall_time():
    log = healed()
    analysis = analysis_of(log)

    assert analysis.wall_s == pytest.approx(log.now)
    for parts in (analysis.parts, *analysis.rank_parts.values()):
        assert sum(asdict(parts).values()) == pytest.approx(analysis.wall_s, abs=1e-12)
    assert analysis.unaccounted_fraction == analysis.parts.unaccounted_s / analysis.wall_s


def test_intervals_of_a_rank_follow_each_other_from_start_to_end():
    analysis = analysis_of(healed())

    for intervals in analysis.intervals.values():
        assert intervals[0].start == 1000.0
        assert intervals[-1].end == pytest.approx(1000.0 + analysis.wall_s)
        assert all(before.end == after.start for before, after in pairwise(intervals))


def test_work_that_overlaps_on_one_rank_is_refused():
    log = undisturbed()
    step = next(event for event in log.events if event["event"] == "step" and event["step"] == 7)
    step["started_t"] -= 1.0

    with pytest.raises(AssertionError, match="overlaps"):
        analysis_of(log)


def test_an_undisturbed_run_has_no_lost_time():
    analysis = analysis_of(undisturbed())

    assert (analysis.parts.replayed_s, analysis.parts.detect_s, analysis.parts.restart_s) == (0, 0, 0)
    assert analysis.goodput_fraction == pytest.approx(9.0 / analysis.wall_s)
    assert (analysis.restarts, analysis.replayed_losses_equal, analysis.problems) == (0, None, ())
    assert [checkpoint.step for checkpoint in analysis.checkpoints] == [10, 20, 30, 40, 50, 60]


def test_a_survivor_that_still_finishes_a_stall_after_the_strike_goes_on_detecting():
    log = up_to_step(24)
    log.fault("exception", rank=1, step=25, after=0.0)
    strike = log.now
    log.write("stall", rank=0, at=strike + 0.02, step=24, started_t=log.start + strike + 0.01, phase="finalize")
    log.abort(detect=0.5)
    log.enter_again(after=0.3)
    log.restore(20)
    log = finish_from(log, 21)
    log.events.sort(key=lambda event: event["t"])
    analysis = analysis_of(log)

    assert analysis.rank_parts[0].detect_s == pytest.approx(0.49)
    assert analysis.rank_parts[1].detect_s == pytest.approx(0.5)
    assert analysis.rank_parts[0].replayed_s == analysis.rank_parts[1].replayed_s == pytest.approx(4 * 0.15)


def test_a_step_that_a_survivor_finishes_just_after_the_strike_is_work_not_detection():
    log = up_to_step(23)
    started = log.now
    log.steps(24, 24)
    late = next(event for event in log.events if event["event"] == "step" and event["step"] == 24)
    late["t"] += 0.03
    log.fault("exception", rank=1, step=25, after=0.02)
    log.abort(detect=0.5)
    log.enter_again(after=0.3)
    log.restore(20)
    analysis = analysis_of(finish_from(log, 21))

    step = next(interval for interval in analysis.intervals[0] if interval.step == 24)
    assert (step.kind, step.end) == ("useful", pytest.approx(log.start + started + 0.15 + 0.03))
    assert analysis.rank_parts[0].detect_s == pytest.approx(0.49)
    assert analysis.rank_parts[1].replayed_s == pytest.approx(0.02 + 4 * 0.15)
    assert analysis.faults[0].steps_lost == 4


def test_an_abort_whose_process_never_comes_back_is_part_of_detection():
    log = up_to_step(41)
    log.fault("sigkill", rank=0, step=42)
    log.write("abort", rank=1, at=log.now + 0.2)
    log.new_cycle(detect=1.5)
    log.restore(40)
    analysis = analysis_of(finish_from(log, 41))

    assert analysis.rank_parts[1].detect_s == pytest.approx(1.5)
    assert analysis.faults[0].layer == "in_job"


def test_an_interruption_that_no_fault_event_explains_stays_unaccounted():
    log = up_to_step(24)
    log.now += 2.0
    log.new_cycle(detect=1.0)
    log.restore(20)
    analysis = analysis_of(finish_from(log, 21))

    assert analysis.parts.unaccounted_s == pytest.approx(2.0 + 1.0 + 0.125)
    assert (analysis.parts.detect_s, analysis.restarts) == (0, 1)


def test_each_fault_is_reported_with_its_layer_its_times_and_its_loss():
    exception, sigkill = analysis_of(healed(), EXCEPTION, SIGKILL).faults

    assert (exception.kind, exception.rank, exception.step, exception.fired) == ("exception", 1, 25, True)
    assert (exception.layer, exception.steps_lost) == ("in_process", 4)
    assert exception.time_to_recover_s == pytest.approx(0.1 + 0.3 + 0.125 + 0.15 + 0.15)
    assert (sigkill.layer, sigkill.steps_lost) == ("in_job", 1)
    assert asdict(sigkill.phases) == pytest.approx(
        {"detect_s": 1.5, "restart_s": 3.5, "load_s": 0.5, "first_step_s": 0.15}
    )
    assert sum(asdict(sigkill.phases).values()) == pytest.approx(sigkill.time_to_recover_s)


def test_the_slowest_rank_decides_when_training_has_recovered():
    log = up_to_step(24)
    log.fault("exception", rank=1, step=25)
    log.abort(detect=0.1)
    log.enter_again(after=0.3)
    log.restore(20)
    log.write("step", rank=0, at=log.now + 0.1, step=21, started_t=log.start + log.now, loss=1.0, sample_ids=[])
    log.write("step", rank=1, at=log.now + 0.4, step=21, started_t=log.start + log.now, loss=1.0, sample_ids=[])
    log.now += 0.4
    (fault,) = analysis_of(finish_from(log, 22)).faults

    assert fault.phases.first_step_s == pytest.approx(0.4)


def test_two_faults_healed_by_one_restart_recover_together():
    log = up_to_step(24)
    log.fault("exception", rank=1, step=25)
    log.fault("exception", rank=0, step=25, after=0.01)
    log.abort(detect=0.1)
    log.enter_again(after=0.3)
    log.restore(20)
    analysis = analysis_of(finish_from(log, 21))

    first, second = analysis.faults
    assert (first.layer, second.layer) == ("in_process", "in_process")
    assert (first.steps_lost, second.steps_lost) == (4, 4)
    assert first.recovered_t == second.recovered_t
    assert first.time_to_recover_s - second.time_to_recover_s == pytest.approx(0.01)
    assert analysis.parts.detect_s == pytest.approx(0.11)


def test_a_fault_during_the_recovery_from_another_keeps_their_layers_apart():
    log = up_to_step(24)
    log.fault("exception", rank=1, step=25)
    log.abort(detect=0.1)
    log.enter_again(after=0.3)
    log.restore(20)
    log.fault("sigkill", rank=0, step=21)
    log.new_cycle(detect=1.5)
    log.restore(20)
    analysis = analysis_of(finish_from(log, 21))

    exception, sigkill = analysis.faults
    assert (exception.layer, sigkill.layer) == ("in_process", "in_job")
    assert (exception.steps_lost, sigkill.steps_lost) == (4, 0)
    assert exception.recovered_t == sigkill.recovered_t
    assert sum(asdict(exception.phases).values()) == pytest.approx(exception.time_to_recover_s)
    assert sum(asdict(analysis.parts).values()) == pytest.approx(analysis.wall_s)


def test_processes_that_count_their_cycles_from_zero_again_belong_to_a_new_job():
    log = up_to_step(41)
    log.fault("sigkill", rank=0, step=42)
    log.new_cycle(detect=20.0, cycle=0)
    log.restore(40)
    (fault,) = analysis_of(finish_from(log, 41)).faults

    assert fault.layer == "job"


def test_a_fault_without_recovery_has_neither_layer_nor_times():
    log = up_to_step(41)
    log.fault("sigkill", rank=0, step=42)
    log.now += 3.0
    log.write("abort", rank=1)
    analysis = analysis_of(log, SIGKILL)

    (fault,) = analysis.faults
    assert (fault.fired, fault.layer, fault.time_to_recover_s, fault.steps_lost) == (True, None, None, None)
    assert analysis.parts.detect_s == pytest.approx(3.0)
    assert "fault sigkill on rank 0 in step 42: training never recovered" in analysis.problems
    assert "rank 0 never completed" in analysis.problems


def test_a_fault_that_one_rank_alone_survives_is_not_recovered():
    log = up_to_step(41)
    log.fault("sigkill", rank=0, step=42)
    log.now += 1.0
    for event, fields in (
        ("restore_start", {}),
        ("restored", {"step": 40, "tier": "durable"}),
        ("step", {"step": 41, "started_t": log.start + log.now, "loss": 1.0, "sample_ids": []}),
    ):
        log.write(event, rank=1, **fields)

    assert analysis_of(log).faults[0].layer is None


def test_a_configured_fault_missing_from_the_log_did_not_fire():
    late = FaultSpec(kind="sigkill", step=59, rank=1)
    analysis = analysis_of(healed(), EXCEPTION, late, SIGKILL)

    assert [fault.fired for fault in analysis.faults] == [True, True, False]
    assert analysis.problems == ("fault sigkill on rank 1 in step 59 did not fire",)


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path):
    log = healed()
    (tmp_path / "events").mkdir()
    for rank in range(log.ranks):
        lines = [json.dumps(event) for event in log.events if event["rank"] == rank]
        lines.insert(lines.index(next(line for line in lines if '"fault"' in line or '"abort"' in line)) + 1, '{"t": 1')
        (tmp_path / "events" / f"rank-{rank:05d}.jsonl").write_text("\n".join(lines) + "\n")

    assert analyse(read_events(tmp_path), job_start=log.start) == analysis_of(log)


def test_ranks_with_different_parameters_have_no_common_hash():
    log = undisturbed()
    log.events[-1]["params_sha256"] = "b" * 64
    analysis = analysis_of(log)

    assert analysis.params_sha256 is None
    assert analysis.problems == ("the ranks' final parameters differ from each other",)


def test_a_rank_that_never_wrote_an_event_is_missed():
    log = undisturbed()
    log.events = [event for event in log.events if event["rank"] == 0]
    analysis = analysis_of(log)

    assert analysis.params_sha256 is None
    assert analysis.problems == ("rank 1 never completed",)


def test_an_empty_log_is_refused_with_a_reason():
    with pytest.raises(ValueError, match="no events"):
        analyse([], job_start=0.0)


def test_the_summary_holds_steps_loss_and_hash():
    analysis = analysis_of(healed())

    assert (analysis.steps, analysis.final_loss, analysis.params_sha256) == (60, 2.5, "a" * 64)
    assert analysis.restarts == 2


def test_the_ledger_keeps_the_last_execution_of_a_step_over_all_ranks():
    log = healed()
    replayed = [event for event in log.events if event["event"] == "step" and event["step"] == 21]
    replayed[0]["sample_ids"] = [9, 9, 9, 9]

    assert samples_ledger(log.events)[21] == tuple(range(168, 176))
    assert samples_ledger(log.events) == samples_ledger(undisturbed().events)


def test_skipped_and_repeated_samples_are_counted_with_multiplicity():
    difference = compare_samples({1: (1, 2), 2: (3, 3), 3: (7, 8)}, {1: (1, 2), 2: (3, 4), 3: (8, 7)})

    assert (difference.skipped, difference.repeated, difference.differing_steps) == ((4,), (3,), (2, 3))


def test_a_replay_on_other_samples_and_one_with_another_loss_are_found():
    log = healed()
    assert analysis_of(log).replay_mismatches == 0
    assert analysis_of(log).replayed_losses_equal is True

    again = [event for event in log.events if event["event"] == "step" and event["step"] in (21, 22)]
    again[-1]["sample_ids"] = [0]
    assert analysis_of(log).replay_mismatches == 1
    again[-2]["loss"] += 2**-40
    assert analysis_of(log).replayed_losses_equal is False

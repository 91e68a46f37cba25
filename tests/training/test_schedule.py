"""The learning rate's shapes, and which longer schedules continue a shorter one."""

import math

import pytest

from training.config import ScheduleConfig
from training.schedule import same_until, schedule_ratio


def test_the_schedule_warms_up_linearly_and_ends_at_its_minimum():
    schedule = ScheduleConfig(warmup_steps=10, min_ratio=0.1)
    assert schedule_ratio(schedule, 1, 100) == pytest.approx(0.1)
    assert schedule_ratio(schedule, 10, 100) == 1.0
    assert schedule_ratio(schedule, 55, 100) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert schedule_ratio(schedule, 100, 100) == pytest.approx(0.1)


def test_a_linear_decay_is_a_straight_line():
    schedule = ScheduleConfig(kind="linear", warmup_steps=10, min_ratio=0.2)
    assert schedule_ratio(schedule, 10, 110) == 1.0
    assert schedule_ratio(schedule, 60, 110) == pytest.approx(0.6)
    assert schedule_ratio(schedule, 110, 110) == pytest.approx(0.2)


def test_wsd_stays_at_the_peak_until_its_last_steps():
    schedule = ScheduleConfig(kind="wsd", warmup_steps=10, decay_steps=20, min_ratio=0)
    assert schedule_ratio(schedule, 5, 100) == 0.5
    assert {schedule_ratio(schedule, step, 100) for step in range(10, 81)} == {1.0}
    assert schedule_ratio(schedule, 90, 100) == pytest.approx(0.5)
    assert schedule_ratio(schedule, 100, 100) == 0.0


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_the_schedule_works_when_the_whole_run_is_warm_up_or_there_is_none(kind):
    assert schedule_ratio(ScheduleConfig(kind=kind, warmup_steps=5), 5, 5) == 1.0
    assert schedule_ratio(ScheduleConfig(kind=kind, warmup_steps=0, min_ratio=0), 4, 4) == pytest.approx(0.0)


def test_a_longer_wsd_run_continues_a_shorter_one_before_its_decay_and_a_cosine_never():
    wsd, cosine = ScheduleConfig(kind="wsd", decay_steps=20), ScheduleConfig()
    assert same_until(wsd, 100, wsd, 200, step=80)
    assert not same_until(wsd, 100, wsd, 200, step=82)
    assert not same_until(cosine, 100, cosine, 200, step=10)
    assert same_until(cosine, 100, cosine, 100, step=100)

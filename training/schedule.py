"""The learning rate as a pure function of the step: there is no scheduler state to save or to lose."""

import math

from training.config import ScheduleConfig


def schedule_ratio(schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """Learning rate at 1-based `step` as a fraction of its peak: linear warm-up, then `schedule.kind`'s decay.

    The last step has `min_ratio` of the peak, unless the whole run is warm-up.
    """
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    decay_steps = schedule.decay_steps or (total_steps - schedule.warmup_steps)
    progress = max(0.0, 1 - (total_steps - step) / decay_steps)
    left = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.kind == "cosine" else 1 - progress
    return schedule.min_ratio + (1 - schedule.min_ratio) * left


def same_until(
    first: ScheduleConfig, first_total_steps: int, second: ScheduleConfig, second_total_steps: int, *, step: int
) -> bool:
    """Whether two schedules have given every step up to `step` the same ratio."""
    return (first, first_total_steps) == (second, second_total_steps) or all(
        schedule_ratio(first, at, first_total_steps) == schedule_ratio(second, at, second_total_steps)
        for at in range(1, step + 1)
    )

"""Learning rate over the run: linear warm-up, then half a cosine down to a floor."""

from __future__ import annotations

import math

from tuner.config.schema import ScheduleConfig


def learning_rate_at(step: int, total_steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """The rate of an update.

    Progress is counted in steps (batches), of which every epoch has the same number, so that the
    curve ends with the run whatever the number of updates.

    Args:
        step: Steps done when the update is made, in [1, total_steps].
        total_steps: Steps of the whole run.
        peak: Highest rate.
        schedule: Share of warm-up; share of the peak at the end.
    """
    warmup_steps = schedule.warmup_fraction * total_steps
    if step <= warmup_steps:
        return peak * step / warmup_steps
    floor = schedule.min_learning_rate_fraction
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))

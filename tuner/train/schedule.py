"""Learning rate over the run: linear warm-up, then as the schedule's kind says.

Progress is counted in steps (batches), of which every epoch has the same number, or in real
tokens, so that an update moves the rate by what it trains. Both are known for the whole run before
it starts, so the curve ends with the run whatever the number of updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from tuner.config.schema import ScheduleConfig, TrainConfig


def peak_rate(config: TrainConfig) -> float:
    """The highest learning rate of a run, scaled to the size of its updates.

    Linear in the tokens of an update (Goyal et al., arXiv 1706.02677), or in their square root
    (for Adam: Malladi et al., arXiv 2205.10287).
    """
    optimizer, tokens = config.optimizer, config.train.tokens_per_update
    reference = optimizer.reference_tokens_per_update
    if optimizer.rate_scaling == "none" or tokens is None or reference is None:
        return optimizer.learning_rate
    times = tokens / reference
    return optimizer.learning_rate * (
        times if optimizer.rate_scaling == "linear" else math.sqrt(times)
    )


def describe_peak(config: TrainConfig) -> str | None:
    """What scaling makes of the learning rate; None if it is not scaled."""
    optimizer, tokens = config.optimizer, config.train.tokens_per_update
    if optimizer.rate_scaling == "none":
        return None
    return (
        f"learning rate {optimizer.learning_rate:g} scaled to {peak_rate(config):g} "
        f"({optimizer.rate_scaling}: {tokens:,} real tokens an update, found for "
        f"{optimizer.reference_tokens_per_update:,})"
    )


def learning_rate_at(done: float, total: float, peak: float, schedule: ScheduleConfig) -> float:
    """The rate of an update.

    Args:
        done: Steps or real tokens done when the update is made, its own included; in (0, total].
        total: The same of the whole run.
        peak: Highest rate.
        schedule: Kind, shares of warm-up and decay, share of the peak at the end.
    """
    warmup = schedule.warmup_fraction * total
    if done <= warmup:
        return peak * done / warmup
    return peak * SHAPES[schedule.kind](done, warmup, total, schedule)


def _cosine(done: float, warmup: float, total: float, schedule: ScheduleConfig) -> float:
    progress = (done - warmup) / (total - warmup)
    floor = schedule.min_learning_rate_fraction
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _linear(done: float, start: float, total: float, schedule: ScheduleConfig) -> float:
    progress = (done - start) / (total - start)
    floor = schedule.min_learning_rate_fraction
    return floor + (1.0 - floor) * (1.0 - progress)


def _constant(done: float, warmup: float, total: float, schedule: ScheduleConfig) -> float:
    return 1.0


def _wsd(done: float, warmup: float, total: float, schedule: ScheduleConfig) -> float:
    """Warm-up, stable, decay (Hu et al., MiniCPM, arXiv 2404.06395; here a linear decay)."""
    start = (1.0 - schedule.decay_fraction) * total
    return 1.0 if done <= start else _linear(done, start, total, schedule)


SHAPES: Mapping[str, Callable[[float, float, float, ScheduleConfig], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _wsd,
}
"""Kind -> share of the peak after the warm-up, from (done, warmup, total, schedule)."""

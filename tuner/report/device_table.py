"""The table of several devices, for the page and for the summary alike."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.report.markup import percent, seconds
from tuner.simulate.stragglers import StragglerCost

DEVICE_HEADERS = (
    "ranks",
    "mean step",
    "slowest rank",
    "waiting",
    "epoch",
    "same shape: mean step",
    "fillers",
    "same shape: epoch",
    "its speed, other shapes = 1",
)


def device_rows(lines: Sequence[StragglerCost]) -> list[list[str]]:
    """A row for each number of ranks; seconds are of the cost model."""
    return [
        [
            f"{line.world_size:,}",
            seconds(line.mean_step_s),
            seconds(line.slowest_step_s),
            percent(line.wait_fraction),
            seconds(line.epoch_s),
            seconds(line.same_shape_step_s),
            percent(line.filler_fraction),
            seconds(line.same_shape_epoch_s),
            f"{line.same_shape_speed:.2f} x",
        ]
        for line in lines
    ]

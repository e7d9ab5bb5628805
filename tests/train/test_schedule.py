"""The learning rate over the run."""

from __future__ import annotations

import math

import pytest

from tuner.config.schema import ScheduleConfig
from tuner.train.schedule import learning_rate_at

SCHEDULE = ScheduleConfig(warmup_fraction=0.1, min_learning_rate_fraction=0.2)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (1, 0.1),
        (5, 0.5),
        (10, 1.0),
        # Half-way down: the mean of peak and floor.
        (55, 0.6),
        # A quarter down: floor + (1 - floor) * (1 + cos(pi/4)) / 2.
        (10 + 22.5, 0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2),
        (100, 0.2),
    ],
)
def test_rate_rises_linearly_then_falls_as_a_cosine(step, expected):
    assert learning_rate_at(step, 100, 1.0, SCHEDULE) == pytest.approx(expected)


def test_without_warm_up_the_first_rate_is_near_the_peak():
    schedule = ScheduleConfig(warmup_fraction=0.0, min_learning_rate_fraction=0.0)
    assert learning_rate_at(1, 1000, 2.0, schedule) == pytest.approx(2.0, rel=1e-4)
    assert learning_rate_at(1000, 1000, 2.0, schedule) == pytest.approx(0.0, abs=1e-12)


def test_a_run_of_warm_up_alone_and_a_run_of_one_step():
    schedule = ScheduleConfig(warmup_fraction=1.0)
    assert [learning_rate_at(step, 4, 1.0, schedule) for step in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert learning_rate_at(1, 1, 1.0, SCHEDULE) == pytest.approx(0.2)

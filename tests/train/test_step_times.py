"""Which step is slow, and whether a curve is flat: by plain Python on the same seconds."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.train.step_times import StepTimes


def fed(seconds, key="a"):
    times = StepTimes()
    return times, [times.add(key, second) for second in seconds]


def test_a_step_is_slow_over_three_medians_and_fifty_milliseconds():
    _, slow = fed([0.1] * 8 + [0.31])
    assert slow == [None] * 8 + [pytest.approx(0.1)]
    # Two of the three conditions are not enough.
    assert fed([0.1] * 7 + [0.9])[1][-1] is None
    assert fed([0.1] * 8 + [0.29])[1][-1] is None
    assert fed([0.01] * 8 + [0.055])[1][-1] is None
    assert fed([0.01] * 8 + [0.065])[1][-1] is not None


def test_shapes_are_compared_with_themselves_alone():
    times = StepTimes()
    for _ in range(10):
        assert times.add("small", 0.1) is None
        assert times.add("large", 1.0) is None
    assert times.add("large", 1.1) is None
    assert times.add("small", 1.1) == pytest.approx(0.1)


def test_the_median_is_that_of_the_last_steps():
    """A machine that has become slower for good is not slow in every step."""
    seconds = [0.1] * 200 + [0.5] * 100
    _, slow = fed(seconds)
    assert slow[200] is not None
    assert slow[-1] is None


@given(st.lists(st.floats(2**-10, 8.0, width=32), min_size=1, max_size=150))
def test_slow_steps_and_curves_are_those_of_plain_python(seconds):
    times, slow = fed(seconds)
    for index, found in enumerate(slow):
        before = seconds[max(0, index - 64) : index]
        median = statistics.median(before) if len(before) >= 8 else None
        is_slow = median is not None and (
            seconds[index] > 3 * median and seconds[index] - median > 0.05
        )
        assert (found is not None) == is_slow
    curve = times.curves()["a"]
    assert curve.num_steps == len(seconds)
    assert curve.median_s == pytest.approx(statistics.median(seconds))
    assert curve.total_s == pytest.approx(sum(seconds))
    if len(seconds) >= 2:
        p95 = statistics.quantiles(seconds, n=20, method="inclusive")[-1]
        assert curve.p95_s == pytest.approx(p95)
    third = len(seconds) // 3
    if len(seconds) < 12:
        assert curve.trend is None and curve.is_flat is None
    else:
        first, last = statistics.median(seconds[:third]), statistics.median(seconds[-third:])
        assert curve.trend == pytest.approx(last / first - 1, abs=1e-6)


def test_a_curve_is_flat_within_a_tenth_and_without_outliers():
    def curve(seconds):
        return fed(seconds)[0].curves()["a"]

    assert curve([1.0] * 12).is_flat is True
    assert curve([1.0] * 11).is_flat is None
    assert curve([1.0] * 8 + [1.09] * 4).is_flat is True
    assert curve([1.0] * 8 + [1.11] * 4).is_flat is False
    assert curve([1.11] * 4 + [1.0] * 8).is_flat is True
    assert curve([1.13] * 4 + [1.0] * 8).is_flat is False
    # One of a hundred is an outlier, one of ten is how the run is.
    assert curve(([1.0] * 99 + [5.0]) * 3).is_flat is True
    assert curve(([1.0] * 9 + [2.0]) * 30).is_flat is False

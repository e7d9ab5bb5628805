"""Accumulation windows: what a window must hold, and a hand-written example."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.batching.windows import update_after_step


def windows_of(real_tokens, ends):
    windows, current = [], []
    for tokens, is_end in zip(real_tokens, ends, strict=True):
        current.append(tokens)
        if is_end:
            windows.append(current)
            current = []
    assert current == []
    return windows


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 200))
def test_windows_hold_the_asked_number_on_average(real_tokens, tokens_per_update):
    ends = update_after_step(np.array(real_tokens), tokens_per_update)
    assert ends.dtype == np.bool_
    assert ends[-1]
    windows = windows_of(real_tokens, ends.tolist())
    assert [tokens for window in windows for tokens in window] == real_tokens
    largest = max(real_tokens)
    if largest <= tokens_per_update:
        # Rounding costs half an update at most, the end of the epoch one more.
        assert abs(len(windows) - sum(real_tokens) / tokens_per_update) <= 1.5
    for window in windows:
        assert sum(window) < 1.5 * tokens_per_update + largest


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 200))
def test_windows_equal_a_plain_loop(real_tokens, tokens_per_update):
    expected, total, updates = [], 0, 0
    for step, tokens in enumerate(real_tokens):
        total += tokens
        rounded = math.floor(Fraction(total, tokens_per_update) + Fraction(1, 2))
        expected.append(rounded > updates or step == len(real_tokens) - 1)
        updates = rounded
    assert update_after_step(np.array(real_tokens), tokens_per_update).tolist() == expected


@pytest.mark.parametrize(
    ("tokens_per_update", "ends"),
    [
        (1, [1, 1, 1, 1]),
        (10, [1, 1, 1, 1]),
        # Running total / 11 is 0.9, 1.8, 2.7, 3.6: rounds to 1, 2, 3, 4.
        (11, [1, 1, 1, 1]),
        # / 16: 0.6, 1.25, 1.9, 2.5 round to 1, 1, 2, 3.
        (16, [1, 0, 1, 1]),
        # / 25: 0.4, 0.8, 1.2, 1.6 round to 0, 1, 1, 2.
        (25, [0, 1, 0, 1]),
        (30, [0, 1, 0, 1]),
        (40, [0, 1, 0, 1]),
        (1000, [0, 0, 0, 1]),
    ],
)
def test_hand_calculated_windows(tokens_per_update, ends):
    assert update_after_step(np.array([10, 10, 10, 10]), tokens_per_update).tolist() == ends


def test_plans_of_other_batch_sizes_have_as_many_updates():
    """4,000 tokens at 400 an update are 10 updates, in steps of 10, of 130 or of 380 tokens."""
    for step in (10, 130, 380):
        steps = [step] * (4000 // step)
        steps.append(4000 - sum(steps))
        assert update_after_step(np.array(steps), 400).sum() == pytest.approx(10, abs=1)


def test_without_a_number_every_step_updates():
    assert update_after_step(np.array([1, 2, 3]), None).tolist() == [True, True, True]


def test_no_step_no_window():
    assert update_after_step(np.array([], dtype=np.int64), 5).tolist() == []
    assert update_after_step(np.array([], dtype=np.int64), None).tolist() == []

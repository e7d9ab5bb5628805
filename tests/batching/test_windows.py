"""Accumulation windows: what a window must hold, and a hand-written example."""

from __future__ import annotations

import itertools
import math
import tracemalloc
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
        assert len(windows) == max(1, rounded(sum(real_tokens), tokens_per_update))
    for window in windows:
        # Nearest to the milestones: half a step off at both ends, half a window at the end.
        assert sum(window) <= 1.5 * tokens_per_update + largest


@given(st.lists(st.integers(10, 50), min_size=1, max_size=60), st.integers(1, 10))
def test_steps_larger_than_a_window_each_end_one(real_tokens, tokens_per_update):
    assert update_after_step(np.array(real_tokens), tokens_per_update).all()


def rounded(total, tokens_per_update):
    return math.floor(Fraction(total, tokens_per_update) + Fraction(1, 2))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_windows_equal_a_search_over_all_steps(real_tokens, tokens_per_update):
    running = list(itertools.accumulate(real_tokens))
    ends = {len(running) - 1}
    for update in range(1, max(1, rounded(running[-1], tokens_per_update))):
        milestone = update * tokens_per_update
        # Of two equally near steps min takes the first.
        ends.add(min(range(len(running)), key=lambda i, m=milestone: abs(running[i] - m)))
    found = update_after_step(np.array(real_tokens), tokens_per_update)
    assert set(np.flatnonzero(found).tolist()) == ends


@pytest.mark.parametrize(
    ("tokens_per_update", "ends"),
    [
        (1, [1, 1, 1, 1]),
        (10, [1, 1, 1, 1]),
        # 40 / 11 rounds to 4 updates: nearest to 11, 22, 33 are 10, 20, 30.
        (11, [1, 1, 1, 1]),
        # 40 / 16 = 2.5 rounds to 3: nearest to 16 and 32 are 20 and 30.
        (16, [0, 1, 1, 1]),
        (20, [0, 1, 0, 1]),
        # Two updates: 20 and 30 are equally near to 25, the first of them ends the window.
        (25, [0, 1, 0, 1]),
        (30, [0, 0, 0, 1]),
        (40, [0, 0, 0, 1]),
        (1000, [0, 0, 0, 1]),
    ],
)
def test_hand_calculated_windows(tokens_per_update, ends):
    assert update_after_step(np.array([10, 10, 10, 10]), tokens_per_update).tolist() == ends


@pytest.mark.parametrize(("per_update", "steps"), [(60, 2), (90, 3), (120, 4), (30, 1)])
def test_equal_steps_make_equal_windows(per_update, steps):
    ends = update_after_step(np.full(12, 30), per_update).reshape(-1, steps)
    assert not ends[:, :-1].any()
    assert ends[:, -1].all()


def test_plans_of_other_batch_sizes_have_as_many_updates():
    """4,000 tokens at 400 an update are 10 updates, in steps of 10, of 130 or of 380 tokens."""
    for step in (10, 130, 380):
        steps = [step] * (4000 // step)
        steps.append(4000 - sum(steps))
        assert update_after_step(np.array(steps), 400).sum() == pytest.approx(10, abs=1)


def test_without_a_number_every_step_updates():
    assert update_after_step(np.array([1, 2, 3]), None).tolist() == [True, True, True]


@pytest.mark.parametrize(
    ("num_steps", "per_update", "windows"),
    [
        (10, 4, [4, 4, 2]),
        (8, 4, [4, 4]),
        (3, 4, [3]),
        (1, 1, [1]),
        (5, 1, [1] * 5),
        (7, 6, [6, 1]),
    ],
)
def test_windows_of_so_many_steps_whatever_they_hold(num_steps, per_update, windows):
    """The last of an epoch has what is left, and is an update of its own."""
    rng = np.random.default_rng(num_steps)
    ends = update_after_step(rng.integers(1, 10_000, num_steps), None, per_update)
    places = np.flatnonzero(ends) + 1
    assert np.diff(places, prepend=0).tolist() == windows


def test_no_step_no_window():
    assert update_after_step(np.array([], dtype=np.int64), 5).tolist() == []
    assert update_after_step(np.array([], dtype=np.int64), None).tolist() == []


@pytest.mark.parametrize("tokens_per_update", [1, 4000, 10**12])
def test_any_number_of_tokens_an_update_takes_the_memory_of_the_steps(tokens_per_update):
    """Eight thousand million tokens: as many updates at one token each, but few steps."""
    real_tokens = np.full(20_000, 400_000)
    tracemalloc.start()
    ends = update_after_step(real_tokens, tokens_per_update)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert ends.sum() == (20_000 if tokens_per_update < 400_000 else 1)
    assert peak_bytes < 10 * real_tokens.nbytes

"""Accumulation windows: what a window must hold, and a hand-written example."""

from __future__ import annotations

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


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(1, 200))
def test_window_is_as_short_as_its_tokens_allow(real_tokens, tokens_per_update):
    ends = update_after_step(np.array(real_tokens), tokens_per_update)
    assert ends.dtype == np.bool_
    assert ends[-1]
    windows = windows_of(real_tokens, ends.tolist())
    assert [tokens for window in windows for tokens in window] == real_tokens
    for window in windows[:-1]:
        assert sum(window) >= tokens_per_update
    for window in windows:
        assert sum(window[:-1]) < tokens_per_update


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 200))
def test_windows_equal_a_plain_loop(real_tokens, tokens_per_update):
    expected, gathered = [], 0
    for step, tokens in enumerate(real_tokens):
        gathered += tokens
        is_end = gathered >= tokens_per_update or step == len(real_tokens) - 1
        expected.append(is_end)
        gathered = 0 if is_end else gathered
    assert update_after_step(np.array(real_tokens), tokens_per_update).tolist() == expected


@pytest.mark.parametrize(
    ("tokens_per_update", "ends"),
    [(1, [1, 1, 1, 1]), (10, [1, 1, 1, 1]), (11, [0, 1, 0, 1]), (30, [0, 0, 1, 1]),
     (40, [0, 0, 0, 1]), (1000, [0, 0, 0, 1])],
)  # fmt: skip
def test_hand_calculated_windows(tokens_per_update, ends):
    assert update_after_step(np.array([10, 10, 10, 10]), tokens_per_update).tolist() == ends


def test_without_a_number_every_step_updates():
    assert update_after_step(np.array([1, 2, 3]), None).tolist() == [True, True, True]


def test_no_step_no_window():
    assert update_after_step(np.array([], dtype=np.int64), 5).tolist() == []
    assert update_after_step(np.array([], dtype=np.int64), None).tolist() == []

"""The threshold of clipping: fixed, or a quantile of the last norms."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.config.schema import LoopConfig
from tuner.train.clipping import LEAST_NORMS, clip_threshold, is_clipped, norms_after

NORMS = st.floats(1e-6, 1e6)


def test_a_fixed_threshold_and_none():
    assert clip_threshold((5.0,) * 50, LoopConfig(clip_norm=0.7)) == 0.7
    assert clip_threshold((5.0,) * 50, LoopConfig(clip_norm=None)) == math.inf
    assert norms_after((), 3.0, LoopConfig(clip_norm=0.7)) == ()


def test_the_fixed_one_holds_until_there_are_enough_norms():
    config = LoopConfig(clip_norm=0.7, clip_quantile=0.5)
    norms = ()
    for count in range(LEAST_NORMS):
        assert clip_threshold(norms, config) == 0.7
        norms = norms_after(norms, float(count), config)
    # The median of 0 to 9.
    assert clip_threshold(norms, config) == 4.5
    without = LoopConfig(clip_norm=None, clip_quantile=0.5)
    assert clip_threshold(norms[1:], without) == math.inf
    assert clip_threshold(norms, without) == 4.5


@pytest.mark.parametrize(
    ("quantile", "expected"),
    # Between the k-th and the next of 11 norms 0, 10, ..., 100: 100 times the quantile.
    [(0.5, 50.0), (0.9, 90.0), (0.95, 95.0), (0.01, 1.0)],
)
def test_quantiles_calculated_by_hand(quantile, expected):
    config = LoopConfig(clip_quantile=quantile)
    norms = tuple(float(norm) for norm in np.random.default_rng(0).permutation(11) * 10)
    assert clip_threshold(norms, config) == pytest.approx(expected)


def test_only_the_last_norms_count():
    config = LoopConfig(clip_quantile=0.5, clip_window=12)
    norms = ()
    for norm in (*[1000.0] * 20, *range(12)):
        norms = norms_after(norms, float(norm), config)
    assert norms == tuple(float(norm) for norm in range(12))
    assert clip_threshold(norms, config) == 5.5


@given(st.lists(NORMS, min_size=LEAST_NORMS, max_size=60), st.floats(0.01, 0.99))
def test_about_the_asked_share_of_updates_is_over_the_threshold(norms, quantile):
    threshold = clip_threshold(norms, LoopConfig(clip_quantile=quantile))
    share_over = np.mean(np.array(norms) > threshold)
    assert min(norms) <= threshold <= max(norms)
    assert share_over <= 1 - quantile + 1 / len(norms)


@given(st.lists(NORMS, max_size=40))
def test_norms_come_back_from_json_to_the_bit(norms):
    assert json.loads(json.dumps(norms)) == norms


def test_whether_an_update_was_clipped():
    assert is_clipped(2.0, 1.0)
    assert not is_clipped(1.0, 2.0)
    assert not is_clipped(1e30, math.inf)
    # The graph divides by the norm plus 1e-6, so a norm that is just the threshold is scaled.
    assert is_clipped(1.0, 1.0)

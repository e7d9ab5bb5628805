"""The shift of lengths, against SciPy's own two-sample test on the rows themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ks_2samp, kstwobign
from strategies import lengths, skewed_tokens

from tuner.simulate.length_shift import RESOLUTION, compare_lengths, length_percentiles


@given(lengths(min_rows=1, max_rows=300), lengths(min_rows=1, max_rows=300))
def test_the_statistic_is_scipys_to_a_hundredth(before, now):
    shift = compare_lengths(length_percentiles(np.array(before)), len(before), np.array(now))
    exact = ks_2samp(before, now, method="asymp").statistic
    assert shift.statistic == pytest.approx(exact, abs=RESOLUTION + 1e-9)
    share_now = np.mean(np.array(now) <= shift.at_length)
    share_before = np.mean(np.array(before) <= shift.at_length)
    assert shift.share_now == pytest.approx(share_now, abs=1e-12)
    assert shift.share_before == pytest.approx(share_before, abs=RESOLUTION + 1e-9)


@pytest.mark.parametrize("factor", [1.0, 1.1, 1.5])
def test_of_many_rows_statistic_and_chance_are_scipys(factor):
    before = np.array(skewed_tokens(4000, seed=1))
    now = (np.array(skewed_tokens(3000, seed=2)) * factor).astype(int)
    shift = compare_lengths(length_percentiles(before), len(before), now)
    exact = ks_2samp(before, now, method="asymp")
    assert shift.statistic == pytest.approx(exact.statistic, abs=0.003)
    if factor == 1.0:
        assert shift.chance > 0.05
    else:
        assert shift.is_resolved
        assert shift.chance < 0.01
    scaled = shift.statistic * np.sqrt(4000 * 3000 / 7000)
    assert shift.chance == pytest.approx(kstwobign.sf(scaled), rel=1e-6)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=250))
def test_percentiles_are_the_smallest_lengths_that_so_many_rows_reach(tokens):
    found = length_percentiles(np.array(tokens))
    ordered = sorted(tokens)
    assert len(found) == 101
    for percent, value in enumerate(found):
        reached = sum(length <= value for length in tokens)
        assert 100 * reached >= percent * len(tokens)
        below = sum(length < value for length in tokens)
        assert value == ordered[0] or 100 * below < percent * len(tokens)


def test_the_same_rows_are_not_apart():
    tokens = np.array(skewed_tokens(2000))
    shift = compare_lengths(length_percentiles(tokens), 2000, tokens)
    assert not shift.is_resolved

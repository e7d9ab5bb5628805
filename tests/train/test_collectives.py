"""Numbers as sums of float32; what ranks do with it is shown by real ones in test_two_ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.train.collectives import join_pieces, split

pytestmark = pytest.mark.mindspore

LARGEST = float(np.finfo(np.float32).max)


def sent(values):
    return join_pieces(split(np.array(values, dtype=np.float64)))


@given(st.floats(1e-20, 1e30) | st.integers(0, 2**53).map(float))
def test_a_number_comes_out_as_it_went_in(value):
    assert sent([value, -value]).tolist() == [value, -value]


def test_counts_over_what_float32_holds_are_exact():
    counts = [2**24 + 1, 2**31 - 1, 2**53 - 1, 0]
    assert sent(counts).tolist() == counts


def test_what_is_no_number_stays_none():
    found = sent([math.nan, math.inf, -math.inf, 1e39, LARGEST])
    assert math.isnan(found[0])
    assert found[1:].tolist() == [math.inf, -math.inf, math.inf, LARGEST]

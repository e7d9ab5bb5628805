"""Which shapes a trial measures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.trial.measure import choose_shapes

shapes = st.tuples(st.integers(1, 40), st.integers(1, 300))
counts = st.dictionaries(shapes, st.integers(0, 9), max_size=30)


def tokens(shape):
    return shape[0] * shape[1]


def test_few_shapes_are_all_measured_largest_first():
    met = {(8, 16): 5, (2, 256): 1, (4, 64): 3}
    assert choose_shapes(met, 3) == [(2, 256), (4, 64), (8, 16)]


def test_of_equally_many_tokens_the_longer_rows_come_first():
    assert choose_shapes({(8, 32): 1, (2, 128): 1, (4, 64): 1}, 5) == [
        (2, 128),
        (4, 64),
        (8, 32),
    ]


def test_shapes_that_the_epoch_does_not_meet_are_left_out():
    assert choose_shapes({(1, 8): 0, (1, 16): 2, (9, 99): 0}, 3) == [(1, 16)]
    assert choose_shapes({(1, 8): 0}, 3) == []
    assert choose_shapes({}, 3) == []


def test_of_many_the_ends_and_those_that_carry_most_tokens():
    # Between (1, 100) and (1, 10) the share of the epoch is 90, 800, 70, 600 tokens.
    met = {(1, 100): 1, (1, 90): 1, (1, 80): 10, (1, 70): 1, (1, 60): 10, (1, 10): 1}
    assert choose_shapes(met, 4) == [(1, 100), (1, 80), (1, 60), (1, 10)]
    assert choose_shapes(met, 3) == [(1, 100), (1, 80), (1, 10)]


@given(counts, st.integers(3, 12))
def test_what_always_holds(met, max_shapes):
    chosen = choose_shapes(met, max_shapes)
    present = [shape for shape, count in met.items() if count]
    assert len(chosen) == min(len(present), max_shapes)
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= set(present)
    assert [tokens(shape) for shape in chosen] == sorted(map(tokens, chosen), reverse=True)
    if present:
        assert tokens(chosen[0]) == max(map(tokens, present))
        assert tokens(chosen[-1]) == min(map(tokens, present))


@pytest.mark.parametrize("max_shapes", [3, 6])
def test_a_heavy_shape_is_never_left_out_for_a_light_one(max_shapes):
    met = {(1, length): 1 for length in range(1, 50)} | {(1, 25): 1000}
    assert (1, 25) in choose_shapes(met, max_shapes)

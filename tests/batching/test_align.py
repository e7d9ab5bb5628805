"""Alignment against counting up one token at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import TABLE, align_rules, align_slowly

from tuner.batching.align import align_length, align_lengths
from tuner.config.schema import AlignRule


@given(align_rules(), st.lists(st.integers(1, 700), max_size=20))
def test_every_length_goes_to_the_smallest_aligned_length(align, tokens):
    aligned = align_lengths(np.array(tokens, dtype=np.int32), align)
    assert aligned.dtype == np.int64
    assert aligned.tolist() == [align_slowly(length, align) for length in tokens]


@given(align_rules())
def test_alignment_keeps_the_order_and_is_done_once(align):
    every_length = np.arange(1, 400)
    aligned = align_lengths(every_length, align)
    assert (np.diff(aligned) >= 0).all()
    assert (aligned >= every_length).all()
    assert (align_lengths(aligned, align) == aligned).all()


@pytest.mark.parametrize(
    ("length", "aligned"),
    [(1, 8), (8, 8), (9, 16), (127, 128), (128, 128), (129, 160), (512, 512), (513, 576),
     (576, 576), (100_000, 100_032)],
)  # fmt: skip
def test_table_rounds_short_lengths_finer_than_long_ones(length, aligned):
    assert align_length(length, TABLE) == aligned


def test_length_just_over_a_rule_follows_the_next():
    table = (AlignRule(up_to=100, multiple=10), AlignRule(multiple=64))
    assert [align_length(n, table) for n in (99, 100, 101, 128, 129)] == [100, 100, 128, 128, 192]


def test_multiple_of_one_changes_nothing():
    assert align_lengths(np.arange(1, 50), 1).tolist() == list(range(1, 50))


def test_lengths_near_the_limit_of_int32_do_not_overflow():
    assert align_lengths(np.array([2**31 - 1], dtype=np.int32), 4096).tolist() == [2**31]

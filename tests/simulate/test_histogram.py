"""The histogram of lengths admits rows as the plan does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import lengths, make_config, make_lengths

from tuner.batching.rows import admit_rows
from tuner.errors import BadInputError
from tuner.simulate.histogram import LengthHistogram


def histogram_of(tokens):
    return LengthHistogram.from_tokens(np.array(tokens, dtype=np.int32))


def data_of(overflow):
    return make_config({"data.overflow": overflow}).data


@given(lengths())
def test_counts_every_row_once(tokens):
    histogram = histogram_of(tokens)
    assert histogram.lengths.tolist() == sorted(set(tokens))
    assert histogram.counts.tolist() == [tokens.count(n) for n in sorted(set(tokens))]
    assert (histogram.num_rows, histogram.total_tokens) == (len(tokens), sum(tokens))
    assert histogram.longest == max(tokens)


@given(lengths(), st.lists(st.integers(0, 250), min_size=1))
def test_sums_up_to_a_length_include_it(tokens, ends):
    histogram = histogram_of(tokens)
    below = [[length for length in tokens if length <= end] for end in ends]
    assert histogram.rows_up_to(np.array(ends)).tolist() == [len(rows) for rows in below]
    assert histogram.tokens_up_to(np.array(ends)).tolist() == [sum(rows) for rows in below]


@given(lengths(), st.none() | st.integers(1, 220), st.sampled_from(["truncate", "drop", "error"]))
def test_admits_what_the_plan_admits(tokens, limit, overflow):
    data = data_of(overflow)
    try:
        expected = admit_rows(make_lengths(tokens), data, limit)
    except BadInputError as error:
        with pytest.raises(BadInputError) as refused:
            histogram_of(tokens).admit(data, limit)
        assert refused.value.fix == error.fix
        return
    admitted = histogram_of(tokens).admit(data, limit)
    assert admitted.num_rows == len(expected.tokens)
    assert np.repeat(admitted.lengths, admitted.counts).tolist() == sorted(expected.tokens)
    assert (np.diff(admitted.lengths) > 0).all()


def test_refusals_count_rows_and_not_lengths():
    with pytest.raises(BadInputError, match=r"3 rows are longer than 8 tokens \(the longest.* 9"):
        histogram_of([1, 9, 9, 9]).admit(data_of("error"), 8)
    with pytest.raises(BadInputError, match=r"no row is left to batch .5 rows, 2 empty, 3 longer"):
        histogram_of([0, 0, 9, 9, 9]).admit(data_of("drop"), 8)


def test_arrays_are_read_only_copies():
    lengths_given = np.array([1, 2])
    histogram = LengthHistogram(lengths=lengths_given, counts=np.array([1, 1]))
    lengths_given[0] = 7
    assert histogram.lengths.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        histogram.counts[0] = 5


def test_a_sample_stands_for_the_set_in_proportion():
    sample = LengthHistogram.from_tokens(np.array([5] * 6 + [8] * 3 + [9]))
    scaled = sample.scaled_to(1000, longest=9)
    assert scaled.lengths.tolist() == [5, 8, 9]
    assert scaled.counts.tolist() == [600, 300, 100]
    beyond = sample.scaled_to(1003, longest=77)
    assert beyond.lengths.tolist() == [5, 8, 9, 77]
    assert beyond.counts.tolist() == [602, 301, 100, 1]
    assert sample.scaled_to(10, longest=9).counts.tolist() == sample.counts.tolist()

"""Where the sequences of packed rows end, against walking through the rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.batching.packed_bounds import PackedBounds
from tuner.errors import BadInputError
from tuner.train.flash_lengths import cumulative_lengths, layout_refusal, num_lengths

ROWS = np.array([[1, 1, 1, 2, 3, 3, 0, 0], [0] * 8, [1] * 8, [1, 2, 3, 4, 5, 6, 7, 8]], np.int32)


def test_hand_calculated_ends():
    """Three samples and padding, a filler row, a full one, and one of single tokens."""
    lengths = cumulative_lengths(ROWS, 128)
    ends = [3, 4, 6, 8, 16, 24, *range(25, 33)]
    assert lengths[: len(ends)].tolist() == ends
    assert (lengths[len(ends) :] == 32).all()
    assert (lengths.shape, lengths.dtype) == ((128,), np.int64)


@st.composite
def segment_rows(draw):
    """Rows as the loader makes them: samples 1, 2, ... and padding at the end only."""
    length = draw(st.integers(1, 12))
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        cuts = sorted(draw(st.sets(st.integers(1, length))))
        ids = np.zeros(length, np.int32)
        for number, (start, end) in enumerate(itertools.pairwise([0, *cuts]), start=1):
            ids[start:end] = number
        rows.append(ids)
    return np.stack(rows)


@given(segment_rows())
def test_sequences_are_the_runs_of_one_segment_row_by_row(segment_ids):
    runs = [len(list(run)) for row in segment_ids.tolist() for _, run in itertools.groupby(row)]
    lengths = cumulative_lengths(segment_ids, 128)
    assert np.diff(lengths, prepend=0)[: len(runs)].tolist() == runs
    assert (np.diff(lengths)[len(runs) - 1 :] == 0).all()
    assert lengths[-1] == segment_ids.size


@pytest.mark.parametrize(
    ("sequences", "entries"), [(1, 128), (128, 128), (129, 256), (1000, 1024), (1024, 1024)]
)
def test_entries_are_the_next_multiple_of_128(sequences, entries):
    assert num_lengths(sequences) == entries


def test_a_batch_beyond_the_plan_loses_no_sequence():
    segment_ids = np.arange(1, 131, dtype=np.int32).reshape(1, 130)
    lengths = cumulative_lengths(segment_ids, 128)
    assert lengths.tolist() == [*range(1, 131), *[130] * 126]


def test_more_sequences_than_the_op_takes_are_refused():
    segment_ids = np.arange(1, 1026, dtype=np.int32).reshape(1, 1025)
    with pytest.raises(BadInputError, match="a batch holds 1025 sequences"):
        cumulative_lengths(segment_ids, 128)
    assert len(cumulative_lengths(segment_ids[:, :1024], 128)) == 1024


@pytest.mark.parametrize(
    ("sequences", "tokens", "words"),
    [
        (1024, 2**20, None),
        (1025, 2**20, "a batch may hold 1025 sequences (layout TND takes 1024)"),
        (1, 2**20 + 1, "a batch may hold 1048577 tokens (layout TND takes 1048576)"),
    ],
)
def test_what_the_layout_takes(sequences, tokens, words):
    assert layout_refusal(PackedBounds(sequences=sequences, tokens=tokens)) == words

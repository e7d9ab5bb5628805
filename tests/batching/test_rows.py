"""Which rows take part: the overflow rule, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
from strategies import make_lengths

from tuner.batching import rows
from tuner.batching.rows import (
    EMPTY,
    OVER_LONG,
    admit_rows,
    admitted_tokens,
    rows_of_length,
)
from tuner.config.schema import DataConfig
from tuner.errors import BadInputError

TOKENS = np.array([5, 0, 12, 10, 11, 0, 1], dtype=np.int32)


def admit(overflow, limit, tokens=TOKENS):
    data = DataConfig(path="d.mindrecord", overflow=overflow)
    return admit_rows(make_lengths(tokens), data, limit)


def test_truncate_cuts_to_the_limit_and_counts():
    admitted = admit("truncate", 10)
    assert admitted.row_indices.tolist() == [0, 2, 3, 4, 6]
    assert admitted.tokens.tolist() == [5, 10, 10, 10, 1]
    assert admitted.num_truncated == 2
    assert admitted.dropped == {EMPTY: 2, OVER_LONG: 0}


def test_drop_leaves_out_and_counts():
    admitted = admit("drop", 10)
    assert admitted.row_indices.tolist() == [0, 3, 6]
    assert admitted.tokens.tolist() == [5, 10, 1]
    assert admitted.num_truncated == 0
    assert admitted.dropped == {EMPTY: 2, OVER_LONG: 2}


def test_error_names_the_first_row_and_how_many():
    with pytest.raises(BadInputError) as error:
        admit("error", 10)
    assert "2 rows are longer than 10 tokens (row 2 has 12)" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("overflow", ["truncate", "drop", "error"])
@pytest.mark.parametrize("limit", [12, 13, None])
def test_limit_is_inclusive(overflow, limit):
    admitted = admit(overflow, limit)
    assert admitted.tokens.tolist() == [5, 12, 10, 11, 1]
    assert admitted.num_truncated == 0
    assert admitted.dropped == {EMPTY: 2, OVER_LONG: 0}


@pytest.mark.parametrize(
    ("tokens", "overflow", "words"),
    [
        ([], "truncate", "(0 rows, 0 empty, 0 longer than 4)"),
        ([0, 0], "truncate", "(2 rows, 2 empty, 0 longer than 4)"),
        ([9, 0, 5], "drop", "(3 rows, 1 empty, 2 longer than 4)"),
    ],
)
def test_no_row_left_is_refused_with_the_counts(tokens, overflow, words):
    with pytest.raises(BadInputError) as error:
        admit(overflow, 4, np.array(tokens, dtype=np.int32))
    assert "d.mindrecord: no row is left to batch" in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("overflow", "tokens"),
    [("truncate", [5, 0, 10, 10, 10, 0, 1]), ("drop", [5, 0, 0, 10, 0, 0, 1])],
)
def test_tokens_of_every_row_are_those_of_the_admitted_ones(overflow, tokens):
    data, lengths = DataConfig(path="d.mindrecord", overflow=overflow), make_lengths(TOKENS)
    found, num_truncated, dropped = admitted_tokens(lengths, data, 10)
    admitted = admit(overflow, 10)
    assert found.tolist() == tokens
    assert (num_truncated, dropped) == (admitted.num_truncated, admitted.dropped)
    assert lengths.tokens.tolist() == TOKENS.tolist()


def test_rows_of_every_length_are_counted_a_part_at_a_time(monkeypatch):
    monkeypatch.setattr(rows, "ROWS_AT_A_TIME", 3)
    assert rows_of_length(TOKENS).tolist() == np.bincount(TOKENS).tolist()

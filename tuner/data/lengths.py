"""How long every row is: the one thing about the data that batching needs to know.

- Files of `varseq-data prepare` have the lengths in the index, and their description says so.
- In other files, the headers of the arrays tell (header_lengths.py), checked against MindSpore on
  some rows of every file. An index column called `length` comes second there, since it may count
  something else in any row: it is believed, after the same check, where headers say nothing.
- Otherwise every row is read (about 15,000 rows a second).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.data.header_lengths import (
    NoticeSink,
    believe_counts,
    layout_of,
    lengths_agree,
    read_counts,
    rows_to_check,
)
from tuner.data.length_cache import FoundTokens, LengthCache, LengthSource
from tuner.data.mindrecord import MindRecordSet, read_index_column, read_rows, require_columns
from tuner.errors import BadInputError

IntArray = npt.NDArray[np.integer[Any]]
BoolArray = npt.NDArray[np.bool_]

LENGTH_COLUMN = "length"
CONTENT_SEED = 0

SOURCE_TEXTS: Mapping[LengthSource, str] = {
    "given": "given by the caller",
    "index": "read from the index",
    "headers": "read from the headers of the arrays and checked against MindSpore on some rows",
    "rows": "counted by reading every row",
}


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """The number of tokens in each row."""

    tokens: IntArray
    """int32 [N], read-only; row i of the MindRecord set."""
    fingerprint: str
    """The fingerprint of the data that the lengths belong to."""
    source: LengthSource = "given"
    """Where the lengths were found first."""
    is_from_cache: bool = False
    """Whether this call took them from the cache of an earlier one."""
    is_left_out: BoolArray | None = None
    """bool [N], read-only; rows that belong to another part of a split; None: no split."""
    left_out_as: str = ""
    """The reason under which these are counted."""

    def __post_init__(self) -> None:
        tokens = np.array(self.tokens, np.int32)
        tokens.flags.writeable = False
        object.__setattr__(self, "tokens", tokens)
        if self.is_left_out is not None:
            is_left_out = np.array(self.is_left_out, bool)
            is_left_out.flags.writeable = False
            object.__setattr__(self, "is_left_out", is_left_out)

    @property
    def num_samples(self) -> int:
        """Number of rows of the set, N, those of another part included."""
        return len(self.tokens)

    @property
    def own_tokens(self) -> IntArray:
        """int32 [M]; tokens of the rows of this part: all of them without a split."""
        if self.is_left_out is None:
            return self.tokens
        own: IntArray = self.tokens[~self.is_left_out]
        return own

    @property
    def total_tokens(self) -> int:
        """Sum over the rows of this part."""
        return int(self.own_tokens.sum(dtype=np.int64))

    @property
    def longest(self) -> int:
        """Tokens of the longest row of this part; 0 if there is no row."""
        return int(self.own_tokens.max(initial=0))

    @property
    def source_text(self) -> str:
        """How the lengths were found, for people."""
        cached = " (taken from the cache)" if self.is_from_cache else ""
        return SOURCE_TEXTS[self.source] + cached


def print_notice(text: str) -> None:
    """Say it on the standard error stream."""
    print(f"note: {text}", file=sys.stderr)


def scan_lengths(
    dataset: MindRecordSet,
    input_column: str = "input_ids",
    *,
    cache: Path | None = None,
    notice: NoticeSink = print_notice,
) -> Lengths:
    """Find the length of every row.

    Args:
        dataset: From `open_mindrecord`.
        input_column: Its number of elements is the length.
        cache: A folder to keep the lengths in, made if it is not there; not used for lengths that
            stand in the index. None keeps nothing. A folder that cannot be written to is told to
            `notice` and changes nothing else.
        notice: Called with a sentence when every row has to be read, with the reason.

    Raises:
        BadInputError: If the column is missing, there are no rows, or one is damaged.
    """
    require_columns(dataset, [input_column])
    require_rows(dataset)
    kept = (
        None
        if cache is None
        else LengthCache(folder=cache, fingerprint=dataset.fingerprint, column=input_column)
    )
    known = kept.read(dataset.num_samples) if kept else None
    found = known or _find_tokens(dataset, input_column, notice)
    # The index is as near as a cache would be.
    if kept and not known and found.source != "index":
        kept.write(found, notice)
    return Lengths(
        tokens=found.tokens,
        fingerprint=dataset.fingerprint,
        source=found.source,
        is_from_cache=known is not None,
    )


def _find_tokens(dataset: MindRecordSet, column: str, notice: NoticeSink) -> FoundTokens:
    described = described_lengths(dataset, column)
    if described is not None:
        return FoundTokens(tokens=described, source="index")
    layout = layout_of(dataset, column)
    if layout is not None:
        counts = read_counts(dataset, layout)
        every_row = np.arange(dataset.num_samples)
        if believe_counts(dataset, column, every_row, counts, notice):
            return FoundTokens(tokens=counts.tokens, source="headers")
    else:
        checked = _checked_lengths(dataset, column)
        if checked is not None:
            return FoundTokens(tokens=checked, source="index")
        notice(f"{dataset.path}: every row is read to count '{column}', which takes longer")
    return FoundTokens(tokens=count_in_every_row(dataset, column), source="rows")


def described_lengths(dataset: MindRecordSet, column: str) -> IntArray | None:
    """The lengths that `varseq-data prepare` put into the index, int64 [N], or None."""
    if dataset.description.get("length_of") != column:
        return None
    return _index_lengths(dataset)


def _checked_lengths(dataset: MindRecordSet, column: str) -> IntArray | None:
    """The index column `length` of somebody else, or None if some rows say otherwise."""
    tokens = _index_lengths(dataset)
    if tokens is None:
        return None
    rows = rows_to_check(dataset)
    return tokens if lengths_agree(dataset, column, rows, tokens[rows]) else None


def _index_lengths(dataset: MindRecordSet) -> IntArray | None:
    has_lengths = all(LENGTH_COLUMN in index.index_values for index in dataset.row_indexes)
    if not (has_lengths and dataset.row_indexes):
        return None
    tokens = read_index_column(dataset, LENGTH_COLUMN)
    is_possible = tokens.min(initial=0) >= 0 and tokens.max(initial=0) < 2**31
    return tokens if is_possible else None


def count_in_every_row(dataset: MindRecordSet, column: str) -> IntArray:
    """Read every row and count its elements, int32 [N]."""
    rows = read_rows(dataset, [column])
    return np.fromiter((row[0].size for row in rows), np.int32, dataset.num_samples)


def require_rows(dataset: MindRecordSet) -> None:
    """Raise a BadInputError if there is no row."""
    if dataset.num_samples == 0:
        raise BadInputError(
            f"{dataset.path} has no rows", fix="prepare it from an input with text"
        )


def sample_rows(dataset: MindRecordSet, limit_rows: int) -> IntArray:
    """Row numbers, int64, ascending: all of them, or a seeded sample with the first and last."""
    if dataset.num_samples <= limit_rows:
        return np.arange(dataset.num_samples)
    chosen = np.random.default_rng(CONTENT_SEED).choice(
        dataset.num_samples, size=limit_rows, replace=False
    )
    chosen[:2] = 0, dataset.num_samples - 1
    rows: IntArray = np.unique(chosen)
    return rows

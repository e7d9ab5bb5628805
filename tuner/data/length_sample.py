"""Lengths of a random sample of rows, and the longest row of all, for sets of enormous size.

- The sample is uniform and without replacement over all files together. Since the index gives
  the number of rows, row numbers are drawn: a reservoir would read every row for the same result.
- The longest row is exact, since shapes and memory depend on it. An index of lengths simply holds
  it. Otherwise the size of a row's blob, which opening has read, bounds its length
  (`ColumnLayout.most_elements`): rows are looked at in descending order of the bound until none of
  the rest can beat the longest found.
- Where neither helps, every row has to be read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.data.column_layout import ColumnLayout
from tuner.data.header_lengths import (
    NoticeSink,
    believe_counts,
    layout_of,
    read_counts,
    rows_to_check,
)
from tuner.data.length_cache import LengthSource
from tuner.data.lengths import (
    SOURCE_TEXTS,
    count_in_every_row,
    described_lengths,
    print_notice,
    require_rows,
)
from tuner.data.mindrecord import MindRecordSet, require_columns
from tuner.errors import BadInputError

IntArray = npt.NDArray[np.integer[Any]]

ROWS_PER_LOOK = 10_000


@dataclass(frozen=True, kw_only=True)
class LengthSample:
    """The lengths of some rows of a set, with what is known of all of them."""

    tokens: IntArray
    """int32 [n], read-only; the lengths of the sample, in the order of the rows."""
    row_indices: IntArray
    """int64 [n], read-only; which rows they are, ascending."""
    num_rows_in_set: int
    """Rows of the whole set, at least n."""
    longest: int
    """Tokens of the longest row of the whole set, exact."""
    source: LengthSource
    """Where the lengths were found."""
    fingerprint: str
    """The fingerprint of the whole set."""

    def __post_init__(self) -> None:
        for name, kind in (("tokens", np.int32), ("row_indices", np.int64)):
            values = np.array(getattr(self, name), kind)
            values.flags.writeable = False
            object.__setattr__(self, name, values)

    @property
    def source_text(self) -> str:
        """How the lengths were found, for people."""
        return SOURCE_TEXTS[self.source]

    @property
    def num_rows(self) -> int:
        """Rows of the sample, n."""
        return len(self.tokens)


def sample_lengths(
    dataset: MindRecordSet,
    input_column: str,
    num_rows: int,
    seed: int = 0,
    *,
    notice: NoticeSink = print_notice,
) -> LengthSample:
    """Find the lengths of a random sample of rows.

    Args:
        dataset: From `open_mindrecord`.
        input_column: Its number of elements is the length.
        num_rows: Size of the sample, at least 1; more than the set has means all of them.
        seed: The same seed on the same number of rows draws the same rows.
        notice: Called with a sentence when every row has to be read, with the reason.

    Raises:
        BadInputError: If the column is missing, there are no rows, one is damaged, or num_rows is
            below 1.
    """
    require_columns(dataset, [input_column])
    require_rows(dataset)
    if num_rows < 1:
        raise BadInputError(f"a sample has at least 1 row (got {num_rows})", fix="ask for more")
    rows = _draw_rows(dataset.num_samples, num_rows, seed)
    tokens, longest, source = _find(dataset, input_column, rows, notice)
    return LengthSample(
        tokens=tokens,
        row_indices=rows,
        num_rows_in_set=dataset.num_samples,
        longest=longest,
        source=source,
        fingerprint=dataset.fingerprint,
    )


def _draw_rows(num_rows_in_set: int, num_rows: int, seed: int) -> IntArray:
    """Distinct row numbers, int64 [n], ascending; each set of n rows is equally likely."""
    size = min(num_rows, num_rows_in_set)
    drawn = np.random.default_rng(seed).choice(num_rows_in_set, size, replace=False, shuffle=False)
    rows: IntArray = np.sort(drawn)
    return rows


def _find(
    dataset: MindRecordSet, column: str, rows: IntArray, notice: NoticeSink
) -> tuple[IntArray, int, LengthSource]:
    """Lengths of the rows, the longest of the set, and where they were found."""
    described = described_lengths(dataset, column)
    if described is not None:
        return described[rows], int(described.max()), "index"
    layout = layout_of(dataset, column)
    if layout is not None:
        with_checked = np.union1d(rows, rows_to_check(dataset))
        counts = read_counts(dataset, layout, with_checked)
        longest = None
        if believe_counts(dataset, column, with_checked, counts, notice):
            known = int(counts.tokens.max())
            longest = _longest_of_set(dataset, column, layout, known, notice)
        if longest is not None:
            return counts.tokens[np.isin(with_checked, rows)], longest, "headers"
    else:
        notice(f"{dataset.path}: every row is read to count '{column}', which takes longer")
    tokens = count_in_every_row(dataset, column)
    return tokens[rows], int(tokens.max()), "rows"


def _longest_of_set(
    dataset: MindRecordSet, column: str, layout: ColumnLayout, known: int, notice: NoticeSink
) -> int | None:
    """Tokens of the longest row of the set, or None if headers are not to be believed.

    `known` is the length of some row, so that rows that cannot be longer are not looked at.
    """
    most = layout.most_elements(dataset.blob_bytes)
    candidates = np.flatnonzero(most > known)
    candidates = candidates[np.argsort(-most[candidates], kind="stable")]
    for start in range(0, len(candidates), ROWS_PER_LOOK):
        rows = candidates[start : start + ROWS_PER_LOOK]
        if most[rows[0]] <= known:
            break
        counts = read_counts(dataset, layout, np.sort(rows))
        if not believe_counts(dataset, column, np.sort(rows), counts, notice):
            return None
        known = max(known, int(counts.tokens.max()))
    return known

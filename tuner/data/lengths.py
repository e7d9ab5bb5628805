"""How long every row is: the one thing about the data that batching needs to know.

The lengths come from the index where `prepare` wrote them there (milliseconds). In other people's
files a column called `length` is believed only if a sample of rows agrees with it; otherwise every
row is read (about 10,000 rows a second).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.data.mindrecord import MindRecordSet, read_index_column, read_rows, require_columns
from tuner.errors import BadInputError

IntArray = npt.NDArray[np.integer[Any]]

LENGTH_COLUMN = "length"
CONTENT_SEED = 0
SPOT_CHECKED_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """The number of tokens in each row."""

    tokens: IntArray
    """int32 [N], read-only; row i of the MindRecord set."""
    fingerprint: str
    """The fingerprint of the data that the lengths belong to."""

    def __post_init__(self) -> None:
        tokens = np.array(self.tokens, np.int32)
        tokens.flags.writeable = False
        object.__setattr__(self, "tokens", tokens)

    @property
    def num_samples(self) -> int:
        """Number of rows, N."""
        return len(self.tokens)

    @property
    def total_tokens(self) -> int:
        """Sum over all rows."""
        return int(self.tokens.sum(dtype=np.int64))

    @property
    def longest(self) -> int:
        """Tokens of the longest row; 0 if there is no row."""
        return int(self.tokens.max(initial=0))


def scan_lengths(dataset: MindRecordSet, input_column: str = "input_ids") -> Lengths:
    """Find the length of every row.

    Raises:
        BadInputError: If the column is missing or there are no rows.
    """
    require_columns(dataset, [input_column])
    require_rows(dataset)
    tokens = _lengths_from_index(dataset, input_column)
    if tokens is None:
        rows = read_rows(dataset, [input_column])
        tokens = np.fromiter((row[0].size for row in rows), np.int32, dataset.num_samples)
    return Lengths(tokens=tokens, fingerprint=dataset.fingerprint)


def require_rows(dataset: MindRecordSet) -> None:
    """Raise a BadInputError if there is no row."""
    if dataset.num_samples == 0:
        raise BadInputError(
            f"{dataset.path} has no rows", fix="prepare it from an input with text"
        )


def _lengths_from_index(dataset: MindRecordSet, input_column: str) -> IntArray | None:
    """The index column `length`, or None if there is none that can be believed."""
    if LENGTH_COLUMN not in dataset.index_columns:
        return None
    if dataset.columns[LENGTH_COLUMN] not in ("int32", "int64"):
        return None
    values = read_index_column(dataset, LENGTH_COLUMN)
    tokens = np.fromiter(values, np.int64, dataset.num_samples)
    if dataset.description.get("length_of") == input_column:
        return tokens
    row_indices = sample_rows(dataset, SPOT_CHECKED_ROWS)
    rows = read_rows(dataset, [input_column], row_indices)
    agree = all(row[0].size == tokens[i] for i, row in zip(row_indices, rows, strict=True))
    return tokens if agree else None


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

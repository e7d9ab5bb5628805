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


@dataclass(frozen=True, kw_only=True)
class ContentSummary:
    """What a look into the rows found."""

    rows_checked: int
    num_samples: int
    """Rows in the set; more than rows_checked if only a random sample was read."""
    max_token_id: int
    """-1 if no checked row has a token."""
    num_label_tokens: int
    """Labels that are trained on (not negative); 0 if there is no label column."""


def scan_lengths(dataset: MindRecordSet, input_column: str = "input_ids") -> Lengths:
    """Find the length of every row.

    Raises:
        BadInputError: If the column is missing or there are no rows.
    """
    require_columns(dataset, [input_column])
    _require_rows(dataset)
    tokens = _lengths_from_index(dataset, input_column)
    if tokens is None:
        rows = read_rows(dataset, [input_column])
        tokens = np.fromiter((row[0].size for row in rows), np.int32, dataset.num_samples)
    return Lengths(tokens=tokens, fingerprint=dataset.fingerprint)


def check_content(
    dataset: MindRecordSet,
    input_column: str = "input_ids",
    label_column: str | None = "labels",
    vocab_size: int | None = None,
    limit_rows: int = 20_000,
) -> ContentSummary:
    """Read rows and check that a model can be trained on them.

    Args:
        dataset: From `open_mindrecord`.
        input_column: Token ids, [length].
        label_column: Labels, [length], not shifted, negative where not trained on; or None.
        vocab_size: Token ids must be below it; None skips the upper bound.
        limit_rows: More rows than this are sampled (seeded), fewer are all read.

    Raises:
        BadInputError: Naming the row, for a token id outside the vocabulary, labels longer or
            shorter than the input, a column that is missing, or a set without rows.
    """
    columns = [input_column] if label_column is None else [input_column, label_column]
    require_columns(dataset, columns)
    _require_rows(dataset)
    row_indices = _sample_rows(dataset, limit_rows)
    max_token_id, num_label_tokens = -1, 0
    for row, arrays in zip(row_indices, read_rows(dataset, columns, row_indices), strict=True):
        where = f"{dataset.path}: row {row}"
        max_token_id = max(max_token_id, _check_ids(where, input_column, arrays[0], vocab_size))
        if label_column is not None:
            _check_labels(where, columns, arrays, vocab_size)
            num_label_tokens += int(np.count_nonzero(arrays[1] >= 0))
    return ContentSummary(
        rows_checked=len(row_indices),
        num_samples=dataset.num_samples,
        max_token_id=max_token_id,
        num_label_tokens=num_label_tokens,
    )


def _require_rows(dataset: MindRecordSet) -> None:
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
    row_indices = _sample_rows(dataset, SPOT_CHECKED_ROWS)
    rows = read_rows(dataset, [input_column], row_indices)
    agree = all(row[0].size == tokens[i] for i, row in zip(row_indices, rows, strict=True))
    return tokens if agree else None


def _sample_rows(dataset: MindRecordSet, limit_rows: int) -> IntArray:
    """Row numbers, int64, ascending: all of them, or a seeded sample with the first and last."""
    if dataset.num_samples <= limit_rows:
        return np.arange(dataset.num_samples)
    chosen = np.random.default_rng(CONTENT_SEED).choice(
        dataset.num_samples, size=limit_rows, replace=False
    )
    chosen[:2] = 0, dataset.num_samples - 1
    rows: IntArray = np.unique(chosen)
    return rows


def _check_ids(where: str, column: str, ids: IntArray, vocab_size: int | None) -> int:
    if ids.size == 0:
        return -1
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
        wrong = lowest if lowest < 0 else highest
        limit = "" if vocab_size is None else f" and below the vocabulary size {vocab_size}"
        raise BadInputError(
            f"{where}: {column} must be at least 0{limit} (got {wrong} at position "
            f"{int(np.flatnonzero(ids == wrong)[0])})",
            fix="set the model's vocabulary to the tokenizer's, or prepare with --vocab-limit",
        )
    return highest


def _check_labels(
    where: str, columns: list[str], arrays: tuple[IntArray, ...], vocab_size: int | None
) -> None:
    ids, labels = arrays
    if labels.size != ids.size:
        relation = "longer" if labels.size > ids.size else "shorter"
        raise BadInputError(
            f"{where}: {columns[1]} is {relation} than {columns[0]} ({labels.size} and {ids.size} "
            f"tokens)",
            fix="write one label per token, -100 where not trained on",
        )
    highest = int(labels.max(initial=-1))
    if vocab_size is not None and highest >= vocab_size:
        raise BadInputError(
            f"{where}: {columns[1]} must be below the vocabulary size {vocab_size} "
            f"(got {highest})",
            fix="set the model's vocabulary to the tokenizer's, or prepare with --vocab-limit",
        )

"""Whether a model can be trained on the rows: ids in the vocabulary, one label a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.data.lengths import require_rows, sample_rows
from tuner.data.mindrecord import MindRecordSet, read_rows, require_columns
from tuner.errors import BadInputError

IntArray = npt.NDArray[np.integer[Any]]

IGNORED_LABEL = -100
VOCABULARY_FIX = "set the model's vocabulary to the tokenizer's, or prepare with --vocab-limit"


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
    require_rows(dataset)
    row_indices = sample_rows(dataset, limit_rows)
    max_token_id, num_label_tokens = -1, 0
    for row, arrays in zip(row_indices, read_rows(dataset, columns, row_indices), strict=True):
        where = f"{dataset.path}: row {row}"
        check_row(where, columns, arrays, vocab_size)
        max_token_id = max(max_token_id, int(arrays[0].max(initial=-1)))
        if label_column is not None:
            num_label_tokens += int(np.count_nonzero(arrays[1] != IGNORED_LABEL))
    return ContentSummary(
        rows_checked=len(row_indices),
        num_samples=dataset.num_samples,
        max_token_id=max_token_id,
        num_label_tokens=num_label_tokens,
    )


def check_row(
    where: str, columns: Sequence[str], arrays: Sequence[IntArray], vocab_size: int | None
) -> None:
    """Check one row.

    Args:
        where: Names the row in an error, for example `data.mindrecord: row 7`.
        columns: Input column, and label column if there is one.
        arrays: Their values, [length] each.
        vocab_size: Ids and labels must be below it; None skips the upper bound.

    Raises:
        BadInputError: a token id is outside the vocabulary, labels are longer or shorter than the
            input, or a label is neither a token id nor -100.
    """
    _check_range(where, columns[0], arrays[0], vocab_size)
    if len(columns) == 1:
        return
    ids, labels = arrays
    if labels.size != ids.size:
        relation = "longer" if labels.size > ids.size else "shorter"
        raise BadInputError(
            f"{where}: {columns[1]} is {relation} than {columns[0]} ({labels.size} and {ids.size} "
            f"tokens)",
            fix="write one label per token, -100 where not trained on",
        )
    _check_range(where, columns[1], labels[labels != IGNORED_LABEL], vocab_size)


def _check_range(where: str, column: str, values: IntArray, vocab_size: int | None) -> None:
    if not values.size:
        return
    lowest, highest = int(values.min()), int(values.max())
    if lowest >= 0 and (vocab_size is None or highest < vocab_size):
        return
    wrong = lowest if lowest < 0 else highest
    limit = "" if vocab_size is None else f" and below the vocabulary size {vocab_size}"
    raise BadInputError(
        f"{where}: {column} must be at least 0{limit} (got {wrong})", fix=VOCABULARY_FIX
    )

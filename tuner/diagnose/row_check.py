"""A look at stored rows: whether all that they hold a value a token of fits together.

A run reads ids and labels alone, and ends at a row in which these do not fit. Masks, types and
positions are stored for other readers, so what is wrong with them is a warning.

Rows are spread evenly over all files and read one by one, in a random order, so that no part is
left out where the time is up. 500 rows of 1,000 tokens took 0.3 s, 500 of 200,000 rows no longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.config.schema import TrainConfig
from tuner.data.mindrecord import MindRecordSet, read_rows
from tuner.diagnose.finding import Finding, finding_of_error
from tuner.errors import BadInputError
from tuner.train.loader import columns_to_read
from tuner.train.shape_check import PER_TOKEN, Mismatch, check_row

MOST_ROWS = 500
TIME_LIMIT_S = 10.0
"""Past this no further row is read: network disks may be slow."""

NUMBERS = ("int32", "int64", "float32", "float64")
"""MindRecord types of columns that can be looked at."""

ENDS_A_RUN = ("labels-length", "outside-vocabulary")
"""Names of what is wrong with ids and labels."""
WHY_PADDED = "padding is counted, and trained on, as tokens"
WHY_NOT_READ = (
    "varseq-train does not read this column; what does read it breaks, or takes values of other "
    "tokens"
)


def check_rows(
    dataset: MindRecordSet,
    config: TrainConfig,
    most_rows: int = MOST_ROWS,
    clock: Callable[[], float] = time.monotonic,
) -> list[Finding]:
    """Look at some rows; needs MindSpore.

    Args:
        dataset: Has the config's columns.
        config: Columns, vocabulary, max_positions.
        most_rows: To look at, >= 1.
        clock: Seconds, for the time limit.

    Returns:
        One for each rule that is broken, under the name that `check_row` gives, with the first
        row and the number of rows; one `config-rows`, ok, if nothing is.
    """
    columns = _per_token_columns(dataset, config)
    found: dict[str, list[tuple[int, Mismatch]]] = {}
    num_rows = 0
    try:
        for number, row in _some_rows(dataset, columns, most_rows, clock):
            num_rows += 1
            for mismatch in check_row(f"row {number}", row, config):
                found.setdefault(mismatch.name, []).append((number, mismatch))
    except BadInputError as error:
        return [finding_of_error(error, name="config-rows", why="a run ends there")]
    if found:
        return [_finding(seen, num_rows) for seen in found.values()]
    what = f"{', '.join(columns)} fit together (rows looked at: {num_rows:,})"
    return [Finding(name="config-rows", severity="ok", what=what)]


def _per_token_columns(dataset: MindRecordSet, config: TrainConfig) -> list[str]:
    """Ids and labels, then arrays of numbers with a usual name of what has a value a token."""
    read = columns_to_read(config.data)
    others = [
        column
        for column in dataset.blob_columns
        if column not in read and dataset.columns[column] in NUMBERS and PER_TOKEN.search(column)
    ]
    return [*read, *others]


def _some_rows(
    dataset: MindRecordSet, columns: Sequence[str], most_rows: int, clock: Callable[[], float]
) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
    if not dataset.num_samples:
        return
    spread = np.linspace(0, dataset.num_samples - 1, most_rows).astype(np.int64)
    numbers = np.random.default_rng(0).permutation(np.unique(spread))
    started = clock()
    for number, row in zip(numbers.tolist(), read_rows(dataset, columns, numbers), strict=True):
        yield number, {name: array.ravel() for name, array in zip(columns, row, strict=True)}
        if clock() - started > TIME_LIMIT_S:
            return


def _finding(seen: Sequence[tuple[int, Mismatch]], num_rows: int) -> Finding:
    """What is wrong with the first row, all columns of it, and with how many rows."""
    rows = {number for number, _ in seen}
    of_first = [mismatch for number, mismatch in seen if number == min(rows)]
    name = of_first[0].name
    ends_a_run = name in ENDS_A_RUN
    why = WHY_PADDED if name == "row-is-padded" else WHY_NOT_READ
    return Finding(
        name=name,
        severity="error" if ends_a_run else "warning",
        what="; ".join(mismatch.what for mismatch in of_first)
        + f" ({len(rows):,} of {num_rows:,} rows looked at)",
        why="varseq-train ends at such a row" if ends_a_run else why,
        fix=of_first[0].fix,
    )

"""Lengths of rows from the headers of their arrays, checked against MindSpore each time.

A file is mapped into memory a stretch at a time, and only the pages with the headers of the rows
asked for are touched: what a process holds does not grow with the file or the number of rows.
Files and stretches are read by several threads.

The layout is MindSpore's own affair and may change. So MindDataset reads some rows of every file,
the first and the last among them, and what it finds decides. That takes some 15 ms for 66 rows,
whatever the size of the set.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.data.column_layout import (
    FORMAT_VERSION,
    LARGEST_ELEMENT_BYTES,
    ColumnLayout,
    ElementCounts,
    read_element_counts,
)
from tuner.data.mindrecord import MindRecordSet, read_rows
from tuner.data.record_index import MAX_THREADS, RowIndex
from tuner.errors import BadInputError

IntArray = npt.NDArray[np.integer[Any]]
NoticeSink = Callable[[str], None]
"""Called with one sentence for people."""

ROWS_PER_STRETCH, BYTES_PER_STRETCH = 50_000, 8 << 20
CHECKED_ROWS = 64
CHECK_SEED = 0


def layout_of(dataset: MindRecordSet, column: str) -> ColumnLayout | None:
    """Where the column stands in a blob, or None if its headers say nothing about lengths."""
    is_known = dataset.format_version == FORMAT_VERSION and dataset.row_indexes
    if not is_known or column not in dataset.blob_columns:
        return None
    if dataset.columns[column] not in LARGEST_ELEMENT_BYTES:
        return None
    return ColumnLayout(
        column_types=tuple(dataset.columns[name] for name in dataset.blob_columns),
        position=dataset.blob_columns.index(column),
    )


def read_counts(
    dataset: MindRecordSet, layout: ColumnLayout, row_indices: IntArray | None = None
) -> ElementCounts:
    """Read the headers of rows.

    Args:
        dataset: From `open_mindrecord`.
        layout: Of the column of interest.
        row_indices: int64 [M], ascending; None means every row.

    Raises:
        BadInputError: If a file cannot be read or is shorter than when it was opened.
    """
    first_rows = np.concatenate([[0], np.cumsum(dataset.rows_per_file)])
    if row_indices is None:
        row_indices = np.arange(dataset.num_samples)
    cuts = np.searchsorted(row_indices, first_rows)
    tasks = []
    for number, (file, index) in enumerate(zip(dataset.files, dataset.row_indexes, strict=True)):
        rows = row_indices[cuts[number] : cuts[number + 1]] - first_rows[number]
        for stretch in _stretches(rows, index.blob_starts):
            tasks.append((file, index, stretch, layout))
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        found = list(pool.map(lambda task: _read_stretch(*task), tasks))
    return ElementCounts(
        tokens=np.concatenate([one.tokens for one in found]),
        is_readable=np.concatenate([one.is_readable for one in found]),
        is_whole=np.concatenate([one.is_whole for one in found]),
    )


def _stretches(rows: IntArray, blob_starts: IntArray) -> list[IntArray]:
    """Cut the rows of a file where there are enough of them, or where the next are far away."""
    if not len(rows):
        return []
    # Rows follow each other in the file; the running maximum is for files where they do not.
    number = np.maximum.accumulate(blob_starts[rows] // BYTES_PER_STRETCH)
    is_cut = np.diff(number) > 0
    is_cut[ROWS_PER_STRETCH - 1 :: ROWS_PER_STRETCH] = True
    return np.split(rows, np.flatnonzero(is_cut) + 1)


def _read_stretch(
    file: Path, index: RowIndex, rows: IntArray, layout: ColumnLayout
) -> ElementCounts:
    starts = index.blob_starts[rows]
    ends = starts + index.blob_bytes[rows]
    # A map has to start at a multiple of the granularity.
    offset = int(starts.min()) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        with file.open("rb") as stream:
            length = int(ends.max()) - offset
            mapped = mmap.mmap(stream.fileno(), length, access=mmap.ACCESS_READ, offset=offset)
    except (OSError, ValueError) as error:  # ValueError: the file is shorter than that
        raise BadInputError(
            f"cannot read {file}: {error}", fix="copy it again or write it again"
        ) from error
    # Nothing keeps the map beyond this call: closing it gives the pages back.
    data = np.frombuffer(mapped, np.uint8)
    return read_element_counts(data, starts - offset, ends - offset, layout)


def rows_to_check(dataset: MindRecordSet) -> IntArray:
    """The first and the last row of every file and seeded random ones between, int64, ascending.

    64 random rows in all, but at least one of each file.
    """
    generator = np.random.default_rng(CHECK_SEED)
    rows, first_row = [np.zeros(0, np.int64)], 0
    for num_rows in dataset.rows_per_file:
        if num_rows:
            count = max(1, CHECKED_ROWS // len(dataset.files))
            random_rows = generator.integers(0, num_rows, count)
            rows.append(first_row + np.concatenate([[0, num_rows - 1], random_rows]))
        first_row += num_rows
    return np.unique(np.concatenate(rows))


def lengths_agree(
    dataset: MindRecordSet, column: str, row_indices: IntArray, tokens: IntArray
) -> bool:
    """Whether MindDataset finds these lengths, int64 [M], in these rows, int64 [M]."""
    rows = read_rows(dataset, [column], row_indices)
    return all(row[0].size == length for row, length in zip(rows, tokens, strict=True))


def believe_counts(
    dataset: MindRecordSet,
    column: str,
    row_indices: IntArray,
    counts: ElementCounts,
    notice: NoticeSink,
) -> bool:
    """Check what headers say, with MindDataset for the rows of `rows_to_check` among them.

    Args:
        dataset: From `open_mindrecord`.
        column: The column of the counts.
        row_indices: int64 [M], ascending; the rows of the counts.
        counts: From `read_counts`.
        notice: Told why they are not believed.

    Returns:
        Whether they are believed; if not, reading the rows decides.

    Raises:
        BadInputError: Naming a row that is damaged such that MindSpore would read other bytes than
            its own, or crash.
    """
    # Rows that cannot be read are kept from MindSpore, which could crash on them.
    check = np.isin(row_indices, rows_to_check(dataset)) & counts.is_readable
    if not lengths_agree(dataset, column, row_indices[check], counts.tokens[check]):
        notice(
            f"{dataset.path}: the headers of '{column}' say other lengths than its rows; every "
            f"row is read instead, which takes longer"
        )
        return False
    if not counts.is_readable.all():
        raise damaged_row(dataset, int(row_indices[np.argmin(counts.is_readable)]))
    if not counts.is_whole.all():
        row = int(row_indices[np.argmin(counts.is_whole)])
        notice(
            f"{dataset.path}: the sizes in {_name_of_row(dataset, row)} do not add up; every row "
            f"is read instead, which takes longer"
        )
        return False
    return True


def damaged_row(dataset: MindRecordSet, row: int) -> BadInputError:
    """The refusal of a row, by its number in its own file."""
    return BadInputError(
        f"{_name_of_row(dataset, row)} is damaged", fix="copy the file again or write it again"
    )


def _name_of_row(dataset: MindRecordSet, row: int) -> str:
    first_rows = np.concatenate([[0], np.cumsum(dataset.rows_per_file)])
    number = int(np.searchsorted(first_rows, row, side="right")) - 1
    return f"row {row - int(first_rows[number])} of {dataset.files[number]}"

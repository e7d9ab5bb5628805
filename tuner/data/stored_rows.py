"""Rows of integer columns straight from MindRecord files, for the trainer: many rows at a time.

MindDataset hands over one row after the other, through threads and queues of its own, and each
time it is opened it reads the whole index again. Here the rows of several batches are read in the
order in which they stand in the files and unpacked together by a few threads; a group of rows
comes back in the order asked for. What is held are the groups of `workers + 1` tasks of about
1 MiB of the files each, or of one group if that is more, whatever the set and its rows.

The layout is MindSpore's own affair and may change. So, as for lengths (header_lengths.py),
MindDataset reads some rows of every file once in a process, and only if both find the same arrays
are rows read this way; else MindDataset reads all of them, and a notice says so.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.data.column_layout import ByteArray, ColumnLayout, ElementPlaces, find_elements
from tuner.data.header_lengths import NoticeSink, damaged_row, layout_of, rows_to_check
from tuner.data.mindrecord import (
    MindRecordSet,
    open_mindrecord,
    read_rows,
    require_columns,
    require_row_indices,
)
from tuner.data.packed_integers import BYTES_BEHIND, IntArray, first_unlike, unpack_integers
from tuner.data.record_files import file_state
from tuner.errors import BadInputError

Row = tuple[npt.NDArray[Any], ...]

BYTES_PER_TASK = 1 << 20
ROWS_PER_OPENING = 200_000
"""Rows that MindDataset is asked for at a time, where it has to read: it keeps a list of them."""

_agreement: dict[tuple[object, ...], bool] = {}
"""(files, fingerprint, columns) -> whether MindDataset found the same arrays, in this process."""


def read_groups(
    dataset: MindRecordSet,
    columns: Sequence[str],
    groups: Iterable[IntArray],
    *,
    workers: int,
    notice: NoticeSink,
) -> Generator[list[Row], None, None]:
    """The rows of every group, in its order; groups are asked for as they are needed.

    Closing the generator, or an error, ends its threads and closes the files.

    Args:
        dataset: From `open_mindrecord`.
        columns: Columns to read; a row is a tuple in this order.
        groups: int64 arrays of row indices, any order over all shards, as the rows of a batch.
        workers: Threads that read and unpack, >= 1.
        notice: Told why MindDataset reads instead, if it does.

    Raises:
        BadInputError: a column is missing, an index is out of range, a row is damaged, or a file
            cannot be read or has other content than when it was opened.
    """
    require_columns(dataset, columns)
    layouts = _layouts(dataset, columns)
    if layouts is None or not _agrees(dataset, columns, layouts, notice):
        yield from _through_mindspore(dataset, columns, groups)
        return
    with _open_files(dataset, columns) as reader, ThreadPoolExecutor(workers, "read-rows") as pool:
        pending: deque[tuple[list[int], Future[list[Row]]]] = deque()
        try:
            for task in _tasks(dataset, groups):
                rows = np.concatenate(task)
                pending.append(([len(g) for g in task], pool.submit(reader.read, rows, layouts)))
                if len(pending) > workers:
                    yield from _by_group(*pending.popleft())
            while pending:
                yield from _by_group(*pending.popleft())
        finally:
            for _, future in pending:
                future.cancel()


def _layouts(dataset: MindRecordSet, columns: Sequence[str]) -> list[ColumnLayout] | None:
    found = [layout_of(dataset, column) for column in columns]
    known = [layout for layout in found if layout is not None]
    return known if len(known) == len(columns) else None


def _agrees(
    dataset: MindRecordSet,
    columns: Sequence[str],
    layouts: Sequence[ColumnLayout],
    notice: NoticeSink,
) -> bool:
    key = (dataset.files, dataset.fingerprint, *columns)
    if key not in _agreement:
        rows = rows_to_check(dataset)
        with _open_files(dataset, columns) as reader:
            ours = reader.read(rows, layouts)
        pairs = zip(ours, read_rows(dataset, columns, rows), strict=True)
        _agreement[key] = all(
            mine.dtype == other.dtype and np.array_equal(mine, other)
            for row, other_row in pairs
            for mine, other in zip(row, other_row, strict=True)
        )
        if not _agreement[key]:
            notice(
                f"{dataset.path}: rows are stored in another way than is known here; MindDataset "
                f"reads them, which takes longer"
            )
    return _agreement[key]


def _through_mindspore(
    dataset: MindRecordSet, columns: Sequence[str], groups: Iterable[IntArray]
) -> Iterator[list[Row]]:
    for some in _cut(groups, lambda group: len(group), ROWS_PER_OPENING):
        rows = read_rows(dataset, columns, np.concatenate(some))
        for group in some:
            yield [next(rows) for _ in group]


def _tasks(dataset: MindRecordSet, groups: Iterable[IntArray]) -> Iterator[list[IntArray]]:
    def blob_bytes(group: IntArray) -> int:
        require_row_indices(dataset, group)
        return int(dataset.blob_bytes[group].sum())

    return _cut(groups, blob_bytes, BYTES_PER_TASK)


def _cut(
    groups: Iterable[IntArray], weight: Callable[[IntArray], int], most: int
) -> Iterator[list[IntArray]]:
    """Neighbouring groups together until they weigh enough."""
    some: list[IntArray] = []
    weighed = 0
    for group in groups:
        some.append(group)
        weighed += weight(group)
        if weighed >= most:
            yield some
            some, weighed = [], 0
    if some:
        yield some


def _by_group(sizes: Sequence[int], future: Future[list[Row]]) -> Iterator[list[Row]]:
    rows, start = future.result(), 0
    for size in sizes:
        yield rows[start : start + size]
        start += size


@contextmanager
def _open_files(dataset: MindRecordSet, columns: Sequence[str]) -> Iterator[_Reader]:
    with ExitStack() as stack:
        streams = []
        for file in dataset.files:
            try:
                streams.append(stack.enter_context(file.open("rb", buffering=0)))
            except OSError as error:
                raise _unreadable(file, error) from error
        yield _Reader(dataset, columns, [stream.fileno() for stream in streams])


class _Reader:
    """Open files of a set."""

    def __init__(
        self, dataset: MindRecordSet, columns: Sequence[str], descriptors: Sequence[int]
    ) -> None:
        self._dataset = dataset
        self._columns = columns
        self._descriptors = descriptors
        self._states = dataset.file_states
        self._first_rows = np.concatenate([[0], np.cumsum(dataset.rows_per_file)])

    def read(self, rows: IntArray, layouts: Sequence[ColumnLayout]) -> list[Row]:
        """Rows in the order asked for.

        Args:
            rows: int64 [M], indices of rows that are there.
            layouts: Of the columns.
        """
        if not len(rows):
            return []
        blobs = self._read_blobs(rows)
        self._require_unchanged()
        data = np.frombuffer(b"".join([*blobs, bytes(BYTES_BEHIND)]), np.uint8)
        ends = np.cumsum(np.fromiter(map(len, blobs), np.int64, len(blobs)))
        starts = ends - np.fromiter(map(len, blobs), np.int64, len(blobs))
        found = [find_elements(data, starts, ends, layout) for layout in layouts]
        for one in found:
            if not one.counts.is_readable.all():
                raise damaged_row(self._dataset, int(rows[np.argmin(one.counts.is_readable)]))
        if not all(one.counts.is_whole.all() for one in found):
            # Sizes that do not add up, and that MindSpore does not look at.
            return list(read_rows(self._dataset, self._columns, rows))
        columns = [
            self._unpack(rows, data, one, layout.column_types[layout.position])
            for one, layout in zip(found, layouts, strict=True)
        ]
        return list(zip(*columns, strict=True))

    def _unpack(
        self, rows: IntArray, data: ByteArray, found: ElementPlaces, kind: str
    ) -> list[npt.NDArray[Any]]:
        counts = found.counts.tokens
        elements = unpack_integers(data, found.starts, found.ends, counts, kind)
        if elements is None:
            bad = first_unlike(data, found.starts, found.ends, counts, kind)
            raise damaged_row(self._dataset, int(rows[bad]))
        cuts = np.cumsum(counts).tolist()
        return [elements[a:b] for a, b in zip([0, *cuts[:-1]], cuts, strict=True)]

    def _read_blobs(self, rows: IntArray) -> list[bytes]:
        file_of_row = np.searchsorted(self._first_rows, rows, side="right") - 1
        starts, sizes = self._dataset.blob_starts[rows], self._dataset.blob_bytes[rows]
        # In the order of the files: neighbours are in the same pages of the cache or the disk.
        order = np.lexsort((starts, file_of_row))
        blobs = [b""] * len(rows)
        wanted = zip(
            order.tolist(),
            file_of_row[order].tolist(),
            starts[order].tolist(),
            sizes[order].tolist(),
            strict=True,
        )
        for place, number, start, size in wanted:
            blobs[place] = self._pread(number, start, size)
        return blobs

    def _require_unchanged(self) -> None:
        """Look for changes; files of another time and the same content are the same files."""
        states = tuple(file_state(os.fstat(descriptor)) for descriptor in self._descriptors)
        if states == self._states:
            return
        dataset = self._dataset
        if open_mindrecord(dataset.files).fingerprint != dataset.fingerprint:
            pairs = zip(dataset.files, states, self._states, strict=True)
            changed = next(file for file, now, before in pairs if now != before)
            raise BadInputError(
                f"{changed} has changed since it was opened",
                fix="start again, with files that stay as they are",
            )
        self._states = states

    def _pread(self, number: int, start: int, size: int) -> bytes:
        try:
            blob = os.pread(self._descriptors[number], size, start)
        except OSError as error:
            raise _unreadable(self._dataset.files[number], error) from error
        if len(blob) != size:
            raise _unreadable(self._dataset.files[number], "it is shorter than when it was opened")
        return blob


def _unreadable(file: object, reason: object) -> BadInputError:
    return BadInputError(f"cannot read {file}: {reason}", fix="copy it again or write it again")

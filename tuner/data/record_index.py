"""The SQLite index beside a MindRecord file, read into arrays.

Table INDEXES has one line per row: ROW_ID; the row's scalar fields at PAGE_OFFSET_RAW ..
PAGE_OFFSET_RAW_END of page PAGE_ID_RAW; its arrays and bytes, the blob, at PAGE_OFFSET_BLOB ..
PAGE_OFFSET_BLOB_END of page PAGE_ID_BLOB; and each index field's value in a column
`<field>_<schema id>`. Page p starts at byte header_size + page_size * p.

Source: MindSpore 2.10 file writer.

SQLite joins the numbers of many rows to one text, which NumPy parses: three times as fast as one
Python tuple per row. SQLite lets go of the interpreter while it works, so ranges of rows are read
by several threads. 100,000 rows take 0.06 s on two cores.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from tuner.errors import BadInputError

IntArray = npt.NDArray[np.integer[Any]]

ROWS_PER_QUERY = 25_000
MAX_THREADS = 8  # SQLite and page faults gain little from more


@dataclass(frozen=True, kw_only=True)
class IndexSource:
    """One index and what the header of its file says about it."""

    path: Path
    """The `.db` file."""
    header_bytes: int
    page_bytes: int
    fields: tuple[tuple[str, str, str], ...]
    """Index field, its column in the table, its MindRecord type."""

    def open(self) -> sqlite3.Connection:
        """Open it for reading.

        Raises:
            BadInputError: If it is not there.
        """
        if not self.path.exists():
            raise BadInputError(
                f"the index {self.path} is missing",
                fix="move a MindRecord file and its .db together",
            )
        # immutable: no lock file, so that a read-only folder and several ranks at once are fine.
        address = f"file:{quote(str(self.path.absolute()))}?mode=ro&immutable=1"
        return sqlite3.connect(address, uri=True)


@dataclass(frozen=True, kw_only=True)
class RowIndex:
    """Where the rows of one file are, and their index values, in the order of ROW_ID."""

    file_name: str
    """The name that the file was written under."""
    blob_starts: IntArray
    """int64 [N], read-only; byte of the file at which the arrays of a row start."""
    blob_bytes: IntArray
    """int64 [N], read-only; bytes of all arrays of a row together."""
    index_values: Mapping[str, IntArray]
    """Integer index field -> its values, int64 [N], read-only."""
    end: int
    """Bytes that the file must have."""
    fingerprint: str
    """sha256 over all of this but the name, and over the index values that are no integers."""

    @property
    def num_rows(self) -> int:
        """Number of rows, N."""
        return len(self.blob_starts)


def read_row_indexes(sources: Sequence[IndexSource]) -> tuple[RowIndex, ...]:
    """Read the indexes of several files, in parallel.

    Raises:
        BadInputError: Naming the first index that is missing, unreadable or contradicts itself.
    """
    num_threads = min(MAX_THREADS, os.cpu_count() or 1)
    found = []
    with ThreadPoolExecutor(num_threads) as pool:
        pending: deque[tuple[IndexSource, str, list[Future[_Range]]]] = deque()
        # Few files ahead: what was read of one takes 24 bytes a row until its turn.
        for source in sources:
            pending.append((source, *_start_reading(source, pool)))
            if len(pending) > num_threads:
                found.append(_finish_reading(*pending.popleft()))
        found += [_finish_reading(*one) for one in pending]
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class _Range:
    """Some rows of the table, in the table's order."""

    numbers: tuple[IntArray, ...]
    """ROW_ID, start and size of the blob, then the integer index fields: int64 [M] each."""
    texts: tuple[str, ...]
    """The other index fields, as SQL literals."""
    raw_end: int
    raw_end_sum: int


def _start_reading(
    source: IndexSource, pool: ThreadPoolExecutor
) -> tuple[str, list[Future[_Range]]]:
    try:
        with closing(source.open()) as connection:
            (name,) = connection.execute("SELECT NAME FROM SHARD_NAME").fetchone()
            (num_rows,) = connection.execute("SELECT COUNT(*) FROM INDEXES").fetchone()
            (first,) = connection.execute("SELECT MIN(rowid) FROM INDEXES").fetchone()
            (last,) = connection.execute("SELECT MAX(rowid) FROM INDEXES").fetchone()
    except (sqlite3.Error, TypeError) as error:
        raise _not_an_index(source, error) from error
    if not num_rows:
        return str(name), []
    # Gaps in SQLite's own numbering are nothing that MindSpore writes: no ranges then.
    step = ROWS_PER_QUERY if last - first + 1 == num_rows else last - first + 1
    starts = range(first, last + 1, step)
    return str(name), [
        pool.submit(_read_range, source, start, start + step - 1) for start in starts
    ]


def _read_range(source: IndexSource, first: int, last: int) -> _Range:
    page_bytes = source.page_bytes
    numbers = [
        "ROW_ID",
        f"{source.header_bytes} + PAGE_ID_BLOB * {page_bytes} + PAGE_OFFSET_BLOB",
        "PAGE_OFFSET_BLOB_END - PAGE_OFFSET_BLOB",
        *(_quoted(column) for _, column, kind in source.fields if _is_integer(kind)),
    ]
    texts = [_quoted(column) for _, column, kind in source.fields if not _is_integer(kind)]
    wanted = [
        "COUNT(*)",
        f"MAX(PAGE_ID_RAW * {page_bytes} + PAGE_OFFSET_RAW_END)",
        "SUM(PAGE_OFFSET_RAW_END)",
        *(f"group_concat({number}, ' ')" for number in numbers),
        *(f"group_concat(quote({text}), ',')" for text in texts),
    ]
    query = f"SELECT {', '.join(wanted)} FROM INDEXES WHERE rowid BETWEEN {first} AND {last}"
    with closing(source.open()) as connection:
        num_rows, raw_end, raw_end_sum, *joined = connection.execute(query).fetchone()
    return _Range(
        numbers=tuple(_parse(text, num_rows) for text in joined[: len(numbers)]),
        texts=tuple(joined[len(numbers) :]),
        raw_end=int(raw_end),
        raw_end_sum=int(raw_end_sum),
    )


def _is_integer(kind: str) -> bool:
    return kind in ("int32", "int64")


def _quoted(column: str) -> str:
    # With the table's name: SQLite takes an unknown "name" alone for a text.
    return 'INDEXES."{}"'.format(column.replace('"', '""'))


def _parse(text: str, num_rows: int) -> IntArray:
    numbers = np.fromstring(text, np.int64, sep=" ")
    if len(numbers) != num_rows:  # NULL is left out, and parsing ends at what is no integer
        raise ValueError("it holds values that are no integers")
    return numbers


def _finish_reading(
    source: IndexSource, file_name: str, pending: Sequence[Future[_Range]]
) -> RowIndex:
    try:
        ranges = [future.result() for future in pending]
    except (sqlite3.Error, TypeError, ValueError) as error:
        raise _not_an_index(source, error) from error
    names = [name for name, _, kind in source.fields if _is_integer(kind)]
    row_ids, starts, sizes, *values = _join(ranges, 3 + len(names))
    if len(row_ids) and (np.diff(row_ids).min(initial=1) < 1 or row_ids[0] < 0):
        raise _not_an_index(source, "its rows have no numbers of their own")
    if starts.min(initial=source.header_bytes) < source.header_bytes or sizes.min(initial=0) < 0:
        raise _not_an_index(source, "it points outside of the rows")
    blob_end = int((starts + sizes).max(initial=0))
    raw_end = source.header_bytes + max((one.raw_end for one in ranges), default=0)
    return RowIndex(
        file_name=file_name,
        blob_starts=starts,
        blob_bytes=sizes,
        index_values=dict(zip(names, values, strict=True)),
        end=max(blob_end, raw_end) if ranges else 0,
        fingerprint=_fingerprint([row_ids, starts, sizes, *values], ranges),
    )


def _join(ranges: Sequence[_Range], num_columns: int) -> list[IntArray]:
    """Columns over all ranges, in the order of ROW_ID, read-only."""
    if not ranges:
        return [np.zeros(0, np.int64)] * num_columns
    columns = [np.concatenate(parts) for parts in zip(*(r.numbers for r in ranges), strict=True)]
    if np.any(np.diff(columns[0]) < 0):
        order = np.argsort(columns[0], kind="stable")
        columns = [column[order] for column in columns]
    for column in columns:
        column.flags.writeable = False
    return columns


def _fingerprint(columns: Sequence[IntArray], ranges: Sequence[_Range]) -> str:
    digest = hashlib.sha256()
    for column in columns:
        digest.update(column.astype("<i8", copy=False).tobytes())
    for position in range(len(ranges[0].texts) if ranges else 0):
        digest.update(",".join(one.texts[position] for one in ranges).encode())
    # Scalars outside of the index leave their sizes here, and the running sum their order.
    digest.update(repr([sum(one.raw_end_sum for one in ranges), len(ranges) > 0]).encode())
    return digest.hexdigest()


def _not_an_index(source: IndexSource, reason: object) -> BadInputError:
    return BadInputError(
        f"{source.path} is not the index of a MindRecord file ({reason})",
        fix="copy the file and its .db again, or write them again",
    )

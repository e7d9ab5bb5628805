"""How a MindRecord row stores its arrays; the number of elements, read from their headers alone.

The layout, of MindSpore 2.10's FileWriter (format "3.0"), found by writing and checked against
MindDataset in tests/data/test_column_layout.py:

- A blob holds the columns that are arrays or bytes, in the order of the header's `blob_fields`,
  which is alphabetical whatever order the schema was given in. Numbers and strings without a shape
  stand elsewhere. Nothing depends on pages or shards, nor on whether a file was appended to.
- It starts with a little-endian uint64, the bytes that follow. Then, if there are several columns,
  each has a big-endian uint64, its bytes, before its content. A single column has none.
- float32 and float64 are stored as they are, as are bytes. int32 and int64 are packed: a
  big-endian uint32, the number n of elements; ceil(n / 4) bytes with 2 bits for each element's
  width of 1, 2, 4 or 8 bytes; the elements, signed and little-endian, as wide as their values
  need. So n elements take at least 4 + ceil(n / 4) + n bytes, and at most 4 + ceil(n / 4) + 4 n
  (int32) or + 8 n (int64). A fixed shape or more dimensions change nothing: n counts all elements.
- An empty array is n = 0 and nothing else. As the only column of a set it cannot be written:
  FileWriter drops the row.

MindSpore believes the sizes of the columns before the one it reads, and its n: where they are
wrong, it returns other bytes or crashes. The total and the size of the column itself do not matter
to it. Hence the two grades below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer[Any]]
BoolArray = npt.NDArray[np.bool_]
ByteArray = npt.NDArray[np.uint8]

FORMAT_VERSION = "3.0"
LARGEST_ELEMENT_BYTES = {"int32": 4, "int64": 8}
SIZE_BYTES, COUNT_BYTES = 8, 4


@dataclass(frozen=True, kw_only=True)
class ColumnLayout:
    """Where the column of interest stands in a blob."""

    column_types: tuple[str, ...]
    """MindRecord types of all columns of the blob, in their order."""
    position: int
    """The column of interest among them; int32 or int64."""

    def least_bytes(self, elements: IntArray) -> IntArray:
        """Bytes of a packed column, int64 [N], if every element fits into one byte."""
        least: IntArray = COUNT_BYTES + (elements + 3) // 4 + elements
        return least

    def most_bytes(self, elements: IntArray) -> IntArray:
        """Bytes of a packed column, int64 [N], if every element is as large as its type allows."""
        width = LARGEST_ELEMENT_BYTES[self.column_types[self.position]]
        most: IntArray = COUNT_BYTES + (elements + 3) // 4 + width * elements
        return most

    def most_elements(self, blob_bytes: IntArray) -> IntArray:
        """An upper bound on the elements of a row, from the size of its blob alone.

        All other columns take at least their headers, so that at most P bytes are left for the n
        elements and their widths: n + ceil(n / 4) <= P, hence 5 n / 4 <= P and n <= 4 P / 5.

        Args:
            blob_bytes: int64 [N], bytes of the whole blob.

        Returns:
            int64 [N], at least 0.
        """
        num_columns = len(self.column_types)
        num_packed = sum(kind in LARGEST_ELEMENT_BYTES for kind in self.column_types)
        sizes = SIZE_BYTES + (SIZE_BYTES * num_columns if num_columns > 1 else 0)
        rest = np.maximum(blob_bytes - sizes - COUNT_BYTES * num_packed, 0)
        bound: IntArray = rest * 4 // 5
        return bound


@dataclass(frozen=True, kw_only=True)
class ElementCounts:
    """What the headers of some rows say."""

    tokens: IntArray
    """int64 [M]; 0 where not readable."""
    is_readable: BoolArray
    """[M]: the sizes lead to the column, and its elements can be within the row."""
    is_whole: BoolArray
    """[M]: moreover all sizes of the row add up, to the byte."""


@dataclass(frozen=True, kw_only=True)
class ElementPlaces:
    """Where the elements of one column stand in some rows."""

    counts: ElementCounts
    starts: IntArray
    """int64 [M]; where in the data their widths start, behind their number."""
    ends: IntArray
    """int64 [M]; where they end. Both mean something in whole rows only."""


def read_element_counts(
    data: ByteArray, starts: IntArray, ends: IntArray, layout: ColumnLayout
) -> ElementCounts:
    """Read the number of elements of one column in each row.

    Args:
        data: uint8 [B], a stretch of the file that holds the rows' blobs.
        starts: int64 [M], at least 0; where in `data` the blobs start.
        ends: int64 [M], at least `starts` and at most B; where they end.
        layout: The columns of the blobs.
    """
    return find_elements(data, starts, ends, layout).counts


def find_elements(
    data: ByteArray, starts: IntArray, ends: IntArray, layout: ColumnLayout
) -> ElementPlaces:
    """Find the elements of one column in each row; arguments of `read_element_counts`."""
    following, is_readable = _take(data, starts, ends, "<u8")
    is_whole = following == ends - starts - SIZE_BYTES
    tokens: IntArray = np.zeros(len(starts), np.int64)
    content_starts = content_ends = tokens
    at: IntArray = starts + SIZE_BYTES
    for position in range(len(layout.column_types)):
        size: IntArray = ends - at
        if len(layout.column_types) > 1:
            size, _ = _take(data, at, ends, ">u8")
            at = at + SIZE_BYTES
        is_inside = (size >= 0) & (size <= ends - at)
        if position < layout.position:
            is_readable &= is_inside
        elif position == layout.position:
            tokens, has_count = _take(data, at, ends, ">u4")
            content_starts, content_ends = at + COUNT_BYTES, at + size
            is_readable &= has_count & (layout.least_bytes(tokens) <= ends - at)
            is_whole &= layout.least_bytes(tokens) <= size
            is_whole &= layout.most_bytes(tokens) >= size
        # Once lost, always lost: nothing is found behind the end of the row.
        at = np.where(is_inside, at + size, ends + 1)
    tokens[~is_readable] = 0
    is_whole &= is_readable & (at == ends)
    return ElementPlaces(
        counts=ElementCounts(tokens=tokens, is_readable=is_readable, is_whole=is_whole),
        starts=content_starts,
        ends=content_ends,
    )


def _take(
    data: ByteArray, at: IntArray, ends: IntArray, dtype: Literal["<u8", ">u8", ">u4"]
) -> tuple[IntArray, BoolArray]:
    """Unaligned numbers at these places, int64 [M], and which of them lie before the row's end.

    Beyond its end a row has 0. Numbers of 2**63 and more come out negative, which no size is.
    """
    num_bytes = np.dtype(dtype).itemsize
    is_inside = at + num_bytes <= ends
    if not is_inside.any():
        return np.zeros(len(at), np.int64), is_inside
    # One item for each byte of the data, each overlapping the next: nothing is copied but hits.
    windows: IntArray = np.ndarray(len(data) - num_bytes + 1, dtype, data, strides=(1,))
    numbers = windows[np.where(is_inside, at, 0)].astype(np.int64)
    numbers[~is_inside] = 0
    return numbers, is_inside

"""Lengths from headers against MindDataset, for all that other people's files may hold."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_bytes import packed

from tuner.data.column_layout import ColumnLayout, read_element_counts
from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import open_mindrecord, read_rows

LENGTHS = [3, 0, 1, 17, 0, 4, 5, 300, 2, 64]
ARRAY32, ARRAY64 = {"type": "int32", "shape": [-1]}, {"type": "int64", "shape": [-1]}
FLOATS, DOUBLES = {"type": "float32", "shape": [-1]}, {"type": "float64", "shape": [-1]}


def tokens(length, dtype):
    """Values of all widths, negative ones too."""
    values = np.array([5, -1, 300, -40_000, 70_000, 2**31 - 1, -(2**31), 0], np.int64)
    if dtype == np.int64:
        values[[1, 4]] = 2**62, -(2**40)
    return np.resize(values, length).astype(dtype)


def value(kind, length, row):
    """Something of about that size, for the columns beside the tokens."""
    return {
        "int32": lambda: tokens(length, np.int32),
        "int64": lambda: tokens(length, np.int64),
        "float32": lambda: np.full(length, 0.5, np.float32),
        "float64": lambda: np.full(length, 0.5, np.float64),
        "bytes": lambda: b"x" * (length % 7),
        "string": lambda: "ü" * (length % 5),
        "number": lambda: row,
        "fixed": lambda: np.full((2, 3), row, np.int32),
        "empty": lambda: np.zeros(0, np.int64),
    }[kind]()


SCHEMA = {
    "int32": ARRAY32,
    "int64": ARRAY64,
    "float32": FLOATS,
    "float64": DOUBLES,
    "bytes": {"type": "bytes"},
    "string": {"type": "string"},
    "number": {"type": "int64"},
    "fixed": {"type": "int32", "shape": [2, 3]},
    "empty": ARRAY64,
}
BESIDE = {
    "nothing": {},
    "labels after": {"labels": "int32"},
    "mask before, labels after": {"attention_mask": "int32", "labels": "int64"},
    "floats before": {"a": "float32", "b": "float64"},
    "floats after": {"weights": "float32"},
    "bytes before": {"image": "bytes", "a": "bytes"},
    "bytes after": {"raw": "bytes"},
    "texts and numbers": {"a_text": "string", "id": "number", "z_text": "string"},
    "fixed shape before": {"a": "fixed"},
    "fixed shape after": {"z": "fixed"},
    "empty arrays on both sides": {"a": "empty", "z": "empty"},
    "everything": {
        "a": "bytes",
        "b": "float64",
        "c": "int32",
        "d": "fixed",
        "e": "string",
        "x": "float32",
        "y": "number",
        "z": "int64",
    },
}


def rows_of(beside, dtype, lengths):
    return [
        {
            "input_ids": tokens(length, dtype),
            **{name: value(kind, length, row) for name, kind in beside.items()},
        }
        for row, length in enumerate(lengths)
    ]


def schema_of(beside, dtype):
    ids = {"input_ids": ARRAY32 if dtype == np.int32 else ARRAY64}
    # Neither first nor alphabetical: the file decides the order.
    return {**{name: SCHEMA[kind] for name, kind in reversed(beside.items())}, **ids}


def check_against_mindspore(path):
    def refuse(text):
        raise AssertionError(text)

    dataset = open_mindrecord(path)
    found = scan_lengths(dataset, notice=refuse)
    assert found.source == "headers"
    read = [row[0].size for row in read_rows(dataset, ["input_ids"])]
    assert found.tokens.tolist() == read
    return read


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_lengths_are_those_of_mindspore_whatever_stands_beside(write_plainly, beside, dtype):
    # FileWriter drops rows without bytes or elements, and with scalars beside refuses them.
    has_blob = any(SCHEMA[kind].get("shape") or kind == "bytes" for kind in beside.values())
    lengths = LENGTHS if has_blob else [length for length in LENGTHS if length]
    path = write_plainly(schema_of(beside, dtype), rows_of(beside, dtype, lengths))
    assert check_against_mindspore(path) == lengths


def test_empty_rows_of_a_single_column_are_not_in_the_file(write_plainly):
    path = write_plainly({"input_ids": ARRAY32}, rows_of({}, np.int32, LENGTHS))
    assert check_against_mindspore(path) == [length for length in LENGTHS if length]


@pytest.mark.parametrize("shape", [[64], [-1, 4], [2, 8, 4]])
@pytest.mark.parametrize("beside", [{}, {"a": "int64", "z": "int64"}], ids=["alone", "between"])
def test_every_element_counts_whatever_the_shape(write_plainly, shape, beside):
    rows = rows_of(beside, np.int32, [64] * 5)
    for row in rows:
        row["input_ids"] = row["input_ids"].reshape(shape)
    schema = {**schema_of(beside, np.int32), "input_ids": {"type": "int32", "shape": shape}}
    assert check_against_mindspore(write_plainly(schema, rows)) == [64] * 5


@pytest.mark.parametrize("beside", [{}, {"a": "int32", "z": "float32"}], ids=["one", "three"])
@pytest.mark.parametrize(("num_shards", "parts"), [(1, 1), (3, 1), (1, 3)])
def test_many_pages_shards_and_appended_rows(write_plainly, beside, num_shards, parts):
    lengths = [int(n) for n in np.random.default_rng(1).integers(1, 90, 2000)]
    path = write_plainly(
        schema_of(beside, np.int32),
        rows_of(beside, np.int32, lengths),
        num_shards=num_shards,
        parts=parts,
    )
    assert sorted(check_against_mindspore(path)) == sorted(lengths)


# A second writer of the same layout, for rows of any kind.


def blob(columns):
    parts = columns if len(columns) == 1 else [struct.pack(">Q", len(c)) + c for c in columns]
    content = b"".join(parts)
    return struct.pack("<Q", len(content)) + content


def int_lists(bits):
    edges = [2**n - 1 for n in range(bits)] + [-(2**n) for n in range(bits)]
    return st.lists(st.sampled_from(edges), max_size=40)


@st.composite
def sets_of_blobs(draw):
    """Layout, blobs, and the number of elements of the column of interest in each."""
    kinds = draw(st.lists(st.sampled_from(["int32", "int64", "float32", "bytes"]), max_size=4))
    position = draw(st.integers(0, len(kinds)))
    kinds.insert(position, draw(st.sampled_from(["int32", "int64"])))
    layout = ColumnLayout(column_types=tuple(kinds), position=position)
    blobs, counts = [], []
    for _ in range(draw(st.integers(1, 5))):
        columns = []
        for i, kind in enumerate(kinds):
            if kind.startswith("int"):
                values = draw(int_lists(int(kind[3:])))
                columns.append(packed(values, int(kind[3:]) // 8))
                if i == position:
                    counts.append(len(values))
            else:
                columns.append(draw(st.binary(max_size=30)))
        blobs.append(blob(columns))
    return layout, blobs, counts


def read(blobs, layout):
    ends = np.cumsum([len(one) for one in blobs])
    starts = ends - [len(one) for one in blobs]
    return read_element_counts(np.frombuffer(b"".join(blobs), np.uint8), starts, ends, layout)


def test_the_second_writer_writes_what_mindspore_writes(write_plainly):
    lengths = [1, 4, 5, 300]
    path = write_plainly(
        schema_of({"z": "int32"}, np.int64), rows_of({"z": "int32"}, np.int64, lengths)
    )
    dataset = open_mindrecord(path)
    (index,) = dataset.row_indexes
    for row, length in enumerate(lengths):
        columns = [packed(tokens(length, t).tolist(), t().itemsize) for t in (np.int64, np.int32)]
        with path.open("rb") as stream:
            stream.seek(int(index.blob_starts[row]))
            assert stream.read(int(index.blob_bytes[row])) == blob(columns)


@given(sets_of_blobs())
def test_counts_of_any_columns_are_read_and_bounded_by_the_size_of_the_row(case):
    layout, blobs, counts = case
    found = read(blobs, layout)
    assert found.tokens.tolist() == counts
    assert found.is_whole.all() and found.is_readable.all()
    most = layout.most_elements(np.array([len(one) for one in blobs]))
    assert (most >= counts).all()


@given(st.integers(0, 5000), st.sampled_from([1, 2, 3]))
def test_the_bound_is_reached_by_rows_of_small_values_without_other_content(length, num_columns):
    layout = ColumnLayout(column_types=("int32",) * num_columns, position=0)
    row = blob([packed([1] * length, 4), *[packed([], 4)] * (num_columns - 1)])
    assert layout.most_elements(np.array([len(row)])).tolist() == [length]


@settings(max_examples=300)
@given(sets_of_blobs(), st.data())
def test_a_damaged_row_is_never_read_beyond_itself(case, data):
    layout, blobs, _ = case
    broken = bytearray(b"".join(blobs))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(broken) - 1))
        broken[at] = data.draw(st.integers(0, 255))
    ends = np.cumsum([len(one) for one in blobs])
    starts = ends - [len(one) for one in blobs]
    found = read_element_counts(np.frombuffer(bytes(broken), np.uint8), starts, ends, layout)
    assert (
        layout.least_bytes(found.tokens)[found.is_readable] <= (ends - starts)[found.is_readable]
    ).all()
    assert not (found.is_whole & ~found.is_readable).any()
    assert (found.tokens >= 0).all()


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=5), st.integers(0, 2))
def test_bytes_of_anything_else_are_no_error(blobs, position):
    layout = ColumnLayout(column_types=("int32", "int64", "int32"), position=position)
    found = read(blobs, layout)
    assert len(found.tokens) == len(blobs)


def test_no_bytes_at_all():
    layout = ColumnLayout(column_types=("int32",), position=0)
    found = read([b"", b""], layout)
    assert not found.is_readable.any()

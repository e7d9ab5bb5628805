"""The index as arrays: order, values, and what is no index."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import numpy as np
import pytest

from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import open_mindrecord, read_index_column, read_rows
from tuner.errors import BadInputError

ARRAY = {"type": "int32", "shape": [-1]}
LENGTHS = list(range(1, 101))


@pytest.fixture
def plain(write_plainly):
    rows = [
        {"input_ids": np.ones(n, np.int32), "id": n - 50, "length": 2 * n, "name": "é'" * (n % 3)}
        for n in LENGTHS
    ]
    kinds = {"id": "int64", "length": "int32", "name": "string"}
    schema = {"input_ids": ARRAY, **{name: {"type": kind} for name, kind in kinds.items()}}
    return write_plainly(schema, rows)


def change_index(path, *statements):
    with closing(sqlite3.connect(f"{path}.db")) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def test_every_scalar_is_an_index_column_unless_some_are_chosen(plain):
    dataset = open_mindrecord(plain)
    assert dataset.index_columns == ("id", "length", "name")
    assert read_index_column(dataset, "id").tolist() == [n - 50 for n in LENGTHS]
    assert read_index_column(dataset, "length").tolist() == [2 * n for n in LENGTHS]
    with pytest.raises(BadInputError, match="no integers called 'name'"):
        read_index_column(dataset, "name")


def test_places_are_those_of_the_file(plain, monkeypatch):
    (whole,) = open_mindrecord(plain).row_indexes
    monkeypatch.setattr("tuner.data.record_index.ROWS_PER_QUERY", 7)
    dataset = open_mindrecord(plain)
    (index,) = dataset.row_indexes
    assert index.blob_starts.tolist() == whole.blob_starts.tolist()
    assert index.fingerprint == whole.fingerprint
    # A single column of n small numbers: a total, a count, their widths and n bytes.
    assert index.blob_bytes.tolist() == [8 + 4 + (n + 3) // 4 + n for n in LENGTHS]
    with pytest.raises(ValueError, match="read-only"):
        index.blob_starts[0] = 1


def test_lines_of_the_table_may_stand_in_any_order(plain):
    before = open_mindrecord(plain)
    change_index(
        plain,
        "CREATE TABLE COPIED AS SELECT * FROM INDEXES ORDER BY ROW_ID * 37 % 100",
        "DELETE FROM INDEXES",
        "INSERT INTO INDEXES SELECT * FROM COPIED ORDER BY rowid",
    )
    after = open_mindrecord(plain)
    (index,) = after.row_indexes
    assert index.blob_starts.tolist() == before.row_indexes[0].blob_starts.tolist()
    assert read_index_column(after, "id").tolist() == [n - 50 for n in LENGTHS]
    found = scan_lengths(after)
    assert found.source == "headers"
    assert found.tokens.tolist() == [row[0].size for row in read_rows(after, ["input_ids"])]


def test_gaps_in_the_numbering_of_sqlite_do_not_matter(plain):
    before = open_mindrecord(plain)
    change_index(plain, "UPDATE INDEXES SET rowid = 10000000000 + rowid WHERE ROW_ID > 50")
    after = open_mindrecord(plain)
    assert after.fingerprint == before.fingerprint
    assert scan_lengths(after).tokens.tolist() == LENGTHS


@pytest.mark.filterwarnings("ignore:string or file could not be read")
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE INDEXES SET PAGE_OFFSET_BLOB_END = 'x' WHERE ROW_ID = 50",
        "UPDATE INDEXES SET PAGE_OFFSET_BLOB = 0.5 WHERE ROW_ID = 50",
        "UPDATE INDEXES SET length_0 = NULL WHERE ROW_ID = 50",
        "UPDATE INDEXES SET PAGE_OFFSET_BLOB = -1 WHERE ROW_ID = 0",
        "UPDATE INDEXES SET PAGE_OFFSET_BLOB_END = 0 WHERE ROW_ID = 50",
        "UPDATE INDEXES SET ROW_ID = 49, INC_0 = 1000 WHERE ROW_ID = 50",
        "UPDATE INDEXES SET ROW_ID = -1 WHERE ROW_ID = 0",
        "ALTER TABLE INDEXES RENAME COLUMN length_0 TO length_1",
        "ALTER TABLE INDEXES RENAME TO OTHER",
        "DELETE FROM SHARD_NAME",
    ],
)
def test_an_index_that_cannot_be_is_one_line(plain, statement):
    change_index(plain, statement)
    with pytest.raises(BadInputError, match="is not the index of a MindRecord file") as caught:
        open_mindrecord(plain)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE INDEXES SET PAGE_ID_BLOB = 9 WHERE ROW_ID = 50",
        "UPDATE INDEXES SET PAGE_OFFSET_BLOB_END = 1000000000 WHERE ROW_ID = 50",
        "UPDATE INDEXES SET PAGE_ID_RAW = 9 WHERE ROW_ID = 50",
    ],
)
def test_rows_beyond_the_file_are_said_to_be_cut_off(plain, statement):
    change_index(plain, statement)
    with pytest.raises(BadInputError, match="is cut off"):
        open_mindrecord(plain)


@pytest.mark.parametrize(
    ("name", "values"),
    [("id", [5, 7]), ("name", ["a", "b"]), ("name", ["a", "aa"]), ("unlisted", ["a", "aa"])],
)
def test_the_fingerprint_sees_other_scalars(write_plainly, name, values):
    prints = set()
    kind = "int64" if name == "id" else "string"
    schema = {"input_ids": ARRAY, "id": {"type": "int64"}, name: {"type": kind}}
    for number, one in enumerate([*values, values[0]]):
        row = {"input_ids": np.ones(3, np.int32), "id": 1, name: one}
        index = ["id"] if name == "unlisted" else ()
        path = write_plainly(schema, [row, row], name=f"{number}.mindrecord", index=index)
        prints.add(open_mindrecord(path).fingerprint)
    assert len(prints) == 2

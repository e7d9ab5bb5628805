"""Rows read straight from files against MindDataset, and what happens where they cannot be."""

from __future__ import annotations

import os
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packed_bytes import packed

from tuner.data import stored_rows
from tuner.data.mindrecord import RowSchema, open_mindrecord, read_rows
from tuner.data.packed_integers import BYTES_BEHIND, first_unlike, unpack_integers
from tuner.data.stored_rows import read_groups
from tuner.errors import BadInputError

ARRAY32, ARRAY64 = {"type": "int32", "shape": [-1]}, {"type": "int64", "shape": [-1]}
VALUES = [5, -1, 300, -40_000, 70_000, 2**31 - 1, -(2**31), 0]


@pytest.fixture(autouse=True)
def forget_what_was_checked(monkeypatch):
    monkeypatch.setattr(stored_rows, "_agreement", {})


def refuse(text):
    raise AssertionError(text)


def values(length, dtype, row=0):
    return np.roll(np.resize(np.array(VALUES), max(length, 8)), row)[:length].astype(dtype)


def read(dataset, columns, groups, workers=2, notice=refuse):
    return list(
        read_groups(dataset, columns, map(np.array, groups), workers=workers, notice=notice)
    )


def check_against_mindspore(dataset, columns, groups, **options):
    ours = read(dataset, columns, groups, **options)
    assert [len(rows) for rows in ours] == [len(group) for group in groups]
    theirs = read_rows(dataset, columns, np.concatenate(groups))
    for row, other in zip((row for rows in ours for row in rows), theirs, strict=True):
        assert [column.dtype for column in row] == [column.dtype for column in other]
        assert all(a.tolist() == b.tolist() for a, b in zip(row, other, strict=True))


# Values of whole numbers of all widths, the 8 bytes of int64 too.


def edges(bits):
    return [2**n - 1 for n in range(bits)] + [-(2**n) for n in range(bits)]


@given(st.sampled_from(["int32", "int64"]), st.data())
def test_what_was_packed_is_unpacked(kind, data):
    bits = int(kind[3:])
    lists = data.draw(
        st.lists(st.lists(st.sampled_from(edges(bits)), max_size=20), min_size=1, max_size=5)
    )
    # Four bytes are the number of elements, which stands before the widths.
    columns = [packed(row, bits // 8)[4:] for row in lists]
    gap = b"\x93" * data.draw(st.integers(0, 3))
    ends = np.cumsum([len(gap) + len(column) for column in columns])
    starts = ends - [len(column) for column in columns]
    stretch = b"".join(gap + column for column in columns) + b"\xff" * BYTES_BEHIND
    counts = np.array([len(row) for row in lists])
    found = unpack_integers(np.frombuffer(stretch, np.uint8), starts, ends, counts, kind)
    assert found is not None and found.dtype == np.dtype(kind)
    assert found.tolist() == [value for row in lists for value in row]


def test_widths_that_do_not_lead_to_the_end_are_refused_and_the_row_is_found():
    good, bad = packed([1, 2, 3], 4)[4:], bytearray(packed([1, 2, 3], 4)[4:])
    bad[0] |= 0b01_00_00_00  # the first element would take two bytes
    data = np.frombuffer(good + bytes(bad) + bytes(BYTES_BEHIND), np.uint8)
    starts, ends = np.array([0, len(good)]), np.array([len(good), 2 * len(good)])
    counts = np.array([3, 3])
    assert unpack_integers(data, starts, ends, counts, "int32") is None
    assert first_unlike(data, starts, ends, counts, "int32") == 1


# Against MindDataset.


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_rows_are_those_of_mindspore_in_any_order_over_all_shards(
    write_plainly, dtype, num_shards
):
    random = np.random.default_rng(num_shards)
    lengths = random.integers(1, 90, 500)
    array = ARRAY32 if dtype == np.int32 else ARRAY64
    rows = [
        {"input_ids": values(n, dtype, i), "labels": values(n, np.int64, i + 1), "a_id": i}
        for i, n in enumerate(lengths.tolist())
    ]
    schema = {"labels": ARRAY64, "input_ids": array, "a_id": {"type": "int64"}}
    dataset = open_mindrecord(write_plainly(schema, rows, num_shards=num_shards))
    order = random.permutation(500)
    groups = [order[:7], order[7:7], order[7:300], order[300:], order[:3]]
    check_against_mindspore(dataset, ["input_ids", "labels"], groups)
    check_against_mindspore(dataset, ["labels"], groups, workers=5)


def test_a_rank_without_rows_reads_nothing(write_rows):
    dataset = open_mindrecord(write_rows([3, 1]))
    none = np.zeros(0, np.int64)
    assert read(dataset, ["input_ids", "labels"], [none, none]) == [[], []]
    assert read(dataset, ["input_ids"], []) == []


def test_empty_arrays_are_empty_rows(write_foreign):
    rows = [
        {"input_ids": values(n, np.int32), "labels": values(n, np.int32), "length": n}
        for n in (3, 0, 5, 0)
    ]
    dataset = open_mindrecord(write_foreign(rows))
    check_against_mindspore(dataset, ["input_ids", "labels"], [[1, 0], [3, 2]])


@pytest.mark.parametrize(
    "other", [{"type": "float32", "shape": [-1]}, {"type": "int32", "shape": [2, 2]}]
)
def test_other_columns_are_read_by_mindspore(write_foreign, other):
    schema = RowSchema(columns={"ids": ARRAY32, "other": other})
    kind = np.dtype(other["type"])
    rows = [{"ids": values(4, np.int32, i), "other": np.full(4, i, kind)} for i in range(6)]
    if other["shape"] == [2, 2]:
        rows = [{**row, "other": row["other"].reshape(2, 2)} for row in rows]
    dataset = open_mindrecord(write_foreign(rows, schema))
    told = []
    check_against_mindspore(dataset, ["ids", "other"], [[5, 0], [1]], notice=told.append)
    # A fixed shape is not in what opening reads: the comparison finds it.
    assert len(told) == (other["shape"] == [2, 2])


def test_rows_that_mindspore_finds_otherwise_are_read_by_it(write_rows, monkeypatch):
    dataset = open_mindrecord(write_rows([3, 1, 4, 1, 5]))
    unpack = stored_rows.unpack_integers
    monkeypatch.setattr(stored_rows, "unpack_integers", lambda *given: unpack(*given) + 1)
    told = []
    check_against_mindspore(dataset, ["input_ids"], [[4, 2], [0]], notice=told.append)
    check_against_mindspore(dataset, ["input_ids"], [[1]], notice=told.append)
    assert len(told) == 1 and "MindDataset" in told[0]


def test_no_row_is_read_twice_and_reading_is_only_a_task_or_two_ahead(write_rows, monkeypatch):
    monkeypatch.setattr(stored_rows, "BYTES_PER_TASK", 2000)
    dataset = open_mindrecord(write_rows([20] * 600, num_shards=2))
    order = np.random.default_rng(0).permutation(600)
    read(dataset, ["input_ids", "labels"], [order[:1]])  # the comparison with MindDataset
    places = Counter()
    pread = os.pread

    def counted(descriptor, size, start):
        places[os.fstat(descriptor).st_ino, start] += 1
        return pread(descriptor, size, start)

    monkeypatch.setattr(os, "pread", counted)
    asked = []

    def groups():
        for start in range(0, 600, 4):
            asked.append(start)
            yield order[start : start + 4]

    found = read_groups(dataset, ["input_ids", "labels"], groups(), workers=2, notice=refuse)
    next(found)
    row_bytes = int(dataset.row_indexes[0].blob_bytes.mean())
    # The tasks of both threads, and the one that is handed out.
    assert len(asked) <= 3 * (2000 // (4 * row_bytes) + 1)
    assert len(list(found)) == 149
    expected = {
        (file.stat().st_ino, start)
        for file, index in zip(dataset.files, dataset.row_indexes, strict=True)
        for start in index.blob_starts.tolist()
    }
    assert set(places) == expected
    assert set(places.values()) == {1}


def test_of_long_rows_fewer_are_read_ahead(write_rows, monkeypatch):
    monkeypatch.setattr(stored_rows, "BYTES_PER_TASK", 20_000)
    dataset = open_mindrecord(write_rows([5] * 400 + [2000] * 60))
    read(dataset, ["input_ids"], [[0]])  # the comparison with MindDataset
    asked = []

    def groups():
        for row in range(400, 460):
            asked.append(row)
            yield np.array([row])

    found = read_groups(dataset, ["input_ids"], groups(), workers=2, notice=refuse)
    next(found)
    row_bytes = int(dataset.blob_bytes[400])
    assert row_bytes > 5 * dataset.blob_bytes.mean()
    assert len(asked) <= 3 * (20_000 // row_bytes + 1)
    found.close()


def open_files_of(dataset):
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    there = [os.readlink(link) for link in links if os.path.lexists(link)]
    return [name for name in there if name in map(str, dataset.files)]


def reading_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("read-rows")]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are listed there")
def test_threads_end_and_files_are_closed_wherever_reading_stops(write_rows, monkeypatch):
    monkeypatch.setattr(stored_rows, "BYTES_PER_TASK", 100)
    dataset = open_mindrecord(write_rows([9] * 50, num_shards=2))
    read(dataset, ["input_ids"], [[0]])

    def start(groups):
        return read_groups(dataset, ["input_ids"], groups, workers=2, notice=refuse)

    def failing():
        yield np.array([3])
        raise BadInputError("no plan", fix="make one")

    found = start(np.array([row]) for row in range(50))
    next(found)
    assert reading_threads() and len(open_files_of(dataset)) == 2
    found.close()
    assert not reading_threads() and not open_files_of(dataset)
    for groups in (failing(), iter([np.array([4]), np.array([99])])):
        with pytest.raises(BadInputError):
            list(start(groups))
        assert not reading_threads() and not open_files_of(dataset)


# What cannot be read.


def test_a_row_that_is_not_there_is_refused(write_rows):
    dataset = open_mindrecord(write_rows([3, 1]))
    with pytest.raises(BadInputError, match="has no row 2"):
        read(dataset, ["input_ids"], [[0, 2]])


def break_row(dataset, row, at, byte):
    start = int(dataset.row_indexes[0].blob_starts[row])
    with dataset.files[0].open("r+b") as stream:
        stream.seek(start + at)
        stream.write(bytes([byte]))


@pytest.mark.parametrize(
    ("at", "byte"),
    [(19, 200), (20, 0x55), (8, 255)],
    ids=["more elements than bytes", "wider elements than bytes", "a column beyond the row"],
)
def test_a_damaged_row_is_named_and_kept_from_mindspore(write_rows, at, byte):
    dataset = open_mindrecord(write_rows([9] * 300))
    read(dataset, ["input_ids", "labels"], [[0]])
    break_row(dataset, 123, at, byte)
    with pytest.raises(BadInputError, match=r"row 123 of .*data\.mindrecord is damaged"):
        read(dataset, ["input_ids", "labels"], [[1, 2], [123, 5]])
    assert len(read(dataset, ["input_ids", "labels"], [[122, 124]])[0]) == 2


def test_a_total_that_mindspore_does_not_look_at_is_no_damage(write_rows):
    dataset = open_mindrecord(write_rows([9] * 300))
    read(dataset, ["input_ids", "labels"], [[0]])
    break_row(dataset, 123, 0, 7)
    check_against_mindspore(dataset, ["input_ids", "labels"], [[1, 123, 5]])


def test_a_file_cut_off_since_it_was_opened_is_named(write_rows):
    dataset = open_mindrecord(write_rows([9] * 300))
    read(dataset, ["input_ids"], [[0]])
    os.truncate(dataset.files[0], int(dataset.row_indexes[0].blob_starts[200]))
    with pytest.raises(BadInputError, match=r"cannot read .*data\.mindrecord: it is shorter"):
        read(dataset, ["input_ids"], [[250]])


def test_a_file_that_has_changed_since_it_was_opened_is_named(write_rows):
    dataset = open_mindrecord(write_rows([9] * 300))
    read(dataset, ["input_ids"], [[0]])
    # The first id of row 0: without a look at the file nothing would tell.
    break_row(dataset, 0, 23, 7)
    assert read_first_id(dataset, 0) == 7
    with pytest.raises(BadInputError, match=r"data\.mindrecord has changed since it was opened"):
        read(dataset, ["input_ids"], [[100]])


def read_first_id(dataset, row):
    return int(next(read_rows(dataset, ["input_ids"], np.array([row])))[0][0])


def test_a_file_that_was_only_touched_is_read_on(write_rows):
    dataset = open_mindrecord(write_rows([9] * 30))
    before = read(dataset, ["input_ids"], [[4, 2]])
    os.utime(dataset.files[0], (1, 1))
    after = read(dataset, ["input_ids"], [[4, 2]])
    assert [row[0].tolist() for row in before[0]] == [row[0].tolist() for row in after[0]]

"""When headers are believed, when every row is read instead, and when a row is called damaged."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import RowSchema, open_mindrecord, read_rows
from tuner.errors import BadInputError

ARRAY = {"type": "int32", "shape": [-1]}
LENGTHS = [int(n) for n in np.random.default_rng(7).integers(5, 40, 300)]
ROW = 131
"""Not among the 64 rows that opening looks at, nor among those that are checked."""


@pytest.fixture
def plain(write_plainly):
    """Two columns, `input_ids` and `labels`, and no index."""
    rows = [{"input_ids": np.arange(n, dtype=np.int32)} for n in LENGTHS]
    rows = [{**row, "labels": row["input_ids"]} for row in rows]
    return write_plainly({"input_ids": ARRAY, "labels": ARRAY}, rows)


def overwrite(path, offset, data, row=ROW):
    """Change bytes in the file, counted from the start of a row."""
    (index,) = open_mindrecord(path).row_indexes
    with path.open("r+b") as stream:
        stream.seek(int(index.blob_starts[row]) + offset)
        stream.write(data)


def u64(number):
    return (number % 2**64).to_bytes(8, "big")


SECOND = 16 + 4 + (LENGTHS[ROW] + 3) // 4 + LENGTHS[ROW]
"""Where the second column of the row begins; its elements take one byte each."""


@pytest.mark.parametrize(
    ("offset", "data"),
    [
        (0, (3).to_bytes(8, "little")),
        (0, b"\xff" * 8),
        (8, u64(2)),
        (8, u64(10_000)),
        (8, u64(-1)),
        (SECOND, u64(2**62)),
        (SECOND, u64(0)),
    ],
    ids=["total small", "total huge", "small", "large", "negative", "next huge", "next 0"],
)
def test_sizes_that_mindspore_does_not_need_lead_to_reading_every_row(plain, offset, data):
    overwrite(plain, offset, data)
    said = []
    found = scan_lengths(open_mindrecord(plain), notice=said.append)
    assert found.source == "rows"
    assert found.tokens.tolist() == LENGTHS
    assert len(said) == 1 and f"row {ROW} of" in said[0] and "do not add up" in said[0]


@pytest.mark.parametrize(
    ("column", "offset", "data"),
    [
        ("input_ids", 16, b"\xff" * 4),
        ("input_ids", 16, (2**31 - 1).to_bytes(4, "big")),
        ("input_ids", 16, (4 * LENGTHS[ROW]).to_bytes(4, "big")),
        ("labels", 8, u64(0)),
        ("labels", 8, u64(2**62)),
        ("labels", 8, u64(-1)),
        ("labels", 8, u64(SECOND - 16 + 1)),
        ("labels", SECOND + 8, b"\xff" * 4),
    ],
)
def test_a_row_that_mindspore_would_crash_on_or_misread_is_named(plain, column, offset, data):
    overwrite(plain, offset, data)
    with pytest.raises(BadInputError, match=rf"row {ROW} of .*plain\.mindrecord is damaged"):
        scan_lengths(open_mindrecord(plain), column, notice=pytest.fail)


def test_a_damaged_row_among_those_to_check_is_kept_from_mindspore(plain):
    overwrite(plain, 16, b"\xff" * 4, row=0)
    with pytest.raises(BadInputError, match="row 0 of"):
        scan_lengths(open_mindrecord(plain), notice=pytest.fail)


def test_a_count_too_small_for_its_bytes_is_what_mindspore_says(plain):
    overwrite(plain, 16, (2).to_bytes(4, "big"))
    said = []
    dataset = open_mindrecord(plain)
    tokens = scan_lengths(dataset, notice=said.append).tokens.tolist()
    assert tokens == [row[0].size for row in read_rows(dataset, ["input_ids"])]
    assert len(said) == 1


@pytest.mark.parametrize(
    "change", [{"blob_columns": ("labels", "input_ids")}, {"format_version": "4.0"}]
)
def test_another_layout_than_ours_is_noticed(write_plainly, change):
    # As if another MindSpore stored columns otherwise: what we take for the header is none.
    rows = [
        {"input_ids": np.ones(n, np.int32), "labels": np.ones(n + 1, np.int32)} for n in LENGTHS
    ]
    path = write_plainly({"input_ids": ARRAY, "labels": ARRAY}, rows)
    said = []
    found = scan_lengths(replace(open_mindrecord(path), **change), notice=said.append)
    assert found.tokens.tolist() == LENGTHS
    assert found.source == "rows"
    assert len(said) == 1


def test_a_file_cut_after_opening_is_one_line(plain):
    dataset = open_mindrecord(plain)
    os.truncate(plain, 128 << 10)
    with pytest.raises(BadInputError, match=r"cannot read .*plain\.mindrecord") as caught:
        scan_lengths(dataset)
    assert "\n" not in str(caught.value)


def test_every_way_to_name_the_files_gives_the_same_lengths(write_plainly, tmp_path):
    rows = [{"input_ids": np.zeros(n, np.int32)} for n in LENGTHS]
    base = write_plainly({"input_ids": ARRAY}, rows, num_shards=4)
    whole = open_mindrecord(base)
    expected = [row[0].size for row in read_rows(whole, ["input_ids"])]
    assert sorted(expected) == sorted(LENGTHS)
    for name in (base, tmp_path, f"{base}*", list(whole.files)):
        assert scan_lengths(open_mindrecord(name)).tokens.tolist() == expected
    backwards = list(whole.files[::-1])
    read = [row[0].size for row in read_rows(open_mindrecord(backwards), ["input_ids"])]
    assert scan_lengths(open_mindrecord(backwards)).tokens.tolist() == read != expected


def test_shards_without_rows(write_plainly):
    rows = [{"input_ids": np.zeros(n, np.int32)} for n in (3, 5)]
    dataset = open_mindrecord(write_plainly({"input_ids": ARRAY}, rows, num_shards=4))
    assert sorted(scan_lengths(dataset).tokens.tolist()) == [3, 5]


class TestIndexOfOthers:
    SCHEMA = RowSchema(
        columns={
            "input_ids": ARRAY,
            "length": {"type": "int64"},
            "id": {"type": "int32"},
            "name": {"type": "string"},
        },
        index_columns=("id", "length", "name"),
    )

    def write(self, write_foreign, counted):
        rows = [
            {"input_ids": np.ones(n, np.int32), "length": length, "id": 7, "name": "it's"}
            for n, length in zip(LENGTHS, counted, strict=True)
        ]
        return open_mindrecord(write_foreign(rows, self.SCHEMA))

    def test_one_wrong_value_in_it_changes_nothing(self, write_foreign):
        counted = list(LENGTHS)
        counted[ROW] += 1
        assert scan_lengths(self.write(write_foreign, counted)).tokens.tolist() == LENGTHS

    @pytest.mark.parametrize(
        ("factor", "source"), [(1, "index"), (2, "rows"), (-1, "rows"), (2**33, "rows")]
    )
    def test_without_headers_it_is_checked_against_rows(self, write_foreign, factor, source):
        dataset = self.write(write_foreign, [n * factor for n in LENGTHS])
        found = scan_lengths(replace(dataset, format_version="?"), notice=lambda text: None)
        assert (found.source, found.tokens.tolist()) == (source, LENGTHS)


def test_columns_without_element_counts_are_read_with_a_notice(write_foreign):
    schema = RowSchema(columns={"input_ids": {"type": "float32", "shape": [-1]}})
    rows = [{"input_ids": np.ones(n, np.float32)} for n in (3, 5)]
    said = []
    found = scan_lengths(open_mindrecord(write_foreign(rows, schema)), notice=said.append)
    assert (found.source, found.tokens.tolist()) == ("rows", [3, 5])
    assert "every row is read to count 'input_ids'" in said[0]


def test_the_notice_goes_to_standard_error_unless_told_otherwise(plain, capfd):
    overwrite(plain, 0, bytes(8))
    scan_lengths(open_mindrecord(plain))
    assert capfd.readouterr().err.startswith("note: ")


@pytest.mark.parametrize(("rows", "num_bytes"), [(7, 10**9), (10**9, 200), (7, 200), (1, 1)])
def test_stretches_cover_every_row_once(plain, monkeypatch, rows, num_bytes):
    monkeypatch.setattr("tuner.data.header_lengths.ROWS_PER_STRETCH", rows)
    monkeypatch.setattr("tuner.data.header_lengths.BYTES_PER_STRETCH", num_bytes)
    assert scan_lengths(open_mindrecord(plain), notice=pytest.fail).tokens.tolist() == LENGTHS

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tuner.data.content import check_content
from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import TOKEN_SCHEMA, RowSchema, open_mindrecord, read_rows
from tuner.errors import BadInputError

LENGTHS = [int(n) for n in np.random.default_rng(5).integers(1, 60, 40)]


def record(ids, labels=None, length=None):
    ids = np.array(ids, np.int32)
    labels = ids if labels is None else np.array(labels, np.int32)
    return {"input_ids": ids, "labels": labels, "length": len(ids) if length is None else length}


@pytest.mark.parametrize("num_shards", [1, 3])
def test_lengths_stand_in_the_order_of_the_rows(write_rows, num_shards):
    dataset = open_mindrecord(write_rows(LENGTHS, num_shards=num_shards))
    lengths = scan_lengths(dataset)
    read = [row[0].size for row in read_rows(dataset, ["input_ids"])]
    assert lengths.tokens.tolist() == read
    assert lengths.num_samples == 40
    assert lengths.total_tokens == sum(LENGTHS)
    assert lengths.longest == max(LENGTHS)
    assert (lengths.source, lengths.is_from_cache) == ("index", False)
    assert lengths.source_text == "read from the index"
    assert lengths.fingerprint == dataset.fingerprint
    assert lengths.tokens.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        lengths.tokens[0] = 1


def test_own_files_are_scanned_without_mindspore(write_rows):
    path = write_rows(LENGTHS)
    code = (
        "import sys; from tuner.data.lengths import scan_lengths;"
        "from tuner.data.mindrecord import open_mindrecord;"
        f"print(scan_lengths(open_mindrecord({str(path)!r})).total_tokens);"
        "print('mindspore' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == [str(sum(LENGTHS)), "False"]


def test_a_foreign_length_column_is_believed_only_if_rows_agree(write_foreign):
    # The column counts something else (characters, say): the rows decide.
    rows = [record([1] * n, length=5 * n) for n in LENGTHS]
    assert scan_lengths(open_mindrecord(write_foreign(rows))).tokens.tolist() == LENGTHS


def test_files_without_a_length_column_are_read_through(write_foreign):
    schema = RowSchema(columns={"tokens": {"type": "int64", "shape": [-1]}})
    path = write_foreign([{"tokens": np.ones(n, np.int64)} for n in LENGTHS], schema)
    assert scan_lengths(open_mindrecord(path), "tokens").tokens.tolist() == LENGTHS


def test_lengths_of_another_column_are_not_taken_from_the_index(write_rows, write_foreign):
    columns = {**TOKEN_SCHEMA.columns, "other": {"type": "int32", "shape": [-1]}}
    schema = RowSchema(columns=columns, index_columns=("length",))
    rows = [{**record([1, 2]), "other": np.zeros(n, np.int32)} for n in LENGTHS]
    dataset = open_mindrecord(write_foreign(rows, schema))
    assert scan_lengths(dataset, "other").tokens.tolist() == LENGTHS


def test_a_missing_column_is_named(write_rows):
    with pytest.raises(BadInputError, match="no column 'ids'"):
        scan_lengths(open_mindrecord(write_rows([1])), "ids")


def test_content_of_good_rows_is_counted(write_foreign):
    rows = [record([3, 9, 4], [-100, 9, 4]), record([7], [-100])]
    summary = check_content(open_mindrecord(write_foreign(rows)), vocab_size=10)
    assert summary.rows_checked == summary.num_samples == 2
    assert summary.max_token_id == 9
    assert summary.num_label_tokens == 2


def test_content_can_be_sampled(write_rows):
    dataset = open_mindrecord(write_rows(LENGTHS))
    summary = check_content(dataset, limit_rows=10)
    assert 9 <= summary.rows_checked <= 10
    assert summary.num_samples == 40
    assert summary.max_token_id == 39  # the last row is always among them
    assert summary == check_content(dataset, limit_rows=10)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (
            record([1, 10, 2]),
            r"row 1: input_ids .* below the vocabulary size 10 \(got 10\)",
        ),
        (record([1, -1]), r"row 1: input_ids must be at least 0.*got -1"),
        (record([1, 2], [1, 2, 3]), r"row 1: labels is longer than input_ids \(3 and 2 tokens\)"),
        (record([1, 2], [1]), "row 1: labels is shorter than input_ids"),
        (
            record([1, 2], [1, 11]),
            r"row 1: labels must be at least 0 and below the vocabulary size 10 \(got 11\)",
        ),
    ],
)
def test_bad_rows_are_named(write_foreign, bad, says):
    dataset = open_mindrecord(write_foreign([record([1, 2]), bad]))
    with pytest.raises(BadInputError, match=says) as caught:
        check_content(dataset, vocab_size=10)
    assert "\n" not in str(caught.value)


def test_labels_may_be_absent(write_foreign):
    schema = RowSchema(columns={"input_ids": {"type": "int64", "shape": [-1]}})
    dataset = open_mindrecord(write_foreign([{"input_ids": np.array([5, 6])}], schema))
    assert check_content(dataset, label_column=None, vocab_size=7).num_label_tokens == 0
    with pytest.raises(BadInputError, match="no column 'labels'"):
        check_content(dataset)


def test_a_set_without_rows_is_an_error(tmp_path):
    from mindspore.mindrecord import FileWriter

    writer = FileWriter(str(tmp_path / "zero.mindrecord"))
    writer.add_schema({"input_ids": {"type": "int32", "shape": [-1]}})
    writer.commit()
    dataset = open_mindrecord(tmp_path / "zero.mindrecord")
    assert dataset.num_samples == 0
    for check in (scan_lengths, lambda d: check_content(d, label_column=None)):
        with pytest.raises(BadInputError, match="has no rows"):
            check(dataset)

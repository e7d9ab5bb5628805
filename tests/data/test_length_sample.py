from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tuner.data.length_sample import sample_lengths
from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import open_mindrecord
from tuner.errors import BadInputError

ARRAY = {"type": "int32", "shape": [-1]}
RANDOM = np.random.default_rng(11)
LENGTHS = [int(n) for n in RANDOM.lognormal(3, 1, 500)]
LENGTHS[333] = 2000
"""The longest is one row, which a small sample misses."""


@pytest.fixture
def plain(write_plainly):
    """Files without an index; wide values make long blobs of short rows."""
    rows = []
    for length in LENGTHS:
        ids = np.full(length, 1, np.int32)
        labels = np.full(length if length == 2000 else 3 * length, 10**9, np.int32)
        rows.append({"input_ids": ids, "labels": labels})
    schema = {"input_ids": ARRAY, "labels": ARRAY}
    return open_mindrecord(write_plainly(schema, rows, num_shards=3))


@pytest.fixture(params=["index", "headers", "rows"])
def dataset(request, write_rows, plain):
    """The same question to each of the three sources."""
    if request.param == "index":
        return open_mindrecord(write_rows(LENGTHS, num_shards=3))
    return plain if request.param == "headers" else replace(plain, format_version="?")


def silent(text):
    return None


@pytest.mark.parametrize("num_rows", [1, 40, 499])
def test_a_sample_holds_distinct_rows_with_their_lengths_and_the_true_maximum(dataset, num_rows):
    sample = sample_lengths(dataset, "input_ids", num_rows, notice=silent)
    tokens = scan_lengths(dataset, notice=silent).tokens
    assert sample.num_rows == len(set(sample.row_indices.tolist())) == num_rows
    assert sample.tokens.tolist() == tokens[sample.row_indices].tolist()
    assert sample.tokens.dtype == np.int32
    assert sample.longest == 2000
    assert sample.num_rows_in_set == len(LENGTHS)
    assert sample.num_rows < sample.num_rows_in_set
    assert sample.fingerprint == dataset.fingerprint


@pytest.mark.parametrize("num_rows", [500, 10**9])
def test_more_rows_than_there_are_means_all_of_them(dataset, num_rows):
    sample = sample_lengths(dataset, "input_ids", num_rows, notice=silent)
    assert sample.num_rows == sample.num_rows_in_set
    assert sample.tokens.tolist() == scan_lengths(dataset, notice=silent).tokens.tolist()


def test_source_is_said(dataset):
    sample = sample_lengths(dataset, "input_ids", 5, notice=silent)
    whole = scan_lengths(dataset, notice=silent)
    assert (sample.source, sample.source_text) == (whole.source, whole.source_text)
    with pytest.raises(ValueError, match="read-only"):
        sample.tokens[0] = 1


def test_the_seed_decides_the_rows(plain):
    def rows(seed):
        return sample_lengths(plain, "input_ids", 50, seed).row_indices.tolist()

    assert rows(1) == rows(1) != rows(2)


def test_rows_of_all_files_are_equally_likely(write_rows):
    dataset = open_mindrecord(write_rows(LENGTHS, num_shards=3))
    times_drawn = np.zeros(dataset.num_samples)
    for seed in range(200):
        times_drawn[sample_lengths(dataset, "input_ids", 100, seed).row_indices] += 1
    # Binomial(200, 0.2): mean 40, standard deviation 5.7; six of them cover 500 rows.
    assert times_drawn.min() > 6 and times_drawn.max() < 74
    ends = np.cumsum(dataset.rows_per_file)
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        assert abs(times_drawn[start:end].mean() - 40) < 2


def test_few_rows_are_looked_at_for_the_longest(plain, monkeypatch):
    import tuner.data.length_sample as module

    looked_at = []
    read_counts = module.read_counts

    def record(dataset, layout, rows):
        looked_at.append(len(rows))
        return read_counts(dataset, layout, rows)

    monkeypatch.setattr(module, "ROWS_PER_LOOK", 10)
    monkeypatch.setattr(module, "read_counts", record)
    assert sample_lengths(plain, "input_ids", 5).longest == 2000
    assert sum(looked_at) < 300


def test_every_row_could_be_the_longest(write_plainly):
    # Blobs of one size whose lengths differ: only the headers tell.
    rows = [
        {"input_ids": np.full(n, 1, np.int32), "labels": np.full(60 - n, 1, np.int32)}
        for n in range(4, 57, 4)
    ]
    path = write_plainly({"input_ids": ARRAY, "labels": ARRAY}, rows)
    for seed in range(5):
        assert sample_lengths(open_mindrecord(path), "input_ids", 1, seed).longest == 56


def test_a_damaged_row_that_might_be_the_longest_is_named(plain):
    row = int(np.argmax([index.blob_bytes.max() for index in plain.row_indexes]))
    index, file = plain.row_indexes[row], plain.files[row]
    widest = int(np.argmax(index.blob_bytes))
    with file.open("r+b") as stream:
        stream.seek(int(index.blob_starts[widest]) + 16)
        stream.write(b"\xff" * 4)
    with pytest.raises(BadInputError, match=rf"row {widest} of .* is damaged"):
        sample_lengths(plain, "input_ids", 1)


@pytest.mark.parametrize("num_rows", [0, -1])
def test_a_sample_of_nothing_is_refused(plain, num_rows):
    with pytest.raises(BadInputError, match="at least 1 row"):
        sample_lengths(plain, "input_ids", num_rows)


def test_a_missing_column_is_named(plain):
    with pytest.raises(BadInputError, match="no column 'ids'"):
        sample_lengths(plain, "ids", 5)

"""Padding of rows and reading ahead."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from strategies import make_config

from tuner.batching.plan import PlannedBatch, plan_batches
from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import MindRecordWriter, open_mindrecord
from tuner.errors import BadInputError
from tuner.train.loader import pad_batch, read_ahead, read_batches

DATA = make_config({"data.pad_id": 9}).data


def planned(rows, padded_length):
    return PlannedBatch(row_indices=np.array(rows), padded_length=padded_length)


def row(ids, labels=None):
    ids = np.array(ids, np.int32)
    return (ids, ids if labels is None else np.array(labels, np.int32))


def test_targets_are_the_labels_of_the_next_position():
    batch = pad_batch([row([5, 6, 7], [-100, 6, 7])], planned([0], 5), DATA, 10)
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 9, 9]]
    assert batch.targets_BT.tolist() == [[6, 7, -100, -100, -100]]
    assert (batch.real_tokens, batch.label_tokens, batch.padded_tokens) == (3, 2, 5)


def test_a_filler_row_has_pad_ids_and_no_label():
    batch = pad_batch([row([5]), row([1, 2])], planned([3, -1, 4], 2), DATA, 10)
    assert batch.input_ids_BT.tolist() == [[5, 9], [9, 9], [1, 2]]
    assert batch.targets_BT.tolist() == [[-100, -100], [-100, -100], [2, -100]]
    assert (batch.real_tokens, batch.label_tokens) == (3, 1)


def test_a_row_over_the_padded_length_is_cut():
    batch = pad_batch([row([1, 2, 3, 4])], planned([0], 3), DATA, 10)
    assert batch.input_ids_BT.tolist() == [[1, 2, 3]]
    assert batch.targets_BT.tolist() == [[2, 3, -100]]
    assert batch.real_tokens == 3


def test_without_a_label_column_the_ids_are_the_labels():
    data = make_config({"data.label_column": None}).data
    batch = pad_batch([(np.array([1, 2, 3]),)], planned([0], 3), data, 10)
    assert batch.targets_BT.tolist() == [[2, 3, -100]]


@pytest.mark.parametrize(
    ("bad_row", "words"),
    [
        (row([1, 2], [1, 2, 3]), ["row 7", "labels is longer than input_ids (3 and 2"]),
        (row([1, 2, 3], [1]), ["row 7", "labels is shorter than input_ids (1 and 3"]),
        (row([1, 10]), ["row 7", "input_ids", "vocabulary size 10", "got 10"]),
        (row([1, -3]), ["row 7", "input_ids", "got -3"]),
        (row([1, 2], [1, 11]), ["row 7", "labels", "got 11"]),
        (row([1, 2], [-1, 2]), ["row 7", "labels", "got -1"]),
    ],
)
def test_a_bad_row_is_named(bad_row, words):
    with pytest.raises(BadInputError) as caught:
        pad_batch([bad_row], planned([7], 8), DATA, 10)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


@pytest.fixture
def small_set(tmp_path):
    """Row i holds i + 1 times the id i."""
    path = tmp_path / "rows.mindrecord"
    with MindRecordWriter(path, description={"length_of": "input_ids"}) as writer:
        for i in range(40):
            ids = np.full(i + 1, i, np.int32)
            writer.write([{"input_ids": ids, "labels": ids, "length": i + 1}])
    return path


def test_batches_hold_the_planned_rows_from_any_step_on(small_set):
    config = make_config(
        {"data.path": str(small_set), "batching.tokens_per_batch": 100, "batching.num_buckets": 3}
    )
    dataset = open_mindrecord(str(small_set))
    plan = plan_batches(scan_lengths(dataset), config)
    steps = list(plan.steps_of_rank(0))
    batches = list(read_batches(dataset, steps, config.data, 100))
    assert len(batches) == plan.num_steps
    for step, batch, real_tokens in zip(steps, batches, plan.real_tokens, strict=True):
        assert batch.shape == step.shape
        assert batch.real_tokens == real_tokens
        for slot, index in enumerate(step.row_indices):
            ids = [int(index)] * (int(index) + 1) if index >= 0 else []
            padded = ids + [0] * (step.padded_length - len(ids))
            assert batch.input_ids_BT[slot].tolist() == padded
    later = list(read_batches(dataset, steps[2:], config.data, 100))
    assert all(
        np.array_equal(a.input_ids_BT, b.input_ids_BT)
        for a, b in zip(batches[2:], later, strict=True)
    )


def test_reading_ahead_keeps_the_order_and_ends():
    with read_ahead(iter(range(20))) as ready:
        assert list(ready) == list(range(20))


def test_an_error_of_the_reader_comes_where_its_batch_would():
    def batches():
        yield 1
        yield 2
        raise BadInputError("row 3 is bad", fix="mend it")

    taken = []
    with pytest.raises(BadInputError, match="row 3"), read_ahead(batches()) as ready:
        for batch in ready:
            taken.append(batch)
    assert taken == [1, 2]


def test_leaving_early_ends_the_thread():
    def endless():
        while True:
            yield 0

    with read_ahead(endless()) as ready:
        next(ready)
    deadline = time.monotonic() + 5
    while any(thread.name == "read-ahead" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)

"""Padding of rows and reading ahead."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from strategies import make_config, slots_of

from tuner.batching.plan import PlannedBatch, plan_batches
from tuner.config.override import override_config
from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import MindRecordWriter, open_mindrecord
from tuner.errors import BadInputError
from tuner.train.loader import pad_batch, read_ahead, read_batches

CONFIG = make_config({"data.pad_id": 9, "model.vocab_size": 10})
PACKED = override_config(CONFIG, {"batching.strategy": "packed"}, source="test")


def planned(rows, padded_length, rows_per_slot=None):
    """One row a slot unless told otherwise."""
    return PlannedBatch(
        row_indices=np.array(rows),
        rows_per_slot=np.array(rows_per_slot or [1] * len(rows)),
        padded_length=padded_length,
    )


def row(ids, labels=None):
    ids = np.array(ids, np.int32)
    return (ids, ids if labels is None else np.array(labels, np.int32))


def test_targets_are_the_labels_of_the_next_position():
    batch = pad_batch([row([5, 6, 7], [-100, 6, 7])], planned([0], 5), CONFIG)
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 9, 9]]
    assert batch.targets_BT.tolist() == [[6, 7, -100, -100, -100]]
    assert (batch.real_tokens, batch.label_tokens, batch.padded_tokens) == (3, 2, 5)


def test_a_filler_row_has_pad_ids_and_no_label():
    batch = pad_batch([row([5]), row([1, 2])], planned([3, 4], 2, [1, 0, 1]), CONFIG)
    assert batch.input_ids_BT.tolist() == [[5, 9], [9, 9], [1, 2]]
    assert batch.targets_BT.tolist() == [[-100, -100], [-100, -100], [2, -100]]
    assert (batch.real_tokens, batch.label_tokens) == (3, 1)


def test_a_batch_of_fillers_alone_has_no_row():
    """What a rank gets of a last batch that the other ranks have filled."""
    batch = pad_batch([], planned([], 3, [0, 0]), CONFIG)
    assert batch.input_ids_BT.tolist() == [[9] * 3] * 2
    assert batch.targets_BT.tolist() == [[-100] * 3] * 2
    assert (batch.real_tokens, batch.label_tokens) == (0, 0)


def test_labels_that_are_too_long_and_too_short_do_not_make_up_for_each_other():
    rows = [row([1, 2], [1, 2, 3]), row([4, 5, 6], [5, 6])]
    with pytest.raises(BadInputError, match="row 7: labels is longer"):
        pad_batch(rows, planned([7, 8], 8), CONFIG)


def test_a_row_over_the_padded_length_is_cut():
    batch = pad_batch([row([1, 2, 3, 4])], planned([0], 3), CONFIG)
    assert batch.input_ids_BT.tolist() == [[1, 2, 3]]
    assert batch.targets_BT.tolist() == [[2, 3, -100]]
    assert batch.real_tokens == 3


def test_rows_are_cut_to_the_longest_length_that_is_admitted():
    """A packed slot has room for more than that, and other samples stand behind."""
    config = override_config(PACKED, {"data.max_length": 3}, source="test")
    rows = [row([1, 2, 3, 4, 5]), row([6, 7, 8])]
    batch = pad_batch(rows, planned([0, 1], 8, [2]), config)
    assert batch.input_ids_BT.tolist() == [[1, 2, 3, 6, 7, 8, 9, 9]]
    assert batch.targets_BT.tolist() == [[2, 3, -100, 7, 8, -100, -100, -100]]
    assert batch.packing is not None
    assert batch.packing.segment_ids_BT.tolist() == [[1, 1, 1, 2, 2, 2, 0, 0]]
    assert batch.real_tokens == 6


def test_without_a_label_column_the_ids_are_the_labels():
    config = make_config({"data.label_column": None})
    batch = pad_batch([(np.array([1, 2, 3]),)], planned([0], 3), config)
    assert batch.targets_BT.tolist() == [[2, 3, -100]]


def test_packed_rows_number_their_samples_and_learn_nothing_across_them():
    rows = [row([5, 6, 7]), row([1]), row([2, 3], [-100, 3]), row([8, 8])]
    batch = pad_batch(rows, planned([4, 0, 2, 3], 7, [3, 0, 1]), PACKED)
    assert batch.input_ids_BT.tolist() == [
        [5, 6, 7, 1, 2, 3, 9],
        [9] * 7,
        [8, 8, 9, 9, 9, 9, 9],
    ]
    assert batch.targets_BT.tolist() == [
        [6, 7, -100, -100, 3, -100, -100],
        [-100] * 7,
        [8, *[-100] * 6],
    ]
    assert batch.packing.segment_ids_BT.tolist() == [
        [1, 1, 1, 2, 3, 3, 0],
        [0] * 7,
        [1, 1, 0, 0, 0, 0, 0],
    ]
    assert batch.packing.positions_BT.tolist() == [
        [0, 1, 2, 0, 0, 1, 0],
        [0] * 7,
        [0, 1, 0, 0, 0, 0, 0],
    ]
    assert (batch.real_tokens, batch.label_tokens) == (8, 4)
    assert len(batch.arrays) == 4


def test_a_packed_batch_names_its_bad_row():
    rows = [row([1]), row([2]), row([99])]
    with pytest.raises(BadInputError, match="row 8: input_ids"):
        pad_batch(rows, planned([6, 7, 8], 4, [2, 1]), PACKED)


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
        pad_batch([bad_row], planned([7], 8), CONFIG)
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


@pytest.mark.parametrize("strategy", ["bucketed", "packed"])
def test_batches_hold_the_planned_rows_from_any_step_on(small_set, strategy):
    config = make_config(
        {
            "data.path": str(small_set),
            "batching.strategy": strategy,
            "batching.tokens_per_batch": 100,
            "batching.num_buckets": 3,
        }
    )
    dataset = open_mindrecord(str(small_set))
    plan = plan_batches(scan_lengths(dataset), config)
    steps = list(plan.steps_of_rank(0))
    batches = list(read_batches(dataset, steps, config))
    assert len(batches) == plan.num_steps
    for step, batch, real_tokens in zip(steps, batches, plan.real_tokens, strict=True):
        assert batch.shape == step.shape
        assert batch.real_tokens == real_tokens
        for slot, rows in enumerate(slots_of(step)):
            ids = [row for row in rows for _ in range(row + 1)]
            padded = ids + [0] * (step.padded_length - len(ids))
            assert batch.input_ids_BT[slot].tolist() == padded
    later = list(read_batches(dataset, steps[2:], config))
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


def test_a_bad_row_ends_the_threads_and_files_behind_it(small_set):
    config = make_config({"data.path": str(small_set), "model.vocab_size": 30})
    dataset = open_mindrecord(str(small_set))
    steps = plan_batches(scan_lengths(dataset), config).steps_of_rank(0)
    # Held on to, the error holds the frames that it came through.
    batches = read_batches(dataset, steps, config)
    with (
        pytest.raises(BadInputError, match="vocabulary") as caught,
        read_ahead(batches) as ready,
    ):
        list(ready)
    assert caught.value.__traceback__ is not None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-")]

"""What does not fit together is named with its place before a graph runs with it."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import make_config

from tuner.batching.plan import PlannedBatch
from tuner.data.content import check_row as check_ids_and_labels
from tuner.errors import BadInputError
from tuner.train.loader import Batch, Packing, pad_batch
from tuner.train.shape_check import FirstBatches, check_batch, check_row, position_limit

PAD = 3
SMALL = {"model.vocab_size": 10, "data.pad_id": PAD}
PADDED = make_config(SMALL)
PACKED = make_config({**SMALL, "batching.strategy": "packed"})
OWN_CELL = make_config({**SMALL, "model.factory": "factories:one_layer"})


def row(*ids):
    return (np.array(ids, np.int32), np.array(ids, np.int32))


def padded_batch(config=PADDED):
    """Rows of 5, 2 and 0 tokens in [3, 6]; a filler stands last."""
    planned = PlannedBatch(
        row_indices=np.arange(2), rows_per_slot=np.array([1, 1, 0]), padded_length=6
    )
    return pad_batch([row(5, 6, 7, 8, 9), row(1, 2)], planned, config)


def packed_batch():
    """Samples of 3 and 2 tokens in one row, of 4 in the other, of [2, 6]."""
    planned = PlannedBatch(
        row_indices=np.arange(3), rows_per_slot=np.array([2, 1]), padded_length=6
    )
    return pad_batch([row(5, 6, 7), row(8, 9), row(1, 2, 4, 5)], planned, PACKED)


def set_at(batch, array, place, value):
    """The batch with one value changed."""
    if array in ("segment_ids_BT", "positions_BT"):
        values = getattr(batch.packing, array).copy()
        values[place] = value
        packing = dataclasses.replace(batch.packing, **{array: values})
        return dataclasses.replace(batch, packing=packing)
    values = getattr(batch, array).copy()
    values[place] = value
    return dataclasses.replace(batch, **{array: values})


@st.composite
def loaded_batches(draw):
    """What the loader makes of any rows: padding ids as tokens, labels ignored, rows cut."""
    config = draw(st.sampled_from([PADDED, PACKED, OWN_CELL]))
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = []
    for length in lengths:
        ids = rng.integers(0, 10, length).astype(np.int32)
        rows.append((ids, np.where(rng.random(length) < 0.3, -100, ids)))
    most = draw(st.integers(1, 3)) if config is PACKED else 1
    counts = [most] * (len(lengths) // most) + [1] * (len(lengths) % most)
    counts.insert(draw(st.integers(0, len(counts))), 0)
    planned = PlannedBatch(
        row_indices=np.arange(len(lengths)),
        rows_per_slot=np.array(counts),
        padded_length=draw(st.integers(max(lengths) * most if config is PACKED else 1, 30)),
    )
    return config, pad_batch(rows, planned, config)


@given(loaded_batches())
def test_what_the_loader_makes_passes(case):
    config, batch = case
    assert check_batch(batch, config, batch.shape[1]) == []


@pytest.mark.parametrize("config", [PADDED, PACKED, OWN_CELL])
def test_batches_of_warm_up_and_measurement_pass(config):
    for shape in ((1, 1), (2, 8), (4, 64)):
        assert check_batch(Batch.empty(shape, config), config, shape[1]) == []
        assert check_batch(Batch.full(shape, config), config, shape[1]) == []


IN_PACKED = [
    (
        "mask-and-ids",
        "segment_ids_BT",
        (1, 3),
        0,
        "row 1, column 3: the mask is 0, but the id is 5",
    ),
    ("mask-and-ids", "segment_ids_BT", (1, 4), 1, "row 1, column 4 is padding under a mask of 1"),
    ("segment-order", "segment_ids_BT", (0, 3), 3, "segment 3 after 1"),
    (
        "segment-order",
        "segment_ids_BT",
        (0, 2),
        3,
        "row 0, column 2 (and 1 more): segment 3 after 1",
    ),
    (
        "segment-order",
        "segment_ids_BT",
        (0, 0),
        2,
        "row 0, column 0 (and 1 more): segment 2 after 0",
    ),
    ("segment-order", "segment_ids_BT", (0, 5), -1, "row 0, column 5: segment -1 after 2"),
    ("positions-not-counted", "positions_BT", (0, 3), 3, "position 3, the sample is at 0"),
    ("positions-not-counted", "positions_BT", (1, 5), 1, "position 1, the sample is at 0"),
    ("positions-past-row", "positions_BT", (1, 3), 6, "position 6 in a row of 6 tokens"),
    ("positions-past-row", "positions_BT", (1, 3), -1, "row 1, column 3: position -1"),
    ("labels-not-padded", "targets_BT", (1, 4), 0, "row 1, column 4: label 0 at padding"),
    ("labels-not-shifted", "targets_BT", (0, 2), 8, "row 0, column 2: label 8 at the last token"),
    (
        "outside-vocabulary",
        "input_ids_BT",
        (1, 0),
        10,
        "row 1, column 0: id 10, vocabulary 0 to 9",
    ),
    ("outside-vocabulary", "input_ids_BT", (1, 0), -100, "id -100"),
    ("outside-vocabulary", "targets_BT", (1, 0), 10, "row 1, column 0: label 10"),
    ("outside-vocabulary", "targets_BT", (1, 0), -1, "label -1"),
    ("label-count", "targets_BT", (1, 0), -100, "label_tokens is 6, but 5 labels"),
]


@pytest.mark.parametrize(("name", "array", "place", "value", "words"), IN_PACKED)
def test_one_wrong_value_in_a_packed_batch_is_named(name, array, place, value, words):
    found = check_batch(set_at(packed_batch(), array, place, value), PACKED, 6)
    [mismatch] = [one for one in found if one.name == name]
    assert words in mismatch.what
    assert mismatch.fix


@pytest.mark.parametrize("config", [PADDED, OWN_CELL])
def test_labels_that_are_not_padded_are_named(config):
    """Labels padded with 0, as ids often are: 1 in the first row, 4 and 6 in the others."""
    batch = padded_batch(config)
    targets = np.where(batch.targets_BT == -100, 0, batch.targets_BT)
    # The last tokens of the rows have no target whatever the padding.
    targets[0, 4] = targets[1, 1] = -100
    [labels, count] = check_batch(dataclasses.replace(batch, targets_BT=targets), config, 6)
    assert labels.name == "labels-not-padded"
    assert labels.what == "row 0, column 5 (and 10 more): label 0 at padding"
    assert count.name == "label-count"


def test_labels_are_counted_where_padding_is_not_certain():
    """The second row ends in a token of the padding's id."""
    planned = PlannedBatch(
        row_indices=np.arange(2), rows_per_slot=np.array([1, 1]), padded_length=4
    )
    batch = pad_batch([row(5), row(1, PAD)], planned, PADDED)
    assert check_batch(batch, PADDED, 4) == []
    wrong = dataclasses.replace(batch, targets_BT=np.zeros((2, 4), np.int32))
    found = check_batch(wrong, PADDED, 4)
    assert found[0].name == "labels-not-padded"
    assert found[0].what == "8 labels are trained on, but the rows have 3 tokens"
    assert found[1].name == "labels-not-shifted"


def test_arrays_of_other_shapes_are_named():
    batch = padded_batch(OWN_CELL)
    short = Packing(
        segment_ids_BT=batch.packing.segment_ids_BT[:, :-1],
        positions_BT=batch.packing.positions_BT,
    )
    [found] = check_batch(dataclasses.replace(batch, packing=short), OWN_CELL, 6)
    assert (found.name, found.what) == (
        "mask-length",
        "segment_ids (the mask) are [3, 5], input_ids [3, 6]",
    )
    short = dataclasses.replace(batch, targets_BT=batch.targets_BT[:, :4])
    [found] = check_batch(short, OWN_CELL, 6)
    assert (found.name, found.what) == ("labels-length", "labels are [3, 4], input_ids [3, 6]")


def test_positions_past_the_table_are_named():
    [found] = check_batch(padded_batch(OWN_CELL), OWN_CELL, 4)
    assert found.name == "positions-past-table"
    assert found.what == "row 0, column 4: position 4, but the table has 4 rows (0 to 3)"
    assert check_batch(padded_batch(OWN_CELL), OWN_CELL, None) == []
    [found] = check_batch(padded_batch(), PADDED, 5)
    assert found.what == "rows have 6 tokens, but the table has 5 rows"


def test_the_table_is_the_configs_or_as_long_as_the_longest_row():
    assert position_limit(PADDED, 48) == 48
    learned = {**SMALL, "model.positions": "learned", "model.max_positions": 64}
    assert position_limit(make_config(learned), 48) == 64
    assert position_limit(OWN_CELL, 48) is None
    own = make_config({**SMALL, "model.factory": "factories:f", "model.max_positions": 32})
    assert position_limit(own, 48) == 32


def test_only_the_first_batch_of_a_shape_is_looked_at():
    first = FirstBatches(PACKED, 6)
    good = packed_batch()
    wrong = set_at(good, "targets_BT", (1, 4), 0)
    with pytest.raises(BadInputError, match=r"B=2 L=6 of data.mindrecord: row 1, column 4"):
        first.check(wrong)
    first.check(good)
    first.check(wrong)


def stored(**changes):
    columns = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1]}
    columns |= {"id": [7], "token_type_ids": [0, 0, 0], **changes}
    return {name: np.array(values, np.int64) for name, values in columns.items()}


STORED = [
    ("column-length", {"attention_mask": [1, 1]}, "attention_mask has 2 values, input_ids has 3"),
    ("column-length", {"token_type_ids": [0]}, "token_type_ids has 1 values"),
    ("labels-length", {"labels": [2, 3]}, "labels is shorter than input_ids"),
    ("outside-vocabulary", {"labels": [1, 2, 10]}, "labels must be at least 0"),
    ("outside-vocabulary", {"input_ids": [1, 2, 10]}, "input_ids must be at least 0"),
    ("mask-values", {"attention_mask": [1, 2, 1]}, "must be 0 or 1 (got 2 at column 1)"),
    ("row-is-padded", {"attention_mask": [1, 1, 0]}, "0 from column 2 on"),
    ("row-is-padded", {"attention_mask": [0, 0, 0]}, "0 from column 0 on"),
    ("positions-past-table", {"position_ids": [0, 1, 4]}, "is 4 at column 2"),
]


@pytest.mark.parametrize(("name", "changes", "words"), STORED)
def test_a_stored_row_whose_columns_do_not_fit_is_named(name, changes, words):
    config = make_config({**SMALL, "model.max_positions": 4})
    [found] = check_row("row 7", stored(**changes), config)
    assert found.name == name
    assert words in found.what
    assert found.what.startswith("row 7: ")


def test_a_sound_stored_row_passes():
    assert check_row("row 7", stored(), PADDED) == []
    alone = {"input_ids": np.array([1, 2], np.int32)}
    assert check_row("row 7", alone, make_config({**SMALL, "data.label_column": None})) == []


def test_ids_and_labels_are_judged_as_the_loader_judges_them():
    columns = stored(labels=[2, 3])
    arrays = (columns["input_ids"], columns["labels"])
    with pytest.raises(BadInputError) as raised:
        check_ids_and_labels("row 7", ["input_ids", "labels"], arrays, 10)
    [found] = check_row("row 7", columns, PADDED)
    assert (found.what, found.fix) == (raised.value.problem, raised.value.fix)


@pytest.mark.parametrize("config", [PADDED, PACKED])
def test_a_look_at_4096_tokens_takes_no_time(config):
    batch = Batch.full((8, 512), config)
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        assert check_batch(batch, config, 512) == []
        seconds.append(time.perf_counter() - started)
    # 0.1 to 0.2 ms alone; the best of 20, since others may work on it.
    assert min(seconds) < 0.002

"""Whether the arrays of a batch, or the columns of a row, fit together; NumPy alone.

The rules are those that `loader.pad_batch` keeps; whatever else makes batches, and whatever is
stored, is held to them before a graph of that shape runs. What a rule sees are two of the three
usual ways in which variable lengths break: mask, labels and ids are not made together, or
positions lie past their table. A batch is looked at once a shape: 0.1 ms for 4096 tokens, with
segment ids and positions 0.2 ms (one core of a server CPU).

Shapes: B rows, T padded tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.batching.grouping import Shape
from tuner.config.schema import DataConfig, TrainConfig
from tuner.data.content import IGNORED_LABEL, VOCABULARY_FIX
from tuner.data.content import check_row as check_ids_and_labels
from tuner.errors import BadInputError
from tuner.train.loader import Batch

BoolArray = NDArray[np.bool_]

TOGETHER = "make ids, labels, mask and positions in one place, and pad them together"
TABLE = "lower data.max_length, enlarge the table (model.max_positions), or use rotary positions"
PER_TOKEN = re.compile(r"(^|_)(mask|ids|labels)$")
"""Columns that hold one value a token, by their usual names: attention_mask, token_type_ids."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Two things that do not fit together.

    Attributes:
        name: Stable, for machines: lower case with hyphens, for example `labels-not-padded`.
        what: What was found in one line: row, column, value.
        fix: What to do about it.
    """

    name: str
    what: str
    fix: str


def check_batch(batch: Batch, config: TrainConfig, max_positions: int | None) -> list[Mismatch]:
    """Look for what breaks a step, or makes it learn from padding.

    Args:
        batch: As a step takes it.
        config: Pad id, vocabulary.
        max_positions: Rows of the model's position table, as `position_limit` gives it; None: not
            known, or there is none.

    Returns:
        One for every rule that is broken, with the first place; arrays of different shapes are
        not looked into.
    """
    found = _shapes(batch)
    if found:
        return found
    found = [*_vocabulary(batch, config.model.vocab_size), *_labels(batch, config.data.pad_id)]
    if batch.packing is None:
        return [*found, *_row_length(batch.shape[1], max_positions)]
    segment_ids, positions = batch.packing.segment_ids_BT, batch.packing.positions_BT
    return [
        *found,
        *_segments(batch, segment_ids, config.data.pad_id),
        *_positions(segment_ids, positions, max_positions),
    ]


def position_limit(config: TrainConfig, longest: int) -> int | None:
    """Rows of the position table that a config's model has; None: a factory does not say.

    Args:
        config: The model section.
        longest: Tokens of the longest padded row, for which the model is built.
    """
    if config.model.factory is not None or config.model.positions == "learned":
        own = None if config.model.factory is not None else longest
        return config.model.max_positions or own
    return longest


class FirstBatches:
    """Refuses the first batch of a shape if it does not fit together; later ones pass."""

    def __init__(self, config: TrainConfig, longest: int) -> None:
        """Look at nothing yet.

        Args:
            config: As `check_batch` takes it.
            longest: Tokens of the longest padded row.
        """
        self._config = config
        self._max_positions = position_limit(config, longest)
        self._seen: set[Shape] = set()

    def check(self, batch: Batch) -> None:
        """Look at a batch of a new shape.

        Raises:
            BadInputError: naming shape, row, column and value.
        """
        shape = batch.shape
        if shape in self._seen:
            return
        found = check_batch(batch, self._config, self._max_positions)
        if found:
            problem = "; ".join(mismatch.what for mismatch in found)
            raise BadInputError(
                f"batch of B={shape[0]} L={shape[1]} of {self._config.data.path}: {problem}",
                fix=found[0].fix,
            )
        self._seen.add(shape)


def check_row(
    where: str, columns: Mapping[str, NDArray[Any]], config: TrainConfig
) -> list[Mismatch]:
    """Look at a row as it is stored: not padded, one value a token in every column.

    Ids and labels are judged by `tuner.data.content.check_row`, which every row of a run passes;
    mask, types and positions are not read by a training and seen here only.

    Args:
        where: Names the row, for example `row 7`; stands before all that is found.
        columns: Name -> [length], of one row, the input column among them; columns that are not
            named like those that hold a value a token are left out of account.
        config: Columns, vocabulary, max_positions.
    """
    data = config.data
    length = columns[data.input_column].size
    found = []
    for name, values in columns.items():
        if name in (data.input_column, data.label_column) or not PER_TOKEN.search(name):
            continue
        if values.size != length:
            what = f"{where}: {name} has {values.size} values, {data.input_column} has {length}"
            found.append(Mismatch(name="column-length", what=what, fix=TOGETHER))
        elif name.endswith("mask"):
            found += _stored_mask(where, name, values)
        elif name.startswith("position"):
            found += _stored_positions(where, name, values, config.model.max_positions)
    return found + _ids_and_labels(where, columns, data, config.model.vocab_size)


def _ids_and_labels(
    where: str, columns: Mapping[str, NDArray[Any]], data: DataConfig, vocab_size: int
) -> list[Mismatch]:
    names = [data.input_column]
    if data.label_column is not None and data.label_column in columns:
        names.append(data.label_column)
    arrays = [columns[name] for name in names]
    try:
        check_ids_and_labels(where, names, arrays, vocab_size)
    except BadInputError as error:
        name = "outside-vocabulary" if error.fix == VOCABULARY_FIX else "labels-length"
        return [Mismatch(name=name, what=error.problem, fix=error.fix)]
    return []


def _stored_mask(where: str, name: str, values: NDArray[Any]) -> list[Mismatch]:
    is_other = (values != 0) & (values != 1)
    if is_other.any():
        column = int(is_other.argmax())
        what = f"{where}: {name} must be 0 or 1 (got {values[column]} at column {column})"
        return [Mismatch(name="mask-values", what=what, fix="write 1 for tokens, 0 for none")]
    if name == "attention_mask" and values.size and not values[-1]:
        end = int(np.flatnonzero(values)[-1]) + 1 if values.any() else 0
        what = f"{where}: {name} is 0 from column {end} on: the row is stored padded"
        fix = "store rows without padding; they are padded when they are batched"
        return [Mismatch(name="row-is-padded", what=what, fix=fix)]
    return []


def _stored_positions(
    where: str, name: str, values: NDArray[Any], max_positions: int | None
) -> list[Mismatch]:
    if max_positions is None or not values.size or values.max() < max_positions:
        return []
    column = int(values.argmax())
    what = f"{where}: {name} is {values[column]} at column {column}, model.max_positions "
    what += f"{max_positions}"
    return [Mismatch(name="positions-past-table", what=what, fix=TABLE)]


def _shapes(batch: Batch) -> list[Mismatch]:
    own = batch.input_ids_BT.shape
    names = ("input_ids", "labels", "segment_ids (the mask)", "position_ids")
    stable = ("", "labels-length", "mask-length", "positions-length")
    return [
        Mismatch(
            name=stable[index],
            what=f"{names[index]} are {list(array.shape)}, input_ids {list(own)}",
            fix=TOGETHER,
        )
        for index, array in enumerate(batch.arrays)
        if array.shape != own
    ]


def _vocabulary(batch: Batch, vocab_size: int) -> list[Mismatch]:
    found = []
    for name, values, lowest in (
        ("id", batch.input_ids_BT, 0),
        ("label", batch.targets_BT, IGNORED_LABEL),
    ):
        is_outside = (values < 0) & (values != lowest) | (values >= vocab_size)
        if is_outside.any():
            what = f"{_place(is_outside)}: {name} {_value(values, is_outside)}, vocabulary "
            what += f"0 to {vocab_size - 1}"
            found.append(Mismatch(name="outside-vocabulary", what=what, fix=VOCABULARY_FIX))
    return found


def _labels(batch: Batch, pad_id: int) -> list[Mismatch]:
    """Labels must be ignored at padding and at the last token of every sample."""
    targets, found = batch.targets_BT, []
    is_trained = targets != IGNORED_LABEL
    is_padding = _padding(batch, pad_id)
    wrong = is_trained & is_padding
    num_labels, real = int(is_trained.sum()), batch.real_tokens
    if wrong.any() or num_labels > real:
        where = f"{_place(wrong)}: label {_value(targets, wrong)} at padding"
        count = f"{num_labels} labels are trained on, but the rows have {real} tokens"
        found.append(
            Mismatch(
                name="labels-not-padded",
                what=where if wrong.any() else count,
                fix=f"pad labels as the ids are padded, with {IGNORED_LABEL}",
            )
        )
    wrong = is_trained & ~is_padding & _ends(batch)
    if wrong.any():
        what = f"{_place(wrong)}: label {_value(targets, wrong)} at the last token of a sample"
        fix = "shift labels within every sample: the target of a token is the label of the next"
        found.append(Mismatch(name="labels-not-shifted", what=what, fix=fix))
    if num_labels != batch.label_tokens:
        what = f"label_tokens is {batch.label_tokens}, but {num_labels} labels are trained on"
        fix = "count them in the padded batch: the loss is divided by them"
        found.append(Mismatch(name="label-count", what=what, fix=fix))
    return found


def _padding(batch: Batch, pad_id: int) -> BoolArray:
    """Where padding is, as far as that is certain."""
    if batch.packing is not None:
        return np.asarray(batch.packing.segment_ids_BT == 0)
    is_pad = batch.input_ids_BT == pad_id
    trailing = np.logical_and.accumulate(is_pad[:, ::-1], axis=1)[:, ::-1]
    # A row may end in tokens of that id, for example where it is the end of a text as well.
    is_certain = int(trailing.sum()) == batch.padded_tokens - batch.real_tokens
    return trailing if is_certain else np.zeros_like(is_pad)


def _ends(batch: Batch) -> BoolArray:
    """The last column, and the last token of every packed sample."""
    ends = np.zeros(batch.shape, dtype=bool)
    ends[:, -1] = True
    if batch.packing is not None:
        segment_ids = batch.packing.segment_ids_BT
        ends[:, :-1] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return ends


def _segments(batch: Batch, segment_ids: NDArray[np.int32], pad_id: int) -> list[Mismatch]:
    found = []
    is_token = batch.input_ids_BT != pad_id
    hidden = is_token & (segment_ids == 0)
    masked_in = int((segment_ids != 0).sum())
    if hidden.any():
        what = (
            f"{_place(hidden)}: the mask is 0, but the id is {_value(batch.input_ids_BT, hidden)}"
        )
        found.append(Mismatch(name="mask-and-ids", what=what, fix=TOGETHER))
    elif masked_in != batch.real_tokens:
        shown = (segment_ids != 0) & ~is_token
        at = f"; {_place(shown)} is padding under a mask of 1" if shown.any() else ""
        what = f"the mask shows {masked_in} tokens, the rows have {batch.real_tokens}{at}"
        found.append(Mismatch(name="mask-and-ids", what=what, fix=TOGETHER))
    before = np.pad(segment_ids, ((0, 0), (1, 0)))[:, :-1]
    # Past column 0 a segment follows a segment: nothing comes after padding.
    may_begin = before > 0
    may_begin[:, 0] = True
    step = segment_ids - before
    wrong = (segment_ids != 0) & (step != 0) & ~(may_begin & (step == 1))
    if wrong.any():
        row, column = _first(wrong)
        what = f"{_place(wrong)}: segment {segment_ids[row, column]} after {before[row, column]}"
        fix = "number the samples of a row 1, 2, ... and put 0 at its end only"
        found.append(Mismatch(name="segment-order", what=what, fix=fix))
    return found


def _positions(
    segment_ids: NDArray[np.int32], positions: NDArray[np.int32], max_positions: int | None
) -> list[Mismatch]:
    length = positions.shape[1]
    past = (positions < 0) | (positions >= length)
    if past.any():
        what = f"{_place(past)}: position {_value(positions, past)} in a row of {length} tokens"
        return [Mismatch(name="positions-past-row", what=what, fix=TOGETHER)]
    found = []
    if max_positions is not None and (past := positions >= max_positions).any():
        what = f"{_place(past)}: position {_value(positions, past)}, but the table has "
        what += f"{max_positions} rows (0 to {max_positions - 1})"
        found.append(Mismatch(name="positions-past-table", what=what, fix=TABLE))
    columns = np.arange(length, dtype=np.int32)
    is_start = np.ones(positions.shape, dtype=bool)
    is_start[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = np.maximum.accumulate(np.where(is_start, columns, 0), axis=1)
    expected = np.where(segment_ids == 0, 0, columns - starts)
    wrong = positions != expected
    if wrong.any():
        what = f"{_place(wrong)}: position {_value(positions, wrong)}, the sample is at "
        what += f"{_value(expected, wrong)}"
        fix = "count positions from 0 in every sample, and put 0 at padding"
        found.append(Mismatch(name="positions-not-counted", what=what, fix=fix))
    return found


def _row_length(length: int, max_positions: int | None) -> list[Mismatch]:
    if max_positions is None or length <= max_positions:
        return []
    what = f"rows have {length} tokens, but the table has {max_positions} rows"
    return [Mismatch(name="positions-past-table", what=what, fix=TABLE)]


def _first(is_wrong: BoolArray) -> tuple[int, int]:
    row, column = divmod(int(is_wrong.argmax()), is_wrong.shape[1])
    return row, column


def _place(is_wrong: BoolArray) -> str:
    """The first place, and how many more there are."""
    row, column = _first(is_wrong)
    more = int(is_wrong.sum()) - 1
    return f"row {row}, column {column}" + (f" (and {more} more)" if more else "")


def _value(values: NDArray[Any], is_wrong: BoolArray) -> int:
    return int(values[_first(is_wrong)])

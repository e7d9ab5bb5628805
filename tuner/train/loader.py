"""Rows of the plan as padded arrays, read ahead of the device by one thread.

Labels are shifted here, on the host: the target of a position is the label of the next one, so the
graph needs no slice. Padding and filler rows get the pad id and ignored targets.

Shapes: B rows, T padded tokens.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.batching.grouping import FILLER, Shape
from tuner.batching.plan import PlannedBatch
from tuner.config.schema import DataConfig
from tuner.data.content import IGNORED_LABEL, check_row
from tuner.data.mindrecord import MindRecordSet, read_rows

READ_AHEAD_BATCHES = 4

Row = tuple[NDArray[Any], ...]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One padded batch.

    Attributes:
        input_ids_BT: int32 [B, T].
        targets_BT: int32 [B, T]; the label of the next position, or -100.
        real_tokens: Tokens of rows, after truncation.
        label_tokens: Targets that count.
    """

    input_ids_BT: NDArray[np.int32]
    targets_BT: NDArray[np.int32]
    real_tokens: int
    label_tokens: int

    @property
    def shape(self) -> Shape:
        """(B, L)."""
        size, length = self.input_ids_BT.shape
        return size, length

    @property
    def padded_tokens(self) -> int:
        """B * T."""
        return self.input_ids_BT.size


def columns_to_read(data: DataConfig) -> list[str]:
    """The columns that training needs: ids, and labels where they are not the ids."""
    return (
        [data.input_column]
        if data.label_column is None
        else [
            data.input_column,
            data.label_column,
        ]
    )


def pad_batch(
    rows: Sequence[Row], planned: PlannedBatch, data: DataConfig, vocab_size: int
) -> Batch:
    """Pad rows to the planned shape.

    Args:
        rows: (ids,) or (ids, labels) of each row that is not a filler, in the plan's order.
        planned: The shape and which slots are fillers.
        data: Pad id and column names.
        vocab_size: Ids are in [0, vocab_size).

    Raises:
        BadInputError: labels and ids of a row differ in length, or one is outside the vocabulary.
    """
    input_ids = np.full(planned.shape, data.pad_id, dtype=np.int32)
    targets = np.full(planned.shape, IGNORED_LABEL, dtype=np.int32)
    real_tokens = 0
    slots = np.flatnonzero(planned.row_indices != FILLER)
    for slot, row in zip(slots.tolist(), rows, strict=True):
        row_index = int(planned.row_indices[slot])
        ids, labels = row[0], row[-1]
        check_row(f"{data.path}: row {row_index}", columns_to_read(data), row, vocab_size)
        length = min(len(ids), planned.padded_length)
        input_ids[slot, :length] = ids[:length]
        targets[slot, : length - 1] = labels[1:length]
        real_tokens += length
    return Batch(
        input_ids_BT=input_ids,
        targets_BT=targets,
        real_tokens=real_tokens,
        label_tokens=int((targets != IGNORED_LABEL).sum()),
    )


def read_batches(
    dataset: MindRecordSet, steps: Sequence[PlannedBatch], data: DataConfig, vocab_size: int
) -> Iterator[Batch]:
    """Padded batches of the given steps, in order; every row is read once.

    Raises:
        BadInputError: as `pad_batch`, or a file that cannot be read.
    """
    if not steps:
        return
    wanted = np.concatenate([step.row_indices for step in steps])
    rows = read_rows(dataset, columns_to_read(data), wanted[wanted != FILLER])
    for planned in steps:
        num_rows = int((planned.row_indices != FILLER).sum())
        batch_rows = [next(rows) for _ in range(num_rows)]
        yield pad_batch(batch_rows, planned, data, vocab_size)


@contextmanager
def read_ahead(batches: Iterator[Batch]) -> Iterator[Iterator[Batch]]:
    """Run an iterator of batches in a thread that keeps a few of them ready.

    An exception of the thread is raised where its batch would have come. Leaving the block ends
    the thread, however many batches are left.
    """
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(READ_AHEAD_BATCHES)
    stop = threading.Event()

    def offer(item: Batch | BaseException | None) -> None:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def read() -> None:
        try:
            for batch in batches:
                offer(batch)
                if stop.is_set():
                    return
            offer(None)
        except BaseException as error:
            offer(error)

    thread = threading.Thread(target=read, name="read-ahead", daemon=True)
    thread.start()
    try:
        yield _take(ready)
    finally:
        stop.set()
        thread.join()


def _take(ready: queue.Queue[Batch | BaseException | None]) -> Iterator[Batch]:
    while True:
        item = ready.get()
        if item is None:
            return
        if isinstance(item, BaseException):
            raise item
        yield item

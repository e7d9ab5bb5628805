"""Rows of the plan as padded arrays, read ahead of the device by one thread.

Labels are shifted here, on the host: the target of a position is the label of the next one, so the
graph needs no slice. Padding and filler rows get the pad id and ignored targets. The last token of
a sample has no target, so in packed rows nothing is learned across samples.

Shapes: B rows, T padded tokens.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.batching.grouping import Shape
from tuner.batching.plan import PlannedBatch, length_limit
from tuner.config.schema import DataConfig, TrainConfig
from tuner.data.content import IGNORED_LABEL, check_content, check_row
from tuner.data.header_lengths import NoticeSink
from tuner.data.lengths import print_notice
from tuner.data.mindrecord import MindRecordSet
from tuner.data.packed_integers import runs
from tuner.data.stored_rows import read_groups
from tuner.errors import BadInputError

DEFAULT_DEPTH = 4
CHECKED_ROWS = 2_000
"""Rows that are looked at before a run starts."""

Row = tuple[NDArray[Any], ...]


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Which tokens of a row belong together.

    Attributes:
        segment_ids_BT: int32 [B, T]; 1, 2, ... for the samples of a row, 0 for padding.
        positions_BT: int32 [B, T]; from 0 in every sample, 0 for padding.
    """

    segment_ids_BT: NDArray[np.int32]
    positions_BT: NDArray[np.int32]

    @classmethod
    def empty(cls, shape: Shape) -> Packing:
        """Of rows that are all padding."""
        return cls(
            segment_ids_BT=np.zeros(shape, dtype=np.int32),
            positions_BT=np.zeros(shape, dtype=np.int32),
        )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One padded batch.

    Attributes:
        input_ids_BT: int32 [B, T].
        targets_BT: int32 [B, T]; the label of the next position, or -100.
        packing: Samples of rows, for a model that is told them; else None.
        real_tokens: Tokens of rows, after truncation.
        label_tokens: Targets that count.
    """

    input_ids_BT: NDArray[np.int32]
    targets_BT: NDArray[np.int32]
    packing: Packing | None = None
    real_tokens: int
    label_tokens: int

    @classmethod
    def empty(cls, shape: Shape, config: TrainConfig) -> Batch:
        """A batch of fillers; it adds exactly 0 to loss and gradient."""
        return cls(
            input_ids_BT=np.full(shape, config.data.pad_id, dtype=np.int32),
            targets_BT=np.full(shape, IGNORED_LABEL, dtype=np.int32),
            packing=Packing.empty(shape) if takes_packing(config) else None,
            real_tokens=0,
            label_tokens=0,
        )

    @classmethod
    def full(cls, shape: Shape, config: TrainConfig) -> Batch:
        """A batch of full rows of random ids, always the same ones; every label counts."""
        rng = np.random.default_rng(shape)
        ids_BT = rng.integers(0, config.model.vocab_size, shape, dtype=np.int32)
        targets_BT = np.roll(ids_BT, -1, axis=1)
        targets_BT[:, -1] = IGNORED_LABEL
        packing = None
        if takes_packing(config):
            places_BT = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
            packing = Packing(
                segment_ids_BT=np.ones(shape, dtype=np.int32), positions_BT=places_BT.copy()
            )
        return cls(
            input_ids_BT=ids_BT,
            targets_BT=targets_BT,
            packing=packing,
            real_tokens=ids_BT.size,
            label_tokens=int((targets_BT != IGNORED_LABEL).sum()),
        )

    @property
    def shape(self) -> Shape:
        """(B, L)."""
        size, length = self.input_ids_BT.shape
        return size, length

    @property
    def padded_tokens(self) -> int:
        """B * T."""
        return self.input_ids_BT.size

    @property
    def arrays(self) -> tuple[NDArray[np.int32], ...]:
        """What a step takes: ids and targets; with packing segment ids and positions too."""
        arrays = (self.input_ids_BT, self.targets_BT)
        if self.packing is None:
            return arrays
        return (*arrays, self.packing.segment_ids_BT, self.packing.positions_BT)


def takes_packing(config: TrainConfig) -> bool:
    """Whether the model takes segment ids and positions.

    The built-in decoder needs them for packed rows only: without them it is faster. A factory's
    Cell gets them always, of padded rows too, so that it has one signature.
    """
    return config.batching.strategy == "packed" or config.model.factory is not None


def columns_to_read(data: DataConfig) -> list[str]:
    """The columns that training needs: ids, and labels where they are not the ids."""
    columns = [data.input_column, data.label_column]
    return [column for column in columns if column is not None]


def check_some_rows(dataset: MindRecordSet, config: TrainConfig) -> None:
    """A look at columns and rows before anything is compiled; the loader checks every row later.

    Raises:
        BadInputError: a column is missing, or a row does not fit the config.
    """
    check_content(
        dataset,
        config.data.input_column,
        config.data.label_column,
        config.model.vocab_size,
        limit_rows=CHECKED_ROWS,
    )


def pad_batch(rows: Sequence[Row], planned: PlannedBatch, config: TrainConfig) -> Batch:
    """Put rows into the planned shape.

    Args:
        rows: (ids,) or (ids, labels) of each row, in the plan's order.
        planned: The shape and how many rows each of its slots holds.
        config: Pad id, columns, vocabulary, and whether rows are packed.

    Raises:
        BadInputError: labels and ids of a row differ in length, or one is outside the vocabulary.
    """
    if not rows:
        return Batch.empty(planned.shape, config)
    ids, labels = _checked_columns(rows, planned, config)
    sizes = np.fromiter((len(row[0]) for row in rows), np.int64, len(rows))
    first = np.cumsum(sizes) - sizes
    starts, kept = _places_in_slots(sizes, planned, length_limit(config))
    batch = Batch.empty(planned.shape, config)
    taken, placed = runs(first, kept), runs(starts, kept)
    batch.input_ids_BT.ravel()[placed] = ids[taken]
    # The label of the next position; what the last token of a row got is that of another row.
    targets = batch.targets_BT.ravel()
    targets[placed[:-1]] = labels[taken[1:]]
    targets[(starts + kept - 1)[kept > 0]] = IGNORED_LABEL
    if batch.packing is not None:
        _number_samples(batch.packing, planned, placed, kept)
    return dataclasses.replace(
        batch,
        real_tokens=len(placed),
        label_tokens=int((batch.targets_BT != IGNORED_LABEL).sum()),
    )


def _checked_columns(
    rows: Sequence[Row], planned: PlannedBatch, config: TrainConfig
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Ids and labels of all rows, one row after the other; all rows are looked at at once."""
    columns = columns_to_read(config.data)
    joined = [np.concatenate(column) for column in zip(*rows, strict=True)]
    is_paired = all(len(row[0]) == len(row[-1]) for row in rows)
    with suppress(BadInputError):
        check_row(config.data.path, columns, joined, config.model.vocab_size)
        if is_paired:
            return joined[0], joined[-1]
    # Something is wrong: which row it is.
    for row, row_index in zip(rows, planned.row_indices.tolist(), strict=True):
        check_row(f"{config.data.path}: row {row_index}", columns, row, config.model.vocab_size)
    raise AssertionError("rows that are good one by one are good together")


def _places_in_slots(
    sizes: NDArray[np.int64], planned: PlannedBatch, limit: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each row starts in the flat batch, and its tokens there.

    Rows are cut as the plan counts them: a slot may be longer than the limit, and hold others
    behind; and to the room there is.
    """
    length = planned.padded_length
    cut = sizes if limit is None else np.minimum(sizes, limit)
    slots = np.repeat(np.arange(len(planned.rows_per_slot)), planned.rows_per_slot)
    before = np.cumsum(cut) - cut
    first_of_slot = np.searchsorted(slots, slots)
    start = np.minimum(before - before[first_of_slot], length)
    return slots * length + start, np.minimum(cut, length - start)


def _number_samples(
    packing: Packing,
    planned: PlannedBatch,
    placed: NDArray[np.integer[Any]],
    kept: NDArray[np.int64],
) -> None:
    ordinals = runs(np.ones(len(planned.rows_per_slot), dtype=np.int64), planned.rows_per_slot)
    packing.segment_ids_BT.ravel()[placed] = np.repeat(ordinals, kept)
    packing.positions_BT.ravel()[placed] = runs(np.zeros(len(kept), dtype=np.int64), kept)


def read_batches(
    dataset: MindRecordSet,
    steps: Iterable[PlannedBatch],
    config: TrainConfig,
    notice: NoticeSink = print_notice,
) -> Iterator[Batch]:
    """Padded batches of the given steps, in order; every row is read once.

    Steps are asked for some batches ahead, so that memory does not grow with their number.

    Args:
        dataset: The rows.
        steps: Of a plan.
        config: Columns, pad id, and threads that read.
        notice: Told when MindDataset has to read the rows, which takes longer.

    Raises:
        BadInputError: as `pad_batch`, or a file that cannot be read.
    """
    pending: deque[PlannedBatch] = deque()

    def rows_of_steps() -> Iterator[NDArray[np.int64]]:
        for planned in steps:
            pending.append(planned)
            yield planned.row_indices

    groups = read_groups(
        dataset,
        columns_to_read(config.data),
        rows_of_steps(),
        workers=config.data.read_workers,
        notice=notice,
    )
    # An error keeps this frame alive, and without closing the reader's files and threads.
    with closing(groups):
        for rows in groups:
            yield pad_batch(rows, pending.popleft(), config)


@contextmanager
def read_ahead(batches: Iterator[Batch], depth: int = DEFAULT_DEPTH) -> Iterator[Iterator[Batch]]:
    """Run an iterator of batches in a thread that keeps a few of them ready.

    Args:
        batches: What the thread runs.
        depth: Batches that are kept ready, >= 1.

    An exception of the thread is raised where its batch would have come. Leaving the block ends
    the thread, however many batches are left.
    """
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(depth)
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
        finally:
            # Files and threads behind the iterator are let go of here, not when it is collected.
            if isinstance(batches, Generator):
                batches.close()

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

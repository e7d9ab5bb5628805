"""`packed`: several samples in one row; rows of one length, or of a few.

Best-fit decreasing: samples from the longest to the shortest, each into the row with the least
room that still holds it, else into a new row. With several row lengths a new row has the first of
them that holds the sample: long rows are opened by long samples alone, what is left in them is
filled with shorter ones, and the short samples that remain share short rows, whose attention costs
little. Samples of one length are placed together: the row with the least room r takes r // length
of them one after the other (its room shrinks, so it stays the tightest), and so does every other
row of the same room. That gives the rows of the sample by sample rule, ties aside, with one
O(log L) search for each run of rows that is filled: some ten thousand for a million samples of
8192 lengths, never more than the samples.

Johnson (1973) bounds best-fit decreasing into one length by 11/9 of the optimum plus a constant;
on real lengths it fills 99.1 to 99.97 % (results/benchmarks/plans.md).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuner.batching.align import align_length
from tuner.batching.grouping import Grouping, IntArray, bucket_batch_size, sizes_of_batches
from tuner.batching.order import shuffle_in_blocks
from tuner.config.schema import BatchingConfig

Fill = tuple[int, int, int]
"""First row, number of neighbouring rows, samples of one length placed in each of them."""


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Rows that samples are packed into; C row lengths.

    Attributes:
        fills: In the order of the samples, from the longest to the shortest.
        opened: (rows, entry of the row lengths) of every run of rows, in the order of their
            numbers.
        tokens: int64 [C]; tokens of the samples in rows of each length.
    """

    fills: list[Fill]
    opened: list[tuple[int, int]]
    tokens: IntArray

    @property
    def num_rows(self) -> IntArray:
        """int64 [C]; rows of each length."""
        counts = np.zeros(len(self.tokens), dtype=np.int64)
        for num_rows, entry in self.opened:
            counts[entry] += num_rows
        return counts

    @property
    def length_of_row(self) -> IntArray:
        """int64 [R]; for each row the entry of the row lengths."""
        runs = np.array(self.opened, dtype=np.int64)
        entries: IntArray = np.repeat(runs[:, 1], runs[:, 0])
        return entries


def packed_lengths(tokens: IntArray, batching: BatchingConfig) -> tuple[int, ...]:
    """Tokens of packed rows, rising: the config's boundaries, or the longest sample aligned.

    Args:
        tokens: int64 [M], lengths in tokens, >= 1.
        batching: Boundaries and alignment.
    """
    return batching.boundaries or (align_length(int(tokens.max()), batching.align),)


def group_packed(
    tokens: IntArray, batching: BatchingConfig, rng: np.random.Generator, world_size: int
) -> Grouping:
    """Batches of packed rows in random order; the rows of a batch have one length.

    Which lengths share a row is the same in every epoch; which samples of a length, and which rows
    share a batch, is drawn anew.

    Args:
        tokens: int64 [M], lengths in tokens, >= 1, none over the longest packed length.
        batching: Packed lengths and batch size.
        rng: Source of the order.
        world_size: Ranks, >= 1.
    """
    capacities = packed_lengths(tokens, batching)
    shuffled = rng.permutation(len(tokens))
    falling = shuffled[np.argsort(-tokens[shuffled], kind="stable")]
    row_of_sample, packed = pack_falling(tokens[falling], capacities)
    length_of_row = packed.length_of_row
    drawn = rng.permutation(len(length_of_row))
    slot_of_row = np.empty(len(length_of_row), dtype=np.int64)
    by_length = np.lexsort((drawn, length_of_row))
    batch_sizes, padded_lengths = [], []
    num_slots = num_placed = 0
    for entry, num_rows in enumerate(packed.num_rows.tolist()):
        if not num_rows:
            continue
        most = bucket_batch_size(entry, num_rows, capacities[entry], batching, world_size)
        batch_sizes.append(sizes_of_batches(num_rows, most, batching, world_size))
        of_length = by_length[num_placed : num_placed + num_rows]
        slot_of_row[of_length] = num_slots + np.arange(num_rows)
        num_placed += num_rows
        num_slots += int(batch_sizes[-1].sum()) * world_size
        padded_lengths.append(np.full(len(batch_sizes[-1]), capacities[entry]))
    slot_of_sample = slot_of_row[row_of_sample]
    sizes, lengths = np.concatenate(batch_sizes), np.concatenate(padded_lengths)
    return Grouping(
        rows=falling[np.argsort(slot_of_sample, kind="stable")],
        rows_per_slot=np.bincount(slot_of_sample, minlength=num_slots),
        batch_sizes=sizes,
        padded_lengths=lengths,
        # Rows of one length are in random places already.
        order=np.arange(len(sizes)) if len(batch_sizes) == 1 else shuffle_in_blocks(lengths, rng),
        shapes=frozenset(zip(sizes.tolist(), lengths.tolist(), strict=True)),
    )


def pack_falling(tokens: IntArray, capacities: Sequence[int]) -> tuple[IntArray, PackedRows]:
    """Which packed row every sample goes to.

    Args:
        tokens: int64 [M], lengths from the longest to the shortest, in [1, last capacity].
        capacities: Tokens of packed rows, rising.

    Returns:
        int64 [M], rows numbered from 0 without a gap; and the rows.
    """
    falling, counts = np.unique(-tokens, return_counts=True)
    packed = pack_counts(-falling[::-1], counts[::-1], capacities)
    first, num_rows, samples_per_row = np.array(packed.fills, dtype=np.int64).T
    offset = first - (np.cumsum(num_rows) - num_rows)
    rows = np.arange(num_rows.sum()) + np.repeat(offset, num_rows)
    row_of_sample: IntArray = np.repeat(rows, np.repeat(samples_per_row, num_rows))
    return row_of_sample, packed


def pack_counts(lengths: IntArray, counts: IntArray, capacities: Sequence[int]) -> PackedRows:
    """Rows that samples of these lengths are packed into.

    Args:
        lengths: int64 [U], tokens, strictly rising, in [1, last capacity].
        counts: int64 [U], samples of each length, > 0.
        capacities: Tokens of packed rows, rising.
    """
    rows = _OpenRows(capacities)
    for length, count in zip(lengths[::-1].tolist(), counts[::-1].tolist(), strict=True):
        rows.place(length, count)
    return PackedRows(fills=rows.fills, opened=rows.opened, tokens=np.array(rows.tokens))


class _OpenRows:
    """Runs of rows by the room that is left in them."""

    def __init__(self, capacities: Sequence[int]) -> None:
        self.fills: list[Fill] = []
        self.opened: list[tuple[int, int]] = []
        self.tokens = [0] * len(capacities)
        self._capacities = list(capacities)
        self._num_rows = 0
        self._rooms: list[int] = []
        """Rooms of at least one row, rising."""
        self._runs_of_room: dict[int, list[tuple[int, int, int]]] = {}
        """Room -> (first row, rows, entry of the capacities) of runs of neighbouring rows."""

    def place(self, length: int, count: int) -> None:
        """Place `count` samples of one length."""
        while count:
            index = bisect_left(self._rooms, length)
            if index < len(self._rooms):
                room = self._rooms[index]
                run = self._take(index)
            else:
                entry = bisect_left(self._capacities, length)
                room = self._capacities[entry]
                run = (self._num_rows, -(-count // (room // length)), entry)
                self._num_rows += run[1]
                self.opened.append((run[1], entry))
            count -= self._fill(run, room, length, count)

    def _fill(self, run: tuple[int, int, int], room: int, length: int, count: int) -> int:
        """Fill rows of the same room one after the other; returns the samples placed."""
        first, num_rows, entry = run
        each = room // length
        placed = min(count, each * num_rows)
        full, rest = divmod(placed, each)
        self._keep((first, full, entry), room - each * length, each)
        if rest:
            self._keep((first + full, 1, entry), room - rest * length, rest)
            full += 1
        self._keep((first + full, num_rows - full, entry), room, 0)
        self.tokens[entry] += placed * length
        return placed

    def _take(self, index: int) -> tuple[int, int, int]:
        room = self._rooms[index]
        runs = self._runs_of_room[room]
        run = runs.pop()
        if not runs:
            del self._runs_of_room[room], self._rooms[index]
        return run

    def _keep(self, run: tuple[int, int, int], room: int, samples: int) -> None:
        first, num_rows, _ = run
        if not num_rows:
            return
        if samples:
            self.fills.append((first, num_rows, samples))
        if room:
            if room not in self._runs_of_room:
                insort(self._rooms, room)
                self._runs_of_room[room] = []
            self._runs_of_room[room].append(run)

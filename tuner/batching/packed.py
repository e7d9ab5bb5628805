"""`packed`: several samples in one row of a fixed number of tokens; one shape.

Best-fit decreasing: samples from the longest to the shortest, each into the row with the least
room that still holds it, else into a new row. Samples of one length are placed together: the row
with the least room r takes r // length of them one after the other (its room shrinks, so it stays
the tightest), and so does every other row of the same room. That gives the rows of the sample by
sample rule, ties aside, with one O(log L) search for each run of rows that is filled: some ten
thousand for a million samples of 8192 lengths, never more than the samples.

Johnson (1973) bounds best-fit decreasing by 11/9 of the optimum plus a constant; on real lengths
it fills 99.1 to 99.97 % (results/benchmarks/plans.md).
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from tuner.batching.align import align_length
from tuner.batching.grouping import Grouping, IntArray, spread_rows
from tuner.config.schema import BatchingConfig

Fill = tuple[int, int, int]
"""First row, number of neighbouring rows, samples of one length placed in each of them."""


def packed_length(tokens: IntArray, batching: BatchingConfig) -> int:
    """Tokens of a packed row: the config's single boundary, or the longest sample aligned.

    Args:
        tokens: int64 [M], lengths in tokens, >= 1.
        batching: Boundary and alignment.
    """
    if batching.boundaries:
        return batching.boundaries[0]
    return align_length(int(tokens.max()), batching.align)


def group_packed(
    tokens: IntArray, batching: BatchingConfig, rng: np.random.Generator, world_size: int
) -> Grouping:
    """Batches of packed rows in random order.

    Which lengths share a row is the same in every epoch; which samples of a length, and which rows
    share a batch, is drawn anew.

    Args:
        tokens: int64 [M], lengths in tokens, >= 1, none over the packed length.
        batching: Packed length and batch size.
        rng: Source of the order.
        world_size: Ranks, >= 1.
    """
    length = packed_length(tokens, batching)
    shuffled = rng.permutation(len(tokens))
    falling = shuffled[np.argsort(-tokens[shuffled], kind="stable")]
    row_of_sample = pack_falling(tokens[falling], length)
    num_rows = int(row_of_sample.max()) + 1
    place_of_row = rng.permutation(num_rows)
    place_of_sample = place_of_row[row_of_sample]
    size = spread_rows(num_rows, length, batching, world_size)
    num_steps = -(-num_rows // (size * world_size))
    return Grouping(
        rows=falling[np.argsort(place_of_sample, kind="stable")],
        rows_per_slot=np.bincount(place_of_sample, minlength=num_steps * size * world_size),
        batch_sizes=np.full(num_steps, size),
        padded_lengths=np.full(num_steps, length),
        order=np.arange(num_steps),  # the rows are in random places already
        shapes=frozenset({(size, length)}),
    )


def pack_falling(tokens: IntArray, capacity: int) -> IntArray:
    """Which packed row every sample goes to.

    Args:
        tokens: int64 [M], lengths from the longest to the shortest, in [1, capacity].
        capacity: Tokens of a packed row.

    Returns:
        int64 [M]; rows are numbered from 0 without a gap.
    """
    falling, counts = np.unique(-tokens, return_counts=True)
    fills = np.array(fill_rows(-falling[::-1], counts[::-1], capacity), dtype=np.int64)
    first, num_rows, samples_per_row = fills.T
    offset = first - (np.cumsum(num_rows) - num_rows)
    rows = np.arange(num_rows.sum()) + np.repeat(offset, num_rows)
    row_of_sample: IntArray = np.repeat(rows, np.repeat(samples_per_row, num_rows))
    return row_of_sample


def count_packed_rows(lengths: IntArray, counts: IntArray, capacity: int) -> int:
    """Rows that samples of these lengths are packed into.

    Args:
        lengths: int64 [U], tokens, strictly rising, in [1, capacity].
        counts: int64 [U], samples of each length, > 0.
        capacity: Tokens of a packed row.
    """
    fills = fill_rows(lengths, counts, capacity)
    return max(first + num_rows for first, num_rows, _ in fills)


def fill_rows(lengths: IntArray, counts: IntArray, capacity: int) -> list[Fill]:
    """Best-fit decreasing; arguments as `count_packed_rows`.

    Returns:
        Fills in the order of the samples, from the longest to the shortest.
    """
    rows = _OpenRows(capacity)
    for length, count in zip(lengths[::-1].tolist(), counts[::-1].tolist(), strict=True):
        rows.place(length, count)
    return rows.fills


class _OpenRows:
    """Runs of rows by the room that is left in them."""

    def __init__(self, capacity: int) -> None:
        self.fills: list[Fill] = []
        self._capacity = capacity
        self._num_rows = 0
        self._rooms: list[int] = []
        """Rooms of at least one row, rising."""
        self._runs_of_room: dict[int, list[tuple[int, int]]] = {}
        """Room -> (first row, rows) of runs of neighbouring rows."""

    def place(self, length: int, count: int) -> None:
        """Place `count` samples of one length."""
        while count:
            index = bisect_left(self._rooms, length)
            if index < len(self._rooms):
                room = self._rooms[index]
                first, num_rows = self._take(index)
            else:
                room, first = self._capacity, self._num_rows
                num_rows = -(-count // (room // length))
                self._num_rows += num_rows
            count -= self._fill(first, num_rows, room, length, count)

    def _fill(self, first: int, num_rows: int, room: int, length: int, count: int) -> int:
        """Fill rows of the same room one after the other; returns the samples placed."""
        each = room // length
        placed = min(count, each * num_rows)
        full, rest = divmod(placed, each)
        self._keep(first, full, room - each * length, each)
        if rest:
            self._keep(first + full, 1, room - rest * length, rest)
            full += 1
        self._keep(first + full, num_rows - full, room, 0)
        return placed

    def _take(self, index: int) -> tuple[int, int]:
        room = self._rooms[index]
        runs = self._runs_of_room[room]
        run = runs.pop()
        if not runs:
            del self._runs_of_room[room], self._rooms[index]
        return run

    def _keep(self, first: int, num_rows: int, room: int, samples: int) -> None:
        if not num_rows:
            return
        if samples:
            self.fills.append((first, num_rows, samples))
        if room:
            if room not in self._runs_of_room:
                insort(self._rooms, room)
                self._runs_of_room[room] = []
            self._runs_of_room[room].append((first, num_rows))

"""`packed`: several samples in one row of a fixed number of tokens; one shape.

Best-fit decreasing: samples from the longest to the shortest, each into the row with the least
room that still holds it, else into a new row. Samples of one length are placed together: the row
with the least room r takes r // length of them one after the other (its room shrinks, so it stays
the tightest), and so does every other row of the same room. That gives the rows of the sample by
sample rule, ties aside, in O(U log L) searches and O(n) array work for n samples of U lengths.

Johnson (1973) bounds best-fit decreasing by 11/9 of the optimum plus a constant; on real lengths
it fills over 99.9 % (results/benchmarks/plans.md).
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from tuner.batching.align import align_length
from tuner.batching.grouping import Grouping, IntArray, spread_rows
from tuner.config.schema import BatchingConfig


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
    lengths, counts = np.unique(-tokens, return_counts=True)
    rows = _OpenRows(capacity)
    placed = [
        part
        for length, count in zip((-lengths).tolist(), counts.tolist(), strict=True)
        for part in rows.place(length, count)
    ]
    return np.concatenate(placed)


class _OpenRows:
    """Rows by the room that is left in them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_rows = 0
        self._rooms: list[int] = []
        """Rooms of at least one row, rising."""
        self._rows_of_room: dict[int, list[IntArray]] = {}

    def place(self, length: int, count: int) -> list[IntArray]:
        """Rows of `count` samples of one length, in parts."""
        parts = []
        while count:
            index = bisect_left(self._rooms, length)
            if index < len(self._rooms):
                room = self._rooms.pop(index)
                rows = np.concatenate(self._rows_of_room.pop(room))
            else:
                room = self._capacity
                rows = self._new_rows(-(-count // (room // length)))
            part = self._fill(rows, room, length, count)
            parts.append(part)
            count -= len(part)
        return parts

    def _fill(self, rows: IntArray, room: int, length: int, count: int) -> IntArray:
        """Fill rows of the same room one after the other, as far as the samples go."""
        each = room // length
        full, rest = divmod(min(count, each * len(rows)), each)
        self._keep(rows[:full], room - each * length)
        if rest:
            self._keep(rows[full : full + 1], room - rest * length)
        self._keep(rows[full + (rest > 0) :], room)
        filled: IntArray = np.repeat(rows[: full + 1], each)[: full * each + rest]
        return filled

    def _keep(self, rows: IntArray, room: int) -> None:
        if not room or not len(rows):
            return
        if room not in self._rows_of_room:
            insort(self._rooms, room)
            self._rows_of_room[room] = []
        self._rows_of_room[room].append(rows)

    def _new_rows(self, count: int) -> IntArray:
        first = self._num_rows
        self._num_rows += count
        return np.arange(first, self._num_rows)

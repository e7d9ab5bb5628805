"""The order of batches of one bucket each: shuffled in blocks that have the same mix of lengths.

A plain shuffle leaves runs of like lengths and stretches without the rare ones, and the loss waves
with them. Here the batches of every shape are dealt evenly over blocks of about BLOCK_STEPS steps,
and each block is shuffled: every stretch of the epoch holds each shape in its share, and
neighbours are of independent length (their correlation is about -1 / BLOCK_STEPS).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

BLOCK_STEPS = 64


def shuffle_in_blocks(padded_lengths: IntArray, rng: np.random.Generator) -> IntArray:
    """An order of steps.

    The batches of one length, in random order, are spread over the epoch in equal distances that
    start at a random place; so a block holds its share of them, rounded up or down.

    Args:
        padded_lengths: int64 [S], L of every batch in tokens.
        rng: Source of the order.

    Returns:
        int64 [S], a permutation: entry s is the batch of step s.
    """
    num_steps = len(padded_lengths)
    order = rng.permutation(num_steps)
    lengths, group, sizes = np.unique(
        padded_lengths[order], return_inverse=True, return_counts=True
    )
    by_group = np.argsort(group, kind="stable")
    rank_in_group = np.empty(num_steps, dtype=np.int64)
    rank_in_group[by_group] = np.arange(num_steps) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    start = rng.random(len(lengths))
    place = (rank_in_group + start[group]) / sizes[group]
    num_blocks = max(1, num_steps // BLOCK_STEPS)
    block = np.floor(place * num_blocks)
    shuffled: IntArray = order[np.lexsort((rng.random(num_steps), block))]
    return shuffled

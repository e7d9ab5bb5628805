"""`dynamic`: random batches, each padded to its own longest row, aligned.

B is one number for all batches, so that the token budget holds even for a batch of the longest
rows. The shapes are B with every aligned length in use: which of them an epoch meets is chance,
which of them any epoch can meet is not.
"""

from __future__ import annotations

import itertools

import numpy as np

from tuner.batching.align import align_lengths
from tuner.batching.grouping import Grouping, IntArray, fill_slots, sizes_of_batches, spread_rows
from tuner.config.schema import BatchingConfig


def group_dynamic(
    tokens: IntArray, batching: BatchingConfig, rng: np.random.Generator, world_size: int
) -> Grouping:
    """Random batches of one batch size, or of two that differ by one.

    Args:
        tokens: int64 [M], lengths in tokens, >= 1.
        batching: Alignment and batch size.
        rng: Source of the order.
        world_size: Ranks, >= 1.
    """
    aligned = align_lengths(tokens, batching.align)
    most = spread_rows(len(tokens), int(aligned.max()), batching, world_size)
    sizes = sizes_of_batches(len(tokens), most, batching, world_size)
    rows = rng.permutation(len(tokens))
    slots = np.cumsum(sizes * world_size)
    padded_lengths = np.maximum.reduceat(aligned[rows], np.append(0, slots[:-1]))
    return Grouping(
        rows=rows,
        rows_per_slot=fill_slots(len(rows), int(slots[-1])),
        batch_sizes=sizes,
        padded_lengths=padded_lengths,
        order=np.arange(len(padded_lengths)),  # the rows are in random order already
        shapes=frozenset(itertools.product(set(sizes.tolist()), np.unique(aligned).tolist())),
    )

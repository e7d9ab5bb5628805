"""`dynamic`: random batches, each padded to its own longest row, aligned.

B is one number for all batches, so that the token budget holds even for a batch of the longest
rows. The shapes are B with every aligned length in use: which of them an epoch meets is chance,
which of them any epoch can meet is not.
"""

from __future__ import annotations

import numpy as np

from tuner.batching.align import align_lengths
from tuner.batching.grouping import Grouping, IntArray, fill_slots, spread_rows
from tuner.config.schema import BatchingConfig


def group_dynamic(
    tokens: IntArray, batching: BatchingConfig, rng: np.random.Generator, world_size: int
) -> Grouping:
    """Random batches of one batch size.

    Args:
        tokens: int64 [M], lengths in tokens, >= 1.
        batching: Alignment and batch size.
        rng: Source of the order.
        world_size: Ranks, >= 1.
    """
    aligned = align_lengths(tokens, batching.align)
    size = spread_rows(len(tokens), int(aligned.max()), batching, world_size)
    rows = rng.permutation(len(tokens))
    slots_per_batch = size * world_size
    padded_lengths = np.maximum.reduceat(aligned[rows], np.arange(0, len(rows), slots_per_batch))
    return Grouping(
        rows=rows,
        rows_per_slot=fill_slots(len(rows), slots_per_batch),
        batch_sizes=np.full(len(padded_lengths), size),
        padded_lengths=padded_lengths,
        order=np.arange(len(padded_lengths)),  # the rows are in random order already
        shapes=frozenset((size, int(length)) for length in np.unique(aligned)),
    )

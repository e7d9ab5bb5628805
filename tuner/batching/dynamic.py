"""`dynamic`: random batches, each padded to its own longest row, aligned.

B is one number for all batches, so that the token budget holds even for a batch of the longest
rows. The shapes are B with every aligned length in use: which of them an epoch meets is chance,
which of them any epoch can meet is not.
"""

from __future__ import annotations

import numpy as np

from tuner.batching.align import align_lengths
from tuner.batching.grouping import FILLER, Grouping, IntArray, pad_slots, spread_rows
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
    slots = pad_slots(rng.permutation(len(tokens)), size * world_size)
    length_of_slot = np.where(slots == FILLER, 0, aligned[slots])
    padded_lengths = length_of_slot.reshape(-1, size * world_size).max(axis=1)
    return Grouping(
        slots=slots,
        batch_sizes=np.full(len(padded_lengths), size),
        padded_lengths=padded_lengths,
        shapes=frozenset((size, int(length)) for length in np.unique(aligned)),
    )

"""What the batches of packed rows hold at most: what is compiled once has to hold all of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tuner.batching.plan import BatchPlan, EpochPlan
from tuner.config.schema import BatchingConfig


@dataclass(frozen=True, kw_only=True)
class PackedBounds:
    """Of the batches of one rank, in whichever epoch.

    Attributes:
        sequences: Most sequences of a batch: its samples, and the padding behind the last sample
            of each row, which counts as one.
        tokens: Most padded tokens of a batch, B * L.
    """

    sequences: int
    tokens: int


def packed_bounds(plan: EpochPlan, batching: BatchingConfig) -> PackedBounds | None:
    """The bounds of a plan; None where rows are not packed, or are planned in slabs.

    Rows hold the same numbers of samples in every epoch, but which rows share a batch is drawn
    anew: counted are the rows of a length that hold the most samples, as many as its batches have
    at most. Every row counts as if it had padding.

    Args:
        plan: Of any epoch.
        batching: The strategy that it was made with.
    """
    if batching.strategy != "packed" or not isinstance(plan, BatchPlan):
        return None
    length_of_slot = np.repeat(plan.padded_lengths, plan.batch_sizes * plan.world_size)
    sequences = 0
    for length in np.unique(plan.padded_lengths):
        size = int(plan.batch_sizes[plan.padded_lengths == length].max())
        rising = np.sort(plan.rows_per_slot[length_of_slot == length] + 1)
        sequences = max(sequences, int(rising[-size:].sum()))
    return PackedBounds(
        sequences=sequences, tokens=max(size * length for size, length in plan.shapes)
    )

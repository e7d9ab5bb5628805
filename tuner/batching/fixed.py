"""`fixed`: every row padded to the longest, aligned; one shape."""

from __future__ import annotations

import numpy as np

from tuner.batching.align import align_length
from tuner.batching.grouping import Grouping, IntArray, fill_buckets
from tuner.config.schema import BatchingConfig


def group_fixed(
    tokens: IntArray, batching: BatchingConfig, rng: np.random.Generator, world_size: int
) -> Grouping:
    """Random batches of one shape.

    Args:
        tokens: int64 [M], lengths in tokens, >= 1.
        batching: Alignment and batch size.
        rng: Source of the order.
        world_size: Ranks, >= 1.
    """
    longest = align_length(int(tokens.max()), batching.align)
    return fill_buckets(tokens, np.array([longest]), batching, rng, world_size)

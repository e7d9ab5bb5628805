"""`bucketed`: rows of like length together, padded to the boundary of their bucket.

A row goes to the first boundary >= its length and is padded to exactly that boundary. (MindSpore's
bucket_batch_by_length is half open instead and pads to boundary - 1.)
"""

from __future__ import annotations

import numpy as np

from tuner.batching.boundary_rules import BOUNDARY_RULES
from tuner.batching.grouping import Grouping, IntArray, fill_buckets
from tuner.config.schema import BatchingConfig


def choose_boundaries(
    tokens: IntArray, batching: BatchingConfig, counts: IntArray | None = None
) -> tuple[int, ...]:
    """The config's boundaries, or those that its rule gives for at most num_buckets buckets.

    Args:
        tokens: int64 [M], lengths in tokens, >= 1.
        batching: Boundaries, or the rule, the number of buckets and the alignment.
        counts: int64 [M], rows of each length, > 0; None: one of each.
    """
    if batching.boundaries:
        return batching.boundaries
    rule = BOUNDARY_RULES[batching.boundary_rule]
    return rule(tokens, batching.align, batching.num_buckets, counts)


def group_bucketed(
    tokens: IntArray, batching: BatchingConfig, rng: np.random.Generator, world_size: int
) -> Grouping:
    """Batches inside buckets.

    Args:
        tokens: int64 [M], lengths in tokens, >= 1, none over the last boundary.
        batching: Boundaries and batch sizes.
        rng: Source of the order.
        world_size: Ranks, >= 1.
    """
    boundaries = np.array(choose_boundaries(tokens, batching))
    return fill_buckets(tokens, boundaries, batching, rng, world_size)

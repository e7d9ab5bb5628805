"""What every study measures besides its own proposals, to hold them against.

All gather the same real tokens for an update and take the largest token budget of the space that
fits in memory, so that what differs is the way of batching.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.batching.align import align_length
from tuner.config.schema import OP_GROUPS
from tuner.study.space import SearchSpace

PAD_TO_LONGEST = "pad to the longest"
RANDOM_BATCHES = "random batches, one dynamic graph"
TEN_QUANTILES = "ten quantile buckets, aligned to 32"
PACKED = "packed rows"
YOUR_CONFIG = "your config"

COMMON_ALIGN = 32
"""Alignment of the baselines, as tuning advice for Ascend has it."""

OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    PAD_TO_LONGEST: {"batching.strategy": "fixed", "graph.mode": "static"},
    RANDOM_BATCHES: {"batching.strategy": "dynamic", "graph.mode": "dynamic"},
    TEN_QUANTILES: {
        "batching.strategy": "bucketed",
        "batching.boundary_rule": "quantile",
        "batching.num_buckets": 10,
        "graph.mode": "static",
    },
    PACKED: {"batching.strategy": "packed", "graph.mode": "static"},
}
"""Name -> what it sets; YOUR_CONFIG sets nothing."""


def baseline_names(has_own_config: bool) -> tuple[str, ...]:
    """The baselines in the order in which they are measured.

    Args:
        has_own_config: The user gave a config, which is then held against too.
    """
    return (*OVERRIDES, YOUR_CONFIG) if has_own_config else tuple(OVERRIDES)


def baseline_overrides(name: str, space: SearchSpace, longest: int) -> dict[str, Any]:
    """The config fields that a baseline sets; none for the user's own config.

    Args:
        name: One of `baseline_names`.
        space: Whose largest token budget and first level it takes.
        longest: Tokens of the longest row after truncation.
    """
    if name == YOUR_CONFIG:
        return {}
    # An alignment coarser than the longest row would pad it for nothing.
    align = min(COMMON_ALIGN, align_length(longest, 8))
    return {
        "batching.boundaries": [],
        "batching.batch_sizes": [],
        "batching.samples_per_batch": None,
        "batching.align": align,
        "batching.tokens_per_batch": max(space.longest_rows_per_batch)
        * align_length(longest, align),
        "graph.jit_level": space.jit_level[0],
        "precision.compute_dtype": space.compute_dtype[0],
        "precision.fp32_ops": [] if space.compute_dtype[0] == "fp32" else list(OP_GROUPS),
        **OVERRIDES[name],
    }

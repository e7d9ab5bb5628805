"""Rules for bucket boundaries, by name: the exact one, and those in common use, to compare.

Each gives at most K boundaries: rising, distinct, aligned, the last covers the longest row. The
common rules round K points up to the alignment; points that meet there are one boundary, so they
may give fewer than K. They do not ask whether the next aligned length in use is shorter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tuner.batching.align import align_lengths
from tuner.batching.boundaries import count_lengths, solve_least_padding
from tuner.batching.bucket_time import FloatArray
from tuner.batching.grouping import IntArray
from tuner.config.schema import AlignRule

Align = int | tuple[AlignRule, ...]

# A point that floating point puts a hair above a whole number of tokens is that number.
POINT_DECIMALS = 6


class BoundaryRule(Protocol):
    """Boundaries for rows of some lengths."""

    def __call__(
        self,
        tokens: NDArray[np.integer[Any]],
        align: Align,
        num_buckets: int,
        counts: IntArray | None = None,
    ) -> tuple[int, ...]:
        """At most num_buckets boundaries in tokens.

        Args:
            tokens: int [M], lengths in tokens, >= 1; M >= 1.
            align: Boundaries follow this rule.
            num_buckets: K >= 1.
            counts: int64 [M], rows of each length, > 0; None: one of each.
        """
        ...


def least_padding(
    tokens: NDArray[np.integer[Any]],
    align: Align,
    num_buckets: int,
    counts: IntArray | None = None,
) -> tuple[int, ...]:
    """The least padded tokens that K boundaries allow, each row padded to its own."""
    return solve_least_padding(tokens, align, num_buckets, counts).best(num_buckets)


def quantile(
    tokens: NDArray[np.integer[Any]],
    align: Align,
    num_buckets: int,
    counts: IntArray | None = None,
) -> tuple[int, ...]:
    """Equal rows: boundary k is the shortest length that k / K of the rows do not exceed.

    Source: fairseq's batching by size percentiles; the ten quantiles of common advice.
    """
    lengths, rows = count_lengths(tokens, counts)
    return _aligned(_equal_shares(lengths, rows, num_buckets), align)


def equal_tokens(
    tokens: NDArray[np.integer[Any]],
    align: Align,
    num_buckets: int,
    counts: IntArray | None = None,
) -> tuple[int, ...]:
    """Equal tokens: the rows up to boundary k are the first that hold k / K of all tokens.

    Source: `estimate_duration_buckets` of lhotse, which NeMo uses. It starts the count anew behind
    each boundary, so its shares drift by up to a row; here shares are of the running total.
    """
    lengths, rows = count_lengths(tokens, counts)
    return _aligned(_equal_shares(lengths, rows * lengths, num_buckets), align)


def exponential(
    tokens: NDArray[np.integer[Any]],
    align: Align,
    num_buckets: int,
    counts: IntArray | None = None,
) -> tuple[int, ...]:
    """Equal ratios: boundary k is shortest * (longest / shortest)^(k / K).

    Source: the exponential warm-up buckets of vLLM for Gaudi, `counts` does not matter.
    """
    shortest, longest = int(np.min(tokens)), int(np.max(tokens))
    shares = np.arange(1, num_buckets + 1) / num_buckets
    return _aligned(_whole(shortest * (longest / shortest) ** shares), align)


def uniform(
    tokens: NDArray[np.integer[Any]],
    align: Align,
    num_buckets: int,
    counts: IntArray | None = None,
) -> tuple[int, ...]:
    """Equal steps from zero: boundary k is longest * k / K; `counts` does not matter."""
    steps = int(np.max(tokens)) * np.arange(1, num_buckets + 1, dtype=np.int64)
    return _aligned(-(-steps // num_buckets), align)


BOUNDARY_RULES: Mapping[str, BoundaryRule] = {
    "least_padding": least_padding,
    "quantile": quantile,
    "equal_tokens": equal_tokens,
    "exponential": exponential,
    "uniform": uniform,
}


def _equal_shares(lengths: IntArray, weights: IntArray, num_shares: int) -> IntArray:
    """The shortest lengths up to which 1 / K, 2 / K, ... of all weight lies, in whole numbers."""
    running = np.cumsum(weights)
    wanted = -(-running[-1] * np.arange(1, num_shares + 1) // num_shares)
    at_share: IntArray = lengths[np.searchsorted(running, wanted, side="left")]
    return at_share


def _whole(points: FloatArray) -> IntArray:
    whole: IntArray = np.ceil(np.round(points, POINT_DECIMALS)).astype(np.int64)
    return whole


def _aligned(points: IntArray, align: Align) -> tuple[int, ...]:
    return tuple(np.unique(align_lengths(points, align)).tolist())

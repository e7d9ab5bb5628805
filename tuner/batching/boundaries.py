"""Exact bucket boundaries: one dynamic program that gives the optimum for every K at once.

Problem: U candidate padded lengths x_1 < ... < x_U, n_i rows in candidate i. A bucket ends at
some x_j and takes all rows since the bucket before; each of its rows costs `row_cost[j]`, having
the bucket at all costs `shape_cost[j]`. Choose K ends (the last is x_U) of least total cost.

Algorithm: with N the running sum of n,
    best_k[j] = min over i < j of best_{k-1}[i] + (N[j] - N[i]) * row_cost[j] + shape_cost[j]
computed for all j at once as a U x U matrix; O(K U^2) time, O(U^2) memory (U = 1024 for a maximum
of 8192 aligned to 8: 8 MB). With row_cost = x and shape_cost = 0 it is minimum padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.batching.align import align_lengths
from tuner.config.schema import AlignRule

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class BoundaryCurve:
    """The optimum for every number of buckets from 1 to K.

    Attributes:
        boundaries: Entry k-1: the best k boundaries in tokens, rising, the last covers all rows.
        cost: float64 [K]; entry k-1 is the total cost with exactly k buckets.
    """

    boundaries: tuple[tuple[int, ...], ...]
    cost: FloatArray

    def best(self, max_buckets: int) -> tuple[int, ...]:
        """The boundaries of least cost with at most `max_buckets` (>= 1) buckets."""
        return self.boundaries[int(np.argmin(self.cost[:max_buckets]))]


def solve_boundaries(
    candidates: IntArray,
    counts: IntArray,
    *,
    row_cost: FloatArray,
    shape_cost: FloatArray,
    max_buckets: int,
) -> BoundaryCurve:
    """Solve for every number of buckets from 1 to min(max_buckets, U).

    Args:
        candidates: int64 [U], padded lengths in tokens, strictly rising.
        counts: int64 [U], rows whose aligned length is the candidate; > 0.
        row_cost: float64 [U], cost of one row padded to the candidate.
        shape_cost: float64 [U], cost of having a bucket that ends there.
        max_buckets: Largest K, >= 1.
    """
    rows_up_to = np.concatenate(([0], np.cumsum(counts))).astype(np.float64)
    last = len(candidates)
    step_cost = (rows_up_to[None, 1:] - rows_up_to[:-1, None]) * row_cost + shape_cost
    step_cost[np.tril_indices(last, k=-1)] = np.inf
    best = np.full(last + 1, np.inf)
    best[0] = 0.0
    came_from = []
    cost = []
    for _ in range(min(max_buckets, last)):
        total = best[:-1, None] + step_cost
        origin = np.argmin(total, axis=0)
        best = np.concatenate(([np.inf], np.take_along_axis(total, origin[None], axis=0)[0]))
        came_from.append(origin)
        cost.append(best[last])
    chosen = tuple(_trace(candidates, came_from[:k]) for k in range(1, len(came_from) + 1))
    return BoundaryCurve(boundaries=chosen, cost=np.array(cost))


def solve_least_padding(
    tokens: IntArray, align: int | tuple[AlignRule, ...], max_buckets: int
) -> BoundaryCurve:
    """Boundaries of least padding for rows of the given lengths.

    Args:
        tokens: int [M], lengths in tokens, >= 1; M >= 1.
        align: Boundaries follow this rule.
        max_buckets: Largest K, >= 1.

    Returns:
        The curve; its cost is padded tokens, one row padded to its own boundary.
    """
    candidates, counts = np.unique(align_lengths(tokens, align), return_counts=True)
    return solve_boundaries(
        candidates,
        counts,
        row_cost=candidates.astype(np.float64),
        shape_cost=np.zeros(len(candidates)),
        max_buckets=max_buckets,
    )


def _trace(candidates: IntArray, came_from: list[IntArray]) -> tuple[int, ...]:
    end = len(candidates)
    ends = []
    for origin in reversed(came_from):
        ends.append(int(candidates[end - 1]))
        end = int(origin[end - 1])
    return tuple(reversed(ends))

"""Exact bucket boundaries: one dynamic program that gives the optimum for every K at once.

Problem: U candidate padded lengths x_1 < ... < x_U, n_i rows in candidate i. A bucket ends at
some x_j and takes all rows since the bucket before. Choose K ends (the last is x_U) of least total
cost. With w(i, j) the cost of a bucket of the rows of candidates i+1 .. j:
    best_k[j] = min over i < j of best_{k-1}[i] + w(i, j)

Of least padding, w(i, j) = (N_j - N_i) * r_j + s_j with N the running sum of n: each row costs r_j
(`row_cost`), having the bucket at all costs s_j (`shape_cost`). Of least time, w(i, j) is the
seconds of the whole steps that the bucket takes, and of its compiles (bucket_time.py).

Where w is the former and r does not fall, the smallest i that gives the minimum does not fall with
j either. Proof: for i < i' < j < j',
    w(i, j') + w(i', j) - w(i, j) - w(i', j') = (N_i' - N_i) * (r_j' - r_j) >= 0
(quadrangle inequality; s_j and best_{k-1}[i] cancel), so what i' gains over i only grows with j.
So the middle column bounds the candidates of both halves. All columns of one depth of this
bisection are done at once: at most 2 U sums a depth, O(K U log U) time, O(U) memory besides the
O(K U) of traces. Where r falls somewhere, where steps are whole, or where U is small, all i are
tried in blocks of columns: O(K U^2) time, 8 MB. Among equal sums the smallest i is taken, that is,
the longest last bucket. Rounding can only exchange sums that differ by no more than it; whole
numbers below 2^53 are exact.

Measured in results/benchmarks/boundaries.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.batching.align import align_lengths
from tuner.batching.bucket_time import BucketTime, FloatArray, RunCost
from tuner.batching.grouping import IntArray
from tuner.config.schema import AlignRule, BatchingConfig

BucketCost = Callable[[IntArray, IntArray], FloatArray]
"""(rows of buckets, int64; their columns j, broadcast against them) -> w, float64."""

Origins = tuple[IntArray, FloatArray]
"""For columns 1..U: the i of the least sum (int64 [U]), and that sum (float64 [U])."""

SUMS_PER_BLOCK = 1 << 20
"""Sums that are held at once where all i are tried: 8 MB."""

WHOLE_STEPS_UP_TO = 1024
"""Candidates up to which steps are counted as whole: all w(i, j) are kept in 8 MB."""

COLUMNS_PER_BLOCK = 128
"""Columns whose sums are held at once at most: a block has no i beyond its last column."""

TRY_EVERY_UP_TO = 640
"""Candidates up to which trying all i is the faster way (results/benchmarks/boundaries.md)."""


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
        candidates: int64 [U], padded lengths in tokens, strictly rising; U >= 1.
        counts: int64 [U], rows whose aligned length is the candidate; > 0.
        row_cost: float64 [U], cost of one row padded to the candidate, finite.
        shape_cost: float64 [U], cost of having a bucket that ends there, finite.
        max_buckets: Largest K, >= 1.
    """
    rows_up_to = _running(counts).astype(np.float64)
    if len(candidates) > TRY_EVERY_UP_TO and (np.diff(row_cost) >= 0).all():
        origins: _Bisection | _EveryOrigin = _Bisection(rows_up_to, row_cost)
    else:
        origins = _EveryOrigin(rows_up_to, lambda rows, columns: rows * row_cost[columns])
    return _solve(candidates, origins, shape_cost, max_buckets)


def _solve(
    candidates: IntArray,
    origins: _Bisection | _EveryOrigin,
    shape_cost: FloatArray,
    max_buckets: int,
) -> BoundaryCurve:
    best = np.full(len(candidates) + 1, np.inf)
    best[0] = 0.0
    came_from = []
    cost = []
    for _ in range(min(max_buckets, len(candidates))):
        origin, least = origins.find(best)
        best = np.concatenate(([np.inf], least + shape_cost))
        came_from.append(origin)
        cost.append(best[-1])
    chosen = tuple(_trace(candidates, came_from[:k]) for k in range(1, len(came_from) + 1))
    return BoundaryCurve(boundaries=chosen, cost=np.array(cost))


def solve_least_padding(
    tokens: NDArray[np.integer[Any]],
    align: int | tuple[AlignRule, ...],
    max_buckets: int,
    counts: IntArray | None = None,
) -> BoundaryCurve:
    """Boundaries of least padding for rows of the given lengths.

    Args:
        tokens: int [M], lengths in tokens, >= 1; M >= 1.
        align: Boundaries follow this rule.
        max_buckets: Largest K, >= 1.
        counts: int64 [M], rows of each length, > 0; None: one of each.

    Returns:
        The curve; its cost is padded tokens, one row padded to its own boundary.
    """
    candidates, rows = count_aligned(tokens, align, counts)
    return solve_boundaries(
        candidates,
        rows,
        row_cost=candidates.astype(np.float64),
        shape_cost=np.zeros(len(candidates)),
        max_buckets=max_buckets,
    )


def solve_least_time(
    tokens: NDArray[np.integer[Any]],
    batching: BatchingConfig,
    cost: RunCost,
    max_buckets: int,
    counts: IntArray | None = None,
) -> BoundaryCurve:
    """Boundaries of least run time, compile time included; `best` finds the number of buckets too.

    A bucket costs the steps that its rows take in all epochs, the last one as full as the plan
    makes it, and the compiles of its shapes: what the plan of these boundaries takes.

    Over WHOLE_STEPS_UP_TO candidates a row padded to L costs its share of a full batch instead,
    epochs * step_s(B, L) / (B * W) with the largest B that the config allows; a bucket costs
    compile_s(B, L). Then a plan takes longer than solved, but by at most `epochs` full steps of
    each of its buckets, if step_s does not fall with B, step_s / B does not rise with B (both hold
    for an overhead plus a cost a row) and compile_s depends on L alone.

    Args:
        tokens: int [M], lengths in tokens, >= 1; M >= 1.
        batching: Alignment, a token budget or a sample count, and whether all batches of a length
            have one size.
        cost: Seconds of steps and compiles, linear in B at any one L.
        max_buckets: Largest K, >= 1.
        counts: int64 [M], rows of each length, > 0; None: one of each.

    Returns:
        The curve; its cost is seconds.

    Raises:
        BadInputError: the longest padded row is over the token budget.
    """
    candidates, rows = count_aligned(tokens, batching.align, counts)
    time = BucketTime(candidates, batching, cost)
    if len(candidates) <= WHOLE_STEPS_UP_TO:
        origins = _EveryOrigin(_running(rows), time.bucket_s)
        return _solve(candidates, origins, np.zeros(len(candidates)), max_buckets)
    return solve_boundaries(
        candidates,
        rows,
        row_cost=time.shared_row_s(),
        shape_cost=time.full_compile_s(),
        max_buckets=max_buckets,
    )


def count_aligned(
    tokens: NDArray[np.integer[Any]],
    align: int | tuple[AlignRule, ...],
    counts: IntArray | None = None,
) -> tuple[IntArray, IntArray]:
    """The aligned lengths in use, rising, and the rows of each; both int64 [U].

    Args:
        tokens: int [M], lengths in tokens, >= 1.
        align: Alignment rule.
        counts: int64 [M], rows of each length; None: one of each.
    """
    # Aligning the distinct lengths alone is several times faster on a million rows.
    lengths, rows = count_lengths(tokens, counts)
    return count_lengths(align_lengths(lengths, align), rows)


def count_lengths(
    tokens: NDArray[np.integer[Any]], counts: IntArray | None = None
) -> tuple[IntArray, IntArray]:
    """The distinct lengths, rising, and the rows of each; both int64 [U].

    Args:
        tokens: int [M], lengths in tokens, in any order.
        counts: int64 [M], rows of each length, less than 2^53 in all; None: one of each.
    """
    if counts is None:
        lengths, rows = np.unique(tokens, return_counts=True)
    else:
        lengths, index = np.unique(tokens, return_inverse=True)
        rows = np.bincount(index, weights=counts, minlength=len(lengths))
    return lengths.astype(np.int64), rows.astype(np.int64)


def _running(counts: IntArray) -> IntArray:
    """N_0 .. N_U: rows up to each candidate, int64 [U + 1]."""
    return np.concatenate(([0], np.cumsum(counts)))


class _Bisection:
    """Bisection over the columns, one depth at a time; row_cost does not fall."""

    def __init__(self, rows_up_to: FloatArray, row_cost: FloatArray) -> None:
        self._rows_up_to = rows_up_to
        self._row_cost = row_cost

    def find(self, best: FloatArray) -> Origins:
        last = len(self._row_cost)
        least = np.empty(last + 1)
        # Column 0 bounds from below, the columns past the last do not bound from above.
        origin = np.zeros(2 * last + 1, dtype=np.int64)
        origin[last + 1 :] = last
        stride = 1 << (last.bit_length() - 1)
        while stride:
            # Columns stride, 3 * stride, ...; their neighbours at one stride are known by now.
            columns = np.arange(stride, last + 1, 2 * stride)
            first = origin[columns - stride]
            num_origins = np.minimum(origin[columns + stride], columns - 1) - first + 1
            starts = np.cumsum(num_origins) - num_origins
            tried = np.arange(num_origins.sum()) + np.repeat(first - starts, num_origins)
            column = np.repeat(columns, num_origins)
            rows = self._rows_up_to[column] - self._rows_up_to[tried]
            sums = best[tried] + rows * self._row_cost[column - 1]
            least[columns] = np.minimum.reduceat(sums, starts)
            hits = np.flatnonzero(sums == least[column])
            origin[columns] = tried[hits[np.searchsorted(hits, starts)]]
            stride //= 2
        return origin[1 : last + 1], least[1:]


class _EveryOrigin:
    """Every i for every column, in blocks of columns; w(i, j) is kept where there is room."""

    def __init__(self, rows_up_to: IntArray | FloatArray, bucket_cost: BucketCost) -> None:
        self._rows_up_to = rows_up_to
        self._bucket_cost = bucket_cost
        last = len(rows_up_to) - 1
        step = min(COLUMNS_PER_BLOCK, max(1, SUMS_PER_BLOCK // last))
        self._blocks = [slice(j, min(j + step, last)) for j in range(0, last, step)]
        keeps = last * last <= SUMS_PER_BLOCK
        self._kept = [self._costs(block) for block in self._blocks] if keeps else None

    def find(self, best: FloatArray) -> Origins:
        origin = np.empty(len(best) - 1, dtype=np.int64)
        least = np.empty(len(best) - 1)
        for number, block in enumerate(self._blocks):
            costs = self._kept[number] if self._kept else self._costs(block)
            sums = costs + best[: block.stop]
            origin[block] = np.argmin(sums, axis=1)
            least[block] = sums[np.arange(len(sums)), origin[block]]
        return origin, least

    def _costs(self, block: slice) -> FloatArray:
        """w(i, j) of the block's columns, float64 [columns, stop]; infinite where i >= j."""
        tried = np.arange(block.stop)
        columns = np.arange(block.start, block.stop)[:, None]
        rows = self._rows_up_to[columns + 1] - self._rows_up_to[tried]
        # Behind its column there is no row, and no bucket.
        costs = self._bucket_cost(np.maximum(rows, 1), columns)
        costs[tried > columns] = np.inf
        return costs


def _trace(candidates: IntArray, came_from: list[IntArray]) -> tuple[int, ...]:
    end = len(candidates)
    ends = []
    for origin in reversed(came_from):
        ends.append(int(candidates[end - 1]))
        end = int(origin[end - 1])
    return tuple(reversed(ends))

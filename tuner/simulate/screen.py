"""What a plan would come to, from the histogram of the lengths alone: no rows, no shuffle.

For `fixed`, `bucketed` and `packed` the shapes and their steps follow from the lengths alone, so
the figures are those of `count_plan(plan_batches(...))` to the last token. For `dynamic` they are
exact expectations over all shuffles: each batch of n rows is a draw without replacement, so
    P(longest aligned length <= u) = C(N_u, n) / C(N, n), N_u of N rows being as short as u,
and given that, its rows are any n of the N_u. By linearity the expected steps of a length are the
sum over the batches, the ragged last one with its own n.

Of more rows than batching.rows_per_slab every slab is screened.

Cost: 1 to 2 ms a setting and slab on one core (results/benchmarks/boundaries.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuner.batching.align import align_length, align_lengths
from tuner.batching.boundaries import BoundaryCurve, solve_least_padding
from tuner.batching.boundary_rules import BOUNDARY_RULES
from tuner.batching.grouping import Shape, bucket_batch_size, sizes_of_batches, spread_rows
from tuner.batching.packed import pack_counts, packed_lengths
from tuner.batching.plan import length_limit
from tuner.batching.slab_shares import batching_of_slabs, count_slabs, rows_of_slabs
from tuner.config.schema import BatchingConfig, LoopConfig, TrainConfig
from tuner.simulate.histogram import IntArray, LengthHistogram
from tuner.simulate.stats import EpochFigures
from tuner.simulate.waste import chance_at_most

Numbers = NDArray[np.int64] | NDArray[np.float64]

BUCKETS_SOLVED_AHEAD = 32
"""One solution serves every smaller number of buckets, so few are asked for alone."""


@dataclass(frozen=True, kw_only=True)
class ScreenedPlan(EpochFigures):
    """Figures of an epoch without its plan; shapes that no epoch meets are left out.

    num_updates is an upper bound: exact where no step has more real tokens than an update, else
    those steps may end fewer.

    Attributes:
        is_exact: All figures hold for every epoch. False: real_tokens_of_shape, and with dynamic
            padded_tokens and shape_counts, are expectations over all shuffles; the others still
            hold.
    """

    is_exact: bool


@dataclass(frozen=True, kw_only=True)
class StepsByShape:
    """The steps of an epoch, shape by shape; G different shapes.

    Attributes:
        batch_sizes: int64 [G]; B, slots of one rank.
        padded_lengths: int64 [G]; L in tokens.
        num_steps: int64 [G], or float64 [G] where they are expected.
        real_tokens: int64 or float64 [G]; tokens of rows over all ranks.
        num_filler_rows: Slots of all steps and ranks that hold no row.
    """

    batch_sizes: IntArray
    padded_lengths: IntArray
    num_steps: Numbers
    real_tokens: Numbers
    num_filler_rows: int


class RowsOfLengths(NamedTuple):
    """Rows by the length that they are padded to; int64 [G] each.

    Attributes:
        padded_lengths: L in tokens.
        num_rows: Rows, >= 1.
        real_tokens: Tokens of these rows.
    """

    padded_lengths: IntArray
    num_rows: IntArray
    real_tokens: IntArray


def screen_fixed(rows: LengthHistogram, batching: BatchingConfig, world_size: int) -> StepsByShape:
    """One shape: the longest row, aligned.

    Args:
        rows: Admitted rows.
        batching: Alignment and batch size.
        world_size: Ranks, >= 1.
    """
    return _fill((align_length(rows.longest, batching.align),), rows, batching, world_size)


def screen_bucketed(
    rows: LengthHistogram, batching: BatchingConfig, world_size: int
) -> StepsByShape:
    """A shape for each bucket that holds rows.

    Args:
        rows: Admitted rows, none over the last boundary.
        batching: Boundaries, written out, and batch sizes.
        world_size: Ranks, >= 1.
    """
    return _fill(batching.boundaries, rows, batching, world_size)


def screen_dynamic(
    rows: LengthHistogram, batching: BatchingConfig, world_size: int
) -> StepsByShape:
    """Expected steps for each aligned length in use.

    Args:
        rows: Admitted rows.
        batching: Alignment and batch size.
        world_size: Ranks, >= 1.
    """
    lengths = np.unique(align_lengths(rows.lengths, batching.align))
    rows_up_to = rows.rows_up_to(lengths)
    mean_tokens_up_to = rows.tokens_up_to(lengths) / rows_up_to
    most = spread_rows(rows.num_rows, int(lengths[-1]), batching, world_size)
    all_sizes = sizes_of_batches(rows.num_rows, most, batching, world_size)
    num_fillers = int(all_sizes.sum()) * world_size - rows.num_rows
    drawn = all_sizes * world_size
    drawn[-1] -= num_fillers
    sizes = np.unique(all_sizes)
    steps_up_to = np.zeros((len(sizes), len(lengths)))
    real_up_to = np.zeros((len(sizes), len(lengths)))
    batches = np.stack([np.searchsorted(sizes, all_sizes), drawn])
    for (index, num_drawn), num_batches in _counted(batches):
        steps = num_batches * chance_at_most(rows_up_to, num_drawn)
        steps_up_to[index] += steps
        real_up_to[index] += steps * num_drawn * mean_tokens_up_to
    return StepsByShape(
        batch_sizes=np.repeat(sizes, len(lengths)),
        padded_lengths=np.tile(lengths, len(sizes)),
        num_steps=np.diff(steps_up_to, prepend=0.0).ravel(),
        real_tokens=np.diff(real_up_to, prepend=0.0).ravel(),
        num_filler_rows=num_fillers,
    )


def screen_packed(
    rows: LengthHistogram, batching: BatchingConfig, world_size: int
) -> StepsByShape:
    """A shape for each packed length in use; which lengths share a row is always the same.

    Args:
        rows: Admitted rows, none over the longest packed length.
        batching: Packed lengths and batch size.
        world_size: Ranks, >= 1.
    """
    capacities = packed_lengths(rows.lengths, batching)
    packed = pack_counts(rows.lengths, rows.counts, capacities)
    used = np.flatnonzero(packed.num_rows)
    lengths, num_rows = np.array(capacities)[used], packed.num_rows[used]
    most = [
        bucket_batch_size(
            entry, int(packed.num_rows[entry]), capacities[entry], batching, world_size
        )
        for entry in used.tolist()
    ]
    rows_of_length = RowsOfLengths(lengths, num_rows, packed.tokens[used])
    return _steps_by_shape(rows_of_length, most, batching, world_size)


SCREENS: Mapping[str, Callable[[LengthHistogram, BatchingConfig, int], StepsByShape]] = {
    "fixed": screen_fixed,
    "bucketed": screen_bucketed,
    "dynamic": screen_dynamic,
    "packed": screen_packed,
}
"""Strategy -> its steps, for every strategy of STRATEGIES."""

EXPECTED = ("dynamic",)
"""Strategies whose figures are expectations."""


def screen_slabs(
    rows: LengthHistogram, num_slabs: int, batching: BatchingConfig, world_size: int
) -> StepsByShape:
    """The steps of all slabs, as `plan_in_slabs` makes them.

    Args:
        rows: Admitted rows.
        num_slabs: K >= 2.
        batching: Boundaries of `bucketed` written out, and batch sizes.
        world_size: Ranks, >= 1.
    """
    totals = np.zeros(rows.longest + 1, dtype=np.int64)
    totals[rows.lengths] = rows.counts
    shared = batching_of_slabs(totals, num_slabs, batching, world_size)
    parts = []
    for counts in rows_of_slabs(totals, num_slabs):
        lengths = np.flatnonzero(counts)
        slab = LengthHistogram(lengths=lengths, counts=counts[lengths])
        parts.append(SCREENS[shared.strategy](slab, shared, world_size))
    return _together(parts)


class Screen:
    """Plans of one data set in any number of settings; solved boundaries are kept.

    Example:
        >>> screen = Screen(LengthHistogram.from_tokens(lengths.tokens))
        >>> [screen.plan(config).padding_fraction for config in candidates]
    """

    def __init__(self, histogram: LengthHistogram) -> None:
        self._histogram = histogram
        self._admitted: dict[tuple[Any, ...], LengthHistogram] = {}
        self._solved: dict[tuple[Any, ...], tuple[int, BoundaryCurve]] = {}

    def plan(self, config: TrainConfig, world_size: int = 1) -> ScreenedPlan:
        """What `count_plan` would say of the plan of this config, or its expectation.

        Args:
            config: Sections `data` (limit, overflow) and `batching`, and of `train` what
                an update is.
            world_size: Ranks, >= 1.

        Raises:
            BadInputError: as `plan_batches`.
        """
        batching = config.batching
        admission, rows = self._rows_of(config)
        if batching.strategy == "bucketed" and not batching.boundaries:
            boundaries = self._choose_boundaries(admission, rows, batching)
            batching = batching.model_copy(update={"boundaries": boundaries})
        num_slabs = count_slabs(rows.num_rows, batching)
        steps = (
            SCREENS[batching.strategy](rows, batching, world_size)
            if num_slabs < 2
            else screen_slabs(rows, num_slabs, batching, world_size)
        )
        return _sum_up(steps, rows, config, world_size)

    def num_admitted(self, config: TrainConfig) -> int:
        """Rows that are batched under this config.

        Raises:
            BadInputError: as `plan_batches`.
        """
        return self._rows_of(config)[1].num_rows

    def _rows_of(self, config: TrainConfig) -> tuple[tuple[Any, ...], LengthHistogram]:
        """The admitted rows, and what they are kept under."""
        admission = (config.data.overflow, length_limit(config))
        if admission not in self._admitted:
            self._admitted[admission] = self._histogram.admit(config.data, admission[1])
        return admission, self._admitted[admission]

    def _choose_boundaries(
        self, admission: tuple[Any, ...], rows: LengthHistogram, batching: BatchingConfig
    ) -> tuple[int, ...]:
        num_buckets = batching.num_buckets
        if batching.boundary_rule != "least_padding":
            rule = BOUNDARY_RULES[batching.boundary_rule]
            return rule(rows.lengths, batching.align, num_buckets, rows.counts)
        key = (*admission, batching.align)
        solved, curve = self._solved.get(key, (0, None))
        if curve is None or solved < num_buckets:
            solved = max(num_buckets, BUCKETS_SOLVED_AHEAD)
            curve = solve_least_padding(rows.lengths, batching.align, solved, rows.counts)
            self._solved[key] = solved, curve
        return curve.best(num_buckets)


def _fill(
    boundaries: tuple[int, ...], rows: LengthHistogram, batching: BatchingConfig, world_size: int
) -> StepsByShape:
    """Rows in the buckets of these boundaries; as `fill_buckets`, empty ones left out."""
    ends = np.array(boundaries)
    num_rows = np.diff(rows.rows_up_to(ends), prepend=0)
    used = np.flatnonzero(num_rows)
    most = [
        bucket_batch_size(index, int(num_rows[index]), boundaries[index], batching, world_size)
        for index in used.tolist()
    ]
    tokens = np.diff(rows.tokens_up_to(ends), prepend=0)
    rows_of_length = RowsOfLengths(ends[used], num_rows[used], tokens[used])
    return _steps_by_shape(rows_of_length, most, batching, world_size)


def _steps_by_shape(
    rows: RowsOfLengths, most: Sequence[int], batching: BatchingConfig, world_size: int
) -> StepsByShape:
    """Steps of rows of padded lengths, in batches of these sizes at most."""
    shapes: list[Shape] = []
    num_steps: list[int] = []
    real_tokens: list[float] = []
    num_slots = 0
    for length, num_rows, tokens, size in zip(*rows, most, strict=True):
        sizes = sizes_of_batches(int(num_rows), size, batching, world_size)
        num_slots += int(sizes.sum()) * world_size
        different, counts = np.unique(sizes, return_counts=True)
        shapes += [(each, int(length)) for each in different.tolist()]
        num_steps += counts.tolist()
        # Which rows share a batch is drawn, so a size has its share of their tokens.
        shares = counts * different / sizes.sum()
        real_tokens += [int(tokens)] if len(different) == 1 else (tokens * shares).tolist()
    batch_sizes, padded_lengths = np.array(shapes).T
    return StepsByShape(
        batch_sizes=batch_sizes,
        padded_lengths=padded_lengths,
        num_steps=np.array(num_steps),
        real_tokens=np.array(real_tokens),
        num_filler_rows=num_slots - int(rows.num_rows.sum()),
    )


def _together(parts: Sequence[StepsByShape]) -> StepsByShape:
    """The steps of several plans, equal shapes added up."""
    sizes = np.concatenate([part.batch_sizes for part in parts])
    lengths = np.concatenate([part.padded_lengths for part in parts])
    shapes, index = np.unique(np.stack([sizes, lengths]), axis=1, return_inverse=True)
    index = index.ravel()
    num_steps = np.concatenate([part.num_steps for part in parts])
    real_tokens = np.concatenate([part.real_tokens for part in parts])
    return StepsByShape(
        batch_sizes=shapes[0],
        padded_lengths=shapes[1],
        num_steps=_added_up(index, num_steps),
        real_tokens=_added_up(index, real_tokens),
        num_filler_rows=sum(part.num_filler_rows for part in parts),
    )


def _added_up(index: IntArray, numbers: Numbers) -> Numbers:
    # Sums in float64 are exact below 2^53.
    sums = np.bincount(index, weights=numbers)
    return sums if numbers.dtype.kind == "f" else sums.astype(np.int64)


def _counted(columns: IntArray) -> Iterator[tuple[tuple[int, int], int]]:
    """Different columns of [2, S], with how often each is there."""
    different, counts = np.unique(columns, axis=1, return_counts=True)
    yield from zip(map(tuple, different.T.tolist()), counts.tolist(), strict=True)


def _sum_up(
    steps: StepsByShape, rows: LengthHistogram, config: TrainConfig, world_size: int
) -> ScreenedPlan:
    shapes = list(zip(steps.batch_sizes.tolist(), steps.padded_lengths.tolist(), strict=True))
    num_steps = round(steps.num_steps.sum())
    padded_tokens = (steps.num_steps * steps.batch_sizes * steps.padded_lengths).sum() * world_size
    return ScreenedPlan(
        num_steps=num_steps,
        num_updates=_max_updates(num_steps, rows.total_tokens, config.train),
        real_tokens=rows.total_tokens,
        padded_tokens=padded_tokens.item(),
        shape_counts=dict(zip(shapes, steps.num_steps.tolist(), strict=True)),
        real_tokens_of_shape=dict(zip(shapes, steps.real_tokens.tolist(), strict=True)),
        num_filler_rows=steps.num_filler_rows,
        is_exact=config.batching.strategy not in EXPECTED
        and len({length for _, length in shapes}) == len(shapes),
    )


def _max_updates(num_steps: int, real_tokens: int, train: LoopConfig) -> int:
    """The rounded number of windows in an epoch, of which each needs a step to end with."""
    tokens_per_update = train.tokens_per_update
    if tokens_per_update is None:
        return -(-num_steps // train.steps_per_update)
    return min(num_steps, max(1, (2 * real_tokens + tokens_per_update) // (2 * tokens_per_update)))

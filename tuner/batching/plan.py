"""The plan of an epoch: which rows form which padded batch of which shape, in which order.

`plan_batches` is the only code that decides who is batched with whom. Simulation, trials and
training call it, so that a simulated padding figure is the trained one; a resumed run computes it
again; and every rank computes the same global plan and takes its own rows.

Invariants:
- every row of the set stands exactly once, or is counted in `dropped` under its reason;
- B * L is at most the token budget; L >= every row of the batch (packed: all rows of a slot
  together), and aligned, or one of the given boundaries;
- `shapes` is the same in every epoch and holds the shape of every batch;
- all ranks have the same number of steps and the same shape at every step;
- the plan follows from (lengths, config, epoch, world size) alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tuner.batching.bucketed import choose_boundaries, group_bucketed
from tuner.batching.dynamic import group_dynamic
from tuner.batching.fixed import group_fixed
from tuner.batching.grouping import Grouping, IntArray, Shape
from tuner.batching.packed import group_packed, packed_lengths
from tuner.batching.rows import AdmittedRows, admit_rows
from tuner.config.override import override_config
from tuner.config.schema import BatchingConfig, TrainConfig
from tuner.data.lengths import Lengths

Strategy = Callable[[IntArray, BatchingConfig, np.random.Generator, int], Grouping]

STRATEGIES: Mapping[str, Strategy] = {
    "fixed": group_fixed,
    "dynamic": group_dynamic,
    "bucketed": group_bucketed,
    "packed": group_packed,
}

WITH_BOUNDARIES = ("bucketed", "packed")
"""Strategies whose longest admitted row is the last boundary."""


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """One step of one rank.

    Attributes:
        row_indices: int64 [R]; rows of the data set, slot after slot.
        rows_per_slot: int64 [B]; their sum is R; 0: filler, above 1: packed.
        padded_length: L in tokens.
    """

    row_indices: IntArray
    rows_per_slot: IntArray
    padded_length: int

    @property
    def shape(self) -> Shape:
        """(B, L)."""
        return len(self.rows_per_slot), self.padded_length


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """All steps of one epoch, for all ranks; arrays are read-only.

    Attributes:
        row_indices: int64 [M]; rows of the data set, slot after slot, step after step.
        rows_per_slot: int64 [sum of B * W]; 0: filler, above 1: packed.
        batch_sizes: int64 [S]; B, slots of one rank.
        padded_lengths: int64 [S]; L in tokens.
        real_tokens: int64 [S]; tokens of real rows over all ranks, after truncation.
        shapes: Every (B, L) of any epoch, most padded tokens first: the order of warm-up.
        num_samples: Rows of the data set.
        num_truncated: Rows cut to the limit.
        dropped: Reason -> rows left out.
        world_size: Ranks, W.
    """

    row_indices: IntArray
    rows_per_slot: IntArray
    batch_sizes: IntArray
    padded_lengths: IntArray
    real_tokens: IntArray
    shapes: tuple[Shape, ...]
    num_samples: int
    num_truncated: int
    dropped: Mapping[str, int]
    world_size: int

    @property
    def num_steps(self) -> int:
        """Steps of the epoch, the same on every rank."""
        return len(self.batch_sizes)

    def steps_of_rank(self, rank: int, start_step: int = 0) -> Iterator[PlannedBatch]:
        """The steps of one rank in order.

        Args:
            rank: In [0, world_size).
            start_step: First step, in [0, num_steps].
        """
        slot_ends = np.cumsum(self.batch_sizes * self.world_size)
        row_ends = np.concatenate(([0], np.cumsum(self.rows_per_slot)))[
            np.concatenate(([0], slot_ends))
        ]
        for step in range(start_step, self.num_steps):
            num_slots = int(self.batch_sizes[step]) * self.world_size
            rows_per_slot = self.rows_per_slot[slot_ends[step] - num_slots : slot_ends[step]]
            # Strided, so that the fillers of a last batch are spread over the ranks.
            is_own = np.arange(num_slots) % self.world_size == rank
            rows = self.row_indices[row_ends[step] : row_ends[step + 1]]
            yield PlannedBatch(
                row_indices=rows[np.repeat(is_own, rows_per_slot)],
                rows_per_slot=rows_per_slot[is_own],
                padded_length=int(self.padded_lengths[step]),
            )

    def shape_counts(self) -> dict[Shape, int]:
        """Steps of this epoch for each planned shape; shapes it does not meet count 0."""
        return self._sum_by_shape(np.ones(self.num_steps, dtype=np.int64))

    def real_tokens_of_shape(self) -> dict[Shape, int]:
        """Real tokens over all ranks in the steps of each planned shape."""
        return self._sum_by_shape(self.real_tokens)

    def _sum_by_shape(self, value_of_step: IntArray) -> dict[Shape, int]:
        sums = dict.fromkeys(self.shapes, 0)
        # One number for (B, L): unique over pairs takes five times as long.
        stride = int(self.padded_lengths.max()) + 1
        keys, index = np.unique(
            self.batch_sizes * stride + self.padded_lengths, return_inverse=True
        )
        # Sums in float64 are exact below 2^53.
        totals = np.bincount(index, weights=value_of_step).astype(np.int64)
        for key, total in zip(keys.tolist(), totals.tolist(), strict=True):
            sums[divmod(key, stride)] = total
        return sums

    @property
    def fingerprint(self) -> str:
        """sha256 of the order, rows, their tokens after truncation, and shapes."""
        digest = hashlib.sha256(repr((self.world_size, self.shapes)).encode())
        steps = (self.batch_sizes, self.padded_lengths, self.real_tokens)
        for array in (self.row_indices, self.rows_per_slot, *steps):
            digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()


def plan_batches(
    lengths: Lengths, config: TrainConfig, *, epoch: int = 0, world_size: int = 1
) -> BatchPlan:
    """Plan one epoch.

    Args:
        lengths: Length of every row of the set.
        config: Sections `data` (limit, overflow) and `batching` decide.
        epoch: >= 0; each has its own order.
        world_size: Ranks, >= 1.

    Raises:
        BadInputError: a row is over the limit under `overflow: error`, no row is left, or the
            token budget is less than one padded row.
    """
    admitted = _admit(lengths, config)
    batching = config.batching
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([batching.seed, epoch])))
    grouping = STRATEGIES[batching.strategy](admitted.tokens, batching, rng, world_size)
    return _in_order(grouping, admitted, lengths.num_samples, world_size)


def resolve_boundaries(lengths: Lengths, config: TrainConfig) -> TrainConfig:
    """The same config with the padded lengths it stands for written out.

    Those of `bucketed` and `packed`; the other strategies have no boundaries.

    Raises:
        BadInputError: as `plan_batches`.
    """
    batching = config.batching
    if batching.strategy not in WITH_BOUNDARIES or batching.boundaries:
        return config
    tokens = _admit(lengths, config).tokens
    boundaries = (
        choose_boundaries(tokens, batching)
        if batching.strategy == "bucketed"
        else packed_lengths(tokens, batching)
    )
    return override_config(
        config,
        {"batching.boundaries": boundaries, "batching.num_buckets": len(boundaries)},
        source="boundaries",
    )


def length_limit(config: TrainConfig) -> int | None:
    """The longest admitted row in tokens: data.max_length or the last boundary; None: any."""
    limits = [config.data.max_length]
    if config.batching.strategy in WITH_BOUNDARIES and config.batching.boundaries:
        limits.append(config.batching.boundaries[-1])
    return min((limit for limit in limits if limit is not None), default=None)


def _admit(lengths: Lengths, config: TrainConfig) -> AdmittedRows:
    return admit_rows(lengths, config.data, length_limit(config))


def _in_order(
    grouping: Grouping,
    admitted: AdmittedRows,
    num_samples: int,
    world_size: int,
) -> BatchPlan:
    order = grouping.order
    slots = _Runs.of_sizes(grouping.batch_sizes * world_size)
    rows_of_batch = np.add.reduceat(grouping.rows_per_slot, slots.starts)
    rows = _Runs.of_sizes(rows_of_batch)
    places = grouping.rows[rows.in_order(order)]
    return BatchPlan(
        row_indices=_read_only(admitted.row_indices[places]),
        rows_per_slot=_read_only(grouping.rows_per_slot[slots.in_order(order)]),
        batch_sizes=_read_only(grouping.batch_sizes[order]),
        padded_lengths=_read_only(grouping.padded_lengths[order]),
        real_tokens=_read_only(
            np.add.reduceat(admitted.tokens[grouping.rows], rows.starts)[order]
        ),
        shapes=tuple(sorted(grouping.shapes, key=_warm_up_order)),
        num_samples=num_samples,
        num_truncated=admitted.num_truncated,
        dropped=admitted.dropped,
        world_size=world_size,
    )


@dataclass(frozen=True, kw_only=True)
class _Runs:
    """Runs of places 0, 1, 2, ...: run i starts at starts[i] and holds sizes[i] >= 1 of them."""

    starts: IntArray
    sizes: IntArray

    @classmethod
    def of_sizes(cls, sizes: IntArray) -> _Runs:
        return cls(starts=np.cumsum(sizes) - sizes, sizes=sizes)

    def in_order(self, order: IntArray) -> IntArray:
        """All places, run after run in the given order of runs."""
        sizes = self.sizes[order]
        offset = self.starts[order] - (np.cumsum(sizes) - sizes)
        places: IntArray = np.arange(sizes.sum()) + np.repeat(offset, sizes)
        return places


def _warm_up_order(shape: Shape) -> tuple[int, int]:
    size, length = shape
    return -size * length, -length


def _read_only(array: IntArray) -> IntArray:
    array.setflags(write=False)
    return array

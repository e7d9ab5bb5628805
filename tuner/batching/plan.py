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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tuner.batching.bucketed import choose_boundaries, group_bucketed
from tuner.batching.dynamic import group_dynamic
from tuner.batching.epoch_plan import EpochPlan, PlannedBatch, in_warm_up_order
from tuner.batching.fixed import group_fixed
from tuner.batching.grouping import Grouping, IntArray
from tuner.batching.packed import group_packed, packed_lengths
from tuner.batching.rows import (
    WITH_BOUNDARIES,
    AdmittedRows,
    admit_rows,
    admitted_tokens,
    length_limit,
    rows_of_length,
)
from tuner.batching.slabs import plan_in_slabs
from tuner.config.override import override_config
from tuner.config.schema import BatchingConfig, TrainConfig
from tuner.data.lengths import Lengths

__all__ = [
    "BatchPlan",
    "EpochPlan",
    "PlannedBatch",
    "length_limit",
    "plan_batches",
    "resolve_boundaries",
]

Strategy = Callable[[IntArray, BatchingConfig, np.random.Generator, int], Grouping]

STRATEGIES: Mapping[str, Strategy] = {
    "fixed": group_fixed,
    "dynamic": group_dynamic,
    "bucketed": group_bucketed,
    "packed": group_packed,
}


@dataclass(frozen=True, kw_only=True)
class BatchPlan(EpochPlan):
    """A plan whose rows are in memory.

    Attributes:
        row_indices: int64 [M]; rows of the data set, slot after slot, step after step.
        rows_per_slot: int64 [sum of B * W]; 0: filler, above 1: packed.
    """

    row_indices: IntArray
    rows_per_slot: IntArray

    def steps_of_rank(self, rank: int, start_step: int = 0) -> Iterator[PlannedBatch]:
        """As every plan has them."""
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

    @property
    def num_fillers(self) -> int:
        """Slots without a row over all ranks."""
        return int((self.rows_per_slot == 0).sum())

    @property
    def fingerprint(self) -> str:
        """sha256 of the order, rows, their tokens after truncation, and shapes."""
        digest = hashlib.sha256(repr((self.world_size, self.shapes)).encode())
        steps = (self.batch_sizes, self.padded_lengths, self.real_tokens)
        for array in (self.row_indices, self.rows_per_slot, *steps):
            digest.update(np.ascontiguousarray(array, "<i8").data)
        return digest.hexdigest()


def plan_batches(
    lengths: Lengths, config: TrainConfig, *, epoch: int = 0, world_size: int = 1
) -> EpochPlan:
    """Plan one epoch; of more rows than batching.rows_per_slab, slab by slab (slabs.py).

    Args:
        lengths: Length of every row of the set.
        config: Sections `data` (limit, overflow) and `batching` decide.
        epoch: >= 0; each has its own order.
        world_size: Ranks, >= 1.

    Raises:
        BadInputError: a row is over the limit under `overflow: error`, no row is left, or the
            token budget is less than one padded row.
    """
    batching = config.batching
    if lengths.num_samples > batching.rows_per_slab:
        found = plan_in_slabs(lengths, config, epoch, world_size, plan_rows)
        if found is not None:
            return found
    admitted = admit_rows(lengths, config.data, length_limit(config))
    return plan_rows(admitted, batching, [batching.seed, epoch], lengths.num_samples, world_size)


def plan_rows(
    admitted: AdmittedRows,
    batching: BatchingConfig,
    seeds: Sequence[int],
    num_samples: int,
    world_size: int,
) -> BatchPlan:
    """Plan rows in memory.

    Args:
        admitted: The rows.
        batching: How to batch them.
        seeds: Of the order.
        num_samples: Rows of the data set.
        world_size: Ranks, >= 1.
    """
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(list(seeds))))
    grouping = STRATEGIES[batching.strategy](admitted.tokens, batching, rng, world_size)
    return _in_order(grouping, admitted, num_samples, world_size)


def resolve_boundaries(lengths: Lengths, config: TrainConfig) -> TrainConfig:
    """The same config with the padded lengths it stands for written out.

    Those of `bucketed` and `packed`; the other strategies have no boundaries.

    Raises:
        BadInputError: as `plan_batches`.
    """
    batching = config.batching
    if batching.strategy not in WITH_BOUNDARIES or batching.boundaries:
        return config
    tokens, _, _ = admitted_tokens(lengths, config.data, length_limit(config))
    totals = rows_of_length(tokens)
    used = np.flatnonzero(totals[1:]) + 1
    boundaries = (
        choose_boundaries(used, batching, totals[used])
        if batching.strategy == "bucketed"
        else packed_lengths(used, batching)
    )
    return override_config(
        config,
        {"batching.boundaries": boundaries, "batching.num_buckets": len(boundaries)},
        source="boundaries",
    )


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
        shapes=in_warm_up_order(grouping.shapes),
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


def _read_only(array: IntArray) -> IntArray:
    array.setflags(write=False)
    return array

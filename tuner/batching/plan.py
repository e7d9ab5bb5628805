"""The plan of an epoch: which rows form which padded batch of which shape, in which order.

`plan_batches` is the only code that decides who is batched with whom. Simulation, trials and
training call it, so that a simulated padding figure is the trained one; a resumed run computes it
again; and every rank computes the same global plan and takes its own rows.

Invariants:
- every row of the set stands exactly once, or is counted in `dropped` under its reason;
- B * L is at most the token budget; L >= every row of the batch, and aligned;
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
from tuner.batching.grouping import FILLER, Grouping, IntArray, Shape
from tuner.batching.rows import AdmittedRows, admit_rows
from tuner.config.override import override_config
from tuner.config.schema import BatchingConfig, TrainConfig
from tuner.data.lengths import Lengths

Strategy = Callable[[IntArray, BatchingConfig, np.random.Generator, int], Grouping]

STRATEGIES: Mapping[str, Strategy] = {
    "fixed": group_fixed,
    "dynamic": group_dynamic,
    "bucketed": group_bucketed,
}


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """One step of one rank.

    Attributes:
        row_indices: int64 [B]; rows of the data set, -1 for filler rows.
        padded_length: L in tokens.
    """

    row_indices: IntArray
    padded_length: int

    @property
    def shape(self) -> Shape:
        """(B, L)."""
        return len(self.row_indices), self.padded_length


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """All steps of one epoch, for all ranks; arrays are read-only.

    Attributes:
        row_indices: int64 [sum of B * W]; rows of the data set, step after step; -1: filler.
        batch_sizes: int64 [S]; B, rows of one rank.
        padded_lengths: int64 [S]; L in tokens.
        real_tokens: int64 [S]; tokens of real rows over all ranks, after truncation.
        shapes: Every (B, L) of any epoch, most padded tokens first: the order of warm-up.
        num_samples: Rows of the data set.
        num_truncated: Rows cut to the limit.
        dropped: Reason -> rows left out.
        world_size: Ranks, W.
    """

    row_indices: IntArray
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
        ends = np.cumsum(self.batch_sizes * self.world_size)
        for step in range(start_step, self.num_steps):
            slots = self.batch_sizes[step] * self.world_size
            rows = self.row_indices[ends[step] - slots : ends[step]]
            # Strided, so that the fillers of a last batch are spread over the ranks.
            yield PlannedBatch(
                row_indices=rows[rank :: self.world_size],
                padded_length=int(self.padded_lengths[step]),
            )

    def shape_counts(self) -> dict[Shape, int]:
        """Steps of this epoch for each planned shape; shapes it does not meet count 0."""
        counts = dict.fromkeys(self.shapes, 0)
        pairs, steps = np.unique(
            np.stack([self.batch_sizes, self.padded_lengths]), axis=1, return_counts=True
        )
        for (size, length), count in zip(pairs.T.tolist(), steps.tolist(), strict=True):
            counts[size, length] = count
        return counts

    @property
    def fingerprint(self) -> str:
        """sha256 of the order, rows, their tokens after truncation, and shapes."""
        digest = hashlib.sha256(repr((self.world_size, self.shapes)).encode())
        steps = (self.batch_sizes, self.padded_lengths, self.real_tokens)
        for array in (self.row_indices, *steps):
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
    order = rng.permutation(len(grouping.batch_sizes))
    return _in_order(grouping, order, admitted, lengths.num_samples, world_size)


def resolve_boundaries(lengths: Lengths, config: TrainConfig) -> TrainConfig:
    """The same config with the boundaries it stands for written out; others are unchanged.

    Raises:
        BadInputError: as `plan_batches`.
    """
    if config.batching.strategy != "bucketed" or config.batching.boundaries:
        return config
    boundaries = choose_boundaries(_admit(lengths, config).tokens, config.batching)
    return override_config(
        config,
        {"batching.boundaries": boundaries, "batching.num_buckets": len(boundaries)},
        source="boundaries",
    )


def _admit(lengths: Lengths, config: TrainConfig) -> AdmittedRows:
    limits = [config.data.max_length]
    if config.batching.strategy == "bucketed" and config.batching.boundaries:
        limits.append(config.batching.boundaries[-1])
    known = [limit for limit in limits if limit is not None]
    return admit_rows(lengths.tokens, config.data, min(known) if known else None)


def _in_order(
    grouping: Grouping,
    order: IntArray,
    admitted: AdmittedRows,
    num_samples: int,
    world_size: int,
) -> BatchPlan:
    num_slots = grouping.batch_sizes * world_size
    starts = np.cumsum(num_slots) - num_slots
    slots = grouping.slots[_ranges(starts[order], num_slots[order])]
    is_row = slots != FILLER
    real = np.where(is_row, admitted.tokens[slots], 0)
    ends = np.cumsum(num_slots[order])
    running = np.concatenate(([0], np.cumsum(real)))[np.concatenate(([0], ends))]
    return BatchPlan(
        row_indices=_read_only(np.where(is_row, admitted.row_indices[slots], FILLER)),
        batch_sizes=_read_only(grouping.batch_sizes[order]),
        padded_lengths=_read_only(grouping.padded_lengths[order]),
        real_tokens=_read_only(np.diff(running)),
        shapes=tuple(sorted(grouping.shapes, key=_warm_up_order)),
        num_samples=num_samples,
        num_truncated=admitted.num_truncated,
        dropped=admitted.dropped,
        world_size=world_size,
    )


def _ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """Concatenation of start, start + 1, ... (count of them) for every pair."""
    ends = np.cumsum(counts)
    ranges: IntArray = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
    return ranges


def _warm_up_order(shape: Shape) -> tuple[int, int]:
    size, length = shape
    return -size * length, -length


def _read_only(array: IntArray) -> IntArray:
    array.setflags(write=False)
    return array

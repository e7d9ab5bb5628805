"""Plans of more rows than are planned at a time: rows are dealt to slabs, batches stay within one.

Every slab gets the same share of every length, the same number of rows of it in every epoch; which
rows is drawn anew, and so is the order of the slabs (slab_shares.py). So the steps of an epoch
and its shapes do not depend on the epoch, and all slabs have the batch sizes of the fullest.
Boundaries are solved for all rows together.

Of the whole set only the lengths, the slab of each row and what is counted of each step stay in
memory, about 7 bytes a row; the rows of a slab are planned when its first step is asked for, and
that takes about 90 bytes a row of the slab. Planning an epoch plans every slab once, for what is
counted of it, and taking its steps plans them again.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tuner.batching.align import align_length
from tuner.batching.epoch_plan import EpochPlan, PlannedBatch, in_warm_up_order
from tuner.batching.grouping import IntArray, Shape, sizes_of_batches, spread_rows
from tuner.batching.packed import pack_counts
from tuner.batching.rows import AdmittedRows, admitted_tokens, length_limit, rows_of_length
from tuner.batching.slab_shares import batching_of_slabs, count_slabs, deal_rows
from tuner.config.schema import BatchingConfig, TrainConfig
from tuner.data.lengths import Lengths

PlanRows = Callable[[AdmittedRows, BatchingConfig, Sequence[int], int, int], EpochPlan]


@dataclass(frozen=True, kw_only=True)
class SlabLoss:
    """What a plan in slabs costs against one of all rows together, counted from the histogram.

    Attributes:
        num_slabs: K.
        num_slots: Slots of all steps and ranks.
        extra_slots: Of these, how many more; all without a row unless rows are packed.
        extra_padded_fraction: Padded tokens more, as a share; None where that is chance: for
            `dynamic`, of a plan.
    """

    num_slabs: int
    num_slots: int
    extra_slots: int
    extra_padded_fraction: float | None

    @property
    def text(self) -> str:
        """In words, for people."""
        slots, padded = self.extra_slots, self.extra_padded_fraction
        line = (
            f"planned in {self.num_slabs} slabs: {abs(slots):,} rows {_compared(slots)} in all "
            f"batches ({abs(slots) / self.num_slots:.3%})"
        )
        if padded is None:
            return f"{line} than in one plan"
        return f"{line} and {abs(padded):.3%} {_compared(padded)} padded tokens than in one plan"


def _compared(difference: float) -> str:
    return "fewer" if difference < 0 else "more"


@dataclass(frozen=True, kw_only=True)
class SlabPlan(EpochPlan):
    """A plan whose rows are planned slab by slab.

    Attributes:
        steps_of_slab: int64 [K]; steps of each slab, in their order.
        plan_slab: Plans the rows of the slab that is taken as the k-th, k in [0, K).
        fillers: Slots without a row.
        digest: Of the plans of all slabs, in their order.
        loss: Against a plan of all rows together.
    """

    steps_of_slab: IntArray
    plan_slab: Callable[[int], EpochPlan]
    fillers: int
    digest: str
    loss: SlabLoss

    def steps_of_rank(self, rank: int, start_step: int = 0) -> Iterator[PlannedBatch]:
        """As every plan has them; a slab is planned when its first step is asked for."""
        ends = np.cumsum(self.steps_of_slab)
        for slab, (end, steps) in enumerate(
            zip(ends.tolist(), self.steps_of_slab.tolist(), strict=True)
        ):
            if start_step < end:
                first = max(0, start_step - (end - steps))
                yield from self.plan_slab(slab).steps_of_rank(rank, first)

    @property
    def num_fillers(self) -> int:
        """Slots without a row over all ranks."""
        return self.fillers

    @property
    def fingerprint(self) -> str:
        """sha256 over the fingerprints of all slabs."""
        return self.digest


def plan_in_slabs(
    lengths: Lengths,
    config: TrainConfig,
    epoch: int,
    world_size: int,
    plan_rows: PlanRows,
) -> SlabPlan | None:
    """Plan one epoch slab by slab; None if the rows that are batched fit into one.

    Args:
        lengths: Of every row of the set.
        config: Sections `data` and `batching` decide.
        epoch: >= 0.
        world_size: Ranks, >= 1.
        plan_rows: Plans the rows of a slab.

    Raises:
        BadInputError: as `plan_batches`.
    """
    tokens, num_truncated, dropped = admitted_tokens(lengths, config.data, length_limit(config))
    num_slabs = count_slabs(int(np.count_nonzero(tokens)), config.batching)
    if num_slabs < 2:
        return None
    totals = rows_of_length(tokens)
    batching = batching_of_slabs(totals, num_slabs, config.batching, world_size)
    seeds = [config.batching.seed, epoch]
    slab_of_row = deal_rows(tokens, num_slabs, seeds)
    # Rare lengths are always in the same slabs: so that these come at any time of an epoch.
    order = np.random.default_rng([*seeds, 0]).permutation(num_slabs)

    def plan_slab(place: int) -> EpochPlan:
        slab = int(order[place])
        rows = np.flatnonzero(slab_of_row == slab)
        admitted = AdmittedRows(
            row_indices=rows,
            tokens=tokens[rows].astype(np.int64),
            num_truncated=0,
            dropped={},
        )
        return plan_rows(admitted, batching, [*seeds, slab + 1], lengths.num_samples, world_size)

    counted = _count_slabs(plan_slab, num_slabs)
    return SlabPlan(
        batch_sizes=counted.batch_sizes,
        padded_lengths=counted.padded_lengths,
        real_tokens=counted.real_tokens,
        shapes=counted.shapes,
        num_samples=lengths.num_samples,
        num_truncated=num_truncated,
        dropped=dropped,
        world_size=world_size,
        steps_of_slab=counted.steps_of_slab,
        plan_slab=plan_slab,
        fillers=counted.fillers,
        digest=counted.digest,
        loss=_loss(counted, totals, config.batching, batching.boundaries, world_size),
    )


@dataclass(frozen=True, kw_only=True)
class _Counted:
    """What is kept of the plans of all slabs; fields as of SlabPlan."""

    batch_sizes: IntArray
    padded_lengths: IntArray
    real_tokens: IntArray
    shapes: tuple[Shape, ...]
    steps_of_slab: IntArray
    fillers: int
    digest: str


def _count_slabs(plan_slab: Callable[[int], EpochPlan], num_slabs: int) -> _Counted:
    """Plan every slab once, one at a time."""
    sizes, padded, real, steps = [], [], [], []
    shapes: set[Shape] = set()
    digest = hashlib.sha256(f"slabs {num_slabs}".encode())
    fillers = 0
    for slab in range(num_slabs):
        plan = plan_slab(slab)
        sizes.append(plan.batch_sizes)
        padded.append(plan.padded_lengths)
        real.append(plan.real_tokens)
        steps.append(plan.num_steps)
        shapes |= set(plan.shapes)
        fillers += plan.num_fillers
        digest.update(plan.fingerprint.encode())
        del plan  # before the next one is in memory too
    return _Counted(
        batch_sizes=_joined(sizes),
        padded_lengths=_joined(padded),
        real_tokens=_joined(real),
        shapes=in_warm_up_order(shapes),
        steps_of_slab=np.array(steps),
        fillers=fillers,
        digest=digest.hexdigest(),
    )


def _joined(parts: list[IntArray]) -> IntArray:
    """In one array; the list is emptied, so that no part is in memory twice for long."""
    joined: IntArray = np.concatenate(parts)
    parts.clear()
    joined.setflags(write=False)
    return joined


def _loss(
    counted: _Counted,
    totals: IntArray,
    batching: BatchingConfig,
    boundaries: Sequence[int],
    world_size: int,
) -> SlabLoss:
    """Against a plan of all rows, whose slots follow from the rows of every length."""
    num_slots = int(counted.batch_sizes.sum()) * world_size
    lengths = np.flatnonzero(totals[1:]) + 1
    counts = totals[lengths]
    extra_padded_fraction: float | None = None
    if batching.strategy == "dynamic":
        longest = align_length(int(lengths[-1]), batching.align)
        whole = [_slots(int(counts.sum()), longest, None, batching, world_size)]
    else:
        whole = [
            _slots(num_rows, boundaries[entry], entry, batching, world_size) if num_rows else 0
            for entry, num_rows in enumerate(_rows_of_entry(lengths, counts, batching, boundaries))
        ]
        padded = int(np.dot(counted.batch_sizes, counted.padded_lengths)) * world_size
        extra_padded_fraction = padded / sum(map(operator.mul, whole, boundaries)) - 1.0
    return SlabLoss(
        num_slabs=len(counted.steps_of_slab),
        num_slots=num_slots,
        extra_slots=num_slots - sum(whole),
        extra_padded_fraction=extra_padded_fraction,
    )


def _rows_of_entry(
    lengths: IntArray, counts: IntArray, batching: BatchingConfig, boundaries: Sequence[int]
) -> list[int]:
    """Rows, or packed rows, of each padded length."""
    if batching.strategy == "packed":
        rows = pack_counts(lengths, counts, boundaries).num_rows
    else:
        rows = np.zeros(len(boundaries), dtype=np.int64)
        np.add.at(rows, np.searchsorted(np.array(boundaries), lengths), counts)
    return [int(num_rows) for num_rows in rows]


def _slots(
    num_rows: int, length: int, entry: int | None, batching: BatchingConfig, world_size: int
) -> int:
    """Slots of rows of one padded length in a plan without slabs, over all ranks."""
    if entry is not None and batching.batch_sizes:
        most = batching.batch_sizes[entry]
    else:
        most = spread_rows(num_rows, length, batching, world_size)
    return int(sizes_of_batches(num_rows, most, batching, world_size).sum()) * world_size

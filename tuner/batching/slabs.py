"""Plans of more rows than are planned at a time: rows are dealt to slabs, batches stay within one.

Every slab gets the same share of every length, the same number of rows of it in every epoch; which
rows is drawn anew. So the steps of an epoch and its shapes do not depend on the epoch, and all
slabs have the batch sizes of the fullest. Boundaries are solved for all rows together.

Of the whole set only the lengths, the slab of each row and what is counted of each step stay in
memory, about 7 bytes a row; the rows of a slab are planned when its first step is asked for, and
that takes about 90 bytes a row of the slab. Planning an epoch plans every slab once, for what is
counted of it, and taking its steps plans them again.

Dealing is by blocks: the rows of one length, in the order of the set, are taken as many at a time
as there are slabs, and each block is dealt once around from a slab that a hash of (seed, epoch,
length, block) draws.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.batching.align import align_length
from tuner.batching.bucketed import choose_boundaries
from tuner.batching.epoch_plan import EpochPlan, PlannedBatch, in_warm_up_order
from tuner.batching.grouping import IntArray, Shape, sizes_of_batches, spread_rows
from tuner.batching.packed import pack_counts, packed_lengths
from tuner.batching.rows import AdmittedRows, judge_rows
from tuner.config.schema import BatchingConfig, TrainConfig
from tuner.data.lengths import Lengths

PlanRows = Callable[[AdmittedRows, BatchingConfig, Sequence[int], int, int], EpochPlan]

ROWS_AT_A_TIME = 1_000_000
NO_SLAB = np.iinfo(np.uint16).max
# Odd numbers of many bits; see Steele, Lea, Flood, "Fast splittable pseudorandom number
# generators" (2014), whose mixing function this is.
_GOLDEN, _MIX_1, _MIX_2 = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


@dataclass(frozen=True, kw_only=True)
class SlabLoss:
    """What a plan in slabs costs against one of all rows together, counted from the histogram.

    Attributes:
        extra_slots: Slots more, all of them without a row unless rows are packed.
        extra_padded_fraction: Padded tokens more, as a share; None for `dynamic`, whose padding
            without slabs is chance.
    """

    extra_slots: int
    extra_padded_fraction: float | None


@dataclass(frozen=True, kw_only=True)
class SlabPlan(EpochPlan):
    """A plan whose rows are planned slab by slab.

    Attributes:
        steps_of_slab: int64 [K]; steps of each slab, in their order.
        plan_slab: Plans the rows of slab k in [0, K).
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
    limit: int | None,
) -> SlabPlan | None:
    """Plan one epoch slab by slab; None if the rows that are batched fit into one.

    Args:
        lengths: Of every row of the set.
        config: Sections `data` and `batching` decide.
        epoch: >= 0.
        world_size: Ranks, >= 1.
        plan_rows: Plans the rows of a slab.
        limit: Longest admitted length in tokens; None: any.

    Raises:
        BadInputError: as `plan_batches`.
    """
    is_kept, num_truncated, dropped = judge_rows(lengths, config.data, limit)
    num_rows = int(is_kept.sum())
    num_slabs = -(-num_rows // config.batching.rows_per_slab)
    if num_slabs < 2:
        return None
    tokens = lengths.tokens if limit is None else np.minimum(lengths.tokens, limit)
    tokens = np.where(is_kept, tokens, 0).astype(np.int32)
    seed = config.batching.seed
    slab_of_row = deal_rows(tokens, num_slabs, [seed, epoch])
    batching = _batching_of_slabs(tokens, num_slabs, config.batching, world_size)

    def plan_slab(slab: int) -> EpochPlan:
        rows = np.flatnonzero(slab_of_row == slab)
        admitted = AdmittedRows(
            row_indices=rows,
            tokens=tokens[rows].astype(np.int64),
            num_truncated=0,
            dropped={},
        )
        seeds = [seed, epoch, slab + 1]
        return plan_rows(admitted, batching, seeds, lengths.num_samples, world_size)

    counted = _count_slabs(plan_slab, num_slabs)
    totals = _rows_of_length(tokens)
    return dataclasses.replace(
        counted,
        loss=_loss(counted, totals, config.batching, batching.boundaries, world_size),
        num_samples=lengths.num_samples,
        num_truncated=num_truncated,
        dropped=dropped,
        world_size=world_size,
    )


def deal_rows(
    tokens: NDArray[np.int32], num_slabs: int, seeds: Sequence[int]
) -> NDArray[np.uint16]:
    """The slab of every row; NO_SLAB for rows of no tokens.

    Args:
        tokens: int32 [N], lengths in tokens; 0: the row is not batched.
        num_slabs: K, in [2, NO_SLAB).
        seeds: Of the draw.
    """
    totals = _rows_of_length(tokens)
    first_of_rest = _first_slab_of_rest(totals, num_slabs)
    key = np.random.SeedSequence(list(seeds)).generate_state(1, np.uint64)[0]
    seen = np.zeros_like(totals)
    slabs = np.full(len(tokens), NO_SLAB, dtype=np.uint16)
    for start in range(0, len(tokens), ROWS_AT_A_TIME):
        some = tokens[start : start + ROWS_AT_A_TIME]
        block, place = np.divmod(seen[some] + _ordinals(some), num_slabs)
        seen += np.bincount(some, minlength=len(seen))
        # The last block of a length is short: the slabs that get one more are always the same.
        is_rest = block == totals[some] // num_slabs
        around = np.where(is_rest, totals[some] % num_slabs, num_slabs)
        shift = (_hashes(some, block, key) % around.astype(np.uint64)).astype(np.int64)
        dealt = (place + shift) % around + np.where(is_rest, first_of_rest[some], 0)
        is_batched = some > 0
        slabs[start : start + len(some)][is_batched] = (dealt % num_slabs)[is_batched]
    return slabs


def _rows_of_length(tokens: NDArray[np.int32]) -> IntArray:
    """int64 [longest + 1]; counted some at a time, since bincount makes int64 of them."""
    counts = np.zeros(int(tokens.max(initial=0)) + 1, dtype=np.int64)
    for start in range(0, len(tokens), ROWS_AT_A_TIME):
        counts += np.bincount(tokens[start : start + ROWS_AT_A_TIME], minlength=len(counts))
    return counts


def _first_slab_of_rest(totals: IntArray, num_slabs: int) -> IntArray:
    """Where the rest of each length starts: behind that of the length before, round the slabs."""
    rest = totals % num_slabs
    rest[0] = 0
    first: IntArray = (np.cumsum(rest) - rest) % num_slabs
    return first


def _ordinals(some: NDArray[np.int32]) -> IntArray:
    """For each entry how many equal ones stand before it, int64."""
    order = np.argsort(some, kind="stable")
    _, sizes = np.unique(some[order], return_counts=True)
    ordinals = np.empty(len(some), dtype=np.int64)
    ordinals[order] = np.arange(len(some)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return ordinals


def _hashes(some: NDArray[np.int32], block: IntArray, key: np.uint64) -> NDArray[np.uint64]:
    mixed = key + _GOLDEN * (some.astype(np.uint64) + (block.astype(np.uint64) << np.uint64(32)))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    hashes: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return hashes


def rows_of_slabs(totals: IntArray, num_slabs: int) -> IntArray:
    """Rows of every length in every slab, int64 [K, longest + 1], as `deal_rows` deals them."""
    table = np.tile(totals // num_slabs, (num_slabs, 1))
    first, rest = _first_slab_of_rest(totals, num_slabs), totals % num_slabs
    for place in range(num_slabs - 1):
        longer = np.flatnonzero(rest > place)
        table[(first[longer] + place) % num_slabs, longer] += 1
    table[:, 0] = 0
    return table


def _batching_of_slabs(
    tokens: NDArray[np.int32], num_slabs: int, batching: BatchingConfig, world_size: int
) -> BatchingConfig:
    """The same batching with lengths and batch sizes that hold for every slab."""
    totals = _rows_of_length(tokens)
    table = rows_of_slabs(totals, num_slabs)
    longest = align_length(len(totals) - 1, batching.align)
    fullest = int(table.sum(axis=1).max())
    if batching.strategy == "dynamic":
        size = spread_rows(fullest, longest, batching, world_size)
        return _with_sizes(batching, samples_per_batch=size)
    # One bucket is what `fixed` is.
    boundaries: tuple[int, ...] = (longest,)
    most_rows = np.array([fullest])
    if batching.strategy == "bucketed":
        boundaries = choose_boundaries(tokens[tokens > 0].astype(np.int64), batching)
        bucket = np.searchsorted(np.array(boundaries), np.arange(len(totals)))
        starts = np.searchsorted(bucket, np.arange(len(boundaries)))
        sums = np.add.reduceat(np.pad(table, ((0, 0), (0, 1))), starts, axis=1)
        most_rows = np.where(np.isin(np.arange(len(boundaries)), bucket), sums.max(axis=0), 0)
    elif batching.strategy == "packed":
        boundaries = packed_lengths(np.array([len(totals) - 1]), batching)
        most_rows = np.max([_packed_rows(counts, boundaries) for counts in table], axis=0)
    sizes = batching.batch_sizes or tuple(
        spread_rows(max(1, rows), length, batching, world_size)
        for rows, length in zip(most_rows.tolist(), boundaries, strict=True)
    )
    return _with_sizes(
        batching,
        strategy="packed" if batching.strategy == "packed" else "bucketed",
        boundaries=boundaries,
        batch_sizes=sizes,
    )


def _with_sizes(batching: BatchingConfig, **changes: object) -> BatchingConfig:
    none = {"tokens_per_batch": None, "samples_per_batch": None}
    return batching.model_copy(update={**none, **changes})


def _packed_rows(counts: IntArray, boundaries: Sequence[int]) -> IntArray:
    lengths = np.flatnonzero(counts)
    return pack_counts(lengths, counts[lengths], boundaries).num_rows


def _count_slabs(plan_slab: Callable[[int], EpochPlan], num_slabs: int) -> SlabPlan:
    """Plan every slab once, one at a time, and keep what is counted of it."""
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
    arrays = [np.concatenate(parts) for parts in (sizes, padded, real)]
    for array in arrays:
        array.setflags(write=False)
    return SlabPlan(
        batch_sizes=arrays[0],
        padded_lengths=arrays[1],
        real_tokens=arrays[2],
        shapes=in_warm_up_order(shapes),
        num_samples=0,
        num_truncated=0,
        dropped={},
        world_size=1,
        steps_of_slab=np.array(steps),
        plan_slab=plan_slab,
        fillers=fillers,
        digest=digest.hexdigest(),
        loss=SlabLoss(extra_slots=0, extra_padded_fraction=None),
    )


def _loss(
    plan: SlabPlan,
    totals: IntArray,
    batching: BatchingConfig,
    boundaries: Sequence[int],
    world_size: int,
) -> SlabLoss:
    slots = int(plan.batch_sizes.sum()) * world_size
    lengths = np.flatnonzero(totals[1:]) + 1
    counts = totals[lengths]
    if batching.strategy == "dynamic":
        longest = align_length(int(lengths[-1]), batching.align)
        whole = _slots(int(counts.sum()), longest, None, batching, world_size)
        return SlabLoss(extra_slots=slots - whole, extra_padded_fraction=None)
    if batching.strategy == "packed":
        rows = pack_counts(lengths, counts, boundaries).num_rows
    else:
        bucket = np.searchsorted(np.array(boundaries), lengths)
        rows = np.bincount(bucket, weights=counts, minlength=len(boundaries)).astype(np.int64)
    slots_of_entry = [
        _slots(num_rows, boundaries[entry], entry, batching, world_size) if num_rows else 0
        for entry, num_rows in enumerate(rows.tolist())
    ]
    padded = int((plan.batch_sizes * plan.padded_lengths).sum()) * world_size
    whole_padded = sum(map(operator.mul, slots_of_entry, boundaries))
    return SlabLoss(
        extra_slots=slots - sum(slots_of_entry),
        extra_padded_fraction=padded / whole_padded - 1.0,
    )


def _slots(
    num_rows: int, length: int, entry: int | None, batching: BatchingConfig, world_size: int
) -> int:
    """Slots of rows of one padded length in a plan without slabs, over all ranks."""
    if entry is not None and batching.batch_sizes:
        most = batching.batch_sizes[entry]
    else:
        most = spread_rows(num_rows, length, batching, world_size)
    return int(sizes_of_batches(num_rows, most, batching, world_size).sum()) * world_size

"""Which rows a slab gets, and the lengths and batch sizes that hold for all slabs.

Dealing is by blocks: the rows of one length, in the order of the set, are taken as many at a time
as there are slabs, and each block is dealt once around from a slab that a hash of (seed, epoch,
length, block) draws. The last block of a length is short; which slabs get a row of it is the same
in every epoch, and goes on where that of the length before ended. So every slab has as many rows
of every length in every epoch, and all slabs have as many rows to within one.

K slabs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.batching.align import align_length
from tuner.batching.bucketed import choose_boundaries
from tuner.batching.grouping import IntArray, spread_rows
from tuner.batching.packed import pack_counts, packed_lengths
from tuner.batching.rows import ROWS_AT_A_TIME, rows_of_length
from tuner.config.schema import BatchingConfig
from tuner.errors import BadInputError

MAX_SLABS = 1_000
NO_SLAB = np.iinfo(np.uint16).max
# Odd numbers of many bits; see Steele, Lea, Flood, "Fast splittable pseudorandom number
# generators" (2014), whose mixing function this is.
_GOLDEN, _MIX_1, _MIX_2 = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


def count_slabs(num_rows: int, batching: BatchingConfig) -> int:
    """Slabs of so many batched rows; 1: they are planned together.

    Raises:
        BadInputError: there would be more than MAX_SLABS.
    """
    num_slabs = -(-num_rows // batching.rows_per_slab)
    if num_slabs > MAX_SLABS:
        raise BadInputError(
            f"batching.rows_per_slab must leave at most {MAX_SLABS:,} slabs (got "
            f"{batching.rows_per_slab}, which makes {num_slabs:,} of {num_rows} rows)",
            fix=f"raise it to {-(-num_rows // MAX_SLABS)} or more",
        )
    return num_slabs


def deal_rows(
    tokens: NDArray[np.int32], num_slabs: int, seeds: Sequence[int]
) -> NDArray[np.uint16]:
    """The slab of every row; NO_SLAB for rows of no tokens.

    Args:
        tokens: int32 [N], lengths in tokens; 0: the row is not batched.
        num_slabs: K, in [2, NO_SLAB).
        seeds: Of the draw.
    """
    totals = rows_of_length(tokens)
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


def batching_of_slabs(
    totals: IntArray, num_slabs: int, batching: BatchingConfig, world_size: int
) -> BatchingConfig:
    """The same batching with lengths and batch sizes that hold for every slab.

    Boundaries are solved for all rows together; sizes are those of the fullest slab. `fixed` is
    written as one bucket.

    Args:
        totals: int64 [longest + 1], rows of every length; entry 0 does not count.
        num_slabs: K >= 2.
        batching: As configured.
        world_size: Ranks, >= 1.

    Raises:
        BadInputError: one padded row is over the token budget.
    """
    table = rows_of_slabs(totals, num_slabs)
    longest = align_length(len(totals) - 1, batching.align)
    fullest = int(table.sum(axis=1).max())
    if batching.strategy == "dynamic":
        size = spread_rows(fullest, longest, batching, world_size)
        return _with_sizes(batching, samples_per_batch=size)
    boundaries: tuple[int, ...] = (longest,)
    most_rows: IntArray = np.array([fullest])
    if batching.strategy == "bucketed":
        lengths = np.flatnonzero(totals[1:]) + 1
        boundaries = choose_boundaries(lengths, batching, totals[lengths])
        most_rows = _most_rows(table, boundaries)
    elif batching.strategy == "packed":
        boundaries = packed_lengths(np.array([len(totals) - 1]), batching)
        most_rows = np.max([_packed_rows(counts, boundaries) for counts in table], axis=0)
    # A boundary that no row goes to may be over the budget.
    sizes = batching.batch_sizes or tuple(
        spread_rows(rows, length, batching, world_size) if rows else 1
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


def _most_rows(table: IntArray, boundaries: Sequence[int]) -> IntArray:
    """Rows of each bucket in the slab that has the most of them, int64 [number of buckets]."""
    bucket = np.searchsorted(np.array(boundaries), np.arange(table.shape[1]))
    most: IntArray = np.max(
        [np.bincount(bucket, weights=counts, minlength=len(boundaries)) for counts in table],
        axis=0,
    ).astype(np.int64)
    return most


def _packed_rows(counts: IntArray, boundaries: Sequence[int]) -> IntArray:
    lengths = np.flatnonzero(counts)
    return pack_counts(lengths, counts[lengths], boundaries).num_rows

"""Rows in slots of batches: what every strategy returns, and the filling of length buckets.

A global batch has B slots for each of W ranks, B * W in all. A slot holds one row of the data set,
or several (packed), or none: a filler, whose labels are all ignored. So a bucket's last batch has
the shape of the others, and no extra shape is born in any epoch. Where a further shape costs
nothing (one dynamic graph), B may differ by one instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.batching.order import shuffle_in_blocks
from tuner.config.schema import BatchingConfig
from tuner.errors import BadInputError

IntArray = NDArray[np.int64]

Shape = tuple[int, int]
"""(B, L): rows of one rank, padded tokens of a row."""


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """Batches of an epoch, and their order.

    Attributes:
        rows: int64 [M]; positions in the admitted rows, slot after slot, each once.
        rows_per_slot: int64 [sum of B * W]; 0: filler.
        batch_sizes: int64 [S]; B, slots of one rank.
        padded_lengths: int64 [S]; L in tokens.
        order: int64 [S]; the batch of each step.
        shapes: Every (B, L) that any epoch of this plan can have.
    """

    rows: IntArray
    rows_per_slot: IntArray
    batch_sizes: IntArray
    padded_lengths: IntArray
    order: IntArray
    shapes: frozenset[Shape]


def rows_per_batch(batching: BatchingConfig, padded_length: int) -> int:
    """The largest B for a padded length under the config's budget or sample count, >= 1.

    Raises:
        BadInputError: one padded row is over the token budget.
    """
    if batching.samples_per_batch is not None:
        return batching.samples_per_batch
    budget = batching.tokens_per_batch or 0
    if padded_length > budget:
        raise BadInputError(
            "batching.tokens_per_batch must be at least the longest padded row "
            f"(got {budget}, the longest is {padded_length} tokens)",
            fix=f"raise it to {padded_length} or lower data.max_length",
        )
    return budget // padded_length


def fill_buckets(
    tokens: IntArray,
    boundaries: IntArray,
    batching: BatchingConfig,
    rng: np.random.Generator,
    world_size: int,
) -> Grouping:
    """Put every row into the bucket of the first boundary >= its length, in random order.

    Args:
        tokens: int64 [M], lengths in tokens, each <= the last boundary.
        boundaries: int64 [K], padded lengths in tokens, strictly rising.
        batching: Gives the batch size of each bucket.
        rng: Source of the order, inside buckets and of batches.
        world_size: Ranks, W >= 1.
    """
    bucket_of_row = np.searchsorted(boundaries, tokens, side="left").astype(np.int32)
    shuffled = rng.permutation(len(tokens))
    by_bucket = shuffled[np.argsort(bucket_of_row[shuffled], kind="stable")]
    counts = np.bincount(bucket_of_row, minlength=len(boundaries))
    rows_per_slot, batch_sizes, padded_lengths = [], [], []
    for index in np.flatnonzero(counts).tolist():
        num_rows, length = int(counts[index]), int(boundaries[index])
        most = bucket_batch_size(index, num_rows, length, batching, world_size)
        batch_sizes.append(sizes_of_batches(num_rows, most, batching, world_size))
        rows_per_slot.append(fill_slots(num_rows, int(batch_sizes[-1].sum()) * world_size))
        padded_lengths.append(np.full(len(batch_sizes[-1]), length))
    sizes, lengths = np.concatenate(batch_sizes), np.concatenate(padded_lengths)
    return Grouping(
        rows=by_bucket,
        rows_per_slot=np.concatenate(rows_per_slot),
        batch_sizes=sizes,
        padded_lengths=lengths,
        order=shuffle_in_blocks(lengths, rng),
        shapes=frozenset(zip(sizes.tolist(), lengths.tolist(), strict=True)),
    )


def fill_slots(num_rows: int, num_slots: int) -> IntArray:
    """Rows in each slot: 1 as far as the rows go, then 0; int64 [num_slots]."""
    return (np.arange(num_slots) < num_rows).astype(np.int64)


def sizes_of_batches(
    num_rows: int, most: int, batching: BatchingConfig, world_size: int
) -> IntArray:
    """B of every batch of the rows of one padded length; int64.

    Args:
        num_rows: Rows, >= 1.
        most: The largest B, as `bucket_batch_size` gives it.
        batching: Says whether all have that one, or sizes that differ by one and leave at most
            world_size - 1 slots empty.
        world_size: Ranks, >= 1.
    """
    num_batches = -(-num_rows // (most * world_size))
    if batching.one_size_per_length:
        return np.full(num_batches, most)
    least, num_larger = divmod(-(-num_rows // world_size), num_batches)
    return np.repeat([least + 1, least], [num_larger, num_batches - num_larger])


def bucket_batch_size(
    index: int, num_rows: int, padded_length: int, batching: BatchingConfig, world_size: int
) -> int:
    """B of a bucket: the explicit size of its boundary, or its rows spread evenly.

    Args:
        index: Of its boundary.
        num_rows: Rows of the bucket, >= 1.
        padded_length: Its boundary in tokens.
        batching: Gives the sizes.
        world_size: Ranks, >= 1.

    Raises:
        BadInputError: one padded row is over the token budget.
    """
    if batching.batch_sizes:
        return batching.batch_sizes[index]
    return spread_rows(num_rows, padded_length, batching, world_size)


def spread_rows(
    num_rows: int, padded_length: int, batching: BatchingConfig, world_size: int
) -> int:
    """B for so many rows of a padded length; under a token budget they are spread evenly.

    100 rows at a budget of 64 make two batches of 50, not 64 and 36 with 28 fillers: the number of
    batches stays, the padding of the last one goes.

    Raises:
        BadInputError: one padded row is over the token budget.
    """
    most = rows_per_batch(batching, padded_length)
    if batching.samples_per_batch is not None:
        return most
    num_batches = -(-num_rows // (most * world_size))
    return -(-num_rows // (num_batches * world_size))

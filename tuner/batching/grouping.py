"""Rows in slots of batches: what every strategy returns, and the filling of length buckets.

A global batch has B rows for each of W ranks, B * W slots; slots without a row hold -1 and become
rows whose labels are all ignored. So a bucket's last batch has the shape of the others, and no
extra shape is born in any epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.config.schema import BatchingConfig
from tuner.errors import BadInputError

IntArray = NDArray[np.int64]
FILLER = -1

Shape = tuple[int, int]
"""(B, L): rows of one rank, padded tokens of a row."""


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """Batches of an epoch before they are put in order.

    Attributes:
        slots: int64 [sum of B * W]; positions in the admitted rows, batch after batch; -1: filler.
        batch_sizes: int64 [S]; B, rows of one rank.
        padded_lengths: int64 [S]; L in tokens.
        shapes: Every (B, L) that any epoch of this plan can have.
    """

    slots: IntArray
    batch_sizes: IntArray
    padded_lengths: IntArray
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
        rng: Source of the order inside buckets.
        world_size: Ranks, W >= 1.
    """
    bucket_of_row = np.searchsorted(boundaries, tokens, side="left").astype(np.int32)
    shuffled = rng.permutation(len(tokens))
    by_bucket = shuffled[np.argsort(bucket_of_row[shuffled], kind="stable")]
    counts = np.bincount(bucket_of_row, minlength=len(boundaries))
    in_bucket = np.split(by_bucket, np.cumsum(counts)[:-1])
    slots, batch_sizes, padded_lengths = [], [], []
    for index, rows in enumerate(in_bucket):
        if not len(rows):
            continue
        length = int(boundaries[index])
        size = (
            batching.batch_sizes[index]
            if batching.batch_sizes
            else spread_rows(len(rows), length, batching, world_size)
        )
        slots.append(pad_slots(rows, size * world_size))
        num_batches = len(slots[-1]) // (size * world_size)
        batch_sizes.append(np.full(num_batches, size))
        padded_lengths.append(np.full(num_batches, length))
    sizes, lengths = np.concatenate(batch_sizes), np.concatenate(padded_lengths)
    return Grouping(
        slots=np.concatenate(slots),
        batch_sizes=sizes,
        padded_lengths=lengths,
        shapes=frozenset(zip(sizes.tolist(), lengths.tolist(), strict=True)),
    )


def pad_slots(rows: IntArray, rows_per_global_batch: int) -> IntArray:
    """Rows followed by fillers up to a whole number of global batches."""
    num_slots = -(-len(rows) // rows_per_global_batch) * rows_per_global_batch
    slots = np.full(num_slots, FILLER, dtype=np.int64)
    slots[: len(rows)] = rows
    return slots


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

"""The largest batch of every bucket that fits in memory, by real steps, largest bucket first.

For each bucket the batch size is bisected with a fresh process a try: forward, backward and
update at the full shape, so that a try that dies is a value and none finds the buffers of another.
Static graphs keep their buffers, so the room of all is shared out: a bucket may take an equal part
of what those before it have left. One dynamic graph takes its largest shape's buffers alone: every
bucket may take all. The first try is what the fitted memory foretells, so that a few tries do
(compare NeMo's OOMptimizer, which doubles and bisects in one process from the same start).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tuner.batching.grouping import Shape

CLOSE_ENOUGH = 0.05
"""Share of the batch size to which its limit is found."""

Probe = Callable[[Shape], int | None]
"""(B, L) -> bytes that the shape added to a process of its own; None if it died for memory."""


@dataclass(frozen=True, kw_only=True)
class FilledBucket:
    """What was found for one bucket.

    Attributes:
        padded_length: L in tokens.
        batch_size: Largest B that fits in its room, at most the rows there are; 0: not one row.
        added_bytes: Measured at that B.
        num_tries: Processes that it took.
    """

    padded_length: int
    batch_size: int
    added_bytes: int
    num_tries: int


@dataclass(frozen=True, kw_only=True)
class Room:
    """The memory that shapes may take.

    Attributes:
        bytes_for_shapes: Limit less the process without a shape.
        is_shared_out: Every shape keeps its buffers; False: the largest takes all.
    """

    bytes_for_shapes: int
    is_shared_out: bool


def fill_buckets_to(
    room: Room, max_batch: Sequence[Shape], guess: Callable[[Shape], float], probe: Probe
) -> tuple[FilledBucket, ...]:
    """Find the batch size of every bucket.

    Args:
        room: What there is.
        max_batch: (largest B, L) of each bucket, longest first.
        guess: Estimated bytes that a shape adds, > 0.
        probe: Measures them.

    Returns:
        A bucket each, longest first.
    """
    left = room.bytes_for_shapes
    found: list[FilledBucket] = []
    for index, (most, length) in enumerate(max_batch):
        share = left // (len(max_batch) - index) if room.is_shared_out else left
        filled = _fill(length, most, share, guess, probe)
        found.append(filled)
        if room.is_shared_out:
            left -= filled.added_bytes
    return tuple(found)


def _fill(
    length: int, most: int, share: int, guess: Callable[[Shape], float], probe: Probe
) -> FilledBucket:
    """Narrow down between a B that fits and one that does not."""
    fits, fits_bytes, too_many, tries = 0, 0, most + 1, 0
    size = _clamp(int(share / max(guess((1, length)), 1.0)), 1, most)
    while too_many - fits > max(1.0, CLOSE_ENOUGH * fits):
        added = probe((size, length))
        tries += 1
        if added is None or added > share:
            too_many = size
        else:
            fits, fits_bytes = size, added
        # In proportion to what was measured; where that leads out of what is open, the middle.
        aimed = int(fits * share / fits_bytes) if fits_bytes else 0
        size = aimed if fits < aimed < too_many else (fits + too_many) // 2
        size = _clamp(size, fits + 1, max(fits + 1, too_many - 1))
    return FilledBucket(
        padded_length=length, batch_size=fits, added_bytes=fits_bytes, num_tries=tries
    )


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))

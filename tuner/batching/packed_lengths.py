"""Lengths of packed rows that make a run short: for one length, for two, and so on.

One length packs fullest, but short samples then pay the attention of long rows; each further
length costs a compile. For K lengths the last is the longest sample; the others are chosen one
after the other from candidates in steps of a third of an octave, each the one that makes the run
shortest beside those that are there, and then moved one at a time as long as that makes it
shorter. The rows are packed for every try, so what is compared are whole steps and exact counts:
some hundred packings for four lengths, a few milliseconds each. No move of one length improves
what is found; it is within 3 % of trying all (tests/batching/test_packed_lengths.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from tuner.batching.align import align_length
from tuner.batching.bucket_time import BucketTime, RunCost
from tuner.batching.grouping import IntArray
from tuner.batching.packed import pack_counts
from tuner.config.schema import BatchingConfig

STEPS_AN_OCTAVE = 3
OCTAVES = 4
"""Rows shorter than a sixteenth of the longest sample would hold a sample or two."""


def solve_packed_lengths(
    lengths: IntArray, counts: IntArray, batching: BatchingConfig, cost: RunCost, max_lengths: int
) -> tuple[tuple[int, ...], ...]:
    """Row lengths for every number of them up to a largest.

    Args:
        lengths: int64 [U], tokens of samples, strictly rising.
        counts: int64 [U], samples of each length, > 0.
        batching: Alignment, and a token budget or a sample count.
        cost: Seconds of steps and compiles.
        max_lengths: >= 1.

    Returns:
        Entry K-1: K lengths in tokens, rising; fewer entries where no further length is left.

    Raises:
        BadInputError: the longest padded row is over the token budget.
    """
    longest = align_length(int(lengths[-1]), batching.align)
    candidates = _candidates(longest, batching)

    @functools.cache
    def run_s(tried: tuple[int, ...]) -> float:
        return packed_run_s(lengths, counts, tried, batching, cost)

    chosen: tuple[int, ...] = (longest,)
    found = [chosen]
    # Refuses a budget under the longest row before anything is compared.
    run_s(chosen)
    while len(found) < max_lengths and set(candidates) - set(chosen):
        chosen = min(_with_another(chosen, candidates), key=run_s)
        while (moved := min(_with_one_moved(chosen, candidates), key=run_s)) != chosen:
            if run_s(moved) >= run_s(chosen):
                break
            chosen = moved
        found.append(chosen)
    return tuple(found)


def _with_another(chosen: tuple[int, ...], candidates: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(sorted({*chosen, length})) for length in candidates if length not in chosen]


def _with_one_moved(chosen: tuple[int, ...], candidates: Sequence[int]) -> list[tuple[int, ...]]:
    """All but the last may move; the choice itself is among them."""
    moved = [chosen]
    for place in range(len(chosen) - 1):
        rest = chosen[:place] + chosen[place + 1 :]
        moved += _with_another(rest, candidates)
    return moved


def packed_run_s(
    lengths: IntArray,
    counts: IntArray,
    row_lengths: Sequence[int],
    batching: BatchingConfig,
    cost: RunCost,
) -> float:
    """Seconds of a run of packed rows: all steps, and a compile of each shape in use."""
    packed = pack_counts(lengths, counts, row_lengths)
    used = np.flatnonzero(packed.num_rows)
    time = BucketTime(np.array(row_lengths)[used], batching, cost)
    return float(time.bucket_s(packed.num_rows[used], np.arange(len(used))).sum())


def _candidates(longest: int, batching: BatchingConfig) -> list[int]:
    parts = 2.0 ** (-np.arange(1, STEPS_AN_OCTAVE * OCTAVES + 1) / STEPS_AN_OCTAVE)
    aligned = {align_length(max(1, round(longest * part)), batching.align) for part in parts}
    return sorted(aligned - {longest})

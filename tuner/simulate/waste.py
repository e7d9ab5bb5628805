"""What padding would cost, from the lengths alone: no plan, no model, exact.

N samples, B rows in a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.simulate.histogram import LengthHistogram

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


@dataclass(frozen=True, kw_only=True)
class LengthProfile:
    """How the lengths are spread and what two simple ways of padding make of them."""

    num_samples: int
    total_tokens: int
    shortest: int
    longest: int
    percentiles: Mapping[int, int]
    """Percent -> tokens: the shortest length that at least so many percent do not exceed."""
    num_distinct_lengths: int
    batch_size: int
    fraction_when_padded_to_longest: float
    """Effective token fraction, 0..1: real tokens by padded tokens."""
    fraction_of_random_batches: float
    """The same for random batches of batch_size rows, each padded to its own longest row."""


def profile_lengths(histogram: LengthHistogram, batch_size: int) -> LengthProfile:
    """Describe lengths.

    Args:
        histogram: Rows by length, with at least one token in all.
        batch_size: Rows of a random batch, at least 1.
    """
    total, num_samples = histogram.total_tokens, histogram.num_rows
    rows_up_to = np.cumsum(histogram.counts)
    ranks = {p: max(-(-p * num_samples // 100), 1) for p in PERCENTILES}
    return LengthProfile(
        num_samples=num_samples,
        total_tokens=total,
        shortest=int(histogram.lengths[0]),
        longest=histogram.longest,
        percentiles={
            p: int(histogram.lengths[np.searchsorted(rows_up_to, rank)])
            for p, rank in ranks.items()
        },
        num_distinct_lengths=len(histogram.lengths),
        batch_size=batch_size,
        fraction_when_padded_to_longest=total / (num_samples * histogram.longest),
        fraction_of_random_batches=total / expected_padded_tokens(histogram, batch_size),
    )


def expected_padded_tokens(histogram: LengthHistogram, batch_size: int) -> float:
    """Expected tokens of an epoch of random batches, each padded to its longest row.

    Args:
        histogram: Rows by length.
        batch_size: Rows of a batch, at least 1; what is left over makes one smaller batch.

    Returns:
        The exact expectation over all shuffles, in tokens.
    """
    whole, rest = divmod(histogram.num_rows, batch_size)
    padded = whole * batch_size * _expected_longest(histogram, batch_size) if whole else 0.0
    return padded + (rest * _expected_longest(histogram, rest) if rest else 0.0)


def chance_at_most(rows_up_to: npt.NDArray[np.int64], num_drawn: int) -> npt.NDArray[np.float64]:
    """How likely the longest of some rows, drawn without putting any back, is at most a length.

    For N_u rows of at most that length, of N in all, and n drawn: C(N_u, n) / C(N, n).

    Args:
        rows_up_to: int64 [U], rows of at most each length, rising; the last is N.
        num_drawn: n, in 1..N.

    Returns:
        float64 [U], 0..1, rising; the last is 1.
    """
    # Lengths that too few rows stay under have no chance; left out, they cost no time either.
    possible = np.searchsorted(rows_up_to, num_drawn)
    left = rows_up_to[possible:].astype(np.float64)
    chance = np.ones(len(left))
    for _ in range(num_drawn):
        chance *= left / left[-1]
        left -= 1.0
    return np.concatenate((np.zeros(possible), chance))


def _expected_longest(histogram: LengthHistogram, num_drawn: int) -> float:
    """The mean of the longest of so many rows drawn without putting any back, in tokens."""
    chance = chance_at_most(np.cumsum(histogram.counts), num_drawn)
    return float(np.diff(chance, prepend=0.0) @ histogram.lengths)

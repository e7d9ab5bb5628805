"""What padding would cost, from the lengths alone: no plan, no model, exact.

N samples, B rows in a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.integer[Any]]
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


def profile_lengths(tokens: Lengths, batch_size: int) -> LengthProfile:
    """Describe lengths.

    Args:
        tokens: int [N], N at least 1, with at least one token in all.
        batch_size: Rows of a random batch, at least 1.
    """
    ordered = np.sort(tokens).astype(np.int64)
    total, num_samples = int(ordered.sum()), len(ordered)
    ranks = {p: -(-p * num_samples // 100) for p in PERCENTILES}
    return LengthProfile(
        num_samples=num_samples,
        total_tokens=total,
        shortest=int(ordered[0]),
        longest=int(ordered[-1]),
        percentiles={p: int(ordered[max(rank, 1) - 1]) for p, rank in ranks.items()},
        num_distinct_lengths=len(np.unique(ordered)),
        batch_size=batch_size,
        fraction_when_padded_to_longest=total / (num_samples * int(ordered[-1])),
        fraction_of_random_batches=total / expected_padded_tokens(ordered, batch_size),
    )


def expected_padded_tokens(ordered: Lengths, batch_size: int) -> float:
    """Expected tokens of an epoch of random batches, each padded to its longest row.

    Args:
        ordered: int [N], ascending.
        batch_size: Rows of a batch; what is left over makes one smaller batch.

    Returns:
        The exact expectation over all shuffles, in tokens.
    """
    whole, rest = divmod(len(ordered), batch_size)
    padded = whole * batch_size * _expected_longest(ordered, batch_size) if whole else 0.0
    return padded + (rest * _expected_longest(ordered, rest) if rest else 0.0)


def _expected_longest(ordered: Lengths, num_rows: int) -> float:
    """The mean of the longest of num_rows samples drawn without putting any back.

    The longest is at most the i-th shortest of all with the probability C(i, n) / C(N, n).
    """
    position = np.arange(1, len(ordered) + 1, dtype=np.float64)
    at_most = np.ones(len(ordered))
    for drawn in range(num_rows):
        at_most *= np.maximum(position - drawn, 0) / (len(ordered) - drawn)
    return float(np.diff(at_most, prepend=0.0) @ ordered)

"""How far two sets of rows are apart in their lengths, one of which is known by percentiles.

The figure is the two-sample Kolmogorov-Smirnov statistic: the largest difference, over all
lengths, of the shares of rows that are at most so long. The percentiles are the smallest lengths
that at least 0, 1, ..., 100 % of the rows do not exceed; between them the share of rows is known
to a hundredth, and so is the statistic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import kolmogorov

RESOLUTION = 0.01
"""Largest error of a share of rows that is read off the percentiles, and of the statistic."""


def length_percentiles(tokens: NDArray[np.integer[Any]]) -> tuple[int, ...]:
    """Shortest, percentiles 1 to 99, longest: for each the smallest length that so many reach.

    Args:
        tokens: int [M], lengths in tokens, M >= 1.
    """
    percentiles = np.percentile(tokens, np.arange(101), method="inverted_cdf")
    return tuple(int(value) for value in percentiles)


@dataclass(frozen=True, kw_only=True)
class LengthShift:
    """Where two sets of rows differ most in length.

    Attributes:
        statistic: Largest difference of the shares of rows that are at most so long, 0..1; known
            to RESOLUTION.
        at_length: Where it is, tokens.
        share_before: Share of the earlier rows of at most so many tokens.
        share_now: The same of the rows at hand.
        chance: Chance of so large a statistic between two random samples, so many rows each, of
            one and the same source (asymptotic); tiny for any difference of many rows.
    """

    statistic: float
    at_length: int
    share_before: float
    share_now: float
    chance: float

    @property
    def is_resolved(self) -> bool:
        """Whether the statistic is larger than its error."""
        return self.statistic > RESOLUTION


def compare_lengths(
    percentiles: Sequence[int], num_before: int, tokens: NDArray[np.integer[Any]]
) -> LengthShift:
    """Compare rows at hand with rows that are known by their percentiles.

    Args:
        percentiles: 101 of the earlier rows, as `length_percentiles` gives them.
        num_before: Number of these rows, >= 1.
        tokens: int [M], lengths of the rows at hand in tokens, M >= 1.
    """
    lengths, counts = np.unique(tokens, return_counts=True)
    # The shares are steps of whole lengths: a largest difference is at one, or just below one.
    places = np.unique(np.concatenate([lengths, lengths - 1, percentiles, _below(percentiles)]))
    running = np.concatenate(([0.0], np.cumsum(counts) / counts.sum()))
    now = running[np.searchsorted(lengths, places, side="right")]
    before = _shares(percentiles, places)
    worst = int(np.argmax(np.abs(now - before)))
    statistic = float(abs(now[worst] - before[worst]))
    num_now = int(counts.sum())
    effective_rows = num_before * num_now / (num_before + num_now)
    return LengthShift(
        statistic=statistic,
        at_length=int(places[worst]),
        share_before=float(before[worst]),
        share_now=float(now[worst]),
        chance=float(kolmogorov(np.sqrt(effective_rows) * statistic)),
    )


def _below(percentiles: Sequence[int]) -> NDArray[np.int64]:
    below: NDArray[np.int64] = np.array(percentiles, dtype=np.int64) - 1
    return below


def _shares(percentiles: Sequence[int], places: NDArray[np.int64]) -> NDArray[np.float64]:
    """Shares of rows of at most so many tokens, read off the percentiles; float64 [P].

    At a length that is percentiles i to j the share is j hundredths, just below it i hundredths,
    each to one; straight lines between.
    """
    values, first = np.unique(percentiles, return_index=True)
    last = np.append(first[1:], len(percentiles)) - 1
    has_room = np.append(True, np.diff(values) > 1)
    at = np.concatenate([values[has_room] - 1, values])
    shares = np.concatenate([first[has_room], last]) / 100.0
    order = np.argsort(at)
    read: NDArray[np.float64] = np.interp(places, at[order], shares[order])
    return np.where(places < values[0], 0.0, read)

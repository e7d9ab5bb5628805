"""How well a sample of the rows tells the padding of the whole set.

With l the tokens of a row and b those of its boundary, the effective fraction is a ratio of means,
    R = sum of l / sum of b, padding = 1 - R,
and from n of N rows drawn uniformly without replacement its standard error is (delta method)
    sqrt((1 - n / N) / n * s^2) / mean of b,  s^2 = sum of (l - R b)^2 / (n - 1).
Where every row is padded to one known length, b is constant and this is the error of the mean.
Source: Cochran, Sampling Techniques, 3rd ed., chapters 2 (finite population) and 6 (ratios).

The interval is normal, so it wants some hundred rows, and enough of the longest: those that no
sample holds are not in its spread either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.errors import BadInputError

NORMAL_95_PERCENT = 1.959964
"""Standard errors on either side of the mean that hold 95 % of a normal distribution."""


@dataclass(frozen=True, kw_only=True)
class SampledPadding:
    """A padding fraction estimated from a sample of the rows.

    Attributes:
        padding_fraction: 0..1, of the sample.
        half_width: The 95 % confidence interval is padding_fraction +- half_width; 0 if the
            sample is the whole set.
    """

    padding_fraction: float
    half_width: float


def estimate_padding(
    sampled_tokens: NDArray[np.integer[Any]], boundaries: Sequence[int], num_rows: int
) -> SampledPadding:
    """Padding of the whole set when each row is padded to its first boundary >= its length.

    For padding to the longest, give one boundary: the longest row of the set, aligned. Filler rows
    of last batches are not counted.

    Args:
        sampled_tokens: int [n], lengths of a uniform sample in tokens, >= 0; n at least 2.
        boundaries: Padded lengths in tokens, rising; the last covers the longest row.
        num_rows: Rows of the set, N >= n.

    Raises:
        BadInputError: fewer than two rows, or one is over the last boundary.
    """
    num_sampled = len(sampled_tokens)
    if num_sampled < 2:
        raise BadInputError(
            f"a sampling error needs at least 2 rows (got {num_sampled})", fix="sample more rows"
        )
    longest = int(np.max(sampled_tokens))
    if longest > boundaries[-1]:
        raise BadInputError(
            f"the last boundary must cover the longest row (got {boundaries[-1]} and {longest})",
            fix=f"raise it to {longest}, or cut the rows to it first",
        )
    tokens = np.asarray(sampled_tokens, dtype=np.float64)
    ends = np.array(boundaries, dtype=np.float64)
    padded = ends[np.searchsorted(ends, tokens, side="left")]
    effective = tokens.sum() / padded.sum()
    variance = ((tokens - effective * padded) ** 2).sum() / (num_sampled - 1)
    error = math.sqrt((1.0 - num_sampled / num_rows) * variance / num_sampled) / padded.mean()
    return SampledPadding(
        padding_fraction=float(1.0 - effective), half_width=float(NORMAL_95_PERCENT * error)
    )

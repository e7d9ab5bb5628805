"""How many rows have which length: all that padding depends on, in a few thousand numbers.

U distinct lengths. A set of a million rows has rarely more than ten thousand of them, so whatever
can be said from the histogram is said a hundred times faster than from the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.batching.boundaries import count_lengths
from tuner.batching.rows import no_row_left
from tuner.config.schema import DataConfig
from tuner.errors import BadInputError

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LengthHistogram:
    """Rows by length; arrays are read-only.

    Attributes:
        lengths: int64 [U], tokens, strictly rising, >= 0; U >= 1.
        counts: int64 [U], rows of each length, > 0.
    """

    lengths: IntArray
    counts: IntArray

    def __post_init__(self) -> None:
        for name in ("lengths", "counts"):
            array = np.array(getattr(self, name), np.int64)
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    @classmethod
    def from_tokens(cls, tokens: NDArray[np.integer[Any]]) -> LengthHistogram:
        """Count rows.

        Args:
            tokens: int [N], length of every row in tokens, >= 0, in any order; N >= 1.
        """
        lengths, counts = count_lengths(tokens)
        return cls(lengths=lengths, counts=counts)

    def scaled_to(self, num_rows: int, longest: int) -> LengthHistogram:
        """What a sample says of the set that it was drawn from.

        Args:
            num_rows: Rows of the set, at least those of the sample.
            longest: Tokens of its longest row; if the sample missed it, it stands for one row.

        Returns:
            Counts in proportion, rounded, at least 1 each; they may miss num_rows by U / 2.
        """
        counts = np.maximum(1, np.round(self.counts * (num_rows / self.num_rows)))
        if longest <= self.longest:
            return LengthHistogram(lengths=self.lengths, counts=counts)
        return LengthHistogram(
            lengths=np.append(self.lengths, longest), counts=np.append(counts, 1)
        )

    @property
    def num_rows(self) -> int:
        """Rows, N."""
        return int(self.counts.sum())

    @property
    def total_tokens(self) -> int:
        """Tokens of all rows."""
        return int(self.counts @ self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(self.lengths[-1])

    def rows_up_to(self, ends: IntArray) -> IntArray:
        """Rows of at most so many tokens.

        Args:
            ends: int64 [K], tokens, inclusive.

        Returns:
            int64 [K].
        """
        return _sum_up_to(self.lengths, self.counts, ends)

    def tokens_up_to(self, ends: IntArray) -> IntArray:
        """Tokens of the rows of at most so many tokens; as `rows_up_to`."""
        return _sum_up_to(self.lengths, self.counts * self.lengths, ends)

    def admit(self, data: DataConfig, limit: int | None) -> LengthHistogram:
        """The rows that are batched, as `admit_rows` admits them.

        Args:
            data: Gives the overflow rule.
            limit: Longest admitted length in tokens, inclusive; None: no limit.

        Raises:
            BadInputError: a row is over the limit and the rule is `error`, or no row is left.
        """
        most = self.longest if limit is None else limit
        num_over = self.num_rows - int(self.rows_up_to(np.array([most]))[0])
        if num_over and data.overflow == "error":
            raise BadInputError(
                f"data.overflow is error and {num_over} rows are longer than {limit} tokens "
                f"(the longest has {self.longest})",
                fix="raise data.max_length or set data.overflow to truncate or drop",
            )
        kept = self.lengths > 0
        if data.overflow == "drop":
            kept &= self.lengths <= most
        if not kept.any():
            num_empty = int(self.counts[self.lengths == 0].sum())
            raise no_row_left(data, self.num_rows, num_empty, num_over, limit)
        lengths, counts = count_lengths(np.minimum(self.lengths[kept], most), self.counts[kept])
        return LengthHistogram(lengths=lengths, counts=counts)


def _sum_up_to(lengths: IntArray, values: IntArray, ends: IntArray) -> IntArray:
    running = np.concatenate(([0], np.cumsum(values)))
    up_to: IntArray = running[np.searchsorted(lengths, ends, side="right")]
    return up_to

"""Rounding lengths up to the padded lengths that an alignment rule allows.

A rule is one multiple, or a table by length: `[{up_to: 128, multiple: 8}, {multiple: 64}]` rounds
lengths up to 128 to multiples of 8 and longer ones to multiples of 64. Each `up_to` is a multiple
of its own rule, so that rounding never leaves its rule and never loses the order of lengths.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.config.schema import AlignRule

IntArray = NDArray[np.int64]


def align_lengths(
    lengths: NDArray[np.integer[Any]], align: int | tuple[AlignRule, ...]
) -> IntArray:
    """Round every length up to the smallest padded length that the rule allows.

    Args:
        lengths: int [N], tokens, >= 1.
        align: One multiple in tokens, or rules by length.

    Returns:
        int64 [N], tokens, each >= its length.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if isinstance(align, int):
        return -(-lengths // align) * align
    multiples = np.array([rule.multiple for rule in align], dtype=np.int64)
    upper_ends = np.array([rule.up_to for rule in align[:-1]], dtype=np.int64)
    multiple = multiples[np.searchsorted(upper_ends, lengths, side="left")]
    aligned: IntArray = -(-lengths // multiple) * multiple
    return aligned


def align_length(length: int, align: int | tuple[AlignRule, ...]) -> int:
    """`align_lengths` of a single length in tokens."""
    return int(align_lengths(np.array([length]), align)[0])

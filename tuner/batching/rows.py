"""Which rows take part in a plan, and how long they are there.

Empty rows are left out. Rows over the limit are cut to it, left out or refused, by the overflow
rule. Rows of another part of a split, as those held out for evaluation, are no matter of the plan.
Nothing vanishes silently: every row left out is counted under its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.config.schema import DataConfig, TrainConfig
from tuner.data.lengths import Lengths
from tuner.errors import BadInputError

EMPTY = "empty"
OVER_LONG = "over_long"

ROWS_AT_A_TIME = 1_000_000

WITH_BOUNDARIES = ("bucketed", "packed")
"""Strategies whose longest admitted row is the last boundary."""


@dataclass(frozen=True, kw_only=True)
class AdmittedRows:
    """Rows that are batched.

    Attributes:
        row_indices: int64 [M], rows of the data set, rising.
        tokens: int64 [M], length of each in tokens after truncation, >= 1.
        num_truncated: Rows of these that were cut.
        dropped: Reason -> number of rows left out; reasons `empty` and `over_long`, and of a split
            that of the other part.
    """

    row_indices: NDArray[np.int64]
    tokens: NDArray[np.int64]
    num_truncated: int
    dropped: Mapping[str, int]


def length_limit(config: TrainConfig) -> int | None:
    """The longest admitted row in tokens: data.max_length or the last boundary; None: any."""
    limits = [config.data.max_length]
    if config.batching.strategy in WITH_BOUNDARIES and config.batching.boundaries:
        limits.append(config.batching.boundaries[-1])
    return min((limit for limit in limits if limit is not None), default=None)


def admit_rows(lengths: Lengths, data: DataConfig, limit: int | None) -> AdmittedRows:
    """Apply the overflow rule.

    Args:
        lengths: Of every row of the set.
        data: Gives the overflow rule.
        limit: Longest admitted length in tokens, inclusive; None: no limit.

    Raises:
        BadInputError: a row is over the limit and the rule is `error`, or no row is left.
    """
    is_kept, num_truncated, dropped = judge_rows(lengths, data, limit)
    kept = np.flatnonzero(is_kept)
    kept_tokens = lengths.tokens[kept].astype(np.int64)
    return AdmittedRows(
        row_indices=kept,
        tokens=kept_tokens if limit is None else np.minimum(kept_tokens, limit),
        num_truncated=num_truncated,
        dropped=dropped,
    )


def judge_rows(
    lengths: Lengths, data: DataConfig, limit: int | None
) -> tuple[NDArray[np.bool_], int, Mapping[str, int]]:
    """Which rows are batched, bool [N]; how many of them are cut; reason -> rows left out.

    Arguments and errors are those of `admit_rows`.
    """
    tokens = lengths.tokens
    is_own = np.ones(len(tokens), dtype=bool)
    split: dict[str, int] = {}
    if lengths.is_left_out is not None:
        is_own = ~lengths.is_left_out
        split[lengths.left_out_as] = len(tokens) - int(is_own.sum())
    empty = is_own & (tokens == 0)
    over = np.zeros(len(tokens), dtype=bool) if limit is None else is_own & (tokens > limit)
    if data.overflow == "error" and over.any():
        _refuse_over_long(tokens, over, limit)
    is_dropping = data.overflow == "drop"
    is_kept = is_own & ~(empty | over if is_dropping else empty)
    num_empty, num_over = int(empty.sum()), int(over.sum())
    if not is_kept.any():
        raise no_row_left(data, int(is_own.sum()), num_empty, num_over, limit)
    dropped = {EMPTY: num_empty, OVER_LONG: num_over if is_dropping else 0, **split}
    return is_kept, 0 if is_dropping else num_over, dropped


def admitted_tokens(
    lengths: Lengths, data: DataConfig, limit: int | None
) -> tuple[NDArray[np.int32], int, Mapping[str, int]]:
    """What `admit_rows` says, in 4 bytes a row.

    Arguments and errors are those of `admit_rows`.

    Returns:
        int32 [N], length of each row of the set in tokens after truncation, 0: it is not batched;
        rows that were cut; reason -> rows left out.
    """
    is_kept, num_truncated, dropped = judge_rows(lengths, data, limit)
    tokens = np.array(lengths.tokens, dtype=np.int32)
    tokens[~is_kept] = 0
    if limit is not None:
        np.minimum(tokens, limit, out=tokens)
    return tokens, num_truncated, dropped


def rows_of_length(tokens: NDArray[np.int32]) -> NDArray[np.int64]:
    """Rows of every length, int64 [longest + 1]; counted some at a time, to save memory.

    Args:
        tokens: int32 [N], lengths in tokens, >= 0.
    """
    # bincount makes int64 of what it is given.
    counts = np.zeros(int(tokens.max(initial=0)) + 1, dtype=np.int64)
    for start in range(0, len(tokens), ROWS_AT_A_TIME):
        counts += np.bincount(tokens[start : start + ROWS_AT_A_TIME], minlength=len(counts))
    return counts


def no_row_left(
    data: DataConfig, num_rows: int, num_empty: int, num_over: int, limit: int | None
) -> BadInputError:
    """The refusal of a set of which no row can be batched."""
    return BadInputError(
        f"{data.path}: no row is left to batch ({num_rows} rows, {num_empty} empty, "
        f"{num_over} longer than {limit})",
        fix="raise data.max_length or set data.overflow to truncate",
    )


def _refuse_over_long(
    tokens: NDArray[np.integer[Any]], over: NDArray[np.bool_], limit: int | None
) -> None:
    first = int(np.flatnonzero(over)[0])
    raise BadInputError(
        f"data.overflow is error and {int(over.sum())} rows are longer than {limit} tokens "
        f"(row {first} has {int(tokens[first])})",
        fix="raise data.max_length or set data.overflow to truncate or drop",
    )

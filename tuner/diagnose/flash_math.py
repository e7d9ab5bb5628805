"""Attention as `ops.flash_attention_score` is documented, by NumPy, for devices without the op.

For a trace of shapes: bias, dropout and prefix, which change no shape, are left out. One head at
a time, so that S1 * S2 numbers are in memory and not those of all heads.

Shapes: B batch, S1 queries, S2 keys, N1 query heads, N2 key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from numpy.typing import NDArray

from tuner.train.flash_arguments import (
    ALL_MASK,
    ALL_TOKENS,
    BAND,
    COMPRESSED_MODES,
    LEFT_UP_CAUSAL,
    PREFIX,
    RIGHT_DOWN_CAUSAL,
    FlashCall,
)

Floats = NDArray[np.float32]

BATCH_THEN_TOKENS: dict[str, tuple[int, ...]] = {"BNSD": (0, 2, 1, 3), "SBH": (1, 0, 2)}
"""Order of axes in which batch and tokens come first, and the same order leads back; other layouts
have them there."""

HIDDEN_SCORE = np.float32(-1e30)
"""Far below any score, and finite: a query that sees no key has a number too."""


def attend_in_numpy(call: FlashCall) -> Floats:
    """attention_out, of the shape of query.

    Args:
        call: That `check_flash_arguments` accepts, with tensors of MindSpore.
    """
    layout = call.input_layout
    head_size = call.query.shape[-1] // (call.head_num if layout.endswith("H") else 1)
    ends = (call.actual_seq_qlen, call.actual_seq_kvlen, call.actual_seq_kvlen)
    queries, keys, values = (
        _sequences(_numbers(tensor), layout, head_size, its_ends)
        for tensor, its_ends in zip((call.query, call.key, call.value), ends, strict=True)
    )
    mixed = [
        _mix(q, k, v, _hidden(call, number, len(q), len(k)), call.scalar_value)
        for number, (q, k, v) in enumerate(zip(queries, keys, values, strict=True))
    ]
    if layout == "TND":
        return np.concatenate(mixed)
    together = np.stack(mixed)
    if layout.endswith("H"):
        together = together.reshape(*together.shape[:2], -1)
    return together.transpose(_order(layout, together.ndim))


def _order(layout: str, num_axes: int) -> tuple[int, ...]:
    return BATCH_THEN_TOKENS.get(layout, tuple(range(num_axes)))


def _numbers(tensor: Any) -> Floats:
    """NumPy has no bfloat16."""
    return np.asarray(tensor.astype(ms.float32).asnumpy())


def _sequences(array: Floats, layout: str, head_size: int, ends: Any) -> list[Floats]:
    """[S, N, D] of every row, or of every sequence of layout TND."""
    if layout == "TND":
        return np.split(array, _whole_numbers(ends)[:-1])
    by_row = array.transpose(_order(layout, array.ndim))
    return list(by_row.reshape(*by_row.shape[:2], -1, head_size))


def _whole_numbers(values: Any) -> Sequence[int]:
    return [int(one) for one in (values.asnumpy() if hasattr(values, "asnumpy") else values)]


def _mix(q: Floats, k: Floats, v: Floats, hidden: NDArray[np.bool_], scale: float) -> Floats:
    """[S1, N1, D] queries and [S2, N2, D] keys and values; hidden is [1 or N1, S1, S2]."""
    mixed = np.empty_like(q)
    group_size = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group_size].T * np.float32(scale)
        scores[hidden[head % len(hidden)]] = HIDDEN_SCORE
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed[:, head] = weights @ v[:, head // group_size]
    return mixed


def _hidden(call: FlashCall, number: int, S1: int, S2: int) -> NDArray[np.bool_]:
    """Which keys the queries of a row must not see, [1 or N1, S1, S2]."""
    mode, mask = call.sparse_mode, call.attn_mask
    before, after = call.pre_tokens, call.next_tokens
    if mode in (LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL):
        before, after = ALL_TOKENS, 0
    elif mode in (ALL_MASK, PREFIX) or mask is None:
        before = after = ALL_TOKENS
    from_corner = S2 - S1 if mode in (RIGHT_DOWN_CAUSAL, BAND) else 0
    distance = np.arange(S2, dtype=np.int32) - np.arange(S1, dtype=np.int32)[:, None]
    hidden = (distance < from_corner - before) | (distance > from_corner + after)
    if mask is None or mode in COMPRESSED_MODES:
        return hidden[None]
    given: NDArray[np.bool_] = mask.asnumpy() != 0
    by_row = given if given.ndim == 4 else given[None, None]
    return np.logical_or(hidden, by_row[number % len(by_row)])

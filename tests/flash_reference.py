"""A NumPy model of what is documented of `ops.flash_attention_score`, by loops; no MindSpore.

Written from the op's docstring (2.10) and CANN's page of sparse modes, apart from
`tuner.train.flash_arguments`, so that each is a check of the other:

- 1 in attn_mask discards, 0 keeps; a mask of floats is a TypeError;
- sparse mode 0: the given mask within the band of pre_tokens and next_tokens from the upper left
  corner, no mask at all without one; 1: the given mask; 2, 3: causal from the upper left and the
  lower right corner; 4: the band from the lower right corner;
- layout TND: sequences laid one behind the other, cumulative lengths, each attends to itself;
  sequences without queries and keys are nothing, queries without keys are an error (CANN's page of
  aclnnFlashAttentionVarLenScore);
- query head n takes key head n // (N1 / N2);
- a query that sees no key has no documented result: NaN here.

The two docstrings disagree on whether real_shift is scaled, so the model has none.

Of modes 2 and 3 it reads the compressed mask at the distance of key from query, up to its size:
what stands there is what is done, so that a mask of the wrong polarity shows. That reading is an
assumption; with the documented matrix it is the triangle.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ANY = 2147483647


def flash_attention_score(query, *arguments, **options):
    """attention_out, of the shape and dtype of query."""
    return exact_attention(query, *arguments, **options).astype(query.dtype)


def exact_attention(
    query, key, value, head_num, real_shift=None, drop_mask=None, padding_mask=None,
    attn_mask=None, prefix=None, actual_seq_qlen=None, actual_seq_kvlen=None, keep_prob=1.0,
    scalar_value=1.0, pre_tokens=ANY, next_tokens=ANY, inner_precise=0, input_layout="BSH",
    sparse_mode=0,
):  # fmt: skip
    """The same before it is rounded to the dtype of query: float64."""
    check_types(query, key, value, attn_mask, scalar_value, input_layout)
    if any(x is not None for x in (real_shift, drop_mask, padding_mask, prefix)) or keep_prob != 1:
        raise ValueError("the model has no bias, dropout or prefix")
    if sparse_mode not in range(5):
        raise RuntimeError(f"sparse_mode {sparse_mode} is not of the model")
    q, k, v = (to_sequences(x, input_layout, head_num, query) for x in (query, key, value))
    if head_num <= 0 or q[0].shape[0] != head_num or head_num % k[0].shape[0]:
        raise RuntimeError("head_num is not that of query, or no multiple of N2")
    if q[0].shape[-1] != k[0].shape[-1]:
        raise RuntimeError("D is not the same")
    if input_layout == "TND":
        check_lengths(actual_seq_qlen, actual_seq_kvlen, query, key, sparse_mode, next_tokens)
        q = cut(q[0], actual_seq_qlen)
        k, v = (cut(x[0], actual_seq_kvlen) for x in (k, v))
    check_mask_shape(attn_mask, sparse_mode, len(q), head_num, q[0].shape[1], k[0].shape[1])
    band = (pre_tokens, next_tokens)
    outputs = []
    for b, sequence in enumerate(zip(q, k, v, strict=True)):

        def hides(n, i, j, sizes, b=b):
            return is_hidden(attn_mask, sparse_mode, band, (b, n, i, j), sizes)

        outputs.append(one_sequence(*sequence, scalar_value, hides))
    return from_sequences(outputs, input_layout).reshape(query.shape)


def one_sequence(q, k, v, scale, hides) -> Array:
    """[N1, S1, D] queries and [N2, S2, D] keys and values, head by head and row by row."""
    N1, S1, _ = q.shape
    N2, S2, _ = k.shape
    out = np.zeros((N1, S1, v.shape[-1]))
    for n in range(N1):
        keys, values = k[n * N2 // N1], v[n * N2 // N1]
        for i in range(S1):
            scores = scale * (keys @ q[n, i])
            kept = [j for j in range(S2) if not hides(n, i, j, (S1, S2))]
            if not kept:
                out[n, i] = np.nan
                continue
            weights = np.exp(scores[kept] - scores[kept].max())
            out[n, i] = weights @ values[kept] / weights.sum()
    return out


def is_hidden(mask, mode, band, place, sizes) -> bool:
    b, n, i, j = place
    S1, S2 = sizes
    pre, following = band
    if mask is None:
        return False
    if mode == 0 and not i - pre <= j <= i + following:
        return True
    if mode in (0, 1):
        full = mask if mask.ndim == 4 else mask[None, None]
        return bool(full[b % len(full), n % full.shape[1], i, j])
    if mode == 4:
        distance = j - i - (S2 - S1)
        return not -pre <= distance <= following
    distance = j - i - (S2 - S1 if mode == 3 else 0)
    distance = max(1 - len(mask), min(distance, len(mask) - 1))
    return bool(mask[max(0, -distance), max(0, distance)])


def to_sequences(x, layout, head_num, query) -> list[Array]:
    """[N, S, D] of every batch; of TND all tokens in one."""
    x64 = np.asarray(x, np.float64)
    if layout == "TND":
        return [x64.transpose(1, 0, 2)]
    if layout in ("BSH", "SBH"):
        head_size = query.shape[-1] // head_num
        x64 = x64 if layout == "BSH" else x64.transpose(1, 0, 2)
        x64 = x64.reshape(*x64.shape[:2], -1, head_size)
    if layout != "BNSD":
        x64 = x64.transpose(0, 2, 1, 3)
    return list(x64)


def from_sequences(outputs: list[Array], layout: str) -> Array:
    if layout == "TND":
        return np.concatenate(outputs, axis=1).transpose(1, 0, 2)
    stacked = np.stack(outputs)
    if layout == "BNSD":
        return stacked
    tokens_first = stacked.transpose(0, 2, 1, 3)
    return tokens_first.transpose(1, 0, 2, 3) if layout == "SBH" else tokens_first


def cut(x: Array, ends) -> list[Array]:
    """As many as there are ends; of no tokens where an end is repeated."""
    return np.split(x, np.asarray(ends)[:-1], axis=1)


def check_types(query, key, value, attn_mask, scalar_value, layout) -> None:
    if query.dtype != np.float16:
        raise TypeError("Dtype of query is not float16 (of bfloat16 NumPy has none)")
    if key.dtype != query.dtype or value.dtype != query.dtype:
        raise TypeError("query, key and value have not the same dtype")
    if attn_mask is not None and attn_mask.dtype not in (np.bool_, np.uint8):
        raise TypeError("Dtype of attn_mask is not bool or uint8")
    if type(scalar_value) is not float or not math.isfinite(scalar_value):
        raise TypeError("scalar_value is no double")
    if layout not in ("BSH", "BNSD", "SBH", "BSND", "TND"):
        raise ValueError("input_layout is not valid")


def check_mask_shape(mask, mode, B, N1, S1, S2) -> None:
    if mask is None:
        if mode:
            raise RuntimeError("this sparse_mode needs its mask")
    elif mode >= 2:
        if mask.shape != (2048, 2048):
            raise RuntimeError("a compressed mask is 2048 x 2048")
    elif mask.shape not in ((B, N1, S1, S2), (B, 1, S1, S2), (S1, S2)):
        raise RuntimeError("attn_mask shape is not valid")


def check_lengths(q_ends, k_ends, query, key, mode, following) -> None:
    if q_ends is None or k_ends is None:
        raise RuntimeError("TND needs both lengths")
    if mode not in (2, 3) or following != 0:
        raise RuntimeError("TND needs sparse_mode 2 or 3 and next_tokens 0")
    for ends, tokens in ((q_ends, len(query)), (k_ends, len(key))):
        rises = np.diff(np.asarray(ends), prepend=0)
        if len(rises) > 1024 or (rises < 0).any() or np.asarray(ends)[-1] != tokens:
            raise RuntimeError("lengths are not cumulative up to T")
    if len(q_ends) != len(k_ends):
        raise RuntimeError("not as many query lengths as key lengths")
    q_lengths, k_lengths = np.diff(q_ends, prepend=0), np.diff(k_ends, prepend=0)
    if ((q_lengths > 0) & (k_lengths == 0)).any() or (mode == 3 and (q_lengths > k_lengths).any()):
        raise RuntimeError("queries have no keys, or fewer than there are queries")

"""What `ops.flash_attention_score` takes, as a value that can be checked before the op is called.

From the documentation, not run: there is no such kernel on CPU. The op is silent about much that
is wrong. A float mask is taken for bool, a mask with the other polarity hides what it should show,
a scale that was forgotten is 1: so arguments are looked at here.

Sources: the docstrings of `ops.flash_attention_score` and of the primitive in MindSpore 2.10; of
CANN the pages of aclnnFlashAttentionScore, aclnnFlashAttentionVarLenScore and of sparseMode.

Shapes: B batch, S1 queries, S2 keys, N1 query heads, N2 key heads, D head size, T all tokens of
sequences laid one behind the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.errors import BadInputError

OP = "ops.flash_attention_score"
MAX_HEADS = 256
MAX_HEAD_SIZE = 512
HEAD_SIZE_MULTIPLE = 16
MAX_LENGTH = 512 * 1024
MAX_BATCH_SIZE = 2 * 1024
MAX_SEQUENCES = 1024
"""Entries of the cumulative lengths of layout TND."""
MAX_TOKENS = 1024 * 1024
"""All tokens of layout TND (CANN)."""
COMPRESSED_SIZE = 2048
"""Rows and columns of the mask of sparse modes 2 to 4, whatever the lengths are."""
ALL_TOKENS = 2147483647
"""pre_tokens or next_tokens without a limit."""

DEFAULT_MASK, ALL_MASK, LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND, PREFIX = range(6)
COMPRESSED_MODES = (LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND)
# Where batch, heads, tokens and head size stand; of layouts with both in one axis the width.
AXES = {"BNSD": "BNSD", "BSND": "BSND", "BSH": "BSH", "SBH": "SBH", "TND": "SND"}


def compressed_causal_mask() -> NDArray[np.uint8]:
    """The mask of sparse modes 2 to 4: 1, which discards, above the diagonal."""
    return np.triu(np.ones((COMPRESSED_SIZE, COMPRESSED_SIZE), np.uint8), k=1)


@dataclass(frozen=True, kw_only=True)
class FlashCall:
    """The arguments of one call, under the op's names and with its defaults.

    Tensors are of MindSpore or arrays of NumPy: what counts is their shape and dtype, and their
    values where these can be read.
    """

    query: Any
    key: Any
    value: Any
    head_num: int
    real_shift: Any = None
    drop_mask: Any = None
    padding_mask: Any = None
    attn_mask: Any = None
    prefix: Any = None
    actual_seq_qlen: Any = None
    actual_seq_kvlen: Any = None
    keep_prob: float = 1.0
    scalar_value: float = 1.0
    pre_tokens: int = ALL_TOKENS
    next_tokens: int = ALL_TOKENS
    inner_precise: int = 0
    input_layout: str = "BSH"
    sparse_mode: int = 0


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """What the shapes of a call mean; of TND B is 1 and S1, S2 are all tokens."""

    B: int
    N1: int
    N2: int
    S1: int
    S2: int
    D: int


def check_flash_arguments(call: FlashCall) -> None:
    """Refuse what the documentation of the op forbids, or what it would take silently and wrongly.

    Args:
        call: All arguments; of the lengths and masks that a graph computes only shape and dtype
            are looked at.

    Raises:
        BadInputError: names the argument, its rule and what was given.
    """
    _check_dtypes(call)
    sizes = _sizes_of(call)
    _check_sizes(sizes, call)
    _check_numbers(call)
    _check_mask(call, sizes)
    _check_lengths(call, sizes)


def _refuse(problem: str, fix: str) -> BadInputError:
    return BadInputError(f"{OP}: {problem}", fix=fix)


def _dtype_of(tensor: Any) -> str:
    """`float16`, `bool` and so on, for NumPy and MindSpore alike."""
    return str(tensor.dtype).lower().rpartition(".")[2].rstrip("_")


def _values_of(tensor: Any) -> NDArray[Any] | None:
    """What a tensor holds; None of one that has a shape only."""
    if isinstance(tensor, (list, tuple)):
        return np.array(tensor)
    if isinstance(tensor, np.ndarray):
        return tensor
    return np.asarray(tensor.asnumpy()) if hasattr(tensor, "asnumpy") else None


def _check_dtypes(call: FlashCall) -> None:
    dtypes = [_dtype_of(tensor) for tensor in (call.query, call.key, call.value)]
    if dtypes[0] not in ("float16", "bfloat16") or len(set(dtypes)) > 1:
        raise _refuse(
            "query, key and value must be of one dtype, float16 or bfloat16 "
            f"(got {', '.join(dtypes)})",
            fix="cast them, or attend by matrix products",
        )
    if call.attn_mask is not None and _dtype_of(call.attn_mask) not in ("bool", "uint8"):
        dtype = _dtype_of(call.attn_mask)
        kind = "a float mask for flash attention" if "float" in dtype else "attn_mask"
        raise _refuse(
            f"{kind}: attn_mask must be bool or uint8, 1 where a key is hidden (got {dtype}); "
            "what is added to scores would be taken for true and false",
            fix="give attn_mask=(mask < 0) for an additive mask, a bias as real_shift, or attend "
            "by matrix products",
        )
    if call.real_shift is not None and _dtype_of(call.real_shift) != dtypes[0]:
        raise _refuse(
            f"real_shift must have the dtype of query (got {_dtype_of(call.real_shift)} and "
            f"{dtypes[0]})",
            fix="cast it",
        )


def _sizes_of(call: FlashCall) -> _Sizes:
    if call.input_layout not in AXES:
        raise _refuse(
            f"input_layout must be one of {', '.join(AXES)} (got {call.input_layout!r})",
            fix="name the layout that query has",
        )
    axes = AXES[call.input_layout]
    shapes = [tuple(tensor.shape) for tensor in (call.query, call.key, call.value)]
    if any(len(shape) != len(axes) for shape in shapes) or shapes[1] != shapes[2]:
        raise _refuse(
            f"layout {call.input_layout} needs query, key and value of {len(axes)} axes, the last "
            f"two of one shape (got {', '.join(map(str, shapes))})",
            fix="give the layout that they have",
        )
    query, key = (dict(zip(axes, shape, strict=True)) for shape in shapes[:2])
    if "H" in axes:
        query["D"], left = divmod(query["H"], max(call.head_num, 1))
        key["N"], key_left = divmod(key["H"], max(query["D"], 1))
        query["N"], key["D"] = call.head_num, query["D"]
        if left or key_left:
            raise _refuse(
                "the widths of query and key must be whole heads "
                f"(got {query['H']} and {key['H']} with head_num {call.head_num})",
                fix="give head_num as the number of query heads",
            )
    if query["D"] != key["D"] or query.get("B") != key.get("B"):
        raise _refuse(
            f"query and key must share batch and head size (got {shapes[0]} and {shapes[1]})",
            fix="give the layout that they have",
        )
    return _Sizes(
        B=query.get("B", 1), N1=query["N"], N2=key["N"], S1=query["S"], S2=key["S"], D=query["D"]
    )


def _check_sizes(sizes: _Sizes, call: FlashCall) -> None:
    if call.head_num != sizes.N1:
        raise _refuse(
            f"head_num is the number of query heads (got {call.head_num} for {sizes.N1})",
            fix="give the query heads, not the key heads",
        )
    refusal = size_refusal(
        num_heads=sizes.N1,
        num_kv_heads=sizes.N2,
        head_size=sizes.D,
        # Of layout TND these are all tokens; its sequences are looked at with the lengths.
        max_length=1 if call.input_layout == "TND" else max(sizes.S1, sizes.S2),
        batch_size=sizes.B,
    )
    if refusal is not None:
        raise _refuse(refusal, fix="attend by matrix products")


def size_refusal(
    *, num_heads: int, num_kv_heads: int, head_size: int, max_length: int, batch_size: int
) -> str | None:
    """Why the op takes no tensors of these sizes, as half a sentence; None if it does.

    Args:
        num_heads: Of queries.
        num_kv_heads: Of keys and values.
        head_size: Width of a head.
        max_length: Longest row in tokens.
        batch_size: Rows.
    """
    if head_size % HEAD_SIZE_MULTIPLE or not 0 < head_size <= MAX_HEAD_SIZE:
        return f"the head size must be a multiple of 16 up to {MAX_HEAD_SIZE} (got {head_size})"
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        return f"key heads must divide query heads (got {num_kv_heads} for {num_heads})"
    if num_heads > MAX_HEADS:
        return f"query heads must be at most {MAX_HEADS} (got {num_heads})"
    if max_length > MAX_LENGTH:
        return f"rows must have at most {MAX_LENGTH} tokens (got {max_length})"
    if batch_size > MAX_BATCH_SIZE:
        return f"a batch must have at most {MAX_BATCH_SIZE} rows (got {batch_size})"
    return None


def _check_numbers(call: FlashCall) -> None:
    if not isinstance(call.scalar_value, float) or not math.isfinite(call.scalar_value):
        raise _refuse(
            f"scalar_value must be a finite float (got {call.scalar_value!r})",
            fix="give 1 / sqrt(head size)",
        )
    if not 0.0 < call.keep_prob <= 1.0 or (call.keep_prob == 1.0) != (call.drop_mask is None):
        given = "no" if call.drop_mask is None else "a"
        raise _refuse(
            "keep_prob must be in (0, 1], with a drop_mask below 1 and none at 1 "
            f"(got {call.keep_prob} with {given} drop_mask)",
            fix="give both or neither",
        )
    if call.padding_mask is not None:
        raise _refuse("padding_mask is not implemented", fix="write padding into attn_mask")
    shift = None if call.real_shift is None else _values_of(call.real_shift)
    if shift is not None and not np.isfinite(shift.astype(np.float64)).all():
        raise _refuse(
            "real_shift must be finite: minus infinity gave NaN",
            fix="hide keys by attn_mask, or take a large negative number",
        )


def _check_mask(call: FlashCall, sizes: _Sizes) -> None:
    mode = call.sparse_mode
    if mode not in range(PREFIX + 1):
        raise _refuse(f"sparse_mode must be 0 to 5 (got {mode})", fix="take 2 for causal rows")
    if call.attn_mask is None:
        if mode != DEFAULT_MASK:
            raise _refuse(
                f"sparse_mode {mode} needs an attn_mask; without one every key is seen",
                fix="give the mask of that mode",
            )
        return
    shape = tuple(call.attn_mask.shape)
    full = (sizes.S1, sizes.S2)
    four_axes = [(sizes.B, heads, *full) for heads in (sizes.N1, 1)]
    allowed: list[tuple[int, ...]] = [full, *four_axes]
    if mode in COMPRESSED_MODES:
        allowed = [(COMPRESSED_SIZE, COMPRESSED_SIZE)]
    elif mode == PREFIX:
        allowed = [*four_axes]
    if shape not in allowed:
        raise _refuse(
            f"attn_mask of sparse_mode {mode} must have the shape "
            f"{' or '.join(map(str, dict.fromkeys(allowed)))} (got {shape})",
            fix="broadcast it to the full shape",
        )
    hidden = _values_of(call.attn_mask)
    if hidden is not None:
        _check_polarity(hidden != 0, mode)


def _check_polarity(hidden: NDArray[np.bool_], mode: int) -> None:
    """A mask of the other polarity hides every query from itself, which no causal mask does."""
    rows, columns = hidden.shape[-2:]
    if mode in COMPRESSED_MODES:
        if not np.array_equal(hidden, compressed_causal_mask() != 0):
            raise _refuse(
                f"attn_mask of sparse_mode {mode} must be 1 above the diagonal and 0 elsewhere: "
                "1 hides a key, 0 keeps it",
                fix="give np.triu(np.ones((2048, 2048)), k=1)",
            )
    elif rows == columns and np.diagonal(hidden, axis1=-2, axis2=-1).all():
        raise _refuse(
            "attn_mask hides every token from itself: 1 hides a key, 0 keeps it, which is the "
            "other way round than in masks of what is seen",
            fix="give its negation",
        )
    elif hidden.all(-1).any():
        raise _refuse(
            "attn_mask hides every key of a query, for which the result is not defined",
            fix="let padding see itself; the loss leaves it out",
        )


def _check_lengths(call: FlashCall, sizes: _Sizes) -> None:
    given = (call.actual_seq_qlen, call.actual_seq_kvlen)
    if call.input_layout != "TND":
        if any(lengths is not None for lengths in given):
            raise _refuse(
                f"layout {call.input_layout} takes no actual_seq_qlen and actual_seq_kvlen",
                fix="leave them out, or take layout TND",
            )
        return
    if any(lengths is None for lengths in given):
        raise _refuse(
            "layout TND needs actual_seq_qlen and actual_seq_kvlen", fix="give cumulative lengths"
        )
    if call.sparse_mode not in (LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL) or call.next_tokens != 0:
        raise _refuse(
            "layout TND needs sparse_mode 2 or 3 and next_tokens 0 "
            f"(got {call.sparse_mode} and {call.next_tokens})",
            fix="give these; other masks need layout BNSD",
        )
    if max(sizes.S1, sizes.S2) > MAX_TOKENS:
        raise _refuse(
            f"layout TND takes {MAX_TOKENS} tokens (got {max(sizes.S1, sizes.S2)})",
            fix="put fewer sequences into a batch",
        )
    queries = _cumulative("actual_seq_qlen", call.actual_seq_qlen, sizes.S1)
    keys = _cumulative("actual_seq_kvlen", call.actual_seq_kvlen, sizes.S2)
    if queries is not None and keys is not None:
        _check_pairs(np.diff(queries, prepend=0), np.diff(keys, prepend=0), call)


def _cumulative(name: str, lengths: Any, num_tokens: int) -> NDArray[Any] | None:
    """Check one array of ends of sequences; None if it cannot be read."""
    if hasattr(lengths, "dtype") and _dtype_of(lengths) != "int64":
        raise _refuse(f"{name} must be int64 (got {_dtype_of(lengths)})", fix="cast it")
    ends = _values_of(lengths)
    if ends is None:
        return None
    if ends.ndim != 1 or not 0 < len(ends) <= MAX_SEQUENCES:
        raise _refuse(
            f"{name} must have one axis of 1 to {MAX_SEQUENCES} entries (got shape {ends.shape})",
            fix="put fewer sequences into a batch",
        )
    if ends[0] < 0 or (np.diff(ends) < 0).any() or ends[-1] != num_tokens:
        raise _refuse(
            f"{name} must be cumulative: never falling, the last equal to the {num_tokens} tokens "
            f"(got {ends[:6].tolist()}{' and more' if len(ends) > 6 else ''}, the last "
            f"{ends[-1]})",
            fix="give np.cumsum of the lengths",
        )
    return ends


def _check_pairs(queries: NDArray[Any], keys: NDArray[Any], call: FlashCall) -> None:
    """Check the lengths of sequences; those without queries and keys fill up (`flash_lengths`)."""
    lacking = int(((queries > 0) & (keys == 0)).sum()) if len(queries) == len(keys) else 0
    if len(queries) != len(keys) or lacking:
        raise _refuse(
            "actual_seq_qlen and actual_seq_kvlen must name the same sequences, with keys for all "
            f"queries (got {len(queries)} and {len(keys)}, {lacking} without keys)",
            fix="leave out queries that have no keys",
        )
    longest = max(queries.max(), keys.max())
    if longest > MAX_LENGTH:
        raise _refuse(
            f"sequences must have at most {MAX_LENGTH} tokens (got {longest})",
            fix="attend by matrix products",
        )
    if call.pre_tokens < queries.max():
        raise _refuse(
            f"pre_tokens must be at least the longest sequence, {queries.max()} "
            f"(got {call.pre_tokens})",
            fix="leave it out",
        )
    if call.sparse_mode == RIGHT_DOWN_CAUSAL and (queries > keys).any():
        raise _refuse(
            "sparse_mode 3 needs no fewer keys than queries in every sequence",
            fix="take sparse_mode 2",
        )

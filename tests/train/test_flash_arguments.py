"""What flash attention is documented to take: our check against a NumPy model, and the reverse."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import flash_reference
import numpy as np
import pytest
from flash_case import as_arrays, drawn

from tuner.errors import BadInputError
from tuner.train.flash_arguments import FlashCall, check_flash_arguments, compressed_causal_mask


def call_of(layout="BNSD", **changes):
    """A causal call that is as documented, 2 batches of 5 tokens, or sequences of 3 and 7."""
    shape = {"BNSD": (2, 4, 5, 16), "BSND": (2, 5, 4, 16), "BSH": (2, 5, 64), "SBH": (5, 2, 64)}
    narrow = {"BNSD": (2, 2, 5, 16), "BSND": (2, 5, 2, 16), "BSH": (2, 5, 32), "SBH": (5, 2, 32)}
    arguments = {
        "query": drawn(*shape.get(layout, (10, 4, 16)), seed=4),
        "key": drawn(*narrow.get(layout, (10, 2, 16)), seed=5),
        "value": drawn(*narrow.get(layout, (10, 2, 16)), seed=6),
        "head_num": 4, "attn_mask": compressed_causal_mask(), "sparse_mode": 2,
        "scalar_value": 0.25, "next_tokens": 0, "input_layout": layout,
    }  # fmt: skip
    if layout == "TND":
        ends = np.array([3, 10], np.int64)
        arguments |= {"actual_seq_qlen": ends, "actual_seq_kvlen": ends}
    return FlashCall(**(arguments | changes))


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH", "TND"])
def test_a_documented_call_of_every_layout_is_accepted(layout):
    call = call_of(layout)
    check_flash_arguments(call)
    found = flash_reference.flash_attention_score(**as_arrays(call))
    assert found.shape == call.query.shape


def test_a_call_of_tensors_without_values_is_accepted():
    """As a graph has them while it is compiled: shape and dtype."""
    q = SimpleNamespace(shape=(2, 4, 5, 16), dtype="BFloat16")
    mask = SimpleNamespace(shape=(2, 1, 5, 5), dtype="Bool")
    check_flash_arguments(
        FlashCall(
            query=q, key=q, value=q, head_num=4, attn_mask=mask, sparse_mode=1,
            scalar_value=0.25, input_layout="BNSD",
        )
    )  # fmt: skip


KEEP = np.tril(np.ones((5, 5), np.uint8))
WRONG = {
    "dtype": ({"query": np.ones((2, 4, 5, 16), np.float32)}, "float16 or bfloat16"),
    "other dtype of keys": ({"key": np.ones((2, 2, 5, 16), np.float32)}, "of one dtype"),
    "mask of int": ({"attn_mask": np.ones((2048, 2048), np.int32)}, "must be bool or uint8"),
    "layout": ({"input_layout": "BSN"}, "input_layout must be one of"),
    "axes": ({"input_layout": "BSH"}, "of 3 axes"),
    "key heads": ({"head_num": 2}, "head_num is the number of query heads (got 2 for 4)"),
    "scale of int": ({"scalar_value": 1}, "scalar_value must be a finite float"),
    "no mask": ({"attn_mask": None}, "sparse_mode 2 needs an attn_mask"),
    "small mask": ({"attn_mask": 1 - KEEP}, "the shape (2048, 2048)"),
    "compressed as full": ({"sparse_mode": 1}, "(5, 5) or (2, 4, 5, 5) or (2, 1, 5, 5)"),
    "padding mask of keys": (
        {"sparse_mode": 0, "attn_mask": np.zeros((2, 1, 1, 5), bool)}, "broadcast it",
    ),
    "mode": ({"sparse_mode": 7}, "sparse_mode must be 0 to 5"),
    "lengths": ({"actual_seq_qlen": [5, 10]}, "takes no actual_seq_qlen"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_forbidden_is_refused_with_the_argument(name):
    changes, words = WRONG[name]
    with pytest.raises(BadInputError) as caught:
        check_flash_arguments(call_of(**changes))
    assert caught.value.problem.startswith("ops.flash_attention_score: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("name", sorted(set(WRONG) - {"lengths"}))
def test_the_model_forbids_the_same(name):
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        flash_reference.flash_attention_score(**as_arrays(call_of(**WRONG[name][0])))


SILENT = {
    "keep mask": ({"sparse_mode": 1, "attn_mask": KEEP}, "hides every token from itself"),
    "query without keys": (
        {"sparse_mode": 1, "attn_mask": (np.arange(5) == 2)[:, None] | (1 - KEEP)},
        "hides every key of a query",
    ),
    "dropout without a mask": ({"keep_prob": 0.9}, "keep_prob must be"),
    "padding_mask": ({"padding_mask": KEEP}, "padding_mask is not implemented"),
    "endless bias": (
        {"real_shift": np.full((1, 4, 5, 5), -np.inf, np.float16)}, "must be finite",
    ),
    "bias of fp32": ({"real_shift": np.zeros((1, 4, 5, 5), np.float32)}, "dtype of query"),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_what_would_be_wrong_in_silence_is_refused(name):
    changes, words = SILENT[name]
    with pytest.raises(BadInputError, match=words):
        check_flash_arguments(call_of(**changes))


def int64(*values):
    return np.array(values, np.int64)


LENGTHS = {
    "not cumulative": (int64(7, 3), "must be cumulative"),
    "lengths themselves": (int64(3, 7), "must be cumulative"),
    "short of T": (int64(3, 9), "must be cumulative"),
    "too many": (np.minimum(np.arange(1, 1026), 10), "1 to 1024 entries"),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_that_break_a_rule_are_refused_by_check_and_model(name):
    ends, words = LENGTHS[name]
    call = call_of("TND", actual_seq_qlen=ends, actual_seq_kvlen=ends)
    with pytest.raises(BadInputError, match=words):
        check_flash_arguments(call)
    with pytest.raises(RuntimeError):
        flash_reference.flash_attention_score(**as_arrays(call))


def test_other_rules_of_lengths():
    for changes, words in (
        ({"actual_seq_kvlen": int64(0, 10)}, "1 without keys"),
        ({"actual_seq_kvlen": int64(3, 7, 10)}, "got 2 and 3"),
        ({"actual_seq_qlen": np.array([3, 10], np.int32)}, "must be int64"),
        ({"actual_seq_qlen": None}, "needs actual_seq_qlen"),
        ({"next_tokens": 5}, "next_tokens 0"),
        ({"pre_tokens": 6}, "at least the longest sequence, 7"),
        ({"sparse_mode": 3, "actual_seq_kvlen": int64(2, 10)}, "no fewer keys than queries"),
    ):
        with pytest.raises(BadInputError, match=words):
            check_flash_arguments(call_of("TND", **changes))


@pytest.mark.parametrize("ends", [(3, 10, 10, 10), (3, 3, 10), (0, 3, 10)])
def test_empty_sequences_fill_up_and_change_nothing(ends):
    """CANN's page has [2, 2, 0, 2, 2] as [2, 4, 4, 6, 8]."""
    filled = call_of("TND", actual_seq_qlen=int64(*ends), actual_seq_kvlen=int64(*ends))
    check_flash_arguments(filled)
    found = flash_reference.flash_attention_score(**as_arrays(filled))
    assert np.array_equal(
        found, flash_reference.flash_attention_score(**as_arrays(call_of("TND")))
    )


def test_queries_without_keys_are_refused_by_the_model_too():
    call = call_of("TND", actual_seq_kvlen=int64(0, 10))
    with pytest.raises(RuntimeError, match="queries have no keys"):
        flash_reference.flash_attention_score(**as_arrays(call))


def test_layout_tnd_may_have_more_tokens_than_a_sequence():
    """As a graph has them: shape and dtype; lengths that can be read are looked at."""

    def call_with(num_tokens, ends):
        tokens = SimpleNamespace(shape=(num_tokens, 4, 16), dtype="Float16")
        names = ("query", "key", "value")
        return call_of(
            "TND", **dict.fromkeys(names, tokens), actual_seq_qlen=ends, actual_seq_kvlen=ends
        )

    unread = SimpleNamespace(shape=(2,), dtype="Int64")
    check_flash_arguments(call_with(2**20, unread))
    check_flash_arguments(call_with(2**20, int64(2**19, 2**20)))
    with pytest.raises(BadInputError, match="takes 1048576 tokens"):
        check_flash_arguments(call_with(2**20 + 1, unread))
    with pytest.raises(BadInputError, match="at most 524288 tokens"):
        check_flash_arguments(call_with(2**20, int64(2**19 + 1, 2**20)))


# The model itself


def test_the_model_equals_a_softmax_by_hand():
    """Two tokens, one head: the first sees itself; scores 0 and ln 3 weigh 1/4 and 3/4."""
    q = np.zeros((1, 1, 2, 16), np.float16)
    k, v = q.copy(), q.copy()
    q[0, 0, 1, 0], k[0, 0, 1, 0] = 2.0, np.log(3.0)
    v[0, 0, :, 0] = 4.0, 8.0
    found = flash_reference.flash_attention_score(
        q, k, v, 1, attn_mask=compressed_causal_mask(), scalar_value=0.5, input_layout="BNSD",
        sparse_mode=2,
    )  # fmt: skip
    np.testing.assert_allclose(found[0, 0, :, 0], [4.0, 7.0], rtol=1e-3)


def test_the_model_has_one_answer_in_all_layouts():
    def answer(layout):
        call = call_of("BNSD")
        tensors = {name: getattr(call, name) for name in ("query", "key", "value")}
        if layout != "BNSD":
            tensors = {name: x.transpose(0, 2, 1, 3) for name, x in tensors.items()}
        if layout in ("BSH", "SBH"):
            tensors = {name: x.reshape(2, 5, -1) for name, x in tensors.items()}
        if layout == "SBH":
            tensors = {name: x.transpose(1, 0, 2) for name, x in tensors.items()}
        found = flash_reference.flash_attention_score(
            **as_arrays(dataclasses.replace(call, **tensors, input_layout=layout))
        )
        if layout == "BNSD":
            return found
        found = found.transpose(1, 0, 2) if layout == "SBH" else found
        return found.reshape(2, 5, 4, 16).transpose(0, 2, 1, 3)

    for layout in ("BSND", "BSH", "SBH"):
        assert np.array_equal(answer(layout), answer("BNSD"))


def test_sequences_of_the_model_attend_to_themselves():
    call = call_of("TND")
    found = flash_reference.flash_attention_score(**as_arrays(call))
    for start, end in ((0, 3), (3, 10)):
        alone = {
            name: getattr(call, name)[None, start:end].transpose(0, 2, 1, 3)
            for name in ("query", "key", "value")
        }
        wanted = flash_reference.flash_attention_score(**as_arrays(call_of("BNSD", **alone)))
        assert np.array_equal(found[start:end], wanted[0].transpose(1, 0, 2))


@pytest.mark.parametrize(
    ("mode", "band", "kept"),
    [
        (2, (2147483647, 0), [[1, 0, 0], [1, 1, 0]]),
        (3, (2147483647, 0), [[1, 1, 0], [1, 1, 1]]),
        (4, (0, 0), [[0, 1, 0], [0, 0, 1]]),
        (4, (1, 0), [[1, 1, 0], [0, 1, 1]]),
        (0, (0, 1), [[1, 1, 0], [0, 1, 1]]),
        (1, (0, 0), [[1, 1, 1], [1, 1, 1]]),
    ],
)
def test_sparse_modes_of_the_model(mode, band, kept):
    """Two queries on three keys; queries of 0 weigh all kept keys alike."""
    q = np.zeros((1, 1, 2, 16), np.float16)
    k = drawn(1, 1, 3, 16)
    v = np.zeros((1, 1, 3, 16), np.float16)
    v[0, 0, :, :3] = np.eye(3)
    mask = compressed_causal_mask() if mode >= 2 else np.zeros((2, 3), bool)
    found = flash_reference.flash_attention_score(
        q, k, v, 1, attn_mask=mask, input_layout="BNSD", sparse_mode=mode, pre_tokens=band[0],
        next_tokens=band[1],
    )  # fmt: skip
    wanted = np.array(kept) / np.sum(kept, axis=1, keepdims=True)
    np.testing.assert_allclose(found[0, 0, :, :3], wanted, rtol=1e-3)

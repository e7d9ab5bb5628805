"""Flash attention without an NPU: our arguments in a NumPy model of what the op documents."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import flash_reference
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from strategies import make_config
from tiny_model import TINY_MODEL, random_batch

from tuner.batching.plan import PlannedBatch
from tuner.config.schema import PrecisionConfig
from tuner.errors import BadInputError
from tuner.train import device_ops
from tuner.train.flash import FlashMask, FlashMix, attention_of, flash_refusal
from tuner.train.flash_arguments import FlashCall, check_flash_arguments, compressed_causal_mask
from tuner.train.graph import op_by_op
from tuner.train.loader import pad_batch
from tuner.train.model import Decoder
from tuner.train.plain_ops import Mix
from tuner.train.precision import dtypes_of

pytestmark = [pytest.mark.mindspore, pytest.mark.usefixtures("device")]

B, N, K, T, H = 2, 4, 2, 9, 16
FLASH_MODEL = {**TINY_MODEL, "model.head_size": H}
FP16 = PrecisionConfig(compute_dtype="fp16", fp32_ops=("softmax",))
# fp16 keeps 11 bits; the scores of a wrong mask or scale are off by tenths.
TOLERANCE = 4e-3
SEGMENT_IDS = np.array([[1, 1, 1, 2, 2, 3, 3, 0, 0], [0] * T], np.int32)


def as_arrays(call: FlashCall) -> dict[str, object]:
    """A call's arguments as the NumPy model takes them."""
    fields = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    return {
        name: value.asnumpy() if isinstance(value, Tensor) else value
        for name, value in fields.items()
    }


class StandIn:
    """In the op's place: checks and keeps the arguments, and answers as the NumPy model."""

    def __init__(self) -> None:
        self.calls: list[FlashCall] = []

    def __call__(self, query, key, value, head_num, **options):
        call = FlashCall(query=query, key=key, value=value, head_num=head_num, **options)
        check_flash_arguments(call)
        self.calls.append(call)
        return Tensor(flash_reference.flash_attention_score(**as_arrays(call)))


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def hidden_of(segment_ids):
    """By the definition: later tokens, and tokens of other segments; [B, 1, T, T]."""
    later = np.arange(T)[None, :] > np.arange(T)[:, None]
    other = segment_ids[:, None, :] != segment_ids[:, :, None]
    return (later[None] | other)[:, None]


def math_mix(q, k, v, hidden):
    """The matrix products, in fp32, of the same fp16 values; queries are scaled before."""
    mask = np.where(hidden, -1e9, 0.0).astype(np.float32).reshape(-1, 1, 1, T, T)
    tensors = [Tensor(x.astype(np.float32)) for x in (q * np.float32(H**-0.5), k, v)]
    return Mix(ms.float32)(*tensors, Tensor(mask)).asnumpy()


@pytest.fixture(scope="module")
def qkv():
    """[B, K, S, H] queries, [B, K, T, H] keys and values; scores of several units."""
    return (
        (4 * drawn(B, K, N // K * T, H, seed=1)).astype(np.float16),
        drawn(B, K, T, H, seed=2),
        drawn(B, K, T, H, seed=3),
    )


def mixed_by_flash(qkv, packing):
    config = make_config(FLASH_MODEL).model
    stand_in = StandIn()
    with op_by_op():
        mask = FlashMask()(packing)
        mixed = FlashMix(config, stand_in)(*map(Tensor, qkv), mask).asnumpy()
    (call,) = stand_in.calls
    return mixed, call


@pytest.fixture(scope="module")
def padded(qkv, device):
    return mixed_by_flash(qkv, ())


@pytest.fixture(scope="module")
def packed(qkv, device):
    return mixed_by_flash(qkv, (Tensor(SEGMENT_IDS), Tensor(SEGMENT_IDS)))


CAUSAL = np.zeros((B, T), np.int32)
KINDS = {"padded": CAUSAL, "packed": SEGMENT_IDS}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def wanted_of(kind, qkv):
    with op_by_op():
        return math_mix(*qkv, hidden_of(KINDS[kind]))


def test_our_arguments_give_what_the_matrix_products_give(kind, qkv, request):
    mixed, _ = request.getfixturevalue(kind)
    assert mixed.dtype == np.float16
    np.testing.assert_allclose(mixed, wanted_of(kind, qkv), rtol=TOLERANCE, atol=TOLERANCE)


def test_our_arguments_are_the_documented_ones(padded, packed):
    for _, call in (padded, packed):
        assert call.head_num == N
        assert tuple(call.query.shape) == (B, N, T, H)
        assert (call.input_layout, call.keep_prob, call.scalar_value) == ("BNSD", 1.0, 0.25)
        assert (call.pre_tokens, call.next_tokens) == (2147483647, 0)
        assert call.actual_seq_qlen is call.actual_seq_kvlen is None
    assert (padded[1].sparse_mode, packed[1].sparse_mode) == (2, 1)
    assert padded[1].attn_mask.shape == (2048, 2048)
    assert np.array_equal(padded[1].attn_mask.asnumpy(), np.triu(np.ones((2048, 2048)), k=1))
    assert packed[1].attn_mask.dtype == ms.bool_
    assert np.array_equal(packed[1].attn_mask.asnumpy(), hidden_of(SEGMENT_IDS))


def test_no_row_of_a_packed_mask_is_all_hidden(packed):
    """Fillers and padding see themselves: a query without keys has no defined result."""
    assert not packed[1].attn_mask.asnumpy().all(-1).any()
    assert np.isfinite(packed[0]).all()


def inverted(call):
    mask = call.attn_mask.asnumpy()
    return dataclasses.replace(call, attn_mask=(1 - mask.astype(np.uint8)))


FAULTS = {
    "inverted polarity": inverted,
    "missing scale": lambda call: dataclasses.replace(call, scalar_value=1.0),
    "no mask": lambda call: dataclasses.replace(call, attn_mask=None, sparse_mode=0),
    "keys in another order": lambda call: dataclasses.replace(
        call, key=call.key.asnumpy()[:, ::-1]
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows_in_the_result(kind, fault, qkv, request):
    _, call = request.getfixturevalue(kind)
    found = flash_reference.flash_attention_score(**as_arrays(FAULTS[fault](call)))
    off = np.abs(found.reshape(B, K, -1, H) - wanted_of(kind, qkv))
    assert np.nanmax(off) > 30 * TOLERANCE


def test_an_inverted_mask_is_refused(kind, request):
    _, call = request.getfixturevalue(kind)
    with pytest.raises(BadInputError, match="1 hides a key, 0 keeps it"):
        check_flash_arguments(inverted(call))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_float_mask_is_refused_by_its_name(kind, dtype, request):
    _, call = request.getfixturevalue(kind)
    floats = dataclasses.replace(call, attn_mask=call.attn_mask.asnumpy().astype(dtype) * -1e4)
    with pytest.raises(BadInputError, match="a float mask for flash attention") as caught:
        check_flash_arguments(floats)
    assert f"got {np.dtype(dtype)}" in caught.value.problem
    with pytest.raises(TypeError, match="attn_mask is not bool or uint8"):
        flash_reference.flash_attention_score(**as_arrays(floats))


def test_a_whole_decoder_gives_the_logits_of_the_matrix_products(device, monkeypatch):
    """Padded rows and packed ones with a filler, two layers, grouped queries."""
    config = make_config(FLASH_MODEL)
    batch = random_batch((3, 12), (12, 7, 2))
    rng = np.random.default_rng(0)
    rows = [(rng.integers(0, 23, length).astype(np.int32),) for length in (5, 2, 4, 9, 1)]
    planned = PlannedBatch(
        row_indices=np.arange(5), rows_per_slot=np.array([3, 0, 2]), padded_length=12
    )
    of_packed = make_config(
        {**FLASH_MODEL, "batching.strategy": "packed", "data.label_column": None}
    )
    both = pad_batch(rows, planned, of_packed)
    packing = (both.packing.segment_ids_BT, both.packing.positions_BT)
    math = Decoder(config.model, 16, 1, dtypes_of(FP16), "math")
    monkeypatch.setattr(device_ops, "chosen_device", lambda: "Ascend")
    flash = Decoder(config.model, 16, 1, dtypes_of(FP16))
    assert (math.is_flash, flash.is_flash) == (False, True)
    stand_in = StandIn()
    for layer in flash.layers:
        layer.attention.mix.attend = stand_in
    for inputs, real in (
        ((batch.input_ids_BT,), batch.input_ids_BT >= 0),
        ((both.input_ids_BT, *packing), packing[0] > 0),
    ):
        with op_by_op():
            wanted = math(*map(Tensor, inputs)).asnumpy()[real]
            found = flash(*map(Tensor, inputs)).asnumpy()[real]
        assert np.abs(wanted).max() > 1.0
        np.testing.assert_allclose(found, wanted, rtol=0.02, atol=0.02)
    assert [call.sparse_mode for call in stand_in.calls] == [2, 2, 1, 1]


def test_flash_where_it_cannot_be_is_refused_with_the_way_out(device):
    config = make_config({**FLASH_MODEL, "graph.attention": "flash"})
    with pytest.raises(BadInputError) as caught:
        Decoder(config.model, 16, 1, dtypes_of(FP16), "flash")
    assert str(caught.value) == (
        "graph.attention flash cannot be: flash attention needs Ascend (here: CPU); set "
        "graph.attention to auto or math"
    )


@pytest.mark.parametrize(
    ("changes", "device_name", "max_length", "batch_size", "words"),
    [
        ({}, "CPU", 16, 1, "needs Ascend (here: CPU)"),
        ({"precision.compute_dtype": "fp32", "precision.fp32_ops": []}, "Ascend", 16, 1, "fp32"),
        ({"model.head_size": 24}, "Ascend", 16, 1, "multiple of 16 up to 512 (got 24)"),
        ({"model.head_size": 528}, "Ascend", 16, 1, "multiple of 16 up to 512 (got 528)"),
        ({"model.num_heads": 512}, "Ascend", 16, 1, "at most 256 (got 512)"),
        ({}, "Ascend", 524289, 1, "at most 524288 tokens (got 524289)"),
        ({}, "Ascend", 16, 2049, "at most 2048 rows (got 2049)"),
        ({"model.factory": "a.b:c"}, "Ascend", 16, 1, "attention of its own"),
    ],
)
def test_a_refusal_says_why_and_auto_goes_on_with_matrix_products(
    changes, device_name, max_length, batch_size, words
):
    base = {**FLASH_MODEL, "precision.compute_dtype": "fp16", "precision.fp32_ops": ["softmax"]}
    config = make_config({**base, **changes})
    arguments = (device_name, max_length, batch_size)
    refusal = flash_refusal(config.model, config.precision, *arguments)
    assert words in refusal
    choice = attention_of(config, *arguments)
    assert (choice.name, choice.reason) == ("math", refusal)
    assert str(choice) == f"attention: matrix products, since {refusal}"
    wanted = make_config({**base, **changes, "graph.attention": "flash"})
    with pytest.raises(BadInputError, match="attention flash cannot be"):
        attention_of(wanted, *arguments)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_auto_takes_flash_up_to_the_limits(dtype):
    config = make_config(
        {"model.num_heads": 256, "model.head_size": 512, "precision.compute_dtype": dtype}
    )
    choice = attention_of(config, "Ascend", 524288, 2048)
    assert str(choice) == "attention: flash_attention_score"
    math = make_config({"graph.attention": "math", "precision.compute_dtype": dtype})
    assert attention_of(math, "Ascend", 16).name == "math"


# Calls of a user's own


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
    "no keys": (int64(3, 3, 10), "none of them without keys"),
    "a filler at the end": (int64(3, 10, 10), "none of them without keys"),
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
        ({"actual_seq_qlen": np.array([3, 10], np.int32)}, "must be int64"),
        ({"actual_seq_qlen": None}, "needs actual_seq_qlen"),
        ({"next_tokens": 5}, "next_tokens 0"),
        ({"pre_tokens": 6}, "at least the longest sequence, 7"),
        ({"sparse_mode": 3, "actual_seq_kvlen": int64(2, 10)}, "no fewer keys than queries"),
    ):
        with pytest.raises(BadInputError, match=words):
            check_flash_arguments(call_of("TND", **changes))


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

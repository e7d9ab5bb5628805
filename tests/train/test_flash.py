"""Flash attention without an NPU: our arguments in a NumPy model of what the op documents."""

from __future__ import annotations

import dataclasses

import flash_reference
import mindspore as ms
import numpy as np
import pytest
from flash_case import as_arrays, drawn
from mindspore import Tensor
from strategies import make_config
from tiny_model import TINY_MODEL, random_batch

from tuner.batching.packed_bounds import PackedBounds
from tuner.batching.plan import PlannedBatch
from tuner.config.schema import PrecisionConfig
from tuner.errors import BadInputError
from tuner.train import build
from tuner.train.flash import FlashMask, FlashMix, attention_of, flash_refusal
from tuner.train.flash_arguments import FlashCall, check_flash_arguments
from tuner.train.flash_lengths import cumulative_lengths
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
# Where its samples and paddings end in all B * T tokens.
ENDS = [3, 5, 7, 9, 18]


class StandIn:
    """In the op's place: checks and keeps the arguments, and answers as the NumPy model."""

    def __init__(self) -> None:
        self.calls: list[FlashCall] = []

    def __call__(self, query, key, value, head_num, **options):
        call = FlashCall(query=query, key=key, value=value, head_num=head_num, **options)
        check_flash_arguments(call)
        self.calls.append(call)
        return Tensor(flash_reference.flash_attention_score(**as_arrays(call)))


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
    lengths = cumulative_lengths(SEGMENT_IDS, 128)
    return mixed_by_flash(qkv, tuple(map(Tensor, (SEGMENT_IDS, SEGMENT_IDS, lengths))))


@pytest.fixture(scope="module")
def masked(qkv, device):
    """Packed rows without lengths."""
    return mixed_by_flash(qkv, (Tensor(SEGMENT_IDS), Tensor(SEGMENT_IDS)))


CAUSAL = np.zeros((B, T), np.int32)
KINDS = {"padded": CAUSAL, "packed": SEGMENT_IDS, "masked": SEGMENT_IDS}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def to_rows(mixed):
    """What the model answers, as the matrix products lay it out: [B, K, S, H]."""
    if mixed.ndim == 3:
        mixed = mixed.reshape(B, T, N, H).transpose(0, 2, 1, 3)
    return mixed.reshape(B, K, -1, H)


def wanted_of(kind, qkv):
    with op_by_op():
        return math_mix(*qkv, hidden_of(KINDS[kind]))


def test_our_arguments_give_what_the_matrix_products_give(kind, qkv, request):
    mixed, _ = request.getfixturevalue(kind)
    assert mixed.dtype == np.float16
    np.testing.assert_allclose(mixed, wanted_of(kind, qkv), rtol=TOLERANCE, atol=TOLERANCE)


def test_to_the_rounding_of_fp32_three_ways_are_one(qkv, packed, masked):
    """Sequences by their ends, by a full mask, and matrix products, before fp16 rounds them."""
    by_ends, by_mask = (
        to_rows(flash_reference.exact_attention(**as_arrays(call))) for _, call in (packed, masked)
    )
    np.testing.assert_allclose(by_ends, by_mask, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(by_ends, wanted_of("packed", qkv), rtol=1e-5, atol=1e-5)


def test_our_arguments_are_the_documented_ones(padded, packed, masked):
    for _, call in (padded, masked):
        assert call.head_num == N
        assert tuple(call.query.shape) == (B, N, T, H)
        assert (call.input_layout, call.keep_prob, call.scalar_value) == ("BNSD", 1.0, 0.25)
        assert (call.pre_tokens, call.next_tokens) == (2147483647, 0)
        assert call.actual_seq_qlen is call.actual_seq_kvlen is None
    assert (padded[1].sparse_mode, masked[1].sparse_mode) == (2, 1)
    for _, call in (padded, packed):
        assert call.attn_mask.dtype == ms.uint8
        assert np.array_equal(call.attn_mask.asnumpy(), np.triu(np.ones((2048, 2048)), k=1))
    assert masked[1].attn_mask.dtype == ms.bool_
    assert np.array_equal(masked[1].attn_mask.asnumpy(), hidden_of(SEGMENT_IDS))


def test_packed_rows_go_in_layout_tnd_with_their_ends_as_a_tensor(qkv, packed):
    _, call = packed
    lengths = [*ENDS, *[B * T] * (128 - len(ENDS))]
    for ends in (call.actual_seq_qlen, call.actual_seq_kvlen):
        assert isinstance(ends, Tensor)
        assert (ends.dtype, ends.asnumpy().tolist()) == (ms.int64, lengths)
    given = {
        field.name: getattr(call, field.name)
        for field in dataclasses.fields(call)
        if field.name not in ("actual_seq_qlen", "actual_seq_kvlen", "attn_mask")
    }
    tokens = {name: given.pop(name).asnumpy() for name in ("query", "key", "value")}
    assert given == {
        "head_num": N, "real_shift": None, "drop_mask": None, "padding_mask": None,
        "prefix": None, "keep_prob": 1.0, "scalar_value": 0.25, "pre_tokens": 2147483647,
        "next_tokens": 0, "inner_precise": 0, "input_layout": "TND", "sparse_mode": 3,
    }  # fmt: skip
    for name, heads, rows in zip(tokens, (N, K, K), qkv, strict=True):
        of_row = rows.reshape(B, heads, T, H)
        for token in range(B * T):
            assert np.array_equal(tokens[name][token], of_row[token // T, :, token % T])


def test_no_token_of_packed_rows_sees_nothing(packed, masked):
    """Fillers and padding see themselves: a query without keys has no defined result."""
    assert not masked[1].attn_mask.asnumpy().all(-1).any()
    assert np.isfinite(masked[0]).all()
    assert np.isfinite(packed[0]).all()


def inverted(call):
    mask = call.attn_mask.asnumpy()
    return dataclasses.replace(call, attn_mask=(1 - mask.astype(np.uint8)))


FAULTS = {
    "inverted polarity": inverted,
    "missing scale": lambda call: dataclasses.replace(call, scalar_value=1.0),
    "keys in another order": lambda call: dataclasses.replace(
        call, key=call.key.asnumpy()[:, ::-1]
    ),
}
# Of one layout, or of the others.
OF_LAYOUT = {
    "padded": {
        "no mask": lambda call: dataclasses.replace(call, attn_mask=None, sparse_mode=0),
    },
    "packed": {
        "ends of rows only": lambda call: with_ends(call, [T, 2 * T]),
        "one sequence": lambda call: with_ends(call, [2 * T]),
        "a boundary one too late": lambda call: with_ends(call, [4, *ENDS[1:]]),
    },
}
OF_LAYOUT["masked"] = OF_LAYOUT["padded"]


def with_ends(call, ends):
    tensor = np.array(ends, np.int64)
    return dataclasses.replace(call, actual_seq_qlen=tensor, actual_seq_kvlen=tensor)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [(kind, fault) for kind, own in OF_LAYOUT.items() for fault in (*FAULTS, *own)],
)
def test_a_planted_fault_shows_in_the_result(kind, fault, qkv, request):
    _, call = request.getfixturevalue(kind)
    faulty = {**FAULTS, **OF_LAYOUT[kind]}[fault](call)
    found = to_rows(flash_reference.flash_attention_score(**as_arrays(faulty)))
    off = np.abs(found - wanted_of(kind, qkv))
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


def test_a_whole_decoder_gives_the_logits_of_the_matrix_products(device):
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
    lengths = cumulative_lengths(packing[0], 128)
    math = Decoder(config.model, 16, 1, dtypes_of(FP16))
    flash = Decoder(config.model, 16, 1, dtypes_of(FP16), is_flash=True)
    stand_in = StandIn()
    for layer in flash.layers:
        layer.attention.mix.attend = stand_in
    for inputs, more, real in (
        ((batch.input_ids_BT,), (), batch.input_ids_BT >= 0),
        ((both.input_ids_BT, *packing), (), packing[0] > 0),
        ((both.input_ids_BT, *packing), (lengths,), packing[0] > 0),
    ):
        with op_by_op():
            wanted = math(*map(Tensor, inputs)).asnumpy()[real]
            found = flash(*map(Tensor, (*inputs, *more))).asnumpy()[real]
        assert np.abs(wanted).max() > 1.0
        np.testing.assert_allclose(found, wanted, rtol=0.02, atol=0.02)
    assert [call.sparse_mode for call in stand_in.calls] == [2, 2, 1, 1, 3, 3]


FP16_MODEL = {
    **FLASH_MODEL,
    "precision.compute_dtype": "fp16",
    "precision.fp32_ops": ["softmax"],
}


@pytest.mark.parametrize(
    ("device_name", "attention", "is_flash"),
    [("Ascend", "auto", True), ("Ascend", "math", False), ("CPU", "auto", False)],
)
def test_the_model_attends_as_config_and_device_say(
    device, monkeypatch, device_name, attention, is_flash
):
    monkeypatch.setattr(build, "chosen_device", lambda: device_name)
    model = build.build_model(make_config({**FP16_MODEL, "graph.attention": attention}), 16)
    assert model.is_flash == is_flash
    mixes = {type(layer.attention.mix) for layer in model.layers}
    assert (mixes == {FlashMix}) == is_flash


def test_flash_where_it_cannot_be_is_refused_with_the_way_out(device):
    config = make_config({**FP16_MODEL, "graph.attention": "flash"})
    with pytest.raises(BadInputError) as caught:
        build.build_model(config, 16)
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
    config = make_config({**FP16_MODEL, **changes})
    arguments = (device_name, max_length, batch_size)
    refusal = flash_refusal(config.model, config.precision, *arguments)
    assert words in refusal
    choice = attention_of(config, *arguments)
    assert (choice.name, choice.reason) == ("math", refusal)
    assert str(choice) == f"attention: matrix products, since {refusal}"
    wanted = make_config({**FP16_MODEL, **changes, "graph.attention": "flash"})
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


@pytest.mark.parametrize(
    ("sequences", "tokens", "words"),
    [
        (1024, 2**20, "packed rows in layout TND"),
        (
            1025,
            4096,
            "packed rows with full masks, since a batch may hold 1025 sequences (layout TND takes "
            "1024)",
        ),
        (
            12,
            2**20 + 1,
            "packed rows with full masks, since a batch may hold 1048577 tokens (layout TND takes "
            "1048576)",
        ),
    ],
)
def test_how_packed_rows_attend_is_said(sequences, tokens, words):
    config = make_config({**FP16_MODEL, "batching.strategy": "packed"})
    bounds = PackedBounds(sequences=sequences, tokens=tokens)
    choice = attention_of(config, "Ascend", 16, 4, bounds)
    assert str(choice) == f"attention: flash_attention_score, {words}"
    on_cpu = str(attention_of(config, "CPU", 16, 4, bounds))
    assert on_cpu == ("attention: matrix products, since flash attention needs Ascend (here: CPU)")

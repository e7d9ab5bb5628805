"""Packed rows by flash attention in the graph of a step, ops that CPU has in the kernel's place.

What is left for Ascend to show is the kernel itself: lengths as an input, layout, gradient and the
number of graphs are those of a run.
"""

from __future__ import annotations

import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from strategies import make_config
from tiny_model import TINY_MODEL

from tuner.batching.packed_bounds import PackedBounds
from tuner.batching.plan import PlannedBatch
from tuner.train import build
from tuner.train.engine import Engine
from tuner.train.flash import FlashMask, FlashMix
from tuner.train.flash_lengths import cumulative_lengths
from tuner.train.loader import pad_batch

pytestmark = [pytest.mark.mindspore, pytest.mark.usefixtures("device")]

MODEL = {
    **TINY_MODEL,
    "model.num_layers": 1,
    "model.head_size": 16,
    "precision.compute_dtype": "fp16",
    "data.label_column": None,
    "batching.strategy": "packed",
}
BOUNDS = PackedBounds(sequences=100, tokens=36)
# Three rows of twelve tokens: a filler between, samples of other lengths, one row full.
BATCHES = {
    "few sequences": ((5, 2, 4, 9, 1), (3, 0, 2)),
    "many sequences": ((1, 1, 2, 1, 3, 4, 5, 3, 4, 2), (6, 3, 1)),
}


def batch_of(name, config):
    lengths, rows_per_slot = BATCHES[name]
    rng = np.random.default_rng(len(lengths))
    rows = [(rng.integers(0, 23, length).astype(np.int32),) for length in lengths]
    planned = PlannedBatch(
        row_indices=np.arange(len(rows)), rows_per_slot=np.array(rows_per_slot), padded_length=12
    )
    return pad_batch(rows, planned, config)


def kernel_of_ops(
    query, key, value, head_num, attn_mask=None, actual_seq_qlen=None, actual_seq_kvlen=None,
    keep_prob=1.0, scalar_value=1.0, pre_tokens=0, next_tokens=0, input_layout="", sparse_mode=0,
):  # fmt: skip
    """What is documented of layout TND in sparse modes 2 and 3, as one full softmax."""
    N, H = query.shape[1:]
    K = key.shape[1]
    # Not ops.arange: of a length that the graph does not know, here it does not compile (2.10).
    places_M = ops.cumsum(ops.ones_like(query[:, 0, 0]).astype(ms.int32), 0) - 1
    # So many sequences come before a token's own as ends lie at or before it.
    is_past = places_M.reshape(-1, 1) >= actual_seq_qlen.reshape(1, -1)
    sequence_M = is_past.astype(ms.int32).sum(-1)
    is_hidden = ops.logical_or(
        places_M.reshape(1, -1) > places_M.reshape(-1, 1),
        sequence_M.reshape(1, -1) != sequence_M.reshape(-1, 1),
    )
    q_KGMH = query.astype(ms.float32).reshape(-1, K, N // K, H).transpose(1, 2, 0, 3)
    k_K1MH = key.astype(ms.float32).reshape(-1, K, 1, H).transpose(1, 2, 0, 3)
    v_K1MH = value.astype(ms.float32).reshape(-1, K, 1, H).transpose(1, 2, 0, 3)
    scores = ops.matmul(q_KGMH, k_K1MH.transpose(0, 1, 3, 2)) * scalar_value
    weights = ops.softmax(scores + is_hidden.astype(ms.float32) * -1e9, -1)
    mixed_KGMH = ops.matmul(weights, v_K1MH)
    return mixed_KGMH.transpose(2, 0, 1, 3).reshape(-1, N, H).astype(query.dtype)


@pytest.fixture
def as_on_ascend(monkeypatch):
    monkeypatch.setattr(build, "chosen_device", lambda: "Ascend")
    monkeypatch.setattr(ops, "flash_attention_score", kernel_of_ops)


@pytest.fixture(scope="module")
def by_products(device):
    """Loss and gradients of each batch by matrix products, in a graph as well."""
    config = make_config(MODEL)
    engine = Engine(config, device, 16, bounds=BOUNDS)
    assert not engine.model.is_flash
    outputs = {}
    for name in BATCHES:
        loss = engine.run_step(batch_of(name, config))
        outputs[name] = loss, engine.read_gradients()
        engine.clear_gradients()
    return outputs


@pytest.mark.parametrize("mode", ["static", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_steps_give_what_matrix_products_give_in_one_graph(
    by_products, as_on_ascend, device, mode
):
    config = make_config({**MODEL, "graph.mode": mode})
    engine = Engine(config, device, 16, bounds=BOUNDS)
    assert engine.model.is_flash
    assert engine.num_lengths == 128
    engine.run_empty_step((3, 12))
    assert not any(gradient.any() for gradient in engine.read_gradients())
    for name, (wanted, gradients) in by_products.items():
        batch = batch_of(name, config)
        loss = engine.run_step(batch)
        assert abs(loss - wanted) / batch.label_tokens < 2e-3
        for found, expected in zip(engine.read_gradients(), gradients, strict=True):
            np.testing.assert_allclose(found, expected, atol=2e-2 * np.abs(expected).max(), rtol=0)
        engine.clear_gradients()
    # The comparison can fail: samples that saw each other would have another loss.
    batch.packing.segment_ids_BT[:] = 1
    assert abs(engine.run_step(batch) - wanted) / batch.label_tokens > 2e-2
    assert engine.num_graphs() == 1, "other numbers of sequences compile nothing"


@pytest.mark.parametrize(
    ("bounds", "num_lengths"),
    [
        (None, 0),
        (PackedBounds(sequences=128, tokens=36), 128),
        (PackedBounds(sequences=129, tokens=36), 256),
        (PackedBounds(sequences=1024, tokens=2**20), 1024),
        (PackedBounds(sequences=1025, tokens=36), 0),
        (PackedBounds(sequences=4, tokens=2**20 + 1), 0),
    ],
)
def test_a_step_takes_lengths_where_layout_tnd_can_be(as_on_ascend, device, bounds, num_lengths):
    assert Engine(make_config(MODEL), device, 16, bounds=bounds).num_lengths == num_lengths


def test_matrix_products_take_no_lengths(device):
    assert Engine(make_config(MODEL), device, 16, bounds=BOUNDS).num_lengths == 0


class OfTheOp(nn.Cell):
    """The op itself with our arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = FlashMask()
        self.mix = FlashMix(make_config(MODEL).model)

    def construct(self, q_BKSH, k_BKTH, v_BKTH, *packing):
        return self.mix(q_BKSH, k_BKTH, v_BKTH, self.mask(packing))


def test_a_graph_takes_the_op_with_our_arguments_and_lacks_the_kernel_alone(device):
    """Types of arguments are looked at before a kernel is looked for; sizes are not, on CPU."""
    segment_ids = np.array([[1, 1, 2, 2, 0, 0]] * 2, np.int32)
    lengths = cumulative_lengths(segment_ids, 128)
    q, k = np.ones((2, 2, 12, 16), np.float16), np.ones((2, 2, 6, 16), np.float16)
    inputs = (q, k, k, segment_ids, segment_ids)
    with pytest.raises(RuntimeError, match="FlashAttentionScore") as caught:
        OfTheOp()(*map(Tensor, (*inputs, lengths)))
    assert re.search("[Uu]nsupported op|unregistered", str(caught.value))
    with pytest.raises(TypeError, match="actual_seq_qlen"):
        OfTheOp()(*map(Tensor, (*inputs, lengths.astype(np.float32))))

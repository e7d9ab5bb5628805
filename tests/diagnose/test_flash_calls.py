"""What a user's Cell hands to flash attention, found on a device that has no such op."""

from __future__ import annotations

import inspect
import os
import sys

os.environ.setdefault("GLOG_v", "4")

import broken_cells
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from strategies import make_config

from tuner.diagnose import flash_calls
from tuner.diagnose.flash_calls import FlashWatch
from tuner.diagnose.shape_trace import model_arrays, trace_forward
from tuner.diagnose.trace_faults import find_faults
from tuner.train.graph import op_by_op
from tuner.train.loader import Batch

pytestmark = pytest.mark.mindspore

VOCAB = 23
CONFIG = make_config(
    {"model.factory": "broken_cells:flash", "model.vocab_size": VOCAB, "device": "cpu"}
)
OP = ops.flash_attention_score


@pytest.fixture(scope="module", autouse=True)
def device():
    from tuner.train.device import open_device

    return open_device(CONFIG)


def traced(factory, shape=(2, 8)):
    model = getattr(broken_cells, factory)(CONFIG, 16)
    return model, trace_forward(model, model_arrays(Batch.full(shape, CONFIG)))


def assert_op_is_back(model):
    assert ops.flash_attention_score is OP
    assert sys.modules["mindspore.ops.function.nn_func"].flash_attention_score is OP
    assert broken_cells.flash_attention_score is OP
    attention = model.layers[1].attention
    assert getattr(attention, "op", OP) is OP
    assert os.environ.get("MS_JIT") is None


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        ("float_mask", "FloatMask"),
        ("float_mask_by_name", "FloatMaskByName"),
        ("float_mask_kept", "FloatMaskKept"),
        ("float_mask_in_jit", "FloatMaskInJit"),
    ],
)
def test_a_float_mask_is_found_however_the_op_is_reached(factory, name):
    model, trace = traced(factory)
    [refused] = trace.refused
    assert refused.cell_name == f"layers.1.attention ({name})"
    assert "a float mask for flash attention" in refused.error.problem
    # The forward comes through, with every Cell left.
    assert trace.error is None and trace.broken is None
    assert trace.calls[0].output_shapes == ((2, 8, VOCAB),)
    assert_op_is_back(model)
    [finding] = find_faults([trace], VOCAB)
    assert (finding.name, finding.severity) == ("flash-arguments", "error")
    assert finding.what.startswith(
        f"at B=2 L=8 layers.1.attention ({name}): ops.flash_attention_score: a float mask"
    )
    assert "attn_mask=(mask < 0)" in finding.fix and "zeros" in finding.why


def test_a_mask_as_documented_passes_and_attends_as_matrix_products_do():
    model, trace = traced("flash", (3, 12))
    assert trace.refused == ()
    [finding] = find_faults([trace], VOCAB)
    assert (finding.name, finding.severity) == ("shapes-follow", "ok")
    assert finding.what.endswith("by NumPy, since this device has no such op")
    assert_op_is_back(model)
    logits = []
    for one in (model, broken_cells.sound(CONFIG, 16)):
        rng = np.random.default_rng(0)
        for weight in one.get_parameters():
            weight.set_data(Tensor(0.3 * rng.standard_normal(weight.shape), ms.float32))
        with op_by_op(), FlashWatch(lambda: "the model").watching(one):
            logits.append(one(*map(Tensor, model_arrays(Batch.full((3, 12), CONFIG)))).asnumpy())
    np.testing.assert_allclose(*logits, atol=5e-3)
    assert np.ptp(logits[0]) > 0.5


def test_a_forward_that_breaks_afterwards_has_both_findings_and_the_op_back():
    model, trace = traced("flash_then_broken", (3, 12))
    assert trace.error is not None and trace.line.endswith("WIDTH)")
    names = [finding.name for finding in find_faults([trace], VOCAB)]
    assert names == ["flash-arguments", "fixed-length"]
    assert_op_is_back(model)


def test_wrong_names_of_arguments_are_the_cells_own_error():
    class Misspelt(broken_cells.Flash):
        def attend(self, q, k, v, mask):
            return ops.flash_attention_score(q, k, v, 1, atten_mask=mask)

    model = broken_cells.with_attention(Misspelt)(CONFIG, 16)
    trace = trace_forward(model, model_arrays(Batch.full((2, 8), CONFIG)))
    assert isinstance(trace.error, TypeError) and "atten_mask" in str(trace.error)
    assert trace.broken.class_name == "Misspelt"
    assert_op_is_back(model)


def test_where_the_device_has_the_op_it_is_called_with_the_same_arguments(monkeypatch):
    """As on Ascend, as far as that can be said without one: the op is a function of this test."""
    calls = []

    def op(*arguments, **options):
        calls.append((arguments, options))
        return arguments[0] + 1

    op.__signature__ = inspect.signature(OP)
    monkeypatch.setattr(ops, "flash_attention_score", op)
    monkeypatch.setattr(flash_calls, "chosen_device", lambda: flash_calls.FLASH_DEVICE)
    watch = FlashWatch(lambda: "a (Cell)")
    query = Tensor(np.zeros((1, 1, 4, 16)), ms.float16)
    mask = Tensor(np.zeros((4, 4)), ms.float32)
    with op_by_op(), watch.watching(nn.Cell()):
        found = ops.flash_attention_score(query, query, query, 1, attn_mask=mask)
    assert (found.asnumpy() == 1).all()
    [(arguments, options)] = calls
    assert arguments == (query, query, query, 1) and options == {"attn_mask": mask}
    [refused] = watch.refused
    assert (refused.cell_name, refused.is_replaced) == ("a (Cell)", False)

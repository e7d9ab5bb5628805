"""Which dtype each op group computes in: against NumPy that rounds, group by group."""

from __future__ import annotations

from contextlib import contextmanager

import mindspore as ms
import numpy as np
import pytest
from numpy_decoder import NumpyDecoder, decoder_logits, log_softmax, summed_cross_entropy
from strategies import make_config
from tiny_model import TINY_MODEL, random_batch

from tuner.config.schema import OP_GROUPS, PrecisionConfig
from tuner.errors import BadInputError
from tuner.train.device import open_device
from tuner.train.engine import Engine
from tuner.train.model import Decoder
from tuner.train.precision import dtypes_of
from tuner.train.step import SummedLoss

pytestmark = pytest.mark.mindspore

ONE_LAYER = {**TINY_MODEL, "model.num_layers": 1}
LOGIT_GROUPS = [group for group in OP_GROUPS if group != "loss"]


def fp16(*lowered):
    """fp16 with these groups lowered and all others kept in fp32."""
    kept = tuple(group for group in OP_GROUPS if group not in lowered)
    return PrecisionConfig(compute_dtype="fp16", fp32_ops=kept)


def engine_of(device, precision, **changes):
    config = make_config(
        {
            **ONE_LAYER,
            "precision.compute_dtype": precision.compute_dtype,
            "precision.fp32_ops": precision.fp32_ops,
            **changes,
        }
    )
    return Engine(config, device, max_padded_length=12)


@contextmanager
def no_graphs():
    """Op by op: the same kernels, and none of the seconds of compiling."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    try:
        yield
    finally:
        ms.set_context(mode=ms.GRAPH_MODE)


@pytest.fixture
def op_by_op(device):
    with no_graphs():
        yield


@pytest.fixture(scope="module")
def batch():
    return random_batch((3, 12), (12, 12, 12))


@pytest.fixture(scope="module")
def rounding_errors(device, batch):
    """Of every group, what lowering it alone adds to the logits: the product's and NumPy's."""
    with no_graphs():
        return compare_groups(batch)


def compare_groups(batch):
    config = make_config(ONE_LAYER).model

    def found(*lowered):
        model = Decoder(config, 16, seed=1, dtypes=dtypes_of(fp16(*lowered)))
        weights = {
            name: parameter.asnumpy().astype(np.float64)
            for name, parameter in model.parameters_and_names()
        }
        low = {"products", *lowered}
        ours = model(ms.Tensor(batch.input_ids_BT))
        expected = NumpyDecoder(weights, config, low).logits(batch.input_ids_BT)
        return ours.asnumpy().astype(np.float64), expected, ours.dtype

    ours, expected, dtype = found()
    assert dtype == ms.float32
    exact = decoder_logits(batch.input_ids_BT, _weights(config), config)
    errors = {"products": (ours - exact, expected - exact)}
    for group in LOGIT_GROUPS:
        ours_low, expected_low, dtype = found(group)
        assert dtype == (ms.float16 if group == "logits" else ms.float32)
        errors[group] = (ours_low - ours, expected_low - expected)
    return errors


def _weights(config):
    return {
        name: parameter.asnumpy().astype(np.float64)
        for name, parameter in Decoder(config, 16, seed=1).parameters_and_names()
    }


def likeness(left, right):
    return np.corrcoef(left.ravel(), right.ravel())[0, 1]


@pytest.mark.parametrize("group", ["products", *LOGIT_GROUPS])
def test_lowering_a_group_rounds_that_group_and_no_other(rounding_errors, group):
    """Rounding errors look random, so only those of the same ops are alike."""
    ours = rounding_errors[group][0]
    assert likeness(ours, rounding_errors[group][1]) > 0.6
    for other in LOGIT_GROUPS:
        if group not in (other, "products"):
            assert likeness(ours, rounding_errors[other][1]) < 0.5, other


def test_loss_in_fp16_rounds_the_log_softmax_and_sums_in_fp32(op_by_op):
    """The sum is far above the largest fp16 number, 65504."""
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((8, 512, 40)) * 12).astype(np.float32)
    targets = rng.integers(0, 40, (8, 512)).astype(np.int32)
    targets[0, :100] = -100
    exact = summed_cross_entropy(logits, targets)
    rounded = np.float16(log_softmax(logits.astype(np.float16).astype(np.float64)))
    chosen = np.take_along_axis(rounded, np.maximum(targets, 0)[..., None], -1)[..., 0]
    expected = -chosen.astype(np.float64)[targets != -100].sum()
    assert exact > 1.2 * 65504
    found = {
        dtype: float(SummedLoss(ms.nn.Identity(), dtype)(ms.Tensor(logits), ms.Tensor(targets)))
        for dtype in (ms.float32, ms.float16)
    }
    assert found[ms.float32] == pytest.approx(exact, rel=1e-6)
    assert found[ms.float16] == pytest.approx(expected, rel=1e-4)
    assert abs(found[ms.float16] - exact) > 1e-6 * exact


def test_hidden_tokens_weigh_exactly_nothing_in_fp16(op_by_op, batch):
    """Even where scores are large: the mask is far below them, and finite."""
    config = make_config({**ONE_LAYER, "model.init_std": 6.0}).model
    model = Decoder(config, 16, seed=1, dtypes=dtypes_of(fp16("softmax")))
    logits = model(ms.Tensor(batch.input_ids_BT)).asnumpy()
    others = batch.input_ids_BT.copy()
    others[:, 6:] = 3
    changed = model(ms.Tensor(others)).asnumpy()
    assert np.isfinite(logits).all()
    assert np.array_equal(changed[:, :6], logits[:, :6])
    assert not np.array_equal(changed[:, 6:], logits[:, 6:])


def gradient(engine):
    return np.concatenate([part.ravel() for part in engine.read_gradients()]).astype(np.float64)


@pytest.fixture(scope="module")
def reference(device, batch):
    engine = engine_of(device, PrecisionConfig())
    loss = engine.run_step(batch)
    return loss, gradient(engine)


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_all_of_fp16_has_the_loss_and_gradient_of_fp32_to_fp16_precision(
    device, batch, reference, mode
):
    engine = engine_of(device, fp16(*OP_GROUPS), **{"graph.mode": mode})
    loss = engine.run_step(batch)
    assert loss == pytest.approx(reference[0], rel=2e-3)
    assert loss != reference[0]
    off = np.linalg.norm(gradient(engine) - reference[1]) / np.linalg.norm(reference[1])
    assert 1e-4 < off < 1e-2
    assert {parameter.dtype for parameter in engine.parameters} == {ms.float32}


@pytest.mark.slow
def test_packed_rows_run_in_fp16(device):
    changes = {"batching.strategy": "packed", "graph.mode": "dynamic"}
    engine = engine_of(device, fp16(*OP_GROUPS), **changes)
    engine.run_empty_step((3, 12))
    assert not gradient(engine).any()
    assert engine.num_graphs() == 1


def test_bf16_is_refused_on_cpu():
    config = make_config({"precision.compute_dtype": "bf16", "device": "cpu"})
    with pytest.raises(BadInputError) as caught:
        open_device(config)
    assert caught.value.problem == (
        "precision.compute_dtype bf16 needs Ascend: MindSpore has no bf16 kernels for CPU"
    )

"""The decoder and its loss against NumPy, its gradients against finite differences."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from numpy_decoder import decoder_logits, summed_cross_entropy
from strategies import make_config
from tiny_model import TINY_MODEL, random_batch

from tuner.train.engine import Engine
from tuner.train.model import Decoder
from tuner.train.step import AccumulateStep, SummedLoss

pytestmark = pytest.mark.mindspore

SHAPE = (3, 12)
LENGTHS = (12, 7, 2)


def weights_of(model):
    return {
        name: parameter.asnumpy().astype(np.float64)
        for name, parameter in model.parameters_and_names()
    }


@pytest.fixture(scope="module")
def model(tiny_config, device):
    return Decoder(tiny_config.model, max_length=16, seed=1)


@pytest.fixture(scope="module")
def logits_cell(tiny_config, device):
    return Decoder(tiny_config.model, max_length=16, seed=1)


@pytest.fixture(scope="module")
def batch():
    return random_batch(SHAPE, LENGTHS, ignored_before=1)


@pytest.fixture(scope="module")
def step(model):
    step = AccumulateStep(SummedLoss(model))
    step.set_train()
    return step


def test_logits_equal_numpy(logits_cell, tiny_config, batch):
    logits = logits_cell(ms.Tensor(batch.input_ids_BT)).asnumpy()
    expected = decoder_logits(batch.input_ids_BT, weights_of(logits_cell), tiny_config.model)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=2e-5)


def test_padding_and_other_rows_change_no_logit_of_a_real_token(logits_cell, batch):
    logits = logits_cell(ms.Tensor(batch.input_ids_BT)).asnumpy()
    others = batch.input_ids_BT.copy()
    others[1, 7:] = 22
    others[2, 2:] = 5
    others[0] = 3
    changed = logits_cell(ms.Tensor(others)).asnumpy()
    assert np.array_equal(changed[1, :7], logits[1, :7])
    assert np.array_equal(changed[2, :2], logits[2, :2])
    assert not np.array_equal(changed[0], logits[0])


def test_loss_equals_numpy_cross_entropy_of_the_models_own_logits(step, logits_cell, batch):
    """The issue's bound: 1e-5, on the mean loss of one batch."""
    logits = logits_cell(ms.Tensor(batch.input_ids_BT)).asnumpy()
    loss = float(step(ms.Tensor(batch.input_ids_BT), ms.Tensor(batch.targets_BT)).asnumpy())
    expected = summed_cross_entropy(logits, batch.targets_BT)
    assert batch.label_tokens == 10 + 5
    assert abs(loss - expected) / batch.label_tokens < 1e-5


@pytest.mark.parametrize("mode", ["static", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_loss_equals_numpy_at_a_real_vocabulary(device, mode):
    """Thousands of logits a position, where a sloppy log-softmax or sum would show."""
    config = make_config(
        {**TINY_MODEL, "model.vocab_size": 3001, "graph.mode": mode, "train.seed": 3}
    )
    lengths = (40, 33, 2, 17)
    batch = random_batch((4, 40), lengths, vocab_size=3001)
    logits = Decoder(config.model, 40, seed=3)(ms.Tensor(batch.input_ids_BT)).asnumpy()
    loss = Engine(config, device, 40).run_step(batch)
    expected = summed_cross_entropy(logits, batch.targets_BT)
    assert loss == pytest.approx(expected, rel=1e-5 / 2)


def test_gradients_equal_finite_differences(step, model, tiny_config, batch):
    """Central differences of the float64 twin, along a random direction of every parameter."""
    for buffer in step.gradients:
        buffer.set_data(ms.ops.zeros_like(buffer))
    step(ms.Tensor(batch.input_ids_BT), ms.Tensor(batch.targets_BT)).asnumpy()
    weights = weights_of(model)
    rng = np.random.default_rng(7)
    eps = 1e-5
    names = [name for name, _ in model.parameters_and_names()]
    assert len(names) == len(step.gradients) == 2 + 2 * 9
    for name, buffer in zip(names, step.gradients, strict=True):
        direction = rng.standard_normal(weights[name].shape)
        direction /= np.linalg.norm(direction)

        def loss_at(offset, name=name, direction=direction):
            moved = {**weights, name: weights[name] + offset * direction}
            logits = decoder_logits(batch.input_ids_BT, moved, tiny_config.model)
            return summed_cross_entropy(logits, batch.targets_BT)

        expected = (loss_at(eps) - loss_at(-eps)) / (2 * eps)
        gradient = buffer.asnumpy().astype(np.float64)
        scale = max(np.linalg.norm(gradient), 1e-3)
        assert abs((gradient * direction).sum() - expected) < 2e-4 * scale, name


def test_a_model_of_one_key_head_and_another_seed_differs(device):
    config = make_config({**TINY_MODEL, "model.num_kv_heads": 1})
    first = Decoder(config.model, max_length=16, seed=1)
    again = Decoder(config.model, max_length=16, seed=1)
    other = Decoder(config.model, max_length=16, seed=2)
    assert np.array_equal(first.embedding.asnumpy(), again.embedding.asnumpy())
    assert not np.array_equal(first.embedding.asnumpy(), other.embedding.asnumpy())
    shape = first.layers[0].attention.k_proj.weight.shape
    assert shape == (4, 16)

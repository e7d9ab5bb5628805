"""Adapters: nothing at first, the only thing that is trained, and merged exactly."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from numpy_decoder import decoder_logits, summed_cross_entropy
from strategies import make_config
from tiny_model import TINY_MODEL, random_batch

from tuner.train.build import build_model
from tuner.train.engine import Engine
from tuner.train.graph import op_by_op
from tuner.train.lora import is_adapter, merged_weights

pytestmark = pytest.mark.mindspore

LORA = {
    "model.lora": {"rank": 3, "alpha": 12.0, "projections": ["q_proj", "v_proj", "down_proj"]},
    "model.num_layers": 1,
}


def config_of(**changes):
    return make_config({**TINY_MODEL, **LORA, **changes})


def logits_of(model, ids):
    with op_by_op():
        return model(ms.Tensor(ids)).asnumpy()


def arrays(parameters):
    return {parameter.name: parameter.asnumpy().copy() for parameter in parameters}


@pytest.fixture(scope="module")
def batch():
    return random_batch((2, 10), (10, 7))


def test_a_new_model_with_adapters_computes_the_bits_of_the_one_without(device, batch):
    plain = build_model(make_config({**TINY_MODEL, "model.num_layers": 1}), 16)
    adapted = build_model(config_of(), 16)
    logits = logits_of(adapted, batch.input_ids_BT)
    assert logits.tobytes() == logits_of(plain, batch.input_ids_BT).tobytes()


def test_a_is_uniform_within_the_root_of_its_width_and_b_is_zero(device):
    """Kaiming's rule with a = sqrt(5): bound = sqrt(6 / ((1 + 5) * num_in))."""
    wide = {"model.width": 64, "model.lora": {"rank": 64, "projections": ["q_proj"]}}
    model = build_model(config_of(**wide), 16)
    adapter = model.layers[0].attention.q_proj.adapter
    drawn = adapter.lora_a.asnumpy()
    bound = np.sqrt(6 / (6 * 64))
    assert drawn.shape == (64, 64)
    assert np.abs(drawn).max() <= bound
    assert np.abs(drawn).max() > 0.99 * bound
    # The standard deviation of a uniform distribution is its bound / sqrt(3).
    assert drawn.std() == pytest.approx(bound / np.sqrt(3), rel=0.03)
    assert not adapter.lora_b.asnumpy().any()
    again = build_model(config_of(**wide), 16).layers[0].attention.q_proj.adapter
    assert again.lora_a.asnumpy().tobytes() == drawn.tobytes()
    other = build_model(config_of(**wide, **{"train.seed": 1}), 16)
    assert (other.layers[0].attention.q_proj.adapter.lora_a.asnumpy() != drawn).any()


@pytest.fixture(scope="module")
def trained(device, batch):
    """An engine after two updates, with its weights before."""
    engine = Engine(config_of(), device, 16)
    before = arrays(engine.model.get_parameters())
    losses = []
    for update in (1, 2):
        losses.append(engine.run_step(batch))
        engine.run_update(0.05, update, batch.label_tokens)
    return engine, before, losses


def test_only_adapters_move_and_only_they_have_buffers(trained):
    engine, before, losses = trained
    after = arrays(engine.model.get_parameters())
    moved = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert moved == {name for name in before if is_adapter(name)}
    assert len(moved) == 6
    assert losses[1] < losses[0]
    # Weights, gradients and two moments of each adapter; then what is frozen.
    assert len(engine.parameters) == 4 * 6 + (2 + 9)
    names = [parameter.name for parameter in engine.parameters]
    assert len(set(names)) == len(names)


def test_gradients_of_adapters_equal_finite_differences(trained, batch):
    engine, _, _ = trained
    config = config_of()
    engine.clear_gradients()
    loss = engine.run_step(batch)
    weights = {
        name: parameter.asnumpy().astype(np.float64)
        for name, parameter in engine.model.parameters_and_names()
    }

    def loss_at(changed):
        logits = decoder_logits(batch.input_ids_BT, changed, config.model)
        return summed_cross_entropy(logits, batch.targets_BT)

    assert loss == pytest.approx(loss_at(weights), rel=1e-5)
    rng = np.random.default_rng(1)
    names = [name for name in weights if is_adapter(name)]
    for name, gradient in zip(names, engine.read_gradients(), strict=True):
        direction = rng.standard_normal(gradient.shape)
        direction /= np.linalg.norm(direction)
        up, down = (
            loss_at({**weights, name: weights[name] + offset * direction})
            for offset in (1e-5, -1e-5)
        )
        scale = max(np.linalg.norm(gradient), 1e-3)
        assert abs((gradient * direction).sum() - (up - down) / 2e-5) < 2e-4 * scale, name


def test_merged_weights_are_those_of_a_model_without_adapters(trained, batch):
    engine, before, _ = trained
    merged = merged_weights(engine.model, config_of().model.lora)
    plain = make_config({**TINY_MODEL, "model.num_layers": 1})
    twin = build_model(plain, 16)
    assert set(merged) == {name for name, _ in twin.parameters_and_names()}
    expected = logits_of(engine.model, batch.input_ids_BT)
    found = decoder_logits(batch.input_ids_BT, merged, plain.model)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=3e-5)
    unmerged = logits_of(twin, batch.input_ids_BT)
    assert np.abs(unmerged - expected).max() > 1e-2
    # Merging copies: the model in training keeps its own.
    weight = engine.model.layers[0].attention.q_proj.weight
    assert weight.asnumpy().tobytes() == before[weight.name].tobytes()


def test_frozen_weights_from_a_source_are_not_saved_again(tmp_path, device):
    from hf_case import write_family

    folder = write_family(tmp_path / "c", "llama")
    lora = {"rank": 2, "projections": ["q_proj"]}
    config = make_config({"model": {"source": str(folder), "lora": lora}})
    engine = Engine(config, device, 16)
    assert len(engine.parameters) == 4 * 2 * 2
    assert all("lora" in parameter.name for parameter in engine.parameters)

"""Biases, norms of queries and keys, head sizes, scaled or learned positions, untied logits."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from numpy_decoder import decoder_logits, summed_cross_entropy
from strategies import make_config
from tiny_model import TINY_MODEL, random_batch

from tuner.batching.plan import PlannedBatch
from tuner.errors import BadInputError
from tuner.train.build import build_model
from tuner.train.engine import Engine
from tuner.train.graph import op_by_op
from tuner.train.loader import pad_batch

pytestmark = pytest.mark.mindspore

LLAMA3 = {
    "model.rope_scaling": {
        "kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_positions": 24,
    },
    "model.rope_theta": 500.0,
}  # fmt: skip
VARIANTS = {
    "qwen2": {
        "model.attention_bias": "qkv", "model.tie_embedding": False,
        "model.rope_scaling": {"kind": "linear", "factor": 3.0},
    },
    "qwen3": {
        "model.attention_bias": "qkvo", "model.qk_norm": True, "model.head_size": 6,
        "model.tie_embedding": False,
    },
    "llama3": {**LLAMA3, "model.norm_eps": 1e-2},
    "learned": {
        "model.positions": "learned", "model.max_positions": 16, "model.tie_embedding": False,
    },
}  # fmt: skip
SAMPLES = (5, 2, 9)


def config_of(variant, **changes):
    return make_config({**TINY_MODEL, **VARIANTS[variant], **changes})


def randomise(model, seed=3):
    """No bias 0, no norm 1: a part that is left out shows."""
    rng = np.random.default_rng(seed)
    for name, parameter in model.parameters_and_names():
        values = rng.standard_normal(parameter.shape) * 0.3 + ("norm" in name)
        parameter.set_data(ms.Tensor(values, ms.float32))


def weights_of(model):
    return {
        name: parameter.asnumpy().astype(np.float64)
        for name, parameter in model.parameters_and_names()
    }


@pytest.fixture
def samples():
    rng = np.random.default_rng(0)
    return [(rng.integers(0, 23, length).astype(np.int32),) for length in SAMPLES]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_numpy(device, variant):
    config = config_of(variant)
    model = build_model(config, 16)
    randomise(model)
    ids = random_batch((2, 12), (12, 12)).input_ids_BT
    with op_by_op():
        logits = model(ms.Tensor(ids)).asnumpy()
    expected = decoder_logits(ids, weights_of(model), config.model)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("variant", ["qwen3", "learned"])
def test_packed_samples_have_the_logits_that_each_has_alone(device, samples, variant):
    config = config_of(variant, **{"batching.strategy": "packed", "data.label_column": None})
    model = build_model(config, 16)
    randomise(model)
    planned = PlannedBatch(
        row_indices=np.arange(3), rows_per_slot=np.array([2, 1]), padded_length=12
    )
    batch = pad_batch(samples, planned, config)
    inputs = (batch.input_ids_BT, batch.packing.segment_ids_BT, batch.packing.positions_BT)
    with op_by_op():
        logits = model(*map(ms.Tensor, inputs)).asnumpy()
    weights = weights_of(model)
    for (ids,), (slot, start) in zip(samples, [(0, 0), (0, 5), (1, 0)], strict=True):
        alone = decoder_logits(ids[None], weights, config.model)[0]
        found = logits[slot, start : start + len(ids)]
        np.testing.assert_allclose(found, alone, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize(
    ("variant", "mode"),
    [("qwen3", "static"), pytest.param("learned", "dynamic", marks=pytest.mark.slow)],
)
def test_loss_and_gradients_of_a_graph_equal_numpys(device, variant, mode):
    """Gradients as central differences along a random direction of every parameter."""
    config = config_of(variant, **{"graph.mode": mode, "model.num_layers": 1})
    engine = Engine(config, device, 16)
    randomise(engine.model)
    batch = random_batch((2, 10), (10, 7))
    loss = engine.run_step(batch)
    weights = weights_of(engine.model)

    def loss_at(changed):
        logits = decoder_logits(batch.input_ids_BT, changed, config.model)
        return summed_cross_entropy(logits, batch.targets_BT)

    assert loss == pytest.approx(loss_at(weights), rel=1e-5)
    names = [name for name, _ in engine.model.parameters_and_names()]
    rng = np.random.default_rng(5)
    for name, gradient in zip(names, engine.read_gradients(), strict=True):
        direction = rng.standard_normal(gradient.shape)
        direction /= np.linalg.norm(direction)
        up, down = (
            loss_at({**weights, name: weights[name] + offset * direction})
            for offset in (1e-5, -1e-5)
        )
        expected = (up - down) / 2e-5
        scale = max(np.linalg.norm(gradient), 1e-3)
        assert abs((gradient * direction).sum() - expected) < 2e-4 * scale, name


def test_initial_weights_of_the_plain_model_have_not_changed(device):
    """The first numbers of its seed; other parts must not move them."""
    plain = build_model(make_config(TINY_MODEL), 16)
    rng = np.random.default_rng(0)
    expected = rng.standard_normal((23, 16), dtype=np.float32) * np.float32(0.3)
    assert plain.embedding.asnumpy().tobytes() == expected.tobytes()
    names = {name for name, _ in plain.parameters_and_names()}
    assert len(names) == 2 + 2 * 9
    assert not any("bias" in name or name.startswith("position") for name in names)


def test_rows_longer_than_the_model_has_positions_are_refused(device):
    config = config_of("learned")
    with pytest.raises(BadInputError, match="has 24 tokens as planned"):
        build_model(config, 24)
    limited = make_config({**TINY_MODEL, "model.max_positions": 8})
    build_model(limited, 8)
    with pytest.raises(BadInputError, match="max_positions is 8"):
        Engine(limited, device, 9)

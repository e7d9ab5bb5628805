"""Packed rows train as their samples alone would: nothing is seen or learned across samples."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_decoder import decoder_logits, summed_cross_entropy
from strategies import make_config
from tiny_model import TINY_MODEL

from tuner.batching.plan import PlannedBatch
from tuner.train import device_ops
from tuner.train.engine import Engine
from tuner.train.loader import Batch, pad_batch
from tuner.train.model import Decoder

pytestmark = pytest.mark.mindspore

LENGTHS = (5, 2, 4, 9, 1)
PACKED = PlannedBatch(
    row_indices=np.arange(5), rows_per_slot=np.array([3, 0, 2]), padded_length=12
)


def config_of(strategy, mode="static"):
    changes = {"batching.strategy": strategy, "graph.mode": mode, "data.label_column": None}
    return make_config({**TINY_MODEL, **changes})


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(0)
    return [(rng.integers(0, 23, length).astype(np.int32),) for length in LENGTHS]


@pytest.fixture(scope="module")
def weights(device):
    model = Decoder(config_of("packed").model, max_length=16, seed=0)
    return {
        name: parameter.asnumpy().astype(np.float64)
        for name, parameter in model.parameters_and_names()
    }


def gradients(engine):
    arrays = [parameter.asnumpy().copy() for parameter in engine.parameters]
    quarter = len(arrays) // 4
    return arrays[quarter : 2 * quarter]


def test_logits_of_a_sample_are_those_of_it_alone(samples, weights, device):
    import mindspore as ms

    config = config_of("packed")
    batch = pad_batch(samples, PACKED, config)
    inputs = (batch.input_ids_BT, batch.packing.segment_ids_BT, batch.packing.positions_BT)
    logits = Decoder(config.model, max_length=16, seed=0)(*map(ms.Tensor, inputs)).asnumpy()
    places = [(0, 0), (0, 5), (0, 7), (2, 0), (2, 9)]
    for (ids,), (slot, start) in zip(samples, places, strict=True):
        alone = decoder_logits(ids[None], weights, config.model)[0]
        found = logits[slot, start : start + len(ids)]
        np.testing.assert_allclose(found, alone, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("mode", "is_full_size"),
    [("static", True), ("dynamic", True), pytest.param("static", False, marks=pytest.mark.slow)],
)
def test_loss_and_gradient_are_those_of_the_samples_alone(
    samples, weights, device, mode, is_full_size, monkeypatch
):
    # The form for CPU, and the one for devices whose kernels broadcast and reduce as they go.
    monkeypatch.setattr(device_ops, "needs_full_sizes", lambda: is_full_size)
    packed = Engine(config_of("packed", mode), device, max_padded_length=16)
    batch = pad_batch(samples, PACKED, config_of("packed"))
    loss = packed.run_step(batch)
    expected = sum(
        summed_cross_entropy(
            decoder_logits(ids[None], weights, config_of("packed").model),
            np.append(ids[1:], -100)[None],
        )
        for (ids,) in samples
    )
    assert batch.label_tokens == sum(LENGTHS) - len(LENGTHS)
    assert abs(loss - expected) / batch.label_tokens < 1e-5
    if mode == "dynamic":
        return
    alone = Engine(config_of("bucketed"), device, max_padded_length=16)
    together = padded_alone(samples)
    assert alone.run_step(together) == pytest.approx(loss, rel=1e-5)
    for ours, theirs in zip(gradients(packed), gradients(alone), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5 * np.abs(theirs).max())


def padded_alone(samples) -> Batch:
    """One sample a row."""
    planned = PlannedBatch(
        row_indices=np.arange(5), rows_per_slot=np.ones(5, np.int64), padded_length=12
    )
    return pad_batch(samples, planned, config_of("bucketed"))


def test_without_segments_the_samples_would_see_each_other(samples, weights, device):
    """The check can fail: the same tokens as one sample have other logits."""
    model = config_of("packed").model
    first, second = samples[0][0], samples[2][0]
    joined = decoder_logits(np.concatenate([first, second])[None], weights, model)[0]
    alone = decoder_logits(second[None], weights, model)[0]
    assert np.abs(joined[len(first) :] - alone).max() > 1e-2


@pytest.mark.parametrize("mode", ["static", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_an_empty_packed_step_adds_nothing(device, mode):
    engine = Engine(config_of("packed", mode), device, max_padded_length=16)
    engine.run_empty_step((3, 12))
    assert all(np.array_equal(gradient, np.zeros_like(gradient)) for gradient in gradients(engine))
    assert engine.num_graphs() == 1

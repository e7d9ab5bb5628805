"""Accumulation equals one big batch; AdamW equals its formula; empty batches add nothing."""

from __future__ import annotations

import numpy as np
import pytest
from strategies import make_config
from tiny_model import TINY_MODEL, random_batch

from tuner.train.engine import Engine

pytestmark = pytest.mark.mindspore

# Every batch of these tests has the same shape, so the graph is compiled once.
SHAPE = (3, 52)
OPTIMIZER = {
    "optimizer.learning_rate": 0.01,
    "optimizer.beta1": 0.8,
    "optimizer.beta2": 0.9,
    "optimizer.eps": 1e-4,
    "optimizer.weight_decay": 0.3,
    "train.clip_norm": None,
}


@pytest.fixture(scope="module")
def config():
    return make_config({**TINY_MODEL, "model.num_layers": 1, **OPTIMIZER})


@pytest.fixture(scope="module")
def shared_engine(config, device):
    return Engine(config, device, max_padded_length=SHAPE[1])


@pytest.fixture
def engine(shared_engine):
    """The shared engine, as it was when it was new."""
    import mindspore as ms

    before = [parameter.asnumpy().copy() for parameter in shared_engine.parameters]
    yield shared_engine
    for parameter, value in zip(shared_engine.parameters, before, strict=True):
        parameter.set_data(ms.Tensor(value))


def values(engine):
    """Weights, gradients, first and second moments, each a list of arrays."""
    arrays = [parameter.asnumpy().copy() for parameter in engine.parameters]
    quarter = len(arrays) // 4
    return [arrays[i * quarter : (i + 1) * quarter] for i in range(4)]


def one_row_batches(label_counts):
    """One row a batch, with just so many label tokens, and the same rows as one batch."""
    lengths = [count + 1 for count in label_counts]
    together = random_batch(SHAPE, lengths, seed=3)
    alone = []
    for row, length in enumerate(lengths):
        batch = random_batch(SHAPE, [0, 0, 0])
        batch.input_ids_BT[0] = together.input_ids_BT[row]
        batch.targets_BT[0] = together.targets_BT[row]
        alone.append((batch, length - 1))
    return alone, together


@pytest.mark.parametrize("label_counts", [(3, 50, 7), (1, 1, 51), (20, 20, 20)])
def test_a_window_of_batches_has_the_gradient_of_one_batch(engine, label_counts):
    alone, together = one_row_batches(label_counts)
    assert together.label_tokens == sum(label_counts)
    losses = [engine.run_step(batch) for batch, _ in alone]
    accumulated = values(engine)[1]
    engine.run_update(0.0, 1, sum(label_counts))
    loss = engine.run_step(together)
    at_once = values(engine)[1]
    assert sum(losses) == pytest.approx(loss, rel=1e-5)
    for left, right in zip(accumulated, at_once, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5 * np.abs(right).max())


def test_a_mean_of_means_would_fail_the_test_above(engine):
    alone, together = one_row_batches((3, 50, 7))
    means = [engine.run_step(batch) / count for batch, count in alone]
    mean = engine.run_step(together) / together.label_tokens
    assert abs(sum(means) / 3 - mean) > 1e-2 * mean


def test_an_update_divides_by_the_labels_of_the_window_and_clears_the_gradients(engine, config):
    """Three updates against AdamW written from its paper, in float64."""
    weights, _, _, _ = values(engine)
    optimizer = config.optimizer
    weights = [weight.astype(np.float64) for weight in weights]
    first = [np.zeros_like(weight) for weight in weights]
    second = [np.zeros_like(weight) for weight in weights]
    for update in (1, 2, 3):
        batch = random_batch(SHAPE, (10 * update, 9, 4), seed=update)
        engine.run_step(batch)
        gradients = [g.astype(np.float64) / batch.label_tokens for g in values(engine)[1]]
        rate = 0.01 * update
        norm = engine.run_update(rate, update, batch.label_tokens)
        square_sum = sum((gradient**2).sum() for gradient in gradients)
        assert norm == pytest.approx(square_sum**0.5, rel=1e-5)
        for i, gradient in enumerate(gradients):
            first[i] = optimizer.beta1 * first[i] + (1 - optimizer.beta1) * gradient
            second[i] = optimizer.beta2 * second[i] + (1 - optimizer.beta2) * gradient**2
            m_hat = first[i] / (1 - optimizer.beta1**update)
            v_hat = second[i] / (1 - optimizer.beta2**update)
            decay = optimizer.weight_decay if weights[i].ndim > 1 else 0.0
            weights[i] -= rate * (m_hat / (np.sqrt(v_hat) + optimizer.eps) + decay * weights[i])
        after, cleared, _, _ = values(engine)
        for expected, weight in zip(weights, after, strict=True):
            np.testing.assert_allclose(weight, expected, rtol=1e-4, atol=1e-6)
        assert all(not gradient.any() for gradient in cleared)


def test_an_empty_batch_adds_exactly_nothing(engine):
    engine.run_step(random_batch(SHAPE, (30, 20, 10)))
    before = values(engine)
    assert engine.run_step(random_batch(SHAPE, (0, 0, 0))) == 0.0
    engine.run_empty_step(SHAPE)
    for left, right in zip(before, values(engine), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def test_warming_up_changes_no_state(engine):
    before = values(engine)
    engine.run_empty_step(SHAPE)
    engine.run_empty_update()
    for left, right in zip(before, values(engine), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def test_clipping_scales_the_gradient_to_the_norm(device, config):
    """AdamW's first update is the sign of the gradient whatever its scale; the moments show it."""
    clipped = Engine(make_config({**TINY_MODEL, "model.num_layers": 1, **OPTIMIZER,
                                  "train.clip_norm": 0.25}), device, SHAPE[1])  # fmt: skip
    batch = random_batch(SHAPE, (40, 20, 10))
    clipped.run_step(batch)
    gradients = [gradient / batch.label_tokens for gradient in values(clipped)[1]]
    norm = clipped.run_update(0.01, 1, batch.label_tokens, clip_norm=0.25)
    assert norm > 0.25
    moments = values(clipped)[2]
    total = sum((moment.astype(np.float64) ** 2).sum() for moment in moments) ** 0.5
    assert total == pytest.approx((1 - config.optimizer.beta1) * 0.25, rel=1e-4)
    np.testing.assert_allclose(
        moments[0], gradients[0] * 0.25 / norm * (1 - config.optimizer.beta1), rtol=1e-3, atol=1e-7
    )


def test_one_dynamic_graph_serves_all_shapes_with_the_same_losses(device):
    changes = {**TINY_MODEL, "model.num_layers": 1}
    static = Engine(make_config(changes), device, 16)
    dynamic = Engine(make_config({**changes, "graph.mode": "dynamic"}), device, 16)
    for shape, lengths in (((2, 16), (16, 5)), ((3, 8), (8, 8, 1)), ((1, 4), (3,))):
        batch = random_batch(shape, lengths)
        assert dynamic.run_step(batch) == pytest.approx(static.run_step(batch), rel=1e-6)
    static.run_empty_update()
    dynamic.run_empty_update()
    assert (static.num_graphs(), dynamic.num_graphs()) == (3 + 1, 1 + 1)

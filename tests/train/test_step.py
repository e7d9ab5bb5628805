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


def assert_same_gradient(accumulated, at_once):
    """To 1e-5 of the largest entry of each weight's gradient."""
    for left, right in zip(accumulated, at_once, strict=True):
        assert np.abs(left - right).max() <= 1e-5 * np.abs(right).max()


@pytest.mark.parametrize("label_counts", [(3, 50, 7), (1, 1, 51), (20, 20, 20), (50, 0, 2)])
def test_a_window_of_batches_has_the_gradient_of_one_batch(engine, label_counts):
    alone, together = one_row_batches(label_counts)
    assert together.label_tokens == sum(label_counts)
    losses = [engine.run_step(batch) for batch, _ in alone]
    accumulated = values(engine)[1]
    engine.run_update(0.0, 1, sum(label_counts))
    loss = engine.run_step(together)
    at_once = values(engine)[1]
    assert sum(losses) == pytest.approx(loss, rel=1e-5)
    assert_same_gradient(accumulated, at_once)


@pytest.mark.parametrize("windows", [((0, 1), (2,)), ((0,), (1, 2)), ((1,), (0, 2))])
def test_other_splits_of_the_same_rows_have_the_same_gradient(engine, windows):
    """3, 50 and 7 labels, as two batches of one and two rows."""
    _, together = one_row_batches((3, 50, 7))
    for rows in windows:
        part = random_batch(SHAPE, [0, 0, 0])
        for place, row in enumerate(rows):
            part.input_ids_BT[place] = together.input_ids_BT[row]
            part.targets_BT[place] = together.targets_BT[row]
        engine.run_step(part)
    accumulated = values(engine)[1]
    engine.run_update(0.0, 1, 60)
    engine.run_step(together)
    assert_same_gradient(accumulated, values(engine)[1])


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


@pytest.mark.parametrize(
    ("no_decay", "is_decayed"),
    [
        ([], lambda name, ndim: True),
        (["norms"], lambda name, ndim: ndim > 1),
        (["embeddings"], lambda name, ndim: name != "embedding"),
        (["norms", "biases", "embeddings"], lambda name, ndim: ndim > 1 and name != "embedding"),
    ],
)
def test_weights_of_the_named_groups_are_not_decayed(device, no_decay, is_decayed):
    """Two updates of drawn gradients against AdamW in float64; only the update is compiled."""
    import mindspore as ms

    settings = {"model.num_layers": 1, **OPTIMIZER, "optimizer.no_decay": no_decay}
    engine = Engine(make_config({**TINY_MODEL, **settings}), device, SHAPE[1])
    quarter = len(engine.parameters) // 4
    names = [parameter.name.rpartition(".")[2] for parameter in engine.parameters[:quarter]]
    rng = np.random.default_rng(0)
    expected = [weight.astype(np.float64) for weight in values(engine)[0]]
    first = [np.zeros_like(weight) for weight in expected]
    second = [np.zeros_like(weight) for weight in expected]
    for update in (1, 2):
        for i, buffer in enumerate(engine.parameters[quarter : 2 * quarter]):
            gradient = rng.standard_normal(buffer.shape).astype(np.float32)
            buffer.set_data(ms.Tensor(gradient * np.float32(8)))
            first[i] = 0.8 * first[i] + 0.2 * gradient
            second[i] = 0.9 * second[i] + 0.1 * gradient.astype(np.float64) ** 2
            step = first[i] / (1 - 0.8**update)
            step /= np.sqrt(second[i] / (1 - 0.9**update)) + 1e-4
            decay = 0.3 if is_decayed(names[i], expected[i].ndim) else 0.0
            expected[i] -= 0.05 * (step + decay * expected[i])
        engine.run_update(0.05, update, label_tokens=8)
    for weight, wanted in zip(values(engine)[0], expected, strict=True):
        np.testing.assert_allclose(weight, wanted, rtol=1e-4, atol=2e-6)


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


@pytest.mark.slow
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

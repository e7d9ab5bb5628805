"""Comparing a graph with the model it came from: what counts as rounding and what does not."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from strategies import make_config
from tiny_model import TINY_MODEL

from tuner.train import cached_graphs
from tuner.train.cache_key import CacheKey
from tuner.train.cached_graphs import CheckingCompiler
from tuner.train.compile_cache import CompileCache, GraphRecord, UnsoundCacheError
from tuner.train.engine import Engine
from tuner.train.graph_check import (
    TOLERANCES,
    UPDATE_TOLERANCE,
    GraphMismatchError,
    checked_batch,
    first_rows,
    fresh_step_outputs,
    fresh_update_outputs,
    known_weights,
    num_distinct_rows,
    relative_error,
    require_equal,
    require_recorded,
    square_sums,
    step_outputs,
    update_outputs,
)

pytestmark = pytest.mark.mindspore

SHAPE = (2, 12)
SMALL = {**TINY_MODEL, "model.num_layers": 1}


def array(*values):
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("value", "wanted", "error"),
    [
        ((1.0, 2.0), (1.0, 2.0), 0.0),
        ((1.0, -4.5), (1.0, -4.0), 0.125),
        # A small element is judged by the largest one of its array.
        ((0.5, -4.0), (0.0, -4.0), 0.125),
        ((0.0, 0.0), (0.0, 0.0), 0.0),
        ((0.0, 1e-30), (0.0, 0.0), np.inf),
        ((np.inf, 1.0), (np.inf, 2.0), 0.5),
        ((np.nan, 2.0), (np.inf, 2.0), 0.0),
        ((np.inf, 2.0), (1.0, 2.0), np.inf),
        ((np.nan, 2.0), (1.0, 2.0), np.inf),
    ],
)
def test_an_error_is_a_share_of_the_largest_value(value, wanted, error):
    assert relative_error(array(*value), array(*wanted)) == pytest.approx(error)


def test_the_mismatch_says_where_and_by_how_much():
    outputs = [array(2.0), array(1.0, 4.0)]
    require_equal(outputs, [array(2.0), array(1.0, 4.0)], 1e-6)
    require_equal(outputs, [array(2.0), array(1.0, 4.0 + 1e-3)], 1e-2)
    with pytest.raises(GraphMismatchError, match=r"array 1 is off by 0\.2"):
        require_equal(outputs, [array(2.0), array(1.0, 5.0)], 1e-2)
    with pytest.raises(GraphMismatchError, match=r"the first value .* 2 instead of 3"):
        require_equal(outputs, [array(3.0), array(1.0, 4.0)], 1e-2)


def test_recorded_values_are_the_loss_and_square_sums():
    sums = square_sums([array(-2.0), array(1.0, 2.0), array(3.0)])
    assert sums == (-2.0, 5.0, 9.0)
    require_recorded(sums, (-2.0, 5.0, 9.0), 1e-6)
    with pytest.raises(GraphMismatchError, match=r"it had 5\.1 when"):
        require_recorded(sums, (-2.0, 5.1, 9.0), 1e-3)
    with pytest.raises(GraphMismatchError, match="3 outputs, 2 when"):
        require_recorded(sums, (-2.0, 5.0), 1e-3)


@pytest.fixture(scope="module")
def config():
    return make_config(SMALL)


@pytest.fixture(scope="module")
def engine(config, device):
    return Engine(config, device, SHAPE[1])


def test_a_graph_equals_its_model_and_every_parameter_keeps_its_bits(engine, config):
    before = [parameter.asnumpy().tobytes() for parameter in engine.parameters]
    batch = checked_batch(SHAPE, config)
    with known_weights(engine):
        fresh = fresh_step_outputs(engine, batch, num_distinct_rows(SHAPE, config))
        require_equal(step_outputs(engine, batch), fresh, TOLERANCES["fp32"])
        assert not any(gradient.any() for gradient in engine.read_gradients())
        found = update_outputs(engine)
        require_equal(found, fresh_update_outputs(engine), UPDATE_TOLERANCE)
        # The update did something: weights are not where the known noise was.
        assert np.abs(found[1] - engine.weights[0].asnumpy()).max() == 0.0
        assert found[1].tobytes() != before[0]
    assert [parameter.asnumpy().tobytes() for parameter in engine.parameters] == before
    assert engine.num_graphs() == 2


CONSTANTS = [{"model.norm_eps": 1e-4}, {"model.rope_theta": 11000.0}]


@pytest.mark.parametrize("changes", CONSTANTS, ids=lambda changes: next(iter(changes)))
def test_a_model_with_another_constant_is_more_than_rounding_apart(device, config, changes):
    """Op by op, since only the size of the difference is asked for here."""
    outputs = []
    for values in ({}, changes):
        engine = Engine(make_config({**SMALL, **values}), device, SHAPE[1])
        with engine.without_graphs(), known_weights(engine):
            outputs.append(step_outputs(engine, checked_batch(SHAPE, config)))
    with pytest.raises(GraphMismatchError):
        require_equal(*outputs, TOLERANCES["fp32"])


def test_an_optimizer_with_another_constant_is_more_than_rounding_apart(device):
    outputs = []
    for changes in ({}, {"optimizer.beta1": 0.91}, {"optimizer.beta2": 0.96},
                    {"optimizer.no_decay": ()}, {"train.clip_norm": None}):  # fmt: skip
        engine = Engine(make_config({**SMALL, **changes}), device, 12)
        with engine.without_graphs():
            outputs.append(update_outputs(engine))
    mine, *others = outputs
    for theirs in others:
        with pytest.raises(GraphMismatchError):
            require_equal(theirs, mine, UPDATE_TOLERANCE)


def test_the_checked_batch_has_two_samples_a_row_and_padding(config):
    packed = make_config({**SMALL, "batching.strategy": "packed"})
    batch = checked_batch((2, 16), packed)
    row = [*range(8), *range(6), 0, 0]
    assert batch.packing.positions_BT.tolist() == [row, row]
    row = [1] * 8 + [2] * 6 + [0, 0]
    assert batch.packing.segment_ids_BT.tolist() == [row, row]
    # 14 tokens: the last of them has no target.
    assert (batch.targets_BT != -100).tolist() == [[True] * 13 + [False] * 3] * 2
    assert batch.label_tokens == 26
    assert checked_batch((2, 16), config).packing is None
    again = checked_batch((2, 16), packed)
    assert np.array_equal(again.input_ids_BT, batch.input_ids_BT)


@pytest.mark.parametrize("size", [1, 2, 9, 46])
def test_the_checked_batch_repeats_its_first_row(config, size):
    packed = make_config({**SMALL, "batching.strategy": "packed"})
    batch = checked_batch((size, 16), packed)
    assert num_distinct_rows((size, 16), packed) == 1
    row = first_rows(batch, 1)
    assert row.shape == (1, 16)
    for whole, part in zip(batch.arrays, row.arrays, strict=True):
        assert np.array_equal(whole, np.tile(part, (size, 1)))
    assert row.label_tokens * size == batch.label_tokens
    # In a user's Cell rows may depend on each other.
    own = make_config({**SMALL, "model.factory": "my_models:make"})
    assert num_distinct_rows((size, 16), own) == size


def checking(engine, config, folder, values, on_stuck=pytest.fail):
    """What checks one graph that gave these values when it was compiled."""
    known = (GraphRecord(shape=SHAPE, compile_s=1e-3, values=values),)
    cache = CompileCache(folder, CacheKey(parts={}), known)
    return CheckingCompiler(engine=engine, config=config, cache=cache, on_stuck=on_stuck)


def test_a_graph_that_gives_what_it_gave_is_taken(engine, config, tmp_path):
    with engine.without_graphs(), known_weights(engine):
        values = square_sums(step_outputs(engine, checked_batch(SHAPE, config)))
        compiled = checking(engine, config, tmp_path, values).compile_step(SHAPE)
    assert compiled.verify_s > 0.0


def test_a_graph_that_gave_something_else_is_refused_by_its_shape(engine, config, tmp_path):
    with engine.without_graphs(), known_weights(engine):
        loss, *values = square_sums(step_outputs(engine, checked_batch(SHAPE, config)))
        compiler = checking(engine, config, tmp_path, (loss * 1.001, *values))
        with pytest.raises(UnsoundCacheError, match=r"B=2 L=12: .* when the graph was compiled"):
            compiler.compile_step(SHAPE)


def test_a_failing_graph_is_refused_by_its_shape(config, tmp_path):
    def run_step(batch):
        raise RuntimeError("For 'Reshape', the size of 'input_x': {1536} is not equal to {512}")

    compiler = checking(SimpleNamespace(run_step=run_step), config, tmp_path, ())
    with pytest.raises(UnsoundCacheError, match=r"B=2 L=12: RuntimeError: For 'Reshape'"):
        compiler.compile_step(SHAPE)


def test_a_graph_that_does_not_answer_in_time_is_told(engine, config, tmp_path, monkeypatch):
    monkeypatch.setattr(cached_graphs, "STUCK_LEAST_S", 0.0)
    told = []
    with engine.without_graphs(), known_weights(engine):
        values = square_sums(step_outputs(engine, checked_batch(SHAPE, config)))
        checking(engine, config, tmp_path, values, told.append).compile_step(SHAPE)
    assert told == ["B=2 L=12: no answer in 0 s"]

"""A Cell of the user's own: trained like the built-in one, and refused with a reason."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from numpy_decoder import summed_cross_entropy
from strategies import make_config

from tuner.batching.plan import PlannedBatch
from tuner.errors import BadInputError
from tuner.train.build import build_model
from tuner.train.engine import Engine
from tuner.train.loader import Batch, pad_batch

pytestmark = pytest.mark.mindspore

LENGTHS = (5, 2, 4, 9, 1)
PACKED = PlannedBatch(
    row_indices=np.arange(5), rows_per_slot=np.array([3, 0, 2]), padded_length=12
)
ALONE = PlannedBatch(
    row_indices=np.arange(5), rows_per_slot=np.ones(5, np.int64), padded_length=12
)
VOCAB = 23


def config_of(function="one_layer", **changes):
    return make_config(
        {
            "model.factory": f"factories:{function}",
            "model.vocab_size": VOCAB,
            "data.label_column": None,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(0)
    return [(rng.integers(0, VOCAB, length).astype(np.int32),) for length in LENGTHS]


def numpy_logits(weights, ids):
    """The Cell of `factories` for one sample, in float64."""
    T = len(ids)
    x = weights["table.embedding_table"][ids] + weights["places.embedding_table"][:T]
    qkv = x @ weights["qkv.weight"].T + weights["qkv.bias"]
    q, k, v = np.split(qkv, 3, axis=1)
    scores = q @ k.T / 4.0
    scores[np.triu_indices(T, k=1)] = -np.inf
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    return (x + odds @ v) @ weights["out.weight"].T + weights["out.bias"]


def expected_loss(engine, samples):
    weights = {
        name: parameter.asnumpy().astype(np.float64)
        for name, parameter in engine.model.parameters_and_names()
    }
    return sum(
        summed_cross_entropy(numpy_logits(weights, ids)[None], np.append(ids[1:], -100)[None])
        for (ids,) in samples
    )


@pytest.mark.parametrize(
    ("strategy", "planned", "mode"),
    [
        ("bucketed", ALONE, "static"),
        pytest.param("packed", PACKED, "dynamic", marks=pytest.mark.slow),
    ],
)
def test_loss_is_that_of_every_sample_alone_padded_or_packed(
    device, samples, strategy, planned, mode
):
    """Padding and neighbours that were seen would show in the loss."""
    changes = {"batching.strategy": strategy, "graph.mode": mode}
    config = config_of(**changes)
    engine = Engine(config, device, 16)
    batch = pad_batch(samples, planned, config)
    loss = engine.run_step(batch)
    assert loss == pytest.approx(expected_loss(engine, samples), rel=1e-5)
    engine.run_update(0.05, 1, batch.label_tokens)
    assert engine.run_step(batch) < loss
    # An empty batch adds exactly 0.
    gradients = engine.read_gradients()
    engine.run_empty_step(batch.shape)
    for before, after in zip(gradients, engine.read_gradients(), strict=True):
        assert before.tobytes() == after.tobytes()
    # Seven trained tensors with gradient and moments, and a frozen one.
    assert len(engine.parameters) == 4 * 6 + 1


def test_padded_rows_carry_their_mask_and_positions(samples):
    batch = pad_batch(samples, ALONE, config_of())
    assert batch.packing is not None
    for row, length in enumerate(LENGTHS):
        real = np.arange(12) < length
        assert np.array_equal(batch.packing.segment_ids_BT[row], real.astype(np.int32))
        places = np.where(real, np.arange(12), 0)
        assert np.array_equal(batch.packing.positions_BT[row], places)
    assert len(batch.arrays) == 4
    assert len(Batch.full((2, 8), config_of()).arrays) == 4
    assert len(Batch.empty((2, 8), config_of()).arrays) == 4
    built_in = make_config({"data.label_column": None})
    assert len(Batch.empty((2, 8), built_in).arrays) == 2


def test_the_seed_is_the_configs(device):
    def table(seed):
        model = build_model(config_of(**{"train.seed": seed}), 16)
        return model.table.embedding_table.asnumpy().tobytes()

    assert table(3) == table(3)
    assert table(3) != table(4)


REFUSED = [
    ("nowhere:function", "no module named nowhere"),
    ("factories:nothing", "factories has no function nothing"),
    ("factories:not_a_function", "has no function not_a_function"),
    ("factories:no_cell", "must return a mindspore.nn.Cell (got list)"),
    ("factories:frozen", "has no trainable parameter"),
    ("factories:too_narrow", "= [2, 8, 23] (got [2, 8, 22])"),
    ("factories:whole_numbers", "one float tensor of logits (got Int32 tensor)"),
    ("factories:failing", "raised KeyError: 'width'"),
    ("factories:two_inputs", "raised"),
]


@pytest.mark.parametrize(("factory", "words"), REFUSED)
def test_what_breaks_the_contract_is_refused(device, factory, words):
    with pytest.raises(BadInputError) as raised:
        build_model(config_of(**{"model.factory": factory}), 16)
    assert words in str(raised.value)
    assert factory in str(raised.value)


def test_an_exception_of_the_user_is_placed_in_the_users_file(device):
    with pytest.raises(BadInputError, match=r"factories\.py:\d+"):
        build_model(config_of("failing"), 16)


def test_a_module_that_does_not_import_is_refused(device, tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / "wrong_module.py").write_text("x = 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadInputError, match="no module named a_module_that_is_not_there"):
        build_model(config_of(**{"model.factory": "broken_module:f"}), 16)
    with pytest.raises(BadInputError, match=r"ZeroDivisionError.*wrong_module\.py:1"):
        build_model(config_of(**{"model.factory": "wrong_module:f"}), 16)


def test_the_current_folder_is_importable(device, tmp_path, monkeypatch):
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "mine.py").write_text("from factories import one_layer\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    model = build_model(config_of(**{"model.factory": "my_package.mine:one_layer"}), 16)
    assert type(model).__name__ == "OneLayer"


def test_op_groups_of_the_built_in_decoder_are_refused(device):
    low = {"precision.compute_dtype": "fp16"}
    with pytest.raises(BadInputError, match=r"\(softmax, norms\)"):
        build_model(config_of(**low, **{"precision.fp32_ops": ["softmax", "norms", "loss"]}), 16)
    build_model(config_of(**low, **{"precision.fp32_ops": ["loss"]}), 16)

"""From an error about shapes to the layers, the line and the likeliest of the usual causes."""

from __future__ import annotations

import dataclasses
import os

os.environ.setdefault("GLOG_v", "4")

import broken_cells
import numpy as np
import pytest
from strategies import make_config

from tuner.config.override import override_config
from tuner.diagnose.mismatch import explain_failure
from tuner.diagnose.shape_trace import model_arrays, trace_forward
from tuner.errors import BadInputError
from tuner.train.build import build_model
from tuner.train.engine import Engine
from tuner.train.loader import Batch, Packing

pytestmark = pytest.mark.mindspore

VOCAB = 23
CONFIG = make_config(
    {"model.factory": "broken_cells:sound", "model.vocab_size": VOCAB, "device": "cpu"}
)
BATCH = Batch.full((4, 12), CONFIG)
GRAPH_ERROR = RuntimeError(
    "For 'Reshape', the size of 'input_x': {1536} is not equal to the size of the second input: "
    "{512}.\n\n----------\n- C++ Call Stack: (For framework developers)\n----------\n"
    "mindspore/ops/infer/reshape.cc:1 InferShape\n"
)


@pytest.fixture(scope="module", autouse=True)
def device():
    from tuner.train.device import open_device

    return open_device(CONFIG)


def raised_by(model, batch):
    """What MindSpore says when a step of this batch runs."""
    error = trace_forward(model, model_arrays(batch)).error
    assert error is not None
    return error


def explained(factory, batch=BATCH):
    model = getattr(broken_cells, factory)(CONFIG, 16)
    explanation = explain_failure(raised_by(model, batch), model, CONFIG, batch)
    assert explanation is not None
    assert [cause.name for cause in explanation.causes] == [
        "mask-and-input",
        "positions-past-table",
        "fixed-length",
    ]
    lines = explanation.lines()
    assert len(lines) <= 12
    assert not [line for line in lines if "C++ Call Stack" in line or "Traceback" in line]
    return explanation


def cause_of(explanation):
    [cause] = [one for one in explanation.causes if one.name == explanation.likeliest]
    return cause


def test_a_reshape_that_breaks_later_is_the_likeliest_cause():
    """It breaks where the mask is added, which speaks for the mask, and weighs less."""
    explanation = explained("fixed_reshape")
    assert explanation.likeliest == "fixed-length"
    assert explanation.where == (
        "layers.1.attention (FixedReshape) took [4, 12, 16], [4, 12, 12] and broke after "
        "layers.1.attention.qkv (Dense) gave [2, 8, 48]; B=2 L=6 fails as well"
    )
    assert cause_of(explanation).evidence == (
        "layers.1.attention.qkv (Dense) takes [2, 8, 16], at B=2 L=6 too"
    )
    assert explanation.causes[0].evidence == "the line works on the mask"
    assert explanation.place.startswith("broken_cells.py:")
    assert explanation.place.endswith(": scores = scores + mask")
    [marked] = [line for line in explanation.lines() if line.startswith(">")]
    assert marked.startswith("> 3. a length is fixed in a reshape")


def test_a_reshape_that_breaks_at_once_is_the_likeliest_cause():
    explanation = explained("fixed_sizes")
    assert explanation.likeliest == "fixed-length"
    assert explanation.place.endswith(": x = x.reshape(2, 8, WIDTH)")
    assert cause_of(explanation).evidence == "the line names a size"
    assert not explanation.causes[0].evidence


def test_a_shape_that_comes_through_speaks_for_a_fixed_length():
    batch = Batch.full((4, 16), CONFIG)
    explanation = explained("fixed_reshape", batch)
    assert "B=2 L=8 comes through" in cause_of(explanation).evidence
    assert explanation.where.endswith("B=2 L=8 comes through")


def test_a_position_table_that_is_too_small_is_the_likeliest_cause():
    explanation = explained("few_places")
    assert explanation.likeliest == "positions-past-table"
    assert explanation.where.startswith("places (Embedding) took [4, 12], and broke on it")
    assert cause_of(explanation).evidence == (
        "places (Embedding) has a table of 8 rows, asked for row 11"
    )


def test_a_mask_made_apart_in_the_model_is_the_likeliest_cause():
    explanation = explained("short_mask")
    assert explanation.likeliest == "mask-and-input"
    assert explanation.place.endswith(": mask = mask + self.padding(segment_ids_BT)")
    assert cause_of(explanation).evidence == "the line works on the mask"


def test_a_mask_one_short_in_the_batch_is_the_likeliest_cause():
    short = Packing(
        segment_ids_BT=BATCH.packing.segment_ids_BT[:, :-1].copy(),
        positions_BT=BATCH.packing.positions_BT,
    )
    explanation = explained("sound", dataclasses.replace(BATCH, packing=short))
    assert explanation.likeliest == "mask-and-input"
    assert cause_of(explanation).evidence == (
        "segment_ids (the mask) are [4, 11], input_ids [4, 12]"
    )


def test_labels_of_another_length_are_told_although_the_forward_comes_through():
    """The loss takes them, which no Cell of the model sees."""
    batch = dataclasses.replace(BATCH, targets_BT=BATCH.targets_BT[:, :-1].copy())
    error = ValueError("For 'Mul', x.shape and y.shape need to broadcast.")
    explanation = explain_failure(error, broken_cells.sound(CONFIG, 16), CONFIG, batch)
    assert explanation.likeliest == "mask-and-input"
    assert "labels are [4, 11], input_ids [4, 12]" in cause_of(explanation).evidence


def test_a_wrong_width_is_none_of_the_three():
    explanation = explained("wrong_width")
    assert explanation.likeliest == ""
    assert "the output of layers.1.first (Dense)" in explanation.where
    assert explanation.where.endswith("B=2 L=6 fails as well")
    assert not [line for line in explanation.lines() if line.startswith(">")]


def test_a_failure_of_the_graph_alone_says_so():
    model = broken_cells.sound(CONFIG, 16)
    explanation = explain_failure(GRAPH_ERROR, model, CONFIG, BATCH)
    assert "comes through op by op" in explanation.where
    assert "graph infers differs from op by op" in explanation.where
    assert explanation.error_line == (
        "RuntimeError: For 'Reshape', the size of 'input_x': {1536} is not equal to the size of "
        "the second input: {512}."
    )
    assert explanation.likeliest == "fixed-length"


def test_the_built_in_decoder_past_its_positions_is_explained():
    """Built for rows of 8 tokens, run with 12: without packing it cuts its tables."""
    config = make_config({"model.vocab_size": VOCAB, "device": "cpu"})
    model = build_model(config, 8)
    batch = Batch.full((2, 12), config)
    explanation = explain_failure(raised_by(model, batch), model, config, batch)
    assert explanation.likeliest == "positions-past-table"
    assert cause_of(explanation).evidence == "rows have 12 tokens, but the table has 8 rows"


@pytest.mark.parametrize(
    ("factory", "likeliest"),
    [("few_places", "positions-past-table"), ("fixed_sizes", "fixed-length")],
)
def test_a_step_that_raised_is_explained_and_the_next_one_runs(device, factory, likeliest):
    """Forward and backward of an engine, op by op; the model is the one that is trained."""
    config = override_config(
        CONFIG, {"model.factory": f"broken_cells:{factory}"}, source="the test"
    )
    engine = Engine(config, device, 12)
    with engine.without_graphs():
        with pytest.raises((RuntimeError, ValueError)) as raised:
            engine.run_step(BATCH)
        explanation = explain_failure(raised.value, engine.model, config, BATCH)
        assert explanation is not None
        assert explanation.likeliest == likeliest
        loss = engine.run_step(Batch.full((2, 8), config))
    # 14 labels; the weights are small, so that all of the vocabulary is about as likely.
    assert loss == pytest.approx(14 * np.log(VOCAB), rel=0.5)


OTHER_ERRORS = [
    RuntimeError("Malloc for kernel output failed, Memory isn't enough; shape [8, 512]"),
    MemoryError("Unable to allocate 4 GiB for an array with shape (8, 512)"),
    TypeError("For 'MatMulExt', the type of 'x2' should be same as 'x1', whatever the shape"),
    RuntimeError("Select CPU operator[Softmax] fail! Unsupported data type!"),
    BadInputError("the shape of data", fix="x"),
    RuntimeError("connection closed"),
]


@pytest.mark.parametrize("error", OTHER_ERRORS, ids=lambda error: type(error).__name__)
def test_errors_about_something_else_are_not_explained(error):
    assert explain_failure(error, broken_cells.sound(CONFIG, 16), CONFIG, BATCH) is None


def test_an_unsupported_dtype_of_a_model_is_not_explained():
    model = broken_cells.wrong_dtype(CONFIG, 16)
    assert explain_failure(raised_by(model, BATCH), model, CONFIG, BATCH) is None
    # The graph may say something else of it.
    assert explain_failure(GRAPH_ERROR, model, CONFIG, BATCH) is None


def test_the_whole_text_is_kept_for_a_log_and_the_lines_name_it(tmp_path):
    explanation = explained("fixed_reshape")
    assert explanation.raw.count("Traceback") >= 2
    assert "The forward, op by op:" in explanation.raw
    assert "C++ Call Stack" in explanation.raw
    log = tmp_path / "shape_error.txt"
    assert explanation.lines(log) == [*explanation.lines(), f"all that MindSpore said: {log}"]

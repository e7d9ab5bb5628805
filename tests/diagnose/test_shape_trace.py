"""Shapes of every Cell, op by op, and what they say of a model with a fault in it."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("GLOG_v", "4")

import broken_cells
import numpy as np
import pytest
from strategies import make_config

from tuner.data.mindrecord import MindRecordWriter
from tuner.diagnose.shape_trace import (
    model_arrays,
    trace_config,
    trace_forward,
    trace_shapes,
)
from tuner.diagnose.trace_faults import find_faults
from tuner.train.loader import Batch

pytestmark = pytest.mark.mindspore

VOCAB = 23
CONFIG = make_config(
    {"model.factory": "broken_cells:sound", "model.vocab_size": VOCAB, "device": "cpu"}
)
SHAPES = ((2, 8), (3, 12))


@pytest.fixture(scope="module", autouse=True)
def device():
    from tuner.train.device import open_device

    return open_device(CONFIG)


def arrays_of(shape):
    return model_arrays(Batch.full(shape, CONFIG))


def faults_of(factory, shapes=SHAPES):
    model = getattr(broken_cells, factory)(CONFIG, 16)
    return find_faults([trace_forward(model, arrays_of(shape)) for shape in shapes], VOCAB)


def line_number(text):
    lines = Path(broken_cells.__file__).read_text(encoding="utf-8").splitlines()
    [number] = [number for number, line in enumerate(lines, start=1) if line.strip() == text]
    return number


def test_calls_are_in_order_with_their_shapes():
    calls = trace_shapes(broken_cells.sound(CONFIG, 16), arrays_of((3, 12)))
    assert [(call.path, call.class_name) for call in calls] == [
        ("", "Model"),
        ("table", "Embedding"),
        ("places", "Embedding"),
        ("layers.0", "Scale"),
        ("layers.1", "Block"),
        ("layers.1.attention", "Attention"),
        ("layers.1.attention.qkv", "Dense"),
        ("layers.1.first", "Dense"),
        ("layers.1.second", "Dense"),
        ("out", "Dense"),
    ]
    by_path = {call.path: call for call in calls}
    assert by_path[""].input_shapes == ((3, 12), (3, 12), (3, 12))
    assert by_path[""].output_shapes == ((3, 12, VOCAB),)
    assert by_path["layers.1"].input_shapes == ((3, 12, 16), (3, 12, 12))
    assert by_path["layers.1.attention.qkv"].output_shapes == ((3, 12, 48),)
    assert by_path["layers.1.first"].weights == (("weight", (32, 16)), ("bias", (32,)))
    assert (by_path["places"].largest_index, by_path["places"].table_rows) == (11, 16)
    # Left from the inside out.
    assert [call.path for call in sorted(calls, key=lambda call: call.left_at)][-2:] == ["out", ""]


def test_hooks_are_gone_afterwards_and_the_mode_is_as_before():
    import mindspore as ms

    for factory in ("sound", "wrong_width"):
        model = getattr(broken_cells, factory)(CONFIG, 16)
        assert trace_shapes(model, arrays_of((2, 8)))
        hooks = [
            hook
            for _, cell in model.cells_and_names()
            for hook in (*cell._forward_pre_hook, *cell._forward_hook)
        ]
        assert hooks == []
    assert ms.get_context("mode") == ms.GRAPH_MODE


def test_a_sound_model_follows_all_shapes():
    [finding] = faults_of("sound")
    assert (finding.name, finding.severity) == ("shapes-follow", "ok")
    assert finding.what == "10 calls of Cells follow the shapes B=2 L=8, B=3 L=12"


def test_a_reshape_with_constants_names_the_cell_and_where_it_shows():
    """3 * 12 * 48 numbers do divide by 2 * 8, so that it breaks at a line further on."""
    [finding] = faults_of("fixed_reshape")
    assert (finding.name, finding.severity) == ("fixed-length", "error")
    where, line, said, stuck, sound = finding.what.split("; ")
    assert where == (
        "at B=3 L=12 layers.1.attention (FixedReshape) took [3, 12, 16], [3, 12, 12] and broke "
        "after layers.1.attention.qkv (Dense) gave [2, 8, 48]"
    )
    assert (
        line == f"broken_cells.py:{line_number('scores = scores + mask')}: scores = scores + mask"
    )
    assert "input.shape = [2, 8, 8] and other.shape = [3, 12, 12]" in said
    assert stuck == (
        "layers.1.attention.qkv (Dense) takes [2, 8, 16] whatever the shape of the batch"
    )
    assert sound == "B=2 L=8 came through"


def test_a_reshape_without_a_free_axis_names_its_own_line():
    [finding] = faults_of("fixed_sizes", [(3, 12)])
    assert finding.name == "fixed-length"
    text = "x = x.reshape(2, 8, WIDTH)"
    assert finding.what.startswith(
        "at B=3 L=12 layers.1.attention (FixedSizes) took [3, 12, 16], [3, 12, 12]"
    )
    assert f"broken_cells.py:{line_number(text)}: {text}; " in finding.what


def test_a_wrong_width_names_both_layers():
    [finding] = faults_of("wrong_width")
    assert finding.name == "layers-do-not-fit"
    assert (
        "layers.1.second (Dense) took [2, 8, 32], the output of layers.1.first (Dense), and broke"
        in finding.what
    )
    assert "weight [16, 40]" in finding.what


def test_a_position_table_that_is_too_small_names_it():
    [finding] = faults_of("few_places")
    assert finding.name == "index-past-table"
    assert finding.what == (
        "at B=3 L=12 places (Embedding) looks up row 11 of a table of 8 rows (0 to 7)"
    )
    assert faults_of("few_places", [(2, 8)])[0].name == "shapes-follow"


def test_a_mask_that_is_one_short_names_its_line():
    [finding] = faults_of("short_mask")
    assert finding.name == "layers-do-not-fit"
    text = "mask = mask + self.padding(segment_ids_BT)"
    assert f"broken_cells.py:{line_number(text)}: {text}; " in finding.what


def test_an_output_that_does_not_follow_names_where_it_began():
    [finding] = faults_of("left_in_windows", [(1, 16), (2, 8)])
    assert finding.name == "output-shape"
    assert finding.what == (
        "at B=1 L=16 the model gives [2, 8, 23] in place of [1, 16, 23]; the first that does not "
        "follow is out.0 (Windows): [1, 16, 16] -> [2, 8, 16]"
    )


def test_a_dtype_is_no_matter_of_shapes():
    [finding] = faults_of("wrong_dtype")
    assert finding.name == "forward-raises"
    assert "Unsupported data type" in finding.what


def write_rows(path, lengths):
    with MindRecordWriter(path, description={"length_of": "input_ids"}) as writer:
        for length in lengths:
            ids = np.arange(length, dtype=np.int32) % VOCAB
            writer.write([{"input_ids": ids, "labels": ids, "length": length}])
    return str(path)


def config_of(tmp_path, factory):
    return make_config(
        {
            "data.path": write_rows(tmp_path / "data.mindrecord", [5, 7, 13, 15, 22, 24]),
            "batching.boundaries": [8, 16, 24],
            "batching.tokens_per_batch": 48,
            "model.factory": factory,
            "model.vocab_size": VOCAB,
            "train.out": str(tmp_path / "run"),
            "device": "cpu",
        }
    )


def test_a_config_is_traced_at_its_smallest_its_largest_and_one_more_shape(tmp_path):
    report = trace_config(config_of(tmp_path, "broken_cells:sound"))
    assert [trace.shape for trace in report.traces] == [(2, 8), (2, 16), (2, 24)]
    assert [finding.name for finding in report.findings] == ["shapes-follow"]
    lines = report.table().splitlines()
    assert lines[0] == "B=2 L=8"
    [line] = [one for one in lines if "layers.1.first" in one and "[2, 24, 16]" in one]
    assert line.split() == ["layers.1.first", "Dense", "[2,", "24,", "16]", "[2,", "24,", "32]"]


@pytest.mark.parametrize("factory", [None, "broken_cells:few_places", "broken_cells:wrong_width"])
def test_the_built_in_decoder_and_faulty_cells_are_reported(tmp_path, factory):
    report = trace_config(config_of(tmp_path, factory))
    [finding] = report.findings
    if factory is None:
        assert finding.name == "shapes-follow"
        assert report.traces[0].calls[0].class_name == "Decoder"
    elif factory.endswith("few_places"):
        assert finding.name == "index-past-table"
        assert "at B=2 L=16 places (Embedding)" in finding.what
    else:
        assert finding.name == "layers-do-not-fit"
        assert "layers.1.second" in finding.what


def test_shapes_of_the_provenance_are_taken_without_the_rows(tmp_path):
    config = make_config(
        {"data.path": "nowhere.mindrecord", "model.factory": "broken_cells:sound"}
        | {"model.vocab_size": VOCAB, "device": "cpu"}
        | {"provenance": PROVENANCE}
    )
    report = trace_config(config)
    assert [trace.shape for trace in report.traces] == [(1, 8), (3, 8), (1, 32)]


PROVENANCE = {
    "data_fingerprint": "0" * 64,
    "num_samples": 6,
    "device": "CPU",
    "versions": {},
    "study": "s",
    "trial": 0,
    "shapes": [[1, 32], [3, 8], [1, 8]],
    "prediction": {
        "estimated_run_s": 1.0,
        "estimated_real_tokens_per_s": 1.0,
        "estimated_steady_real_tokens_per_s": 1.0,
        "estimated_compile_s": 1.0,
        "effective_token_fraction": 0.5,
        "peak_bytes": 1,
    },
}

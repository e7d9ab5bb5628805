"""Unplanned compiles: every cause is told from the others, on real graphs; and without counts."""

from __future__ import annotations

import json
import types

import numpy as np
import pytest
from mindspore import Tensor, nn
from strategies import make_config
from tiny_model import TINY_MODEL

from tuner.batching.plan import plan_batches
from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import MindRecordWriter, open_mindrecord
from tuner.train.checkpoint import CheckpointFolder
from tuner.train.engine import Engine
from tuner.train.graph import num_compiled_graphs
from tuner.train.loop import Loop, RunParts
from tuner.train.recompiles import (
    CONSTANT,
    FIRST_CALL,
    NEW_DTYPE,
    NEW_INPUTS,
    NEW_SHAPE,
    SUSPECTED,
    TRAIN_FLIP,
    RecompileWatch,
)
from tuner.train.run_log import RunLog
from tuner.train.state import TrainState

pytestmark = pytest.mark.mindspore


class Doubled(nn.Cell):
    """x * times; `times` is a Python number, which a graph holds as a constant."""

    def construct(self, x: Tensor, times: int) -> Tensor:
        return x * times


def ones(*shape, dtype=np.float32):
    return Tensor(np.ones(shape, dtype))


@pytest.fixture
def watched(device):
    """A Cell with one planned graph, of [2, 3] float32 and times 2, and its armed watch."""
    cell = Doubled().set_train()
    notices = []
    watch = RecompileWatch()
    assert watch.run(cell, ones(2, 3), 2).asnumpy().tolist() == [[2.0] * 3] * 2
    watch.arm(notices.append)
    watch.step = 7
    return cell, watch, notices


CALLS = [
    (NEW_SHAPE, (2, 4), np.float32, 2, True),
    (NEW_DTYPE, (2, 3), np.int32, 2, True),
    (CONSTANT, (2, 3), np.float32, 5, True),
    (TRAIN_FLIP, (2, 3), np.float32, 2, False),
]


@pytest.mark.parametrize(("cause", "shape", "dtype", "times", "is_training"), CALLS)
def test_every_cause_is_named_and_counted_once(watched, cause, shape, dtype, times, is_training):
    cell, watch, notices = watched
    watch.run(cell, ones(2, 3), 2)
    assert watch.found == ()
    cell.set_train(is_training)
    output = watch.run(cell, ones(*shape, dtype=dtype), times)
    assert output.asnumpy().tolist() == np.full(shape, times).tolist()
    (recompile,) = watch.found
    assert (recompile.cell, recompile.cause) == ("Doubled", cause)
    assert (recompile.shape, recompile.step) == (shape, 7)
    assert 0.0 < recompile.seconds == watch.seconds
    assert len(notices) == 1
    assert cause in notices[0]
    assert "step 7: Doubled at " in notices[0]
    # The graph is there now: the same call again compiles nothing.
    watch.run(cell, ones(*shape, dtype=dtype), times)
    assert len(watch.found) == 1
    assert num_compiled_graphs(cell) == 2


def test_a_cause_is_warned_about_once_and_counted_each_time(watched):
    cell, watch, notices = watched
    for length in (4, 5, 6):
        watch.run(cell, ones(2, length), 2)
    assert [recompile.shape for recompile in watch.found] == [(2, 4), (2, 5), (2, 6)]
    assert len(notices) == 1
    watch.run(cell, ones(2, 6), 3)
    assert watch.found[-1].cause == CONSTANT
    assert len(notices) == 2


def test_several_differences_are_all_named_as_seen_from_the_nearest_call(watched):
    cell, watch, _ = watched
    watch.run(cell, ones(2, 4, dtype=np.int32), 2)
    assert watch.found[-1].cause == f"{NEW_SHAPE} and {NEW_DTYPE}"
    watch.run(cell, ones(2, 4), 2)
    # One difference from either of the two calls; the shape differs from the earlier one.
    assert watch.found[-1].cause == NEW_SHAPE


def test_a_value_that_is_no_input_shows_as_a_constant(device):
    """A compile although cell and inputs look as before: here the Cell's phase."""
    cell = nn.Dense(3, 3)
    watch = RecompileWatch()
    watch.run(cell, ones(2, 3))
    watch.arm(lambda line: None)
    cell.phase = "another"
    watch.run(cell, ones(2, 3))
    assert [recompile.cause for recompile in watch.found] == [CONSTANT]


def test_a_later_warm_up_is_planned_and_a_cell_without_one_is_not(watched):
    _, watch, _ = watched
    evaluation = Doubled().set_train(False)
    with watch.planned():
        watch.run(evaluation, ones(2, 3), 2)
        watch.run(evaluation, ones(4, 3), 2)
    watch.run(evaluation, ones(4, 3), 2)
    assert watch.found == ()
    watch.run(evaluation, ones(5, 3), 2)
    forgotten = Doubled()
    watch.run(forgotten, ones(2, 3), 2)
    watch.run(forgotten, (ones(2, 3), ones(2, 3)), 2)
    assert [recompile.cause for recompile in watch.found] == [NEW_SHAPE, FIRST_CALL, NEW_INPUTS]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Six rows of 8 tokens."""
    path = tmp_path_factory.mktemp("rows") / "data.mindrecord"
    with MindRecordWriter(path, description={"length_of": "input_ids"}) as writer:
        ids = np.arange(8, dtype=np.int32)
        writer.write([{"input_ids": ids, "labels": ids, "length": 8}] * 6)
    return open_mindrecord(path)


def test_a_run_counts_from_the_step_on_in_which_a_shape_came_that_nobody_planned(
    device, dataset, tmp_path
):
    """Three steps of a planned shape; the evaluation after the second has another one."""
    config = make_config(
        {
            **TINY_MODEL,
            "model.num_layers": 1,
            "batching.samples_per_batch": 2,
            "batching.tokens_per_batch": None,
            "evaluation": {"path": "none", "every_steps": 2},
            "train.async_checkpoint": False,
        }
    )
    engine = Engine(config, device, 16)
    engine.run_empty_step((2, 8))
    engine.run_empty_update()
    notices = []

    def evaluate(steps):
        if steps == 2:
            engine.run_empty_step((3, 16))
        return 1.0

    parts = RunParts(
        config=config,
        dataset=dataset,
        lengths=scan_lengths(dataset),
        engine=engine,
        checkpoints=CheckpointFolder(tmp_path / "checkpoints", 1),
        log=(log := RunLog(tmp_path, 0)),
        on_step=lambda record: None,
        on_notice=notices.append,
        stop_requested=lambda: False,
        evaluate=evaluate,
    )
    Loop(parts, TrainState(), plan_batches(parts.lengths, config)).run()
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["recompiles"] for line in lines] == [0, 0, 1]
    (recompile,) = engine.recompiles.found
    assert (recompile.cell, recompile.cause) == ("AccumulateStep", NEW_SHAPE)
    assert (recompile.shape, recompile.step) == ((3, 16), 2)
    # A compile of this step takes a good part of a second at least.
    assert recompile.seconds == lines[-1]["recompile_s"] > 0.1
    assert lines[0]["recompile_s"] == 0.0
    (notice,) = [line for line in notices if "unplanned" in line]
    assert "step 2: AccumulateStep at 3x16, new shape" in notice
    assert "planned shape" in notice


class Clock:
    """A clock that a fake Cell moves on."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def fake_cell(clock, taken_s):
    """A Cell whose calls take the given seconds, one after the other."""
    remaining = iter(taken_s)

    class Slow:
        training = True

        def __call__(self, x):
            clock.seconds += next(remaining)
            return x

    return Slow()


def fake_input(*shape):
    return types.SimpleNamespace(shape=shape, dtype="float32")


def test_without_counts_a_call_of_many_times_the_median_is_suspected():
    clock = Clock()
    cell = fake_cell(clock, [9.0, 1.0, 1.0, 1.2, 4.0, 7.0, 1.0])
    watch = RecompileWatch(lambda cell: None, clock)
    for _ in range(4):
        watch.run(cell, fake_input(2, 8))
    watch.arm(lambda line: None)
    for _ in range(3):
        watch.run(cell, fake_input(2, 8))
    # 4.0 is an outlier; 7.0 is more than five times the median of (9, 1, 1, 1.2, 4), 1.2.
    (recompile,) = watch.found
    assert recompile.cause == SUSPECTED
    assert recompile.seconds == pytest.approx(7.0 - 1.2)


def test_without_counts_the_first_call_of_a_shape_is_judged_by_the_slowest_shape():
    clock = Clock()
    cell = fake_cell(clock, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 9.0, 11.0])
    watch = RecompileWatch(lambda cell: None, clock)
    for length in (8, 8, 8, 16, 16, 16):
        watch.run(cell, fake_input(2, length))
    watch.arm(lambda line: None)
    watch.run(cell, fake_input(2, 24))
    assert watch.found == ()
    watch.run(cell, fake_input(2, 32))
    assert [recompile.shape for recompile in watch.found] == [(2, 32)]


def test_the_seconds_of_a_compile_leave_the_usual_seconds_out():
    """A Python constant: the signature was called before, so its median is known."""
    clock = Clock()
    cell = fake_cell(clock, [5.0, 1.0, 2.0, 3.0, 8.0])
    # One graph more once the fifth call, which starts at 11 s, is over.
    watch = RecompileWatch(lambda cell: 1 if clock.seconds < 12.0 else 2, clock)
    for _ in range(4):
        watch.run(cell, fake_input(2, 8))
    watch.arm(lambda line: None)
    watch.run(cell, fake_input(2, 8))
    assert [recompile.cause for recompile in watch.found] == [CONSTANT]
    # Median of 5, 1, 2, 3.
    assert watch.seconds == pytest.approx(8.0 - 2.5)

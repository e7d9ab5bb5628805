"""The course of a run: windows, schedule, clipping, evaluation, and going on to the same bits.

All runs share one compiled engine, so a run may be stopped and taken up after every single step.
"""

from __future__ import annotations

import json
import math
from typing import ClassVar

import numpy as np
import pytest
from checkpoint_case import parameter_bytes
from strategies import make_config
from tiny_model import TINY_MODEL

from tuner.batching.plan import plan_batches
from tuner.config.override import override_config
from tuner.config.schema import LoopConfig
from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import MindRecordWriter, open_mindrecord
from tuner.errors import BadInputError
from tuner.train.checkpoint import CheckpointFolder
from tuner.train.engine import Engine
from tuner.train.loop import DivergedError, Loop, RunParts
from tuner.train.run_log import RunLog
from tuner.train.state import TrainState

pytestmark = pytest.mark.mindspore

LONGEST = 12
NUM_ROWS = 23
STEPS_PER_EPOCH = 12  # Two rows a step; the last has one and a filler.
OUTCOME = ("step", "epoch", "loss", "updates", "grad_norm", "learning_rate", "clip_norm",
           "clipped", "label_tokens")  # fmt: skip


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Rows of 3 to 12 tokens; of six in ten no label counts."""
    path = tmp_path_factory.mktemp("rows") / "data.mindrecord"
    rng = np.random.default_rng(0)
    with MindRecordWriter(path, description={"length_of": "input_ids"}) as writer:
        for number in range(NUM_ROWS):
            length = LONGEST if number == 0 else int(rng.integers(3, LONGEST + 1))
            ids = rng.integers(0, 23, length).astype(np.int32)
            labels = ids if number % 5 < 2 else np.full_like(ids, -100)
            writer.write([{"input_ids": ids, "labels": labels, "length": length}])
    return open_mindrecord(path)


@pytest.fixture(scope="module")
def config():
    return make_config(
        {
            **TINY_MODEL,
            "model.num_layers": 1,
            "batching.strategy": "fixed",
            "batching.samples_per_batch": 2,
            "batching.tokens_per_batch": None,
            "batching.align": 4,
            "optimizer.learning_rate": 0.01,
            "train.epochs": 3,
            "train.clip_norm": 1.0,
            "train.checkpoint_every_steps": 1,
            "train.keep_last": 99,
            "train.async_checkpoint": False,
        }
    )


class Course:
    """Runs of one engine from its first weights, each into a folder of its own."""

    def __init__(self, config, dataset, device):
        self.config, self.dataset = config, dataset
        self.lengths = scan_lengths(dataset)
        self.engine = Engine(config, device, LONGEST)
        self.engine.run_empty_step((2, LONGEST))
        self.engine.run_empty_update()
        self.first = [parameter.asnumpy().copy() for parameter in self.engine.parameters]

    def run(self, out, *, until=None, resume=False, evaluate=None, **fields):
        """A run, or the part of it until some steps are done; its end state."""
        import mindspore as ms

        for parameter, value in zip(self.engine.parameters, self.first, strict=True):
            parameter.set_data(ms.Tensor(value))
        in_train = LoopConfig.model_fields
        names = {f"train.{name}" if name in in_train else name: fields[name] for name in fields}
        config = override_config(self.config, names)
        folder = CheckpointFolder(
            out / "checkpoints", config.train.keep_last, config.train.keep_best
        )
        state = folder.load_newest(self.engine.parameters, pytest.fail) if resume else TrainState()
        log = RunLog(out, state.steps)
        self.notices = []
        parts = RunParts(
            config=config,
            dataset=self.dataset,
            lengths=self.lengths,
            engine=self.engine,
            checkpoints=folder,
            log=log,
            on_step=lambda record: None,
            on_notice=self.notices.append,
            stop_requested=lambda: until is not None and loop.state.steps >= until,
            evaluate=evaluate,
        )
        loop = Loop(parts, state, plan_batches(self.lengths, config))
        end = loop.run()
        log.close()
        return end


@pytest.fixture(scope="module")
def course(config, dataset, device):
    return Course(config, dataset, device)


def records(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in OUTCOME} for line in lines]


def updates_in(lines):
    return [line for line in lines if line["grad_norm"] is not None]


EVERYTHING = {
    "steps_per_update": 2,
    "clip_norm": None,
    "clip_quantile": 0.5,
    "schedule.kind": "wsd",
    "schedule.progress": "tokens",
    "schedule.warmup_fraction": 0.2,
    "schedule.decay_fraction": 0.3,
}


@pytest.fixture(scope="module")
def whole(course, tmp_path_factory):
    """Windows of two steps, a threshold that follows the norms, three epochs; uninterrupted."""
    out = tmp_path_factory.mktemp("whole")
    return out, course.run(out, **EVERYTHING), list(course.notices)


class TestWindows:
    def test_the_last_window_of_an_epoch_is_shorter_and_an_update_of_its_own(
        self, course, tmp_path
    ):
        """12 steps at 5 an update: 5, 5 and 2, in every epoch."""
        course.run(tmp_path, steps_per_update=5)
        lines = records(tmp_path)
        ends = [line["step"] for line in updates_in(lines)]
        assert ends == [5, 10, 12, 17, 22, 24, 29, 34, 36]

    def test_the_last_update_is_the_mean_over_its_own_labels(self, course, tmp_path):
        """The gradients of a window of two steps against those of the same two, alone."""
        course.run(tmp_path, steps_per_update=5, clip_norm=None, epochs=1)
        tail = records(tmp_path)[-1]
        state = course.run(tmp_path / "cut", steps_per_update=5, clip_norm=None, epochs=1,
                           until=10)  # fmt: skip
        assert (state.window_label_tokens, state.step_in_epoch) == (0, 10)
        gradients = 0.0
        labels = 0
        course.engine.clear_gradients()
        from tuner.train.loader import read_batches

        plan = plan_batches(course.lengths, course.config)
        for batch in read_batches(course.dataset, list(plan.steps_of_rank(0, 10)), course.config):
            course.engine.clear_gradients()
            course.engine.run_step(batch)
            one = np.concatenate([part.ravel() for part in course.engine.read_gradients()])
            gradients = gradients + one.astype(np.float64)
            labels += batch.label_tokens
        norm = float(np.sqrt((gradients**2).sum())) / labels
        assert tail["grad_norm"] == pytest.approx(norm, rel=1e-5)

    def test_a_window_without_labels_says_so_and_changes_nothing(self, whole):
        out, end, notices = whole
        lines = records(out)
        windows = [lines[start : start + 2] for start in range(0, len(lines), 2)]
        empty = [window for window in windows if not sum(line["label_tokens"] for line in window)]
        assert empty
        assert end.updates == len(windows) - len(empty)
        told = [line for line in notices if "no label in the whole update window" in line]
        assert len(told) == len(empty)
        for first, last in empty:
            before, after = (out_state(out, step) for step in (first["step"] - 1, last["step"]))
            assert (after.updates, after.norms) == (before.updates, before.norms)
            assert after.window_label_tokens == 0
            assert last["grad_norm"] is last["learning_rate"] is last["clipped"] is None
            if before.steps:
                assert parameter_bytes(out, before.steps) == parameter_bytes(out, after.steps)

    def test_a_step_without_labels_leaves_the_window_as_it_was(self, whole):
        out, _, _ = whole
        opened = [
            line["step"]
            for line in records(out)
            if line["step"] % 2 and not line["label_tokens"] and line["step"] > 1
        ]
        assert opened
        for step in opened:
            assert parameter_bytes(out, step) == parameter_bytes(out, step - 1)


def out_state(out, steps):
    """The state that the checkpoint of a step holds."""
    if steps == 0:
        return TrainState()
    from tuner.train.state import parse_saved

    text = (out / "checkpoints" / f"step_{steps:08d}" / "state.json").read_text()
    return parse_saved(text).state


class TestScheduleAndClipping:
    def test_the_rate_follows_the_tokens_of_the_planned_run(self, whole, course):
        """Trapezium over 3 epochs' real tokens: up in the first 20 %, down in the last 30 %."""
        out, end, _ = whole
        total = 3 * int(np.minimum(course.lengths.tokens, LONGEST).sum())
        assert end.real_tokens == total
        done = np.cumsum([
            tokens
            for epoch in range(3)
            for tokens in plan_batches(course.lengths, course.config, epoch=epoch).real_tokens
        ])  # fmt: skip
        for line in updates_in(records(out)):
            share = done[line["step"] - 1] / total
            expected = np.interp(share, [0.0, 0.2, 0.7, 1.0], [0.0, 0.01, 0.01, 0.001])
            assert line["learning_rate"] == pytest.approx(expected)

    def test_the_threshold_is_the_quantile_of_the_norms_before(self, whole):
        out, end, _ = whole
        made = updates_in(records(out))
        norms = [line["grad_norm"] for line in made]
        assert len(made) > 12
        for number, line in enumerate(made):
            expected = float(np.median(norms[:number])) if number >= 10 else None
            assert line["clip_norm"] == expected
            if expected is None:
                assert line["clipped"] is False
            elif abs(line["grad_norm"] / expected - 1) > 1e-5:
                assert line["clipped"] == (line["grad_norm"] > expected)
        assert end.norms == tuple(norms)
        assert {line["clipped"] for line in made[10:]} == {True, False}

    def test_new_thresholds_and_rates_compile_nothing(self, whole, course):
        assert course.engine.num_graphs() == 2

    def test_a_threshold_above_every_norm_is_none_to_the_bit(self, course, tmp_path):
        ends = []
        for name, clip_norm in (("none", None), ("high", 1e6)):
            end = course.run(tmp_path / name, clip_norm=clip_norm, epochs=1)
            ends.append(parameter_bytes(tmp_path / name, end.steps))
        assert ends[0] == ends[1]

    def test_what_scaling_makes_of_the_rate_is_told(self, course, tmp_path):
        scaled = {"tokens_per_update": 40, "epochs": 1, "schedule.kind": "constant",
                  "schedule.warmup_fraction": 0.0, "optimizer.rate_scaling": "sqrt",
                  "optimizer.reference_tokens_per_update": 10}  # fmt: skip
        course.run(tmp_path, **scaled)
        assert {line["learning_rate"] for line in updates_in(records(tmp_path))} == {0.02}
        assert any("learning rate 0.01 scaled to 0.02" in line for line in course.notices)


class TestGoingOn:
    @pytest.mark.parametrize(
        ("step", "in_background"), [(1, True), (7, False), (12, True), (24, False), (35, True)]
    )
    def test_a_run_stopped_after_any_step_goes_on_to_the_same_bits(
        self, course, whole, tmp_path, step, in_background
    ):
        """In a window, at its end, at the end of an epoch, before and after thresholds follow."""
        out, end, _ = whole
        fields = {**EVERYTHING, "async_checkpoint": in_background, "checkpoint_every_steps": 4}
        stopped = course.run(tmp_path, until=step, **fields)
        assert stopped.steps == step
        resumed = course.run(tmp_path, resume=True, **fields)
        assert resumed == end
        assert records(tmp_path) == records(out)
        assert parameter_bytes(tmp_path, end.steps) == parameter_bytes(out, end.steps)

    def test_taken_up_after_every_single_step(self, course, whole, tmp_path):
        out, end, _ = whole
        for step in range(1, end.steps + 1):
            state = course.run(tmp_path, resume=step > 1, until=step, **EVERYTHING)
        assert state == end
        assert records(tmp_path) == records(out)
        assert parameter_bytes(tmp_path, end.steps) == parameter_bytes(out, end.steps)


class TestEvaluation:
    """Losses are given here; what matters is when they are asked for and what is kept."""

    LOSSES: ClassVar = {8: 3.0, 16: 2.0, 24: 1.5, 28: 4.0, 36: 2.5}
    FIELDS: ClassVar = {
        "evaluation": {"path": "none", "every_steps": 7},
        "steps_per_update": 4,
        "keep_last": 1,
        "keep_best": 2,
        "checkpoint_every_steps": 1000,
    }

    def run(self, course, out, **more):
        asked = []

        def evaluate(steps):
            asked.append(steps)
            return self.LOSSES.get(steps, 9.0)

        end = course.run(out, evaluate=evaluate, **self.FIELDS, **more)
        return asked, end

    def test_it_comes_at_the_next_update_and_at_the_end(self, course, tmp_path):
        """Windows end at 4, 8, 12, ...; the first at or after 7, 14, 21, 28, 35."""
        asked, end = self.run(course, tmp_path)
        assert asked == [8, 16, 24, 28, 36]
        assert (end.best.steps, end.best.loss) == (24, 1.5)
        assert end.evaluated_steps == 36

    def test_the_best_are_kept_and_the_best_is_loaded(self, course, tmp_path):
        self.run(course, tmp_path)
        names = sorted(entry.name for entry in (tmp_path / "checkpoints").glob("step_*"))
        assert names == ["step_00000016", "step_00000024", "step_00000036"]
        folder = CheckpointFolder(tmp_path / "checkpoints", 1, 2)
        assert folder.load_best(course.engine.parameters, pytest.fail).steps == 24

    def test_a_resumed_run_evaluates_as_an_uninterrupted_one(self, course, tmp_path):
        whole, end = self.run(course, tmp_path / "whole")
        for step in (3, 8, 14, 17, 24, 33):
            first, _ = self.run(course, tmp_path / f"{step}", until=step)
            rest, resumed = self.run(course, tmp_path / f"{step}", resume=True)
            assert first + rest == whole
            assert resumed == end

    def test_only_at_the_end(self, course, tmp_path):
        evaluation = {"evaluation": {"path": "none"}}
        asked = []
        course.run(tmp_path, evaluate=asked.append, max_steps=9, **evaluation)
        assert asked == [9]
        stopped = []
        course.run(tmp_path / "stopped", evaluate=stopped.append, until=9, **evaluation)
        assert stopped == []

    def test_a_loss_that_is_no_number_is_no_best(self, course, tmp_path):
        losses = iter([math.nan, 5.0, math.inf, 7.0, 6.0])
        end = course.run(tmp_path, evaluate=lambda steps: next(losses), **self.FIELDS)
        assert end.best.loss == 5.0


class TestFailures:
    def test_a_write_that_fails_beside_the_steps_ends_the_run_with_its_reason(
        self, course, tmp_path
    ):
        """The folder of the checkpoints becomes a file while the run goes on."""
        fields = {"async_checkpoint": True, "checkpoint_every_steps": 3, "epochs": 3}
        course.run(tmp_path, until=4, **fields)
        checkpoints = tmp_path / "checkpoints"
        unfinished = checkpoints / ".unfinished_step_00000007"
        unfinished.write_text("in the way")
        with pytest.raises(BadInputError, match="cannot save a checkpoint") as error:
            course.run(tmp_path, resume=True, **fields)
        assert "--resume" in str(error.value)
        assert (checkpoints / "latest").read_text().strip() == "step_00000004"
        unfinished.unlink()
        end = course.run(tmp_path, resume=True, **fields)
        course.run(tmp_path / "whole", **fields)
        assert parameter_bytes(tmp_path, end.steps) == parameter_bytes(
            tmp_path / "whole", end.steps
        )

    def test_gradients_that_are_no_numbers_are_never_saved(self, course, tmp_path):
        import mindspore as ms

        course.run(tmp_path, until=5)
        weights = course.engine.parameters[0]
        real_step = course.engine.run_step

        def poisoned(batch):
            loss = real_step(batch)
            gradient = course.engine.parameters[len(course.engine.parameters) // 4]
            gradient.set_data(ms.Tensor(np.full(gradient.shape, np.nan, np.float32)))
            return loss

        course.engine.run_step = poisoned
        try:
            with pytest.raises(DivergedError, match="gradient norm is nan") as error:
                course.run(tmp_path, resume=True)
        finally:
            del course.engine.run_step
        assert "last checkpoint is of step" in str(error.value)
        folder = CheckpointFolder(tmp_path / "checkpoints", 99)
        state = folder.load_newest(course.engine.parameters, pytest.fail)
        assert np.isfinite(weights.asnumpy()).all()
        assert state.updates == out_state(tmp_path, state.steps).updates
        course.engine.clear_gradients()

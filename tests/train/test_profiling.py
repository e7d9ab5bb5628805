"""Profiled steps leave tables that can be read; a failing profiler leaves training alone."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from strategies import make_config
from tiny_model import TINY_MODEL, random_batch

from tuner.diagnose.fallback import read_profile
from tuner.train.device import ASCEND, Device
from tuner.train.engine import Engine
from tuner.train.profiling import SKIPPED_STEPS, StepProfiler

pytestmark = pytest.mark.mindspore


def one_softmax(step):
    """A step of one op, which needs no compile."""
    return ms.ops.Softmax()(ms.Tensor(np.full((4, 8), step, np.float32))).asnumpy()


@pytest.fixture
def run_steps(device):
    """Run steps under a profiler; returns the notices and what the steps gave."""

    def run(folder, num_steps, profiled_steps, run_step=one_softmax):
        notices, results = [], []
        with StepProfiler(folder, profiled_steps, device, notices.append) as profiler:
            for step in range(num_steps):
                profiler.before_step()
                results.append(run_step(step))
                profiler.after_step()
        return notices, results

    return run


def calls(folder):
    return {op.op_type: op.count for op in read_profile(folder).ops}


@pytest.mark.parametrize("profiled", [1, 3])
def test_so_many_steps_are_profiled_and_no_others(tmp_path, run_steps, profiled):
    folder = tmp_path / "new" / "profile of steps"
    notices, _ = run_steps(folder, SKIPPED_STEPS + profiled + 2, profiled)
    assert notices == [f"profile of {profiled} step{'s' * (profiled > 1)}: {folder}"]
    assert calls(folder) == {"Softmax": profiled}
    report = read_profile(folder)
    assert [finding.name for finding in report.findings] == ["cpu-profile"]
    assert 0 < report.total_s < 1


def test_a_run_that_ends_early_keeps_what_was_profiled(tmp_path, run_steps):
    notices, _ = run_steps(tmp_path, SKIPPED_STEPS + 2, 5)
    assert notices == [f"profile of 2 steps: {tmp_path}"]
    assert calls(tmp_path) == {"Softmax": 2}


def test_a_run_that_fails_within_a_step_keeps_what_was_profiled(tmp_path, run_steps):
    def fail_at_last(step):
        one_softmax(step)
        if step == SKIPPED_STEPS + 1:
            raise FloatingPointError("the loss is nan")

    with pytest.raises(FloatingPointError):
        run_steps(tmp_path, SKIPPED_STEPS + 2, 5, fail_at_last)
    assert calls(tmp_path) == {"Softmax": 2}


@pytest.mark.parametrize("num_steps", [0, SKIPPED_STEPS])
def test_a_run_of_the_first_steps_alone_has_no_profile(tmp_path, run_steps, num_steps):
    notices, _ = run_steps(tmp_path, num_steps, 5)
    assert len(notices) == 1 and notices[0].startswith("no profile: it starts after 2 steps")
    assert list(tmp_path.rglob("*.csv")) == []


def test_a_second_profile_in_a_folder_is_told_apart_from_the_first(tmp_path, run_steps):
    for _ in range(2):
        notices, _ = run_steps(tmp_path, SKIPPED_STEPS + 1, 1)
        assert notices == [f"profile of 1 step: {tmp_path}"]
    assert calls(tmp_path) == {"Softmax": 2}
    assert "several-profiles" in [finding.name for finding in read_profile(tmp_path).findings]


def test_a_folder_that_cannot_be_made_is_a_notice(tmp_path, run_steps):
    (tmp_path / "file").write_text("")
    notices, results = run_steps(tmp_path / "file" / "profile", 4, 1)
    assert len(results) == 4
    assert len(notices) == 1 and notices[0].startswith("no profile: NotADirectoryError")


@pytest.mark.parametrize("method", ["__init__", "start", "stop"])
def test_a_profiler_that_raises_is_a_notice(tmp_path, run_steps, monkeypatch, method):
    stop = ms.profiler.profile.stop

    def fail(self, **options):
        if method == "stop":
            # Else it would run on into the next test.
            stop(self)
        raise RuntimeError("no such\nprofiler")

    monkeypatch.setattr(ms.profiler.profile, method, fail)
    notices, results = run_steps(tmp_path, SKIPPED_STEPS + 3, 1)
    assert notices == ["no profile: RuntimeError: no such profiler"]
    assert len(results) == SKIPPED_STEPS + 3


def test_a_profiler_that_writes_nothing_is_a_notice(tmp_path, run_steps, monkeypatch):
    """MindSpore's profiler logs its failures and returns."""
    monkeypatch.setattr(ms.profiler.profile, "start", lambda self: None)
    monkeypatch.setattr(ms.profiler.profile, "stop", lambda self: None)
    notices, _ = run_steps(tmp_path, SKIPPED_STEPS + 2, 1)
    assert notices == [f"no profile: MindSpore's profiler wrote no table to {tmp_path}"]


def test_on_ascend_the_level_is_the_one_with_shapes(tmp_path):
    """As far as it goes without one: MindSpore takes the arguments and starts nothing."""
    from mindspore.profiler.common.profiler_context import ProfilerContext

    notices = []
    ascend = Device(name=ASCEND, memory_kind="device pool")
    with StepProfiler(tmp_path, 1, ascend, notices.append) as profiler:
        profiler.before_step()
        profiler.after_step()
        kept = ProfilerContext()
        assert kept.profiler_level == ms.profiler.ProfilerLevel.Level1
        assert set(kept.activities) == {
            ms.profiler.ProfilerActivity.CPU,
            ms.profiler.ProfilerActivity.NPU,
        }
    assert len(notices) == 1 and "the run had no more" in notices[0]


def test_training_steps_give_the_same_losses_under_the_profiler(tmp_path, device, run_steps):
    config = make_config({**TINY_MODEL, "model.num_layers": 1})
    engine = Engine(config, device, max_padded_length=16)

    def run_step(step):
        return engine.run_step(random_batch((2, 16), [16, 9], seed=step))

    plain = [run_step(step) for step in range(5)]
    _, losses = run_steps(tmp_path, 5, 2, run_step)
    assert losses == plain
    counted = calls(tmp_path)
    assert counted["MatMul"] > 0
    assert all(count % 2 == 0 for count in counted.values())

"""What is kept of a run's steps: slow ones told, pauses and compiles excused, sums by hand."""

from __future__ import annotations

import json

import pytest
from step_records import record

from tuner.train.metrics import EvaluationRecord
from tuner.train.run_log import RunLog


@pytest.fixture
def notices():
    return []


@pytest.fixture
def log(tmp_path, notices):
    log = RunLog(tmp_path, 0, notices.append)
    yield log
    log.close()


def feed(log, seconds, **changes):
    start = log.figures().num_steps
    return [
        log.append(record(start + step, step_s=value, **changes))
        for step, value in enumerate(seconds, start=1)
    ]


def test_a_slow_step_is_told_with_its_place_and_written_as_slow(log, notices, tmp_path):
    feed(log, [0.1] * 9)
    (slow,) = feed(log, [1.4], epoch=2, step_in_epoch=37, data_wait_s=0.7)
    assert slow.slow
    (line,) = notices
    assert line == (
        "slow step 10 (epoch 2, its step 37, B=2 L=8): 1.40 s, usual 0.10 s; waited 0.70 s for "
        "data besides"
    )
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["slow"] for line in lines] == [False] * 9 + [True]


def test_five_are_told_and_all_are_counted(log, notices):
    for _ in range(7):
        feed(log, [0.1] * 30 + [1.1])
    assert len(notices) == 5
    assert "counted only" in notices[-1] and "counted only" not in notices[-2]
    figures = log.figures()
    assert figures.num_slow == 7
    assert figures.slow_excess_s == pytest.approx(7.0, rel=1e-6)


def test_after_a_pause_or_with_a_compile_a_step_may_take_long(log, notices):
    feed(log, [0.1] * 9)
    log.pause()
    assert not feed(log, [1.0])[0].slow
    assert feed(log, [1.0])[0].slow
    assert not feed(log, [3.0], recompiles=1, recompile_s=2.9)[0].slow
    evaluation = EvaluationRecord(
        step=12, seconds=0.25, rows=1, label_tokens=2, loss=1.0, perplexity=2.7
    )
    log.evaluated(evaluation)
    assert not feed(log, [1.0], recompiles=1)[0].slow
    assert log.figures().num_slow == 1
    assert log.figures().evaluation == evaluation
    assert log.figures().evaluation_s == 0.25


def test_updates_are_compared_with_updates(log):
    """Every fourth step has an update of 0.5 s: not slow, and not in the curve of the shape."""
    for _ in range(12):
        feed(log, [0.1] * 3)
        assert not feed(log, [0.6], update_s=0.5)[0].slow
    assert feed(log, [2.1], update_s=2.0)[0].slow
    curve = log.figures().curves[(2, 8)]
    assert curve.median_s == curve.p95_s == pytest.approx(0.1)


def test_sums_are_of_the_steps_of_this_process(tmp_path):
    log = RunLog(tmp_path, 0)
    feed(log, [0.5] * 3)
    log.close()
    log = RunLog(tmp_path, 2)
    log.append(record(3, step_s=0.25, data_wait_s=0.1, update_s=0.05, loss=4.0))
    log.append(
        record(4, (4, 16), step_s=0.75, real_tokens=50, grad_norm=None, loss=None)
    )  # fmt: skip
    log.close()
    figures = log.figures()
    assert (figures.num_steps, figures.num_updates) == (2, 1)
    assert (figures.real_tokens, figures.padded_tokens) == (60, 16 + 64)
    assert figures.effective_token_fraction == 0.75
    assert (figures.step_s, figures.data_wait_s) == (1.0, 0.1)
    assert figures.first_losses == figures.last_losses == (4.0,)
    assert set(figures.curves) == {(2, 8), (4, 16)}
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()]
    assert steps == [1, 2, 3, 4]

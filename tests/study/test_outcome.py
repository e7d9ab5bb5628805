"""Outcomes: kept as plain data without a loss, and estimated again from all measurements."""

from __future__ import annotations

import dataclasses
import json

import pytest
from search_case import COST, HUNDRED_ROWS, SMALL, TEN_ROWS, baselines, search
from study_case import make_setup, make_space

from tuner.simulate.cost_book import CostBook
from tuner.simulate.measurement import CostKey
from tuner.study.baselines import PAD_TO_LONGEST
from tuner.study.outcome import (
    OVER_MEMORY,
    estimate_again,
    outcome_from_plain,
    outcome_to_plain,
)
from tuner.trial.fake import FakeRunner


def outcomes_of_every_kind(tmp_path):
    """Measured, from shared measurements, pruned, out of memory, refused, below fp32."""
    space = SMALL.model_copy(update={"compute_dtype": ("fp32", "fp16"), "max_static_shapes": 4})
    runner = FakeRunner(COST)
    runner.group_deviations = {"softmax": (0.0, 0.0, 9), "loss": (0.001, 0.001, 0)}
    setup = make_setup(
        tmp_path, HUNDRED_ROWS, space, trials=20, memory_limit_bytes=600_000_000,
        base={"train.epochs": 100},
    )  # fmt: skip
    return search(setup, runner)


def test_nothing_is_lost_on_the_way_through_the_storage(tmp_path):
    result = outcomes_of_every_kind(tmp_path)
    statuses = {item.outcome.status for item in result.outcomes}
    assert statuses >= {"ok", "oom", "refused"}
    assert any(item.outcome.precision for item in result.outcomes)
    for item in result.outcomes:
        text = json.dumps(outcome_to_plain(item.outcome))
        assert outcome_from_plain(json.loads(text)) == item.outcome


def test_figures_follow_from_the_book(tmp_path):
    result = search(make_setup(tmp_path, HUNDRED_ROWS, SMALL, trials=8), FakeRunner(COST))
    again = estimate_again(result.outcomes, result.book, "CPU")
    assert again == result.outcomes
    # The same measurements in another order.
    processes = [item.outcome.process("CPU") for item in reversed(result.outcomes)]
    assert estimate_again(result.outcomes, CostBook(processes), "CPU") == result.outcomes
    # Everything twice as slow: a shape that was measured costs its median.
    twice = [
        dataclasses.replace(
            process,
            shapes=tuple(
                dataclasses.replace(
                    shape,
                    first_call_s=2 * shape.first_call_s,
                    steady_s=tuple(2 * seconds for seconds in shape.steady_s),
                )
                for shape in process.shapes
            ),
        )
        for process in processes
    ]
    slow = estimate_again(result.outcomes, CostBook(twice), "CPU")
    fixed = [item for item in result.outcomes if item.outcome.baseline == PAD_TO_LONGEST]
    slow_fixed = [item for item in slow if item.outcome.baseline == PAD_TO_LONGEST]
    before, after = fixed[0].outcome.estimate, slow_fixed[0].outcome.estimate
    # 25 steps of (4, 512); the update, 0.99 s once and 0.01 s a time, stays as it was.
    steps_s = 25 * (0.02 + 1.3e-4 * 2048 + 2.8e-7 * 2048 * 512)
    assert after.estimated_run_s - before.estimated_run_s == pytest.approx(5.0 + steps_s)


def test_a_failure_has_no_figure_whatever_is_known(tmp_path):
    result = search(make_setup(tmp_path, TEN_ROWS, make_space(), trials=1), FakeRunner(COST))
    item = result.outcomes[0]
    failed = dataclasses.replace(
        item, outcome=dataclasses.replace(item.outcome, status="timeout", reason="too long")
    )
    (again,) = estimate_again([failed], result.book, "CPU")
    assert again.outcome.estimate is None and again.outcome.real_tokens_per_s is None


def test_the_figures_of_the_table(tmp_path):
    result = search(make_setup(tmp_path, TEN_ROWS, make_space(), trials=1), FakeRunner(COST))
    outcome = baselines(result)[PAD_TO_LONGEST].outcome
    # 10 rows of 85 tokens in three steps of (4, 32).
    assert (outcome.num_shapes, outcome.num_steps) == (1, 3)
    assert outcome.effective_token_fraction == pytest.approx(85 / 384)
    assert outcome.length_autocorrelation == 0.0
    assert outcome.expected_peak_bytes == 500_000_000 + 50_000 * 128
    assert outcome.process("CPU").key == CostKey.of(outcome.config, "CPU")
    unplanned = dataclasses.replace(outcome, figures=None, shapes=(), estimate=None, peak_bytes=0)
    assert (unplanned.num_steps, unplanned.effective_token_fraction) == (0, 0.0)
    assert unplanned.expected_peak_bytes == 0


def test_what_was_not_run_for_memory_is_told_from_other_refusals(tmp_path):
    result = search(make_setup(tmp_path, TEN_ROWS, make_space(), trials=1), FakeRunner(COST))
    refused = dataclasses.replace(
        result.outcomes[0].outcome, status="refused", reason=f"it takes 9 GB, {OVER_MEMORY}"
    )
    assert refused.is_over_memory
    assert not dataclasses.replace(refused, reason="9 static shapes").is_over_memory
    assert not dataclasses.replace(refused, status="oom").is_over_memory

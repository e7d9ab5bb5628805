"""Units of work: what they measure, and that figures follow from measurements, not their order."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from search_case import COST, HUNDRED_ROWS, TEN_ROWS
from strategies import make_config, skewed_tokens
from study_case import make_setup, make_space

from tuner.simulate.cost_book import CostBook
from tuner.simulate.estimate import estimate_run
from tuner.study.guide import configure
from tuner.study.knowledge import Knowledge
from tuner.study.space import all_choices
from tuner.study.unit import MAX_SHAPES_A_TRIAL, measure_unit, partial_estimate, plan_unit
from tuner.trial.fake import FakeRunner
from tuner.trial.record import TrialResult

SPACE = make_space(
    strategy=["bucketed", "dynamic", "fixed", "packed"],
    num_buckets={"low": 2, "high": 5},
    align=[8, 32],
    longest_rows_per_batch=[2, 4],
    graph_mode=["static", "dynamic"],
)


@pytest.fixture
def setup(tmp_path):
    tokens = skewed_tokens(300, seed=3, longest=500)
    setup = make_setup(
        tmp_path, tokens, SPACE, base={"train.epochs": 20}, memory_limit_bytes=10**12
    )
    np.save(setup.folder.lengths, setup.data.lengths.tokens)
    return setup


def configs_of(setup):
    """Some points of every kind, by the boundaries of least padding."""
    choices = random.Random(0).sample(all_choices(setup.space), 24)
    return [configure(setup, choice) for choice in choices]


def outcomes_of(setup, configs, order, noise, baseline=None):
    """Estimates of all, by the place of their config, measured in this order."""
    knowledge, runner = Knowledge(setup), FakeRunner(COST, noise=noise)
    for number in order:
        unit = plan_unit(setup, number, configs[number], knowledge.book, baseline)
        if unit.needs_process:
            outcome = measure_unit(setup, runner, unit)
        else:
            outcome = unit.outcome or unit.finish(TrialResult(status="ok"))
        knowledge.keep(number, outcome)
    return knowledge.outcomes(), runner


@pytest.mark.parametrize("seed", range(3))
def test_without_noise_the_order_of_trials_does_not_change_a_figure(setup, seed):
    """The hidden cost is one that the fit can be, so that any few shapes tell all of it."""
    configs = configs_of(setup)
    order = list(range(len(configs)))
    first, _ = outcomes_of(setup, configs, order, noise=0.0)
    random.Random(seed).shuffle(order)
    second, _ = outcomes_of(setup, configs, order, noise=0.0)
    assert [item.number for item in first] == [item.number for item in second]
    compared = 0
    for one, other in zip(first, second, strict=True):
        if one.outcome.estimate is None:
            assert other.outcome.estimate is None
            continue
        compared += 1
        # On one dynamic graph a first call that adds nothing counts for a millisecond.
        is_static = one.outcome.config.graph.mode == "static"
        assert one.outcome.estimate.estimated_run_s == pytest.approx(
            other.outcome.estimate.estimated_run_s, rel=1e-9 if is_static else 1e-4
        )
    assert compared >= 15


@pytest.mark.parametrize("seed", range(3))
def test_with_noise_figures_of_wholly_measured_plans_are_equal_in_any_order(setup, seed):
    static = [config for config in configs_of(setup) if config.graph.mode == "static"]
    order = list(range(len(static)))
    first, _ = outcomes_of(setup, static, order, noise=0.1, baseline="whole")
    random.Random(seed).shuffle(order)
    second, _ = outcomes_of(setup, static, order, noise=0.1, baseline="whole")
    estimates = [(a.outcome.estimate, b.outcome.estimate)
                 for a, b in zip(first, second, strict=True)]  # fmt: skip
    assert all(one == other for one, other in estimates)
    measured = [one for one, _ in estimates if one is not None]
    assert len(measured) >= 8
    assert {one.measured_time_fraction for one in measured} == {1.0}


def test_a_proposal_measures_few_shapes_and_a_baseline_all(setup):
    choice = next(c for c in all_choices(SPACE) if c.num_buckets == 5 and c.graph_mode == "static")
    space = SPACE.model_copy(update={"num_buckets": SPACE.num_buckets.model_copy(
        update={"high": 12})})  # fmt: skip
    setup = dataclasses.replace(setup, space=space)
    config = configure(setup, dataclasses.replace(choice, num_buckets=12))
    proposal = plan_unit(setup, 0, config, CostBook())
    baseline = plan_unit(setup, 0, config, CostBook(), "whole")
    assert len(proposal.planned_shapes) == 12
    assert 1 <= len(proposal.shapes) <= MAX_SHAPES_A_TRIAL
    assert sorted(baseline.shapes) == sorted(proposal.planned_shapes)
    for unit in (proposal, baseline):
        tokens = [size * length for size, length in unit.shapes]
        assert tokens == sorted(tokens, reverse=True) or unit is baseline
    largest = max(size * length for size, length in proposal.planned_shapes)
    assert proposal.shapes[0][0] * proposal.shapes[0][1] == largest


def test_what_is_known_is_not_asked_again(setup):
    config = configs_of(setup)[0]
    unit = plan_unit(setup, 0, config, CostBook(), "whole")
    outcome = measure_unit(setup, FakeRunner(COST), unit)
    book = CostBook([outcome.process("CPU")])
    again = plan_unit(setup, 1, config, book)
    assert again.shapes == () and not again.needs_process
    assert plan_unit(setup, 1, config, book, "whole").shapes == ()


def test_the_partial_estimate_of_a_whole_measurement_is_the_estimate(setup):
    choice = next(c for c in all_choices(SPACE) if c.num_buckets == 4 and c.graph_mode == "static")
    unit = plan_unit(setup, 0, configure(setup, choice), CostBook(), "whole")
    seen = []

    def on_measured(measured):
        seen.append(partial_estimate(unit, measured, CostBook()))
        return False

    outcome = measure_unit(setup, FakeRunner(COST), unit, on_measured)
    assert len(seen) == 4
    # Measured shapes only ever become more.
    fractions = [estimate.measured_time_fraction for estimate in seen]
    assert fractions == sorted(fractions) and fractions[-1] == pytest.approx(1.0)
    whole = estimate_run(unit.figures, 20, CostBook([outcome.process("CPU")]).known(unit.key))
    # The update is measured last: 0.99 s once, 0.01 s each time.
    updates_s = 0.99 + 20 * unit.figures.num_updates * 0.01
    assert whole.estimated_run_s == pytest.approx(seen[-1].estimated_run_s + updates_s)


def test_a_failed_trial_shares_its_shapes_but_not_its_peak(tmp_path):
    setup = make_setup(tmp_path, HUNDRED_ROWS, SPACE, memory_limit_bytes=700_000_000)
    config = make_config(
        {
            "batching.strategy": "bucketed",
            "batching.boundaries": [32, 96, 160, 320, 512],
            "batching.tokens_per_batch": 2048,
            "graph.mode": "static",
        }
    )
    outcome = measure_unit(setup, FakeRunner(COST), plan_unit(setup, 0, config, CostBook(), "x"))
    assert outcome.status == "oom"
    # 500 MB and 50 kB a token leave 4,000 tokens: two of five shapes of 1,000 to 1,600.
    assert [item.batch_size * item.padded_length for item in outcome.measured] == [1600, 1440]
    assert len(outcome.asked) == 5
    assert outcome.process("CPU").peak_bytes == 0
    assert len(outcome.process("CPU").shapes) == 2


def test_ten_rows_by_hand(tmp_path):
    setup = make_setup(tmp_path, TEN_ROWS, SPACE)
    config = make_config(
        {
            "batching.strategy": "bucketed",
            "batching.boundaries": [16, 32],
            "batching.tokens_per_batch": 128,
            "graph.mode": "static",
        }
    )
    unit = plan_unit(setup, 7, config, CostBook())
    assert unit.number == 7 and str(unit.key) == "CPU static O0 fp32 single"
    assert unit.figures.shape_counts == {(5, 16): 2, (1, 32): 1}
    assert unit.claim_of((5, 16)) == "CPU static O0 fp32 single 5x16"


class TestDynamicGraphs:
    def choice(self, strategy):
        return next(
            choice
            for choice in all_choices(SPACE)
            if (choice.strategy, choice.graph_mode) == (strategy, "dynamic")
            and choice.longest_rows_per_batch == 4
            and choice.align == 8
        )

    def test_are_measured_at_many_short_rows_too(self, setup):
        """All batches of the plan have four rows, since the longest may be in any."""
        config = configure(setup, self.choice("dynamic"))
        unit = plan_unit(setup, 0, config, CostBook())
        assert {size for size, _ in unit.planned_shapes} == {4}
        others = [shape for shape in unit.shapes if shape[0] != 4]
        # By hand: the budget is 4 rows of the longest; quantiles by sorting, to whole eights.
        tokens = np.sort(setup.data.lengths.tokens)
        tenth, half = (int(-(-tokens[len(tokens) * k // 10 - 1] // 8) * 8) for k in (1, 5))
        budget = 4 * int(-(-tokens[-1] // 8) * 8)
        assert set(others) <= {(budget // tenth, tenth), (budget // half, half)}
        assert (budget // tenth, tenth) in others
        sizes = [size * length for size, length in unit.shapes]
        assert sizes == sorted(sizes, reverse=True)

    def test_which_are_not_asked_again(self, setup):
        config = configure(setup, self.choice("dynamic"))
        unit = plan_unit(setup, 0, config, CostBook())
        outcome = measure_unit(setup, FakeRunner(COST), unit)
        again = plan_unit(setup, 1, config, CostBook([outcome.process("CPU")]))
        assert all(shape[0] == 4 for shape in again.shapes)

    def test_a_static_graph_would_compile_for_it(self, setup):
        choice = next(c for c in all_choices(SPACE) if c.num_buckets and c.graph_mode == "static")
        unit = plan_unit(setup, 0, configure(setup, choice), CostBook())
        assert unit.shapes and set(unit.shapes) <= set(unit.planned_shapes)

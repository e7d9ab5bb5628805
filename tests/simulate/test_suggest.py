"""The suggestion against plans that are built and counted, one by one."""

from __future__ import annotations

import numpy as np
import pytest
from strategies import make_config, make_lengths, skewed_tokens

from tuner.batching.plan import plan_batches
from tuner.errors import BadInputError
from tuner.simulate.cost import CostModel, StepCost, default_cost_model
from tuner.simulate.histogram import LengthHistogram
from tuner.simulate.stats import count_plan
from tuner.simulate.suggest import ALIGNMENTS, NOT_WORTH_MORE, RunSetting, suggest_buckets

TOKENS = skewed_tokens(3000, longest=1000)


def setting(*, epochs=3, tokens_per_batch=8192, cost=None):
    return RunSetting(
        tokens_per_batch=tokens_per_batch, epochs=epochs, cost=cost or default_cost_model()
    )


def suggest(tokens, **changes):
    return suggest_buckets(LengthHistogram.from_tokens(np.array(tokens)), setting(**changes))


def run_s(choice):
    return choice.estimate.estimated_run_s


def counted_run_s(choice, epochs):
    """Seconds of the plan as it is trained, from the formulas."""
    config = make_config(
        {
            "batching.strategy": choice.name,
            "batching.boundaries": [] if choice.name == "fixed" else list(choice.boundaries),
            "batching.align": choice.align,
            "batching.tokens_per_batch": 8192,
        }
    )
    stats = count_plan(plan_batches(make_lengths(TOKENS), config), None)
    cost = default_cost_model()
    seconds = 0.0
    for (size, length), steps in stats.shape_counts.items():
        step = cost.step
        step_s = step.overhead_s + size * length * (step.token_s + step.attention_s * length)
        seconds += cost.compile_base_s + cost.compile_per_step_s * step_s + epochs * steps * step_s
    return seconds, stats


@pytest.mark.parametrize("epochs", [1, 10])
def test_every_figure_is_that_of_the_plan(epochs):
    suggestion = suggest(TOKENS, epochs=epochs)
    for choice in (*suggestion.curve, suggestion.fixed, suggestion.packed):
        seconds, stats = counted_run_s(choice, epochs)
        assert run_s(choice) == pytest.approx(seconds)
        assert choice.num_shapes == stats.num_shapes
        assert choice.plan.num_steps == stats.num_steps
        assert choice.plan.padding_fraction == stats.padding_fraction
    assert suggestion.gain == pytest.approx(run_s(suggestion.fixed) / run_s(suggestion.best))


def test_the_suggestion_is_the_coarsest_and_smallest_within_a_percent():
    suggestion = suggest(TOKENS)
    least = min(map(run_s, suggestion.best_of_align))
    good_aligns = [
        choice.align
        for choice in suggestion.best_of_align
        if run_s(choice) <= least * (1 + NOT_WORTH_MORE)
    ]
    assert suggestion.best.align == max(good_aligns)
    least = min(map(run_s, suggestion.curve))
    good_counts = [
        len(choice.boundaries)
        for choice in suggestion.curve
        if run_s(choice) <= least * (1 + NOT_WORTH_MORE)
    ]
    assert len(suggestion.best.boundaries) == min(good_counts)
    assert [len(choice.boundaries) for choice in suggestion.curve] == list(
        range(1, len(suggestion.curve) + 1)
    )
    assert {choice.align for choice in suggestion.best_of_align} == set(ALIGNMENTS)


def test_a_longer_run_pays_for_more_buckets():
    counts = [len(suggest(TOKENS, epochs=epochs).best.boundaries) for epochs in (1, 10, 100)]
    assert counts[0] < counts[1] < counts[2]


def test_where_compiling_costs_more_than_padding_one_bucket_is_suggested():
    dear = CostModel(
        step=StepCost(overhead_s=0.0, token_s=1e-6, attention_s=0.0, max_relative_error=0.0),
        compile_base_s=60.0,
        compile_per_step_s=0.0,
        source="a test",
    )
    suggestion = suggest(TOKENS, cost=dear)
    assert len(suggestion.best.boundaries) == 1
    assert suggestion.gain == pytest.approx(1.0)


@pytest.mark.parametrize("tokens", [[5], [7] * 20, [1, 1000], [0, 3], [0, 0, 9, 9]])
def test_small_sets(tokens):
    suggestion = suggest(tokens)
    assert suggestion.best.boundaries[-1] >= max(tokens)


def test_a_budget_below_the_coarse_alignments_leaves_them_out():
    suggestion = suggest([100, 500], tokens_per_batch=504)
    assert [choice.align for choice in suggestion.best_of_align] == [8]
    with pytest.raises(BadInputError, match=r"got 500, the longest is 504 tokens"):
        suggest([100, 500], tokens_per_batch=500)

"""Figures from the histogram against those of plans."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict

import numpy as np
import pytest
from cost_case import STATIC, measure, process_of
from hypothesis import given
from hypothesis import strategies as st
from strategies import align_slowly, make_config, make_lengths, plan_cases, skewed_tokens

from tuner.batching.plan import STRATEGIES, plan_batches
from tuner.errors import BadInputError
from tuner.simulate.cost_book import CostBook
from tuner.simulate.estimate import estimate_run
from tuner.simulate.histogram import LengthHistogram
from tuner.simulate.screen import EXPECTED, SCREENS, Screen
from tuner.simulate.stats import count_plan

EXACT = sorted(set(SCREENS) - set(EXPECTED))


def screen_of(tokens):
    return Screen(LengthHistogram.from_tokens(np.array(tokens)))


def with_update(config, tokens_per_update, steps_per_update=1):
    update = {"tokens_per_update": tokens_per_update, "steps_per_update": steps_per_update}
    train = config.train.model_copy(update=update)
    return config.model_copy(update={"train": train})


def real_tokens_of_shape(plan):
    real = Counter()
    for size, length, tokens in zip(
        plan.batch_sizes.tolist(),
        plan.padded_lengths.tolist(),
        plan.real_tokens.tolist(),
        strict=True,
    ):
        real[size, length] += tokens
    return dict(real)


def by_length(tokens_of_shape):
    tokens = defaultdict(float)
    for (_, length), number in tokens_of_shape.items():
        tokens[length] += number
    return dict(tokens)


@pytest.mark.parametrize("strategy", EXACT)
@given(data=st.data())
def test_exact_strategies_equal_the_counted_plan(strategy, data):
    case = data.draw(plan_cases(strategy, slabs=True))
    config = with_update(case.config, data.draw(st.none() | st.integers(1, 3000)))
    plan = plan_batches(case.lengths, config, world_size=case.world_size)
    stats = count_plan(plan, config.train.tokens_per_update)
    screened = screen_of(case.tokens).plan(config, case.world_size)
    assert screened.is_exact or not config.batching.one_size_per_length
    assert screened.num_steps == stats.num_steps
    assert screened.real_tokens == stats.real_tokens
    assert screened.padded_tokens == stats.padded_tokens
    assert screened.shape_counts == stats.shape_counts
    assert screened.num_filler_rows == stats.num_filler_rows
    if screened.is_exact:
        assert screened.real_tokens_of_shape == real_tokens_of_shape(plan)
    assert by_length(screened.real_tokens_of_shape) == pytest.approx(
        by_length(real_tokens_of_shape(plan))
    )
    assert screened.effective_token_fraction == stats.effective_token_fraction
    assert screened.padding_fraction == stats.padding_fraction


@pytest.mark.parametrize("strategy", sorted(SCREENS))
@given(data=st.data())
def test_updates_are_an_upper_bound_that_is_met_if_no_step_is_larger(strategy, data):
    case = data.draw(plan_cases(strategy, slabs=True))
    tokens_per_update = data.draw(st.none() | st.integers(1, 6000))
    config = with_update(case.config, tokens_per_update)
    plan = plan_batches(case.lengths, config, world_size=case.world_size)
    counted = count_plan(plan, tokens_per_update).num_updates
    screened = screen_of(case.tokens).plan(config, case.world_size).num_updates
    assert counted <= screened
    if tokens_per_update is None or plan.real_tokens.max() <= tokens_per_update:
        assert counted == screened


@pytest.mark.parametrize("strategy", sorted(SCREENS))
@given(data=st.data())
def test_updates_of_so_many_steps_are_exact(strategy, data):
    case = data.draw(plan_cases(strategy))
    steps_per_update = data.draw(st.integers(1, 9))
    config = with_update(case.config, None, steps_per_update)
    plan = plan_batches(case.lengths, config, world_size=case.world_size)
    counted = count_plan(plan, None, steps_per_update).num_updates
    screened = screen_of(case.tokens).plan(config, case.world_size)
    assert screened.num_updates == counted == -(-plan.num_steps // steps_per_update)


@given(plan_cases("dynamic", slabs=True))
def test_what_dynamic_plans_have_in_common_is_exact(case):
    plan = plan_batches(case.lengths, case.config, world_size=case.world_size)
    stats = count_plan(plan, None)
    screened = screen_of(case.tokens).plan(case.config, case.world_size)
    assert not screened.is_exact
    assert screened.num_steps == stats.num_steps
    assert screened.real_tokens == stats.real_tokens
    assert screened.num_filler_rows == stats.num_filler_rows
    assert set(screened.shape_counts) == set(plan.shapes)
    assert sum(screened.shape_counts.values()) == pytest.approx(stats.num_steps)
    assert sum(screened.real_tokens_of_shape.values()) == pytest.approx(stats.real_tokens)
    area = sum(count * size * length for (size, length), count in screened.shape_counts.items())
    assert screened.padded_tokens == pytest.approx(area * case.world_size)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("rows_per_batch", [1, 2, 3])
@pytest.mark.parametrize("tokens", [[1, 4, 9, 9, 20, 33], [7, 7, 30], [5], [1, 8, 9, 16, 17]])
def test_dynamic_is_the_mean_over_all_shuffles(tokens, rows_per_batch, world_size):
    """Every order of the rows, cut into batches, the last one filled up."""
    slots = rows_per_batch * world_size
    steps, real, orders = Counter(), Counter(), list(itertools.permutations(tokens))
    for order in orders:
        for start in range(0, len(order), slots):
            batch = order[start : start + slots]
            shape = rows_per_batch, align_slowly(max(batch), 8)
            steps[shape] += 1
            real[shape] += sum(batch)
    config = make_config(
        {
            "batching.strategy": "dynamic",
            "batching.tokens_per_batch": None,
            "batching.samples_per_batch": rows_per_batch,
        }
    )
    screened = screen_of(tokens).plan(config, world_size)
    for shape, count in screened.shape_counts.items():
        assert count == pytest.approx(steps[shape] / len(orders), abs=1e-12)
        assert screened.real_tokens_of_shape[shape] == pytest.approx(
            real[shape] / len(orders), abs=1e-9
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"batching.tokens_per_batch": 16384},
        {"batching.tokens_per_batch": None, "batching.samples_per_batch": 16},
        {"batching.tokens_per_batch": 8192, "batching.align": 64, "data.max_length": 512},
    ],
)
@pytest.mark.parametrize("world_size", [1, 4])
def test_dynamic_plans_are_within_four_standard_errors_of_the_expectation(changes, world_size):
    """The mean padding of 100 epochs; the last batch is ragged."""
    tokens = skewed_tokens(1999)
    config = make_config({"batching.strategy": "dynamic", **changes})
    screened = screen_of(tokens).plan(config, world_size)
    epochs = [
        plan_batches(make_lengths(tokens), config, epoch=epoch, world_size=world_size)
        for epoch in range(100)
    ]
    padded = [count_plan(plan, None).padded_tokens for plan in epochs]
    error = statistics.stdev(padded) / math.sqrt(len(padded))
    assert abs(statistics.mean(padded) - screened.padded_tokens) < 4 * error
    assert error < 0.005 * screened.padded_tokens
    longest = max(screened.shape_counts)
    met = [plan.shape_counts()[longest] for plan in epochs]
    error = statistics.stdev(met) / math.sqrt(len(met))
    assert abs(statistics.mean(met) - screened.shape_counts[longest]) < 4 * error + 1e-9


def test_one_screen_serves_all_settings_as_new_ones_would():
    tokens = skewed_tokens(3000)
    screen = screen_of([0, *tokens])
    for num_buckets, align, max_length, overflow in itertools.product(
        [3, 50, 7], [8, 32], [None, 700], ["truncate", "drop"]
    ):
        config = make_config(
            {
                "batching.num_buckets": num_buckets,
                "batching.align": align,
                "data.max_length": max_length,
                "data.overflow": overflow,
            }
        )
        screened = screen.plan(config)
        assert screened == screen_of([0, *tokens]).plan(config)
        stats = count_plan(plan_batches(make_lengths([0, *tokens]), config), None)
        assert screened.shape_counts == stats.shape_counts


def test_a_screened_plan_is_estimated_like_the_counted_one():
    tokens = skewed_tokens(3000)
    config = make_config({"train.tokens_per_update": 8192})
    plan = plan_batches(make_lengths(tokens), config)
    measured = [measure(shape, 1e-4 * shape[0] * shape[1]) for shape in plan.shapes[:3]]
    costs = CostBook([process_of(STATIC, measured)]).known(STATIC)
    counted, screened = (
        estimate_run(stats, 1, costs)
        for stats in (count_plan(plan, 8192), screen_of(tokens).plan(config))
    )
    assert screened.estimated_compile_s == pytest.approx(counted.estimated_compile_s, rel=1e-12)
    assert screened.estimated_run_s == pytest.approx(counted.estimated_run_s, rel=1e-12)
    assert screened.estimated_real_tokens_per_s == pytest.approx(
        counted.estimated_real_tokens_per_s, rel=1e-12
    )


def test_hand_calculated_buckets():
    """Rows of 5, 8 and 20 tokens; two buckets, 8 and 24; rows fit into one batch of each."""
    config = make_config({"batching.num_buckets": 2, "batching.tokens_per_batch": 48})
    screened = screen_of([5, 8, 20]).plan(config)
    assert screened.shape_counts == {(2, 8): 1, (1, 24): 1}
    assert screened.real_tokens_of_shape == {(2, 8): 13, (1, 24): 20}
    assert (screened.real_tokens, screened.padded_tokens) == (33, 40)
    assert (screened.num_steps, screened.num_updates, screened.num_filler_rows) == (2, 2, 0)


def test_every_strategy_has_a_screen():
    assert set(SCREENS) == set(STRATEGIES)


def test_refuses_what_the_plan_refuses():
    small = make_config({"batching.tokens_per_batch": 16})
    with pytest.raises(BadInputError, match="at least the longest padded row"):
        screen_of([5, 20]).plan(small)
    strict = make_config({"data.overflow": "error", "data.max_length": 8})
    with pytest.raises(BadInputError, match="1 rows are longer than 8"):
        screen_of([5, 20]).plan(strict)

"""Lengths of packed rows against trying all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from strategies import make_config, make_lengths, skewed_tokens

from tuner.batching.boundaries import count_lengths
from tuner.batching.bucket_time import RunCost
from tuner.batching.packed_lengths import packed_run_s, solve_packed_lengths
from tuner.batching.plan import plan_batches
from tuner.errors import BadInputError
from tuner.simulate.stats import count_plan

BATCHING = make_config({"batching.strategy": "packed", "batching.tokens_per_batch": 4096}).batching


def step_s(shape):
    size, length = shape
    return 0.02 + 1.3e-4 * size * length + 2.8e-7 * size * length**2


def cost_of(compile_s=5.0, epochs=3):
    return RunCost(step_s=step_s, compile_s=lambda shape: compile_s, epochs=epochs, world_size=1)


def counted(seed, num_rows=3000):
    return count_lengths(np.array(skewed_tokens(num_rows, seed=seed)))


def planned_run_s(tokens, lengths, cost):
    """By a whole plan, row by row."""
    config = make_config(
        {
            "batching.strategy": "packed",
            "batching.boundaries": list(lengths),
            "batching.tokens_per_batch": 4096,
        }
    )
    counts = count_plan(plan_batches(make_lengths(tokens), config), None).shape_counts
    steps_s = sum(count * cost.step_s(shape) for shape, count in counts.items())
    return cost.epochs * steps_s + sum(map(cost.compile_s, counts))


@pytest.mark.parametrize("lengths", [(2048,), (256, 2048), (64, 512, 2048)])
def test_seconds_are_those_of_the_plan(lengths):
    tokens = skewed_tokens(2000, seed=1)
    seconds = packed_run_s(*count_lengths(np.array(tokens)), lengths, BATCHING, cost_of())
    assert seconds == pytest.approx(planned_run_s(tokens, lengths, cost_of()), rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_two_lengths_are_the_best_of_their_candidates_and_three_near_it(seed):
    lengths, counts = counted(seed)
    cost = cost_of()
    one, two, three = solve_packed_lengths(lengths, counts, BATCHING, cost, 3)
    longest = one[0]
    parts = [2.0 ** (-k / 3) for k in range(1, 13)]
    candidates = sorted({-(-round(longest * part) // 8) * 8 for part in parts} - {longest})

    def seconds(tried):
        return packed_run_s(lengths, counts, tried, BATCHING, cost)

    assert seconds(two) == min(seconds((length, longest)) for length in candidates)
    pairs = itertools.combinations(candidates, 2)
    assert seconds(three) <= 1.03 * min(seconds((*pair, longest)) for pair in pairs)


def test_a_second_length_pays_where_a_compile_is_cheap_and_samples_are_short():
    lengths, counts = counted(0)
    one, two = solve_packed_lengths(lengths, counts, BATCHING, cost_of(compile_s=0.1), 2)
    cheap = cost_of(compile_s=0.1)
    assert packed_run_s(lengths, counts, two, BATCHING, cheap) < 0.95 * packed_run_s(
        lengths, counts, one, BATCHING, cheap
    )


def test_rows_of_one_length_leave_no_other_to_choose():
    solved = solve_packed_lengths(np.array([8]), np.array([50]), BATCHING, cost_of(), 4)
    assert solved == ((8,),)


def test_a_budget_under_the_longest_sample_is_refused():
    with pytest.raises(BadInputError, match="tokens_per_batch"):
        solve_packed_lengths(np.array([5000]), np.array([1]), BATCHING, cost_of(), 2)

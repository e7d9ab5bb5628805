"""Plan statistics against a recount batch by batch in plain Python."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    admit_slowly,
    make_config,
    make_lengths,
    plan_cases,
    skewed_tokens,
)

from tuner.batching.plan import STRATEGIES, plan_batches
from tuner.simulate.stats import count_plan


def correlation_slowly(values):
    """Pearson's correlation of neighbours, written out."""
    before, after = values[:-1], values[1:]
    mean_before, mean_after = sum(before) / len(before), sum(after) / len(after)
    together = sum(
        (x - mean_before) * (y - mean_after) for x, y in zip(before, after, strict=True)
    )
    spread_before = sum((x - mean_before) ** 2 for x in before)
    spread_after = sum((y - mean_after) ** 2 for y in after)
    return together / math.sqrt(spread_before * spread_after)


def updates_slowly(real_tokens, tokens_per_update, steps_per_update):
    """Steps that are nearest to a milestone of the running total, and the last one."""
    if tokens_per_update is None:
        return math.ceil(Fraction(len(real_tokens), steps_per_update))
    running = list(itertools.accumulate(real_tokens))
    num_updates = math.floor(Fraction(running[-1], tokens_per_update) + Fraction(1, 2))
    ends = {len(running) - 1}
    for update in range(1, num_updates):
        distances = [abs(total - update * tokens_per_update) for total in running]
        ends.add(distances.index(min(distances)))
    return len(ends)


def stats_of_lengths(padded_lengths):
    """Statistics of a plan whose steps have these padded lengths."""
    plan = plan_batches(make_lengths([8] * 4), make_config())
    num_steps = len(padded_lengths)
    return count_plan(
        dataclasses.replace(
            plan,
            row_indices=np.arange(num_steps),
            rows_per_slot=np.ones(num_steps, dtype=np.int64),
            batch_sizes=np.ones(num_steps, dtype=np.int64),
            padded_lengths=np.array(padded_lengths),
            real_tokens=np.ones(num_steps, dtype=np.int64),
            shapes=tuple((1, length) for length in sorted(set(padded_lengths))),
        ),
        None,
    )


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@given(data=st.data())
def test_statistics_equal_a_slow_recount(strategy, data):
    case = data.draw(plan_cases(strategy))
    tokens_per_update = data.draw(st.none() | st.integers(1, 3000))
    plan = plan_batches(case.lengths, case.config, world_size=case.world_size)
    steps_per_update = data.draw(st.integers(1, 9))
    stats = count_plan(plan, tokens_per_update, steps_per_update)
    tokens_of_row = admit_slowly(case.tokens, case.config).tokens_of_row
    ranks = [list(plan.steps_of_rank(rank)) for rank in range(case.world_size)]
    batches = [batch for steps in ranks for batch in steps]
    real_by_step = [
        sum(tokens_of_row[row] for batch in step for row in batch.row_indices.tolist())
        for step in zip(*ranks, strict=True)
    ]
    padded_tokens = sum(len(batch.rows_per_slot) * batch.padded_length for batch in batches)
    seen = Counter(batch.shape for batch in ranks[0])
    assert stats.num_steps == len(ranks[0])
    assert stats.real_tokens == sum(tokens_of_row.values())
    assert stats.padded_tokens == padded_tokens
    assert stats.num_filler_rows == sum(batch.rows_per_slot.tolist().count(0) for batch in batches)
    assert {shape: count for shape, count in stats.shape_counts.items() if count} == seen
    assert set(stats.shape_counts) == set(plan.shapes)
    real_by_shape = dict.fromkeys(plan.shapes, 0)
    for step, real_tokens in zip(ranks[0], real_by_step, strict=True):
        real_by_shape[step.shape] += real_tokens
    assert stats.real_tokens_of_shape == real_by_shape
    assert stats.num_shapes == len(seen)
    assert stats.num_updates == updates_slowly(real_by_step, tokens_per_update, steps_per_update)
    assert stats.effective_token_fraction == sum(tokens_of_row.values()) / padded_tokens
    assert stats.padding_fraction == pytest.approx(1 - stats.effective_token_fraction)
    assert 0 <= stats.padding_fraction < 1


def test_hand_calculated_plan():
    """Rows of 5, 8 and 20 tokens; two buckets, 8 and 24; rows fit into one batch of each."""
    config = make_config({"batching.num_buckets": 2, "batching.tokens_per_batch": 48})
    stats = count_plan(plan_batches(make_lengths([5, 8, 20]), config), None)
    assert stats.shape_counts == {(2, 8): 1, (1, 24): 1}
    assert (stats.real_tokens, stats.padded_tokens) == (33, 40)
    assert stats.effective_token_fraction == 33 / 40
    assert (stats.num_steps, stats.num_updates, stats.num_filler_rows) == (2, 2, 0)
    assert stats.length_autocorrelation == 0.0


@given(st.lists(st.integers(1, 500), min_size=3, max_size=40))
def test_autocorrelation_equals_the_written_out_formula(values):
    found = stats_of_lengths(values).length_autocorrelation
    assert isinstance(found, float)
    if len(set(values[:-1])) == 1 or len(set(values[1:])) == 1:
        assert found == 0.0
    else:
        assert found == pytest.approx(correlation_slowly(values), abs=1e-9)
        assert found == pytest.approx(np.corrcoef(values[:-1], values[1:])[0, 1], abs=1e-9)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([64], 0.0),
        ([64, 128], 0.0),
        ([64, 64, 64, 64], 0.0),
        ([64, 64, 128], 0.0),
        ([128, 64, 64], 0.0),
        ([1, 2, 3, 4, 5], 1.0),
        ([9, 7, 5, 3], 1.0),
        ([8, 64, 8, 64, 8], -1.0),
        ([1, 2, 1, 1, 2], -0.5773502691896258),
    ],
)
def test_autocorrelation_by_hand(values, expected):
    """The last: deviations (-1, 3, -1, -1)/4 and (2, -2, -2, 2)/4 give -8 / sqrt(12 * 16)."""
    assert stats_of_lengths(values).length_autocorrelation == pytest.approx(expected)


def test_sorted_batches_are_told_from_shuffled_ones():
    plan = plan_batches(make_lengths(skewed_tokens(3000)), make_config())
    shuffled = stats_of_lengths(plan.padded_lengths.tolist())
    in_order = stats_of_lengths(sorted(plan.padded_lengths.tolist()))
    assert abs(shuffled.length_autocorrelation) < 0.3
    assert in_order.length_autocorrelation > 0.95

"""Rows held out for evaluation: the same on every machine, never in both parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import make_config, make_lengths, plan_cases, rows_of

from tuner.batching.plan import STRATEGIES, plan_batches
from tuner.config.schema import EvaluationConfig
from tuner.data.held_out import (
    HELD_OUT,
    TRAINED_ON,
    held_out_part,
    is_held_out,
    row_draws,
    training_part,
)
from tuner.errors import BadInputError

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def splitmix(state):
    """The generator's next output in Python's own whole numbers, from its published C code."""
    z = (state + GAMMA) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def draw_slowly(seed, row):
    start = splitmix((seed & MASK) * GAMMA & MASK)
    return (splitmix((start + row) * GAMMA & MASK) >> 11) / 2**53


def split(fraction, seed=0):
    return EvaluationConfig(fraction=fraction, seed=seed)


def test_the_generator_is_the_published_one():
    # The first outputs of splitmix64 seeded with 1234567, as Rosetta Code lists them.
    outputs = [splitmix(1234567 + step * GAMMA & MASK) for step in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 1, 7, 2**63, 2**64 + 7])
def test_a_row_draws_what_whole_numbers_say(seed):
    drawn = row_draws(200, seed)
    assert drawn.tolist() == [draw_slowly(seed, row) for row in range(200)]


def test_draws_are_even_and_seeds_have_nothing_in_common():
    one, other = row_draws(100_000, 0), row_draws(100_000, 1)
    counts, _ = np.histogram(one, 20, (0.0, 1.0))
    # 5000 each; five standard deviations are 345.
    assert abs(counts - 5000).max() < 345
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.016
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.016


def test_more_rows_and_larger_fractions_take_none_away():
    few, many = is_held_out(300, split(0.1)), is_held_out(1000, split(0.1))
    assert many[:300].tolist() == few.tolist()
    assert 60 < many.sum() < 140
    larger = is_held_out(1000, split(0.3))
    assert larger[many].all()
    assert not is_held_out(10, EvaluationConfig(path="other.mindrecord")).any()


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@given(data=st.data())
def test_every_row_is_trained_on_or_held_out_and_counted(strategy, data):
    case = data.draw(plan_cases(strategy))
    evaluation = split(data.draw(st.floats(0.05, 0.9)), data.draw(st.integers(0, 9)))
    held_out = set(np.flatnonzero(is_held_out(len(case.tokens), evaluation)).tolist())
    own = [length for row, length in enumerate(case.tokens) if row not in held_out]
    lengths = training_part(case.lengths, evaluation)
    try:
        alone = plan_batches(make_lengths(own), case.config, world_size=case.world_size)
    except BadInputError:
        with pytest.raises(BadInputError):
            plan_batches(lengths, case.config, world_size=case.world_size)
        return
    plan = plan_batches(lengths, case.config, world_size=case.world_size)
    assert not held_out & set(rows_of(plan))
    assert plan.dropped == {**alone.dropped, HELD_OUT: len(held_out)}
    assert len(rows_of(plan)) + sum(plan.dropped.values()) == len(case.tokens)
    # Otherwise the plan is that of a set that never had the other rows.
    number = [row for row in range(len(case.tokens)) if row not in held_out]
    assert [number[row] for row in rows_of(alone)] == rows_of(plan)
    assert alone.shapes == plan.shapes


def test_the_two_parts_are_the_set():
    lengths = make_lengths(range(1, 101))
    training, rest = training_part(lengths, split(0.2)), held_out_part(lengths, split(0.2))
    both = [*training.own_tokens.tolist(), *rest.own_tokens.tolist()]
    assert sorted(both) == list(range(1, 101))
    assert rest.left_out_as == TRAINED_ON
    assert training.total_tokens + rest.total_tokens == 5050
    assert max(training.longest, rest.longest) == 100
    assert training.num_samples == rest.num_samples == 100


def test_without_a_fraction_there_is_one_part():
    lengths = make_lengths([3, 4])
    assert training_part(lengths, None) is lengths
    assert training_part(lengths, EvaluationConfig(path="other.mindrecord")) is lengths


def test_a_part_without_rows_is_refused():
    with pytest.raises(BadInputError, match="holds out none of the 3 rows"):
        held_out_part(make_lengths([3, 4, 5]), split(1e-9))
    everything = training_part(make_lengths([3, 4, 5]), split(1 - 1e-12))
    with pytest.raises(BadInputError, match=r"no row is left to batch \(0 rows"):
        plan_batches(everything, make_config())


def test_a_row_over_the_limit_that_is_held_out_is_no_matter_of_the_plan():
    held_out = is_held_out(50, split(0.5))
    tokens = [99 if out else 5 for out in held_out]
    config = make_config({"data.max_length": 10, "data.overflow": "error"})
    plan = plan_batches(training_part(make_lengths(tokens), split(0.5)), config)
    assert plan.num_truncated == 0

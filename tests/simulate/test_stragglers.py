"""Waiting for the slowest rank: by hand, by counting all outcomes, and by drawing them."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import make_config, make_lengths, skewed_tokens

from tuner.batching.plan import STRATEGIES, plan_batches
from tuner.errors import BadInputError
from tuner.simulate.cost import StepCost
from tuner.simulate.histogram import LengthHistogram
from tuner.simulate.screen import Screen
from tuner.simulate.stragglers import WORLD_SIZES, expected_slowest, simulate_stragglers

COST = StepCost(overhead_s=0.02, token_s=1.3e-4, attention_s=2.8e-7, max_relative_error=0.0)


def simulate(tokens, changes, world_sizes=WORLD_SIZES, cost=COST):
    screen = Screen(LengthHistogram.from_tokens(np.array(tokens)))
    return simulate_stragglers(screen, make_config(changes), cost, world_sizes)


class TestExpectedSlowest:
    @pytest.mark.parametrize(
        ("world_size", "expected"),
        [(1, 7 / 2), (2, 161 / 36), (3, 119 / 24)],
    )
    def test_of_dice(self, world_size, expected):
        """The mean of the highest of one, two and three fair dice."""
        faces = [3, 1, 6, 2, 5, 4]
        assert expected_slowest(faces, [1] * 6, world_size) == pytest.approx(expected, rel=1e-12)

    def test_of_two_shapes_by_hand(self):
        """Three steps of 1 s and one of 2 s: both ranks at 1 s with (3/4)^2, 9/16 + 2 * 7/16."""
        assert expected_slowest([1.0, 2.0], [3, 1], 2) == pytest.approx(23 / 16, rel=1e-12)

    @given(
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=5),
        st.integers(1, 4),
    )
    def test_of_any_distribution_by_counting_all_outcomes(self, shapes, world_size):
        shapes = [*shapes, (3, 1)]
        total = sum(steps for _, steps in shapes)
        expected = sum(
            Fraction(max(seconds for seconds, _ in ranks))
            * np.prod([Fraction(steps, total) for _, steps in ranks])
            for ranks in itertools.product(shapes, repeat=world_size)
        )
        step_s, num_steps = zip(*shapes, strict=True)
        told = expected_slowest(step_s, num_steps, world_size)
        assert told == pytest.approx(float(expected), rel=1e-9, abs=1e-12)

    @pytest.mark.parametrize("world_size", [8, 64, 512])
    def test_of_drawn_ranks(self, world_size):
        rng = np.random.default_rng(5)
        step_s, num_steps = rng.lognormal(0.0, 0.8, 24), rng.integers(1, 60, 24)
        shares = num_steps / num_steps.sum()
        slowest = rng.choice(step_s, (4000, world_size), p=shares).max(axis=1)
        error_s = slowest.std() / np.sqrt(len(slowest))
        told = expected_slowest(step_s, num_steps, world_size)
        assert abs(told - slowest.mean()) < 4.0 * error_s + 1e-12

    def test_one_rank_waits_for_nobody_and_very_many_for_the_slowest_of_all(self):
        step_s, num_steps = [0.5, 3.0, 1.0], [10.0, 0.5, 4.5]
        assert expected_slowest(step_s, num_steps, 1) == pytest.approx(11.0 / 15.0)
        assert expected_slowest(step_s, num_steps, 10**6) == pytest.approx(3.0, rel=1e-12)
        rising = [expected_slowest(step_s, num_steps, size) for size in range(1, 40)]
        assert rising == sorted(rising)

    def test_shapes_of_the_same_seconds_are_one(self):
        assert expected_slowest([0.1, 0.1, 0.1], [1, 3, 7], 512) == 0.1
        split = expected_slowest([2.0, 1.0, 2.0], [1, 6, 2], 3)
        assert split == pytest.approx(expected_slowest([1.0, 2.0], [2, 1], 3), rel=1e-12)


class TestSimulation:
    def test_by_hand(self):
        """Six rows of 10 tokens, two of 100, two rows a batch, 1 ms a padded token.

        One rank: three steps of 0.02 s, one of 0.2 s. Two ranks of other shapes: two steps of
        9/16 * 0.02 + 7/16 * 0.2 s. The same shape: two steps of 0.02 s and one of 0.2 s, whose
        twelve slots hold eight rows.
        """
        cost = StepCost(overhead_s=0.0, token_s=1e-3, attention_s=0.0, max_relative_error=0.0)
        changes = {
            "batching.strategy": "bucketed",
            "batching.boundaries": [10, 100],
            "batching.tokens_per_batch": None,
            "batching.samples_per_batch": 2,
        }
        (line,) = simulate([10] * 6 + [100] * 2, changes, [2], cost)
        assert (line.world_size, line.num_batches, line.num_steps) == (2, 4, 2)
        assert line.mean_step_s == pytest.approx(0.065)
        assert line.slowest_step_s == pytest.approx(0.09875)
        assert line.wait_s == pytest.approx(0.03375)
        assert line.wait_fraction == pytest.approx(0.03375 / 0.09875)
        assert line.epoch_s == pytest.approx(0.1975)
        assert line.same_shape_num_steps == 3
        assert line.same_shape_step_s == pytest.approx(0.08)
        assert line.same_shape_epoch_s == pytest.approx(0.24)
        assert line.filler_fraction == pytest.approx(4 / 12)
        assert line.same_shape_speed == pytest.approx(0.1975 / 0.24)

    @pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - {"dynamic"}))
    def test_same_shape_is_the_plan_of_so_many_ranks(self, strategy):
        tokens, changes = skewed_tokens(4000, longest=1024), {"batching.strategy": strategy}
        for line in simulate(tokens, changes, [1, 8, 64]):
            plan = plan_batches(
                make_lengths(tokens), make_config(changes), world_size=line.world_size
            )
            counts = plan.shape_counts()
            seconds = sum(steps * COST.step_s(shape) for shape, steps in counts.items())
            assert line.same_shape_num_steps == plan.num_steps
            assert line.same_shape_epoch_s == pytest.approx(seconds)
            assert line.filler_fraction == pytest.approx((plan.rows_per_slot == 0).mean())

    def test_other_shapes_are_ranks_that_shuffle_the_plan_on_their_own(self):
        tokens, changes = skewed_tokens(4000), {"batching.num_buckets": 6}
        plan = plan_batches(make_lengths(tokens), make_config(changes))
        shapes = zip(plan.batch_sizes.tolist(), plan.padded_lengths.tolist(), strict=True)
        step_s = np.array([COST.step_s(shape) for shape in shapes])
        rng = np.random.default_rng(0)
        for line in simulate(tokens, changes, [8, 64]):
            orders = np.array([rng.permutation(step_s) for _ in range(line.world_size)])
            drawn_s = np.mean([rng.permuted(orders, axis=1).max(axis=0).mean() for _ in range(60)])
            assert line.mean_step_s == pytest.approx(step_s.mean())
            assert line.num_steps == -(-plan.num_steps // line.world_size)
            assert line.slowest_step_s == pytest.approx(drawn_s, rel=0.01)

    def test_random_batches_of_one_shape_are_as_long_as_the_longest_of_all_ranks(self):
        """The expectation of the screen against plans of twenty epochs."""
        tokens = skewed_tokens(3000, longest=1024)
        changes = {"batching.strategy": "dynamic"}
        (line,) = simulate(tokens, changes, [8])
        planned_s = [
            sum(
                steps * COST.step_s(shape)
                for shape, steps in plan_batches(
                    make_lengths(tokens), make_config(changes), epoch=epoch, world_size=8
                )
                .shape_counts()
                .items()
            )
            for epoch in range(20)
        ]
        assert line.same_shape_epoch_s == pytest.approx(np.mean(planned_s), rel=0.02)

    def test_one_shape_is_waited_for_by_nobody(self):
        for line in simulate(skewed_tokens(500), {"batching.strategy": "fixed"}):
            assert line.wait_s == line.wait_fraction == 0.0
            assert line.slowest_step_s == line.mean_step_s

    @settings(max_examples=30)
    @given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.sampled_from(WORLD_SIZES))
    def test_shares_are_shares_with_any_rows(self, tokens, world_size):
        for strategy in STRATEGIES:
            (line,) = simulate(tokens, {"batching.strategy": strategy}, [world_size])
            assert 0.0 <= line.wait_fraction < 1.0
            assert 0.0 <= line.filler_fraction < 1.0
            assert line.num_steps >= 1 and line.same_shape_epoch_s > 0.0

    def test_what_cannot_be_planned_is_refused(self):
        with pytest.raises(BadInputError, match="tokens_per_batch must be at least"):
            simulate([500], {"batching.tokens_per_batch": 100})

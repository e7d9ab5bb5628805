"""The learning rate over the run, and how long a run is."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import make_config, make_lengths

from tuner.batching.plan import plan_batches
from tuner.config.schema import ScheduleConfig
from tuner.train.run_length import total_real_tokens, total_steps
from tuner.train.schedule import describe_peak, learning_rate_at, peak_rate

KINDS = ("cosine", "linear", "constant", "wsd")


def schedule(kind, warmup=0.1, decay=0.2, floor=0.2):
    return ScheduleConfig(
        kind=kind, warmup_fraction=warmup, decay_fraction=decay, min_learning_rate_fraction=floor
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("step", "expected"), [(1, 0.1), (5, 0.5), (10, 1.0)])
def test_every_kind_warms_up_linearly(kind, step, expected):
    assert learning_rate_at(step, 100, 1.0, schedule(kind)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "step", "expected"),
    [
        # Half-way down: the mean of peak and floor.
        ("cosine", 55, 0.6),
        # A quarter down: floor + (1 - floor) * (1 + cos(pi/4)) / 2.
        ("cosine", 10 + 22.5, 0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2),
        ("cosine", 100, 0.2),
        # From 1 at step 10 to 0.2 at step 100: 0.8 / 90 a step.
        ("linear", 11, 1.0 - 0.8 / 90),
        ("linear", 55, 0.6),
        ("linear", 100, 0.2),
        ("constant", 11, 1.0),
        ("constant", 100, 1.0),
        # The last 20 of 100 steps go from 1 to 0.2: 0.04 a step.
        ("wsd", 11, 1.0),
        ("wsd", 80, 1.0),
        ("wsd", 81, 0.96),
        ("wsd", 95, 0.4),
        ("wsd", 100, 0.2),
    ],
)
def test_rates_calculated_by_hand(kind, step, expected):
    assert learning_rate_at(step, 100, 1.0, schedule(kind)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "last"), [("cosine", 0.6), ("linear", 0.6), ("constant", 3.0), ("wsd", 0.6)]
)
@pytest.mark.parametrize("total", [7, 24, 123_457])
def test_the_last_update_has_the_floor_or_of_a_constant_rate_the_peak(kind, last, total):
    assert learning_rate_at(total, total, 3.0, schedule(kind)) == pytest.approx(last)


@given(
    kind=st.sampled_from(KINDS),
    warmup=st.floats(0.0, 0.5),
    decay=st.floats(0.01, 0.5),
    floor=st.floats(0.0, 1.0),
    total=st.integers(1, 10**9),
    at=st.floats(0.0, 1.0),
)
def test_rates_are_continuous_and_fall_after_the_warm_up(kind, warmup, decay, floor, total, at):
    """A millionth of the run changes the rate by at most the steepest slope times a millionth."""
    config = schedule(kind, warmup, decay, floor)
    apart = total * 1e-6
    done = max(at * total, apart)
    before, after = (learning_rate_at(x, total, 1.0, config) for x in (done - apart / 2, done))
    assert -1e-12 <= after <= 1.0 + 1e-12
    steepest = max(1 / max(warmup, 1e-12) if done - apart < warmup * total else 0.0,
                   math.pi / 2 / 0.5, 1 / decay)  # fmt: skip
    assert abs(after - before) <= steepest * 1e-6 + 1e-9
    if done - apart / 2 >= warmup * total:
        assert after <= before + 1e-12


def test_without_warm_up_the_first_rate_is_near_the_peak():
    config = ScheduleConfig(warmup_fraction=0.0, min_learning_rate_fraction=0.0)
    assert learning_rate_at(1, 1000, 2.0, config) == pytest.approx(2.0, rel=1e-4)
    assert learning_rate_at(1000, 1000, 2.0, config) == pytest.approx(0.0, abs=1e-12)


def test_a_run_of_warm_up_alone_and_a_run_of_one_step():
    config = ScheduleConfig(warmup_fraction=1.0)
    assert [learning_rate_at(step, 4, 1.0, config) for step in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert learning_rate_at(1, 1, 1.0, schedule("cosine")) == pytest.approx(0.2)


def test_a_wsd_of_warm_up_and_decay_alone_and_one_without_decay():
    edge = schedule("wsd", warmup=0.25, decay=0.75, floor=0.0)
    assert [learning_rate_at(step, 4, 1.0, edge) for step in (1, 2, 4)] == pytest.approx(
        [1.0, 2 / 3, 0.0]
    )
    assert learning_rate_at(100, 100, 1.0, schedule("wsd", decay=0.0)) == 1.0


@pytest.mark.parametrize(
    ("rule", "expected"), [("linear", 0.01 * 4), ("sqrt", 0.01 * 2), ("none", 0.01)]
)
def test_the_peak_follows_the_tokens_of_an_update(rule, expected):
    """Four times the tokens that the rate was found for."""
    reference = None if rule == "none" else 16_384
    config = make_config(
        {
            "optimizer.learning_rate": 0.01,
            "optimizer.rate_scaling": rule,
            "optimizer.reference_tokens_per_update": reference,
            "train.tokens_per_update": 65_536,
        }
    )
    assert peak_rate(config) == pytest.approx(expected)
    told = describe_peak(config)
    if rule == "none":
        assert told is None
    else:
        assert told == (
            f"learning rate 0.01 scaled to {expected:g} ({rule}: 65,536 real tokens an update, "
            "found for 16,384)"
        )


class TestRunLength:
    """Seven rows of 1 to 7 tokens, one a batch, in another order every epoch."""

    LENGTHS = make_lengths([1, 2, 3, 4, 5, 6, 7])

    def config(self, **train):
        overrides = {f"train.{name}": value for name, value in train.items()}
        return make_config(
            {
                "batching.strategy": "dynamic",
                "batching.samples_per_batch": 1,
                "batching.tokens_per_batch": None,
                **overrides,
            }
        )

    def length_of(self, config):
        plan = plan_batches(self.LENGTHS, config)
        return total_steps(config, plan.num_steps), total_real_tokens(self.LENGTHS, config, plan)

    def test_whole_epochs(self):
        assert self.length_of(self.config(epochs=3)) == (21, 3 * 28)
        assert self.length_of(self.config(epochs=3, max_steps=99)) == (21, 3 * 28)
        assert self.length_of(self.config(epochs=9, max_steps=14)) == (14, 2 * 28)

    @pytest.mark.parametrize("steps", [1, 5, 7, 8, 13, 20])
    def test_a_run_that_max_steps_cuts_short(self, steps):
        config = self.config(epochs=3, max_steps=steps)
        taken = [
            int(tokens)
            for epoch in range(3)
            for tokens in plan_batches(self.LENGTHS, config, epoch=epoch).real_tokens
        ]
        assert self.length_of(config) == (steps, sum(taken[:steps]))

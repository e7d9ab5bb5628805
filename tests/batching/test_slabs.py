"""Rows dealt to slabs; what all plans must hold is in test_plan_contract.py."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import make_config, make_lengths, rows_of, skewed_tokens

from tuner.batching.plan import STRATEGIES, plan_batches
from tuner.batching.slab_shares import NO_SLAB, deal_rows, rows_of_slabs
from tuner.batching.slabs import SlabLoss, SlabPlan
from tuner.config.override import override_config
from tuner.errors import BadInputError

NAMES = sorted(STRATEGIES)


def config_of(strategy, rows_per_slab, **batching):
    changes = {"strategy": strategy, "rows_per_slab": rows_per_slab, **batching}
    return make_config({f"batching.{name}": value for name, value in changes.items()})


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=200),
    st.integers(2, 9),
    st.lists(st.integers(0, 2**32), min_size=1, max_size=3),
)
def test_every_slab_gets_its_share_of_every_length_in_every_epoch(tokens, num_slabs, seeds):
    slabs = deal_rows(np.array(tokens, np.int32), num_slabs, seeds)
    assert [slab == NO_SLAB for slab in slabs] == [length == 0 for length in tokens]
    counted = Counter(zip(slabs.tolist(), tokens, strict=True))
    table = rows_of_slabs(np.bincount(tokens), num_slabs)
    for slab in range(num_slabs):
        for length in range(1, max(tokens) + 1):
            assert counted[slab, length] == table[slab, length]
            share = tokens.count(length) / num_slabs
            assert abs(counted[slab, length] - share) < 1
    sizes = [sum(counted[slab, length] for length in range(1, 7)) for slab in range(num_slabs)]
    assert max(sizes) - min(sizes) <= 1


def test_a_row_is_in_any_slab_as_often_as_in_another():
    tokens = np.full(40, 5, np.int32)
    slabs = np.array([deal_rows(tokens, 4, [0, epoch]) for epoch in range(2000)])
    for row in (0, 7, 39):
        counts = np.bincount(slabs[:, row], minlength=4)
        # Four standard deviations of 2000 draws with a chance of one in four.
        assert np.abs(counts - 500).max() < 4 * np.sqrt(2000 * 0.25 * 0.75)


@pytest.mark.parametrize("strategy", NAMES)
def test_a_set_that_fits_into_one_slab_is_planned_as_ever(strategy):
    lengths = make_lengths(skewed_tokens(500))
    plans = [plan_batches(lengths, config_of(strategy, rows)) for rows in (500, 16_000_000)]
    assert plans[0].fingerprint == plans[1].fingerprint
    assert not isinstance(plans[0], SlabPlan)
    assert isinstance(plan_batches(lengths, config_of(strategy, 499)), SlabPlan)


@pytest.mark.parametrize("strategy", NAMES)
def test_batches_stay_within_a_slab_and_steps_are_planned_when_they_are_asked_for(strategy):
    plan = plan_batches(make_lengths(skewed_tokens(600)), config_of(strategy, 200), world_size=2)
    assert isinstance(plan, SlabPlan) and len(plan.steps_of_slab) == 3
    planned = []
    plan_slab = plan.plan_slab
    object.__setattr__(plan, "plan_slab", lambda slab: (planned.append(slab), plan_slab(slab))[1])
    first_of_second = int(plan.steps_of_slab[0])
    steps = plan.steps_of_rank(0, first_of_second)
    next(steps)
    assert planned == [1]
    assert len(list(steps)) == plan.num_steps - first_of_second - 1
    assert planned == [1, 2]
    assert len(rows_of(plan)) == 600


@pytest.mark.parametrize("strategy", NAMES)
def test_the_loss_is_the_difference_to_a_plan_of_all_rows(strategy):
    lengths = make_lengths(skewed_tokens(3000))
    in_slabs = config_of(strategy, 700, tokens_per_batch=8192)
    together = override_config(in_slabs, {"batching.rows_per_slab": 3000}, source="test")
    plan, whole = plan_batches(lengths, in_slabs), plan_batches(lengths, together)
    assert plan.loss.extra_slots == plan.batch_sizes.sum() - whole.batch_sizes.sum()
    padded, least = ((p.batch_sizes * p.padded_lengths).sum() for p in (plan, whole))
    if strategy == "dynamic":
        assert plan.loss.extra_padded_fraction is None
    else:
        assert plan.loss.extra_padded_fraction == pytest.approx(padded / least - 1)
    assert padded <= 1.25 * least


def test_slabs_come_in_another_order_in_another_epoch():
    """Only one slab has the one row of 2000 tokens, the same one in every epoch."""
    lengths = make_lengths([8] * 400 + [2000])
    plans = [plan_batches(lengths, config_of("bucketed", 101), epoch=epoch) for epoch in range(30)]
    ends = [np.cumsum(plan.steps_of_slab) for plan in plans]
    steps = [np.argmax(plan.padded_lengths) for plan in plans]
    places = {int(np.searchsorted(*pair, "right")) for pair in zip(ends, steps, strict=True)}
    assert len(plans[0].steps_of_slab) == 4
    assert places == {0, 1, 2, 3}


@pytest.mark.parametrize("strategy", ["bucketed", "packed"])
def test_a_boundary_that_no_row_goes_to_may_be_over_the_budget(strategy):
    changes = {"boundaries": [16, 64, 9000], "tokens_per_batch": 640}
    plans = [
        plan_batches(make_lengths([3, 60] * 50), config_of(strategy, rows, **changes))
        for rows in (20, 1000)
    ]
    assert isinstance(plans[0], SlabPlan)
    lengths = [{length for _, length in plan.shapes} for plan in plans]
    assert lengths[0] == lengths[1] <= {16, 64}


def test_more_slabs_than_there_may_be_are_refused():
    with pytest.raises(BadInputError, match="leave at most 1,000 slabs") as error:
        plan_batches(make_lengths([5] * 2003), config_of("bucketed", 2))
    assert "raise it to 3 or more" in str(error.value)
    plan = plan_batches(make_lengths([5] * 2003), config_of("bucketed", 3))
    assert plan.loss.num_slabs == 668


def test_the_loss_is_told_in_words():
    loss = SlabLoss(num_slabs=3, num_slots=20_000, extra_slots=1_200, extra_padded_fraction=0.0125)
    assert loss.text == (
        "planned in 3 slabs: 1,200 rows more in all batches (6.000%) and 1.250% more padded "
        "tokens than in one plan"
    )
    unknown = dataclasses.replace(loss, extra_padded_fraction=None)
    assert unknown.text.endswith("(6.000%) than in one plan")
    luck = dataclasses.replace(loss, extra_slots=0, extra_padded_fraction=-0.001)
    assert "0 rows more in all batches (0.000%) and 0.100% fewer padded tokens" in luck.text

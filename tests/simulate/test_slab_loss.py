"""What slabs cost by the histogram, against plans that are made and counted."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import make_config, make_lengths, plan_cases, skewed_tokens

from tuner.batching.plan import STRATEGIES, plan_batches
from tuner.batching.slabs import SlabPlan
from tuner.simulate.histogram import LengthHistogram
from tuner.simulate.screen import EXPECTED, Screen
from tuner.simulate.slab_loss import estimate_slab_loss

EXACT = sorted(set(STRATEGIES) - set(EXPECTED))


def screen_of(tokens):
    return Screen(LengthHistogram.from_tokens(np.array(tokens)))


@pytest.mark.parametrize("strategy", EXACT)
@settings(max_examples=60)
@given(data=st.data())
def test_the_loss_is_that_of_the_plan(strategy, data):
    case = data.draw(plan_cases(strategy, slabs=True))
    plan = plan_batches(case.lengths, case.config, world_size=case.world_size)
    loss = estimate_slab_loss(screen_of(case.tokens), case.config, case.world_size)
    assert (loss is not None) == isinstance(plan, SlabPlan)
    if isinstance(plan, SlabPlan):
        assert loss == plan.loss


def test_of_dynamic_plans_it_is_the_mean_over_epochs():
    tokens = skewed_tokens(1999)
    changes = {"batching.strategy": "dynamic", "batching.tokens_per_batch": 16384}
    in_slabs, in_one = (
        make_config({**changes, "batching.rows_per_slab": rows}) for rows in (300, 1999)
    )
    loss = estimate_slab_loss(screen_of(tokens), in_slabs)
    assert estimate_slab_loss(screen_of(tokens), in_one) is None
    padded = []
    for config in (in_slabs, in_one):
        plans = [plan_batches(make_lengths(tokens), config, epoch=epoch) for epoch in range(100)]
        padded.append([int((p.batch_sizes * p.padded_lengths).sum()) for p in plans])
    means = [statistics.mean(values) for values in padded]
    error = sum(statistics.stdev(values) / 10 / statistics.mean(values) for values in padded)
    assert loss.num_slabs == 7
    assert abs(loss.extra_padded_fraction - (means[0] / means[1] - 1)) < 4 * error
    first = plan_batches(make_lengths(tokens), in_slabs)
    assert (loss.num_slots, loss.extra_slots) == (first.loss.num_slots, first.loss.extra_slots)

"""Which configs are the same one to a study."""

from __future__ import annotations

import pytest
from strategies import make_config, make_lengths

from tuner.batching.plan import plan_batches, resolve_boundaries
from tuner.study.propose import as_planned

TOKENS = [3, 9, 17, 30, 30, 12, 5, 8]


@pytest.mark.parametrize("strategy", ["fixed", "packed", "bucketed"])
@pytest.mark.parametrize(("one", "other"), [(8, 16), (8, 32), (16, 32)])
def test_configs_are_one_exactly_where_their_plans_are(strategy, one, other):
    lengths = make_lengths(TOKENS)
    configs = [
        resolve_boundaries(
            lengths,
            make_config(
                {
                    "batching.strategy": strategy,
                    "batching.align": align,
                    "batching.num_buckets": 2,
                    "batching.tokens_per_batch": 128,
                }
            ),
        )
        for align in (one, other)
    ]
    plans = [plan_batches(lengths, config) for config in configs]
    same_plan = plans[0].shapes == plans[1].shapes
    planned = [as_planned(config, max(TOKENS)) for config in configs]
    assert (planned[0] == planned[1]) is same_plan


def test_of_random_batches_the_alignment_counts():
    configs = [
        make_config({"batching.strategy": "dynamic", "batching.align": align}) for align in (8, 16)
    ]
    assert as_planned(configs[0], 30) != as_planned(configs[1], 30)

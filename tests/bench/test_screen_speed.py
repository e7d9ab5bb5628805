"""How long it takes to screen a thousand settings of a million rows."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from strategies import TABLE, make_config, make_lengths
from tabulate import tabulate

from tuner.batching.plan import plan_batches
from tuner.simulate.histogram import LengthHistogram
from tuner.simulate.screen import Screen
from tuner.simulate.stats import count_plan

pytestmark = pytest.mark.slow

LIMIT_S = 2.0
ALIGNS = (1, 8, 16, 64, [rule.model_dump() for rule in TABLE])
BUDGETS = (8192, 16384, 32768, 65536)


def config_of(strategy, align, budget, num_buckets):
    return make_config(
        {
            "batching.strategy": strategy,
            "batching.align": align,
            "batching.tokens_per_batch": budget,
            "batching.num_buckets": num_buckets,
        }
    )


def settings_of(strategy, buckets):
    return [config_of(strategy, *case) for case in itertools.product(ALIGNS, BUDGETS, buckets)]


def test_a_thousand_settings_of_a_million_rows():
    """1,000 settings: 640 bucketed, 20 fixed, 20 dynamic times 17 numbers of ranks."""
    tokens = np.clip(np.random.default_rng(0).lognormal(6, 1, 10**6), 1, 8192).astype(np.int32)
    bucketed = [(config, 1) for config in settings_of("bucketed", range(1, 33))]
    fixed = [(config, 1) for config in settings_of("fixed", [1])]
    dynamic = [
        (config, world_size)
        for config in settings_of("dynamic", [1])
        for world_size in range(1, 18)
    ]
    start = time.perf_counter()
    screen = Screen(LengthHistogram.from_tokens(tokens))
    histogram_s = time.perf_counter() - start
    lines = [("histogram of 1,000,000 lengths", 1, f"{histogram_s:.3f}")]
    for name, settings in (("fixed", fixed), ("bucketed", bucketed), ("dynamic", dynamic)):
        begin = time.perf_counter()
        for config, world_size in settings:
            screen.plan(config, world_size)
        lines.append((name, len(settings), f"{time.perf_counter() - begin:.3f}"))
    total_s = time.perf_counter() - start
    lines.append(("all", len(fixed) + len(bucketed) + len(dynamic), f"{total_s:.3f}"))
    begin = time.perf_counter()
    count_plan(plan_batches(make_lengths(tokens), bucketed[-1][0]), None)
    lines.append(("bucketed, planned row by row", 1, f"{time.perf_counter() - begin:.3f}"))
    print("\n" + tabulate(lines, headers=["what", "settings", "s"], tablefmt="github"))
    assert len(fixed) + len(bucketed) + len(dynamic) == 1000
    assert total_s <= LIMIT_S

"""How long planning takes, and what rule, number of buckets and alignment make of real lengths.

`python -m pytest -m slow -s tests/bench/test_plans.py` prints tables of
results/benchmarks/plans.md.
"""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from length_sets import azure_tokens, lognormal_tokens, mix_tokens, uniform_tokens
from strategies import make_config, make_lengths
from tabulate import tabulate

from tuner.batching.boundary_rules import BOUNDARY_RULES
from tuner.batching.plan import plan_batches, resolve_boundaries
from tuner.simulate.stats import count_plan

pytestmark = pytest.mark.slow

LIMITS_S = {"fixed": 1.0, "dynamic": 1.0, "bucketed": 1.0, "packed": 10.0}
NUM_BUCKETS = (4, 8, 16, 32)
ALIGNS = (8, 32, 64)
SETS = {
    # Name -> lengths, tokens of a batch.
    "shared mix": (mix_tokens, 4096),
    "azure 2023 conversations": (azure_tokens, 16384),
}


def config_of(strategy, budget, **batching):
    changes = {"strategy": strategy, "tokens_per_batch": budget, **batching}
    return make_config({f"batching.{name}": value for name, value in changes.items()})


def least_cpu_seconds(work, num_runs=3):
    """Other processes only ever add, through caches."""
    taken = []
    for _ in range(num_runs):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return min(taken)


def test_a_million_rows_are_planned_in_seconds_of_one_core():
    sets = {"lognormal": lognormal_tokens(10**6), "uniform": uniform_tokens(10**6)}
    lines = []
    for (name, tokens), strategy in itertools.product(sets.items(), LIMITS_S):
        lengths, config = make_lengths(tokens), config_of(strategy, 16384)
        taken_s = least_cpu_seconds(lambda given=(lengths, config): plan_batches(*given))
        lines.append((name, strategy, f"{taken_s:.2f}", LIMITS_S[strategy]))
        assert taken_s <= LIMITS_S[strategy]
    headers = ["1,000,000 lengths", "strategy", "CPU s", "limit s"]
    print("\n" + tabulate(lines, headers=headers, tablefmt="github"))


class Planned:
    """One plan and its figures."""

    def __init__(self, tokens, config):
        lengths = make_lengths(tokens)
        self.boundaries = resolve_boundaries(lengths, config).batching.boundaries
        plan = plan_batches(lengths, config)
        self.stats = count_plan(plan, None)
        shapes = [batch.shape for batch in plan.steps_of_rank(0)]
        assert self.stats.num_steps == len(shapes)
        assert self.stats.num_shapes == len(set(shapes))
        assert self.stats.padded_tokens == sum(size * length for size, length in shapes)
        assert self.stats.real_tokens == tokens.sum()

    @property
    def cell(self):
        stats = self.stats
        return f"{100 * stats.padding_fraction:.1f} ({stats.num_shapes}, {stats.num_steps})"


def padded_rows(tokens, boundaries):
    """Tokens of all rows, each padded to its own boundary; no fillers."""
    ends = np.array(boundaries)
    return int(ends[np.searchsorted(ends, tokens)].sum())


@pytest.mark.parametrize("name", SETS)
def test_exact_boundaries_pad_least_whatever_their_number_and_alignment(name):
    read_tokens, budget = SETS[name]
    tokens = read_tokens()
    by_row, by_plan = [], []
    for align, num_buckets in itertools.product(ALIGNS, NUM_BUCKETS):
        planned = {
            rule: Planned(
                tokens,
                config_of(
                    "bucketed", budget, align=align, num_buckets=num_buckets, boundary_rule=rule
                ),
            )
            for rule in BOUNDARY_RULES
        }
        padded = {rule: padded_rows(tokens, p.boundaries) for rule, p in planned.items()}
        assert padded["least_padding"] == min(padded.values())
        assert all(p.stats.padded_tokens >= padded[rule] for rule, p in planned.items())
        assert all(p.stats.num_shapes <= num_buckets for p in planned.values())
        percent = (f"{100 * (1 - tokens.sum() / value):.1f}" for value in padded.values())
        by_row.append([align, num_buckets, *percent])
        by_plan.append([align, num_buckets, *(p.cell for p in planned.values())])
    headers = ["align", "K", *BOUNDARY_RULES]
    print(f"\n\n{name}: {len(tokens):,} rows, {tokens.sum():,} tokens, longest {tokens.max():,}")
    print("\nPadding %, every row padded to its boundary\n")
    print(tabulate(by_row, headers=headers, tablefmt="github", disable_numparse=True))
    print(f"\nPadding % of the plan (shapes, steps), batches of {budget} tokens\n")
    print(tabulate(by_plan, headers=headers, tablefmt="github", disable_numparse=True))


@pytest.mark.parametrize("name", SETS)
def test_plans_without_buckets(name):
    read_tokens, budget = SETS[name]
    tokens = read_tokens()
    lines = []
    for align in ALIGNS:
        plans = {
            strategy: Planned(tokens, config_of(strategy, budget, align=align))
            for strategy in ("fixed", "dynamic", "packed")
        }
        assert plans["fixed"].stats.num_shapes == plans["packed"].stats.num_shapes == 1
        assert plans["packed"].stats.padding_fraction < plans["dynamic"].stats.padding_fraction
        lines.append([align, *(p.cell for p in plans.values())])
    print(f"\n\n{name}: padding % of the plan (shapes, steps), batches of {budget} tokens\n")
    headers = ["align", "fixed", "dynamic", "packed"]
    print(tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True))

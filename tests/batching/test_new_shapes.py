"""How often a step meets a shape that no step before it had: each is a compile of a static graph.

Source of the example: an article on variable lengths reports more than 60 compiles in the first
100 steps for batches of 16 rows of 64 to 512 tokens. That holds where long rows are rarer than
short ones. Where all lengths are equally likely most batches hold a row close to 512: it is 51.
"""

from __future__ import annotations

import numpy as np
import pytest
from strategies import make_config, make_lengths

from tuner.batching.plan import plan_batches

SHORTEST, LONGEST, ROWS, STEPS = 64, 512, 16, 100
SIXTEEN_ROWS = {"batching.tokens_per_batch": None, "batching.samples_per_batch": ROWS}
DYNAMIC = {**SIXTEEN_ROWS, "batching.strategy": "dynamic", "batching.align": 1}

EQUALLY_LIKELY = [1] * (LONGEST - SHORTEST + 1)
RARER_THE_LONGER = [LONGEST + 1 - length for length in range(SHORTEST, LONGEST + 1)]


def new_shapes(likely, changes, *, seed=0, steps=STEPS):
    """New shapes among the first steps of an epoch, lengths drawn with these odds."""
    odds = np.array(likely) / sum(likely)
    drawn = np.random.default_rng(seed).choice(
        np.arange(SHORTEST, LONGEST + 1), size=20_000, p=odds
    )
    plan = plan_batches(make_lengths(drawn.tolist()), make_config(changes))
    shapes = [batch.shape for batch in plan.steps_of_rank(0)]
    return len(set(shapes[:steps])), len(plan.shapes)


def expected_new_shapes(likely):
    """Exact: a batch is as long as l with P(all rows <= l) - P(all rows <= l - 1)."""
    total, up_to, expected, below = sum(likely), 0, 0.0, 0.0
    for weight in likely:
        up_to += weight
        at_most = (up_to / total) ** ROWS
        expected += 1 - (1 - (at_most - below)) ** STEPS
        below = at_most
    return expected


@pytest.mark.parametrize(
    ("likely", "rounded"),
    [(EQUALLY_LIKELY, 51.0), (RARER_THE_LONGER, 76.6)],
    ids=["equally likely", "rarer the longer"],
)
def test_dynamic_batches_meet_as_many_new_shapes_as_chance_has_it(likely, rounded):
    counted = [new_shapes(likely, DYNAMIC, seed=seed)[0] for seed in range(20)]
    assert expected_new_shapes(likely) == pytest.approx(rounded, abs=0.05)
    # The count of one epoch spreads by 4 to 7, the mean of 20 by 1.5 at most.
    assert np.mean(counted) == pytest.approx(expected_new_shapes(likely), abs=4.0)


def test_dynamic_meets_a_new_shape_in_most_of_the_first_hundred_steps():
    """The article's figure."""
    for seed in range(5):
        assert new_shapes(RARER_THE_LONGER, DYNAMIC, seed=seed)[0] > 60


@pytest.mark.parametrize("likely", [EQUALLY_LIKELY, RARER_THE_LONGER])
@pytest.mark.parametrize("num_buckets", [1, 4, 10])
def test_bucketed_meets_each_of_its_shapes_once_as_new(likely, num_buckets):
    changes = {**SIXTEEN_ROWS, "batching.num_buckets": num_buckets}
    assert new_shapes(likely, changes) == (num_buckets, num_buckets)


def test_alignment_alone_leaves_fewer_new_shapes():
    counts = [
        new_shapes(RARER_THE_LONGER, {**DYNAMIC, "batching.align": align})[0]
        for align in (1, 8, 32, 64)
    ]
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == len(counts)
    # Lengths of 64 to 512 in multiples of 64: eight shapes at most.
    assert counts[-1] <= 8

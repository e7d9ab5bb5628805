"""Plans for up to 64 ranks: what every rank takes must fit together, whatever the lengths."""

from __future__ import annotations

import time
from fractions import Fraction

import numpy as np
import pytest
from strategies import admit_slowly, make_config, make_lengths, skewed_tokens

from tuner.batching.plan import STRATEGIES, plan_batches
from tuner.batching.windows import update_after_step
from tuner.errors import BadInputError
from tuner.simulate.histogram import LengthHistogram
from tuner.simulate.screen import EXPECTED, Screen

NAMES = sorted(STRATEGIES)
SETS_OF_A_STRATEGY = 250
MOST_RANKS = 64
PRIMES = (2, 3, 5, 7, 11, 13, 17, 31, 61, 97, 127, 211, 251)
LONGEST = 200


def draw_tokens(rng: np.random.Generator, world_size: int) -> list[int]:
    """Lengths of one of the kinds that plans are most likely to break at."""
    kind = rng.integers(6)
    if kind == 0:
        drawn = rng.lognormal(3.0, 1.0, rng.integers(1, 250))
        return [int(value) for value in np.clip(drawn, 1, LONGEST)]
    if kind == 1:
        return [int(value) for value in rng.integers(1, LONGEST + 1, rng.choice(PRIMES))]
    if kind == 2:
        return [int(value) for value in rng.integers(1, LONGEST + 1, max(1, world_size - 1))]
    if kind == 3:
        short = [int(value) for value in rng.integers(1, 9, rng.integers(0, 200))]
        return [*short, LONGEST]
    if kind == 4:
        return [int(rng.integers(1, LONGEST + 1))] * int(rng.integers(1, 200))
    with_empty = [int(value) for value in rng.integers(0, 30, rng.integers(1, 150))]
    return [*with_empty, 1]


def draw_config(rng: np.random.Generator, strategy: str):
    changes = {
        "batching.strategy": strategy,
        "batching.align": int(rng.choice([1, 7, 8, 32])),
        "batching.num_buckets": int(rng.integers(1, 7)),
        "batching.seed": int(rng.integers(100)),
        "batching.one_size_per_length": bool(rng.integers(2)),
        "batching.tokens_per_batch": None,
        "data.max_length": int(rng.integers(20, 250)) if rng.integers(2) else None,
        "data.overflow": str(rng.choice(["truncate", "drop"])),
    }
    has_boundaries = strategy in ("bucketed", "packed") and rng.integers(2)
    if has_boundaries:
        ends = sorted({int(end) for end in rng.integers(8, 220, rng.integers(1, 6))})
        changes["batching.boundaries"] = ends
    rule = rng.integers(3)
    if rule == 0:
        changes["batching.tokens_per_batch"] = 256 + int(rng.integers(0, 2000))
    elif rule == 1 or not has_boundaries:
        changes["batching.samples_per_batch"] = int(rng.choice([1, 2, 3, 5, 16]))
    else:
        changes["batching.batch_sizes"] = [int(size) for size in rng.integers(1, 12, len(ends))]
    return make_config(changes)


def drawn_cases(strategy: str):
    """Sets that hold at least one row after the overflow rule, with a config and ranks."""
    rng = np.random.default_rng([17, NAMES.index(strategy)])
    num_cases = 0
    while num_cases < SETS_OF_A_STRATEGY:
        ends = {0: 1, 1: MOST_RANKS}
        world_size = ends.get(num_cases, int(rng.integers(1, MOST_RANKS + 1)))
        tokens, config = draw_tokens(rng, world_size), draw_config(rng, strategy)
        fate = admit_slowly(tokens, config)
        if not fate.tokens_of_row:
            with pytest.raises(BadInputError, match="no row is left"):
                plan_batches(make_lengths(tokens), config, world_size=world_size)
            continue
        num_cases += 1
        labels = rng.integers(0, np.array(tokens) + 1)
        yield tokens, config, world_size, int(rng.integers(5)), fate, labels


def ends_slowly(tokens_of_step: list[int], tokens_per_update: int) -> list[bool]:
    """The steps nearest to the milestones, by exact fractions; the first of two as near."""
    totals = np.cumsum(tokens_of_step).tolist()
    num_updates = max(1, int(Fraction(totals[-1], tokens_per_update) + Fraction(1, 2)))
    ends = {len(totals) - 1}
    for update in range(1, num_updates):
        goal = update * tokens_per_update
        ends.add(min(range(len(totals)), key=lambda step: abs(totals[step] - goal)))
    return [step in ends for step in range(len(totals))]


@pytest.mark.parametrize("strategy", NAMES)
def test_ranks_fit_together(strategy):
    """The same steps and shapes on all ranks, every row once, and sums that are the plan's."""
    seen_ranks, num_sparse = set(), 0
    for tokens, config, world_size, epoch, fate, labels in drawn_cases(strategy):
        lengths = make_lengths(tokens)
        plan = plan_batches(lengths, config, epoch=epoch, world_size=world_size)
        again = plan_batches(make_lengths(tokens), config, epoch=epoch, world_size=world_size)
        assert again.fingerprint == plan.fingerprint
        ranks = [list(plan.steps_of_rank(rank)) for rank in range(world_size)]

        shapes = list(zip(plan.batch_sizes.tolist(), plan.padded_lengths.tolist(), strict=True))
        assert all([batch.shape for batch in steps] == shapes for steps in ranks)
        assert set(shapes) <= set(plan.shapes)

        rows = np.concatenate([batch.row_indices for steps in ranks for batch in steps])
        assert sorted(rows.tolist()) == sorted(fate.tokens_of_row)
        assert len(rows) + sum(plan.dropped.values()) == len(tokens)

        kept = np.array([fate.tokens_of_row.get(row, 0) for row in range(len(tokens))])
        summed = np.zeros((2, plan.num_steps), dtype=np.int64)
        fillers = np.zeros((world_size, plan.num_steps), dtype=np.int64)
        for rank, steps in enumerate(ranks):
            for step, batch in enumerate(steps):
                own = batch.row_indices
                summed[:, step] += kept[own].sum(), labels[own].sum()
                fillers[rank, step] = (batch.rows_per_slot == 0).sum()
        assert summed[0].tolist() == plan.real_tokens.tolist()
        assert summed[0].min() >= 1
        assert summed[1].sum() == labels[list(fate.tokens_of_row)].sum()
        assert (fillers.max(axis=0) - fillers.min(axis=0)).max() <= 1

        tokens_per_update = int(plan.real_tokens.mean()) * (1 + epoch) + 1
        ends = update_after_step(plan.real_tokens, tokens_per_update)
        assert ends.tolist() == ends_slowly(summed[0].tolist(), tokens_per_update)

        seen_ranks.add(world_size)
        num_sparse += len(rows) < world_size
    # The sample holds what it is there for.
    assert len(seen_ranks) > 50 and min(seen_ranks) == 1 and max(seen_ranks) == MOST_RANKS
    assert num_sparse > 20


@pytest.mark.parametrize("strategy", [name for name in NAMES if name not in EXPECTED])
def test_what_is_screened_is_what_is_planned(strategy):
    for tokens, config, world_size, epoch, fate, _ in drawn_cases(strategy):
        plan = plan_batches(make_lengths(tokens), config, epoch=epoch, world_size=world_size)
        screen = Screen(LengthHistogram.from_tokens(np.array(tokens)))
        screened = screen.plan(config, world_size)
        assert screened.shape_counts == plan.shape_counts()
        assert screened.num_filler_rows == (plan.rows_per_slot == 0).sum()
        assert screened.real_tokens == sum(fate.tokens_of_row.values())


@pytest.mark.parametrize("strategy", NAMES)
def test_sixty_four_ranks_are_planned_as_fast_as_one(strategy):
    lengths = make_lengths(skewed_tokens(200_000))
    config = make_config({"batching.strategy": strategy, "batching.tokens_per_batch": 16384})
    taken_s = {}
    for world_size in (1, MOST_RANKS):
        started = time.process_time()
        plan = plan_batches(lengths, config, world_size=world_size)
        num_rows = sum(len(batch.row_indices) for batch in plan.steps_of_rank(world_size - 1))
        taken_s[world_size] = time.process_time() - started
        # Packed slots hold as many rows as fit, so ranks have nearly the same number of them.
        assert num_rows == pytest.approx(200_000 / world_size, rel=0.05)
    assert taken_s[MOST_RANKS] < 2.0 * taken_s[1] + 0.5

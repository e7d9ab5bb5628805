"""Guided proposals against planning and estimating every point of the space slowly."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from search_case import COST, baselines, proposals, search
from strategies import skewed_tokens
from study_case import make_setup, make_space

from tuner.batching.boundaries import solve_least_time
from tuner.batching.plan import plan_batches
from tuner.simulate.cost_book import CostBook
from tuner.simulate.estimate import estimate_run
from tuner.simulate.measurement import CostKey
from tuner.simulate.stats import count_plan
from tuner.study.guide import (
    WORTH_ANOTHER_TRIAL,
    Guide,
    configure,
    precisions_of,
    with_boundaries,
)
from tuner.study.space import all_choices
from tuner.trial.fake import FakeRunner, HiddenCost

SPACE = make_space(
    strategy=["bucketed", "fixed", "packed"],
    num_buckets={"low": 2, "high": 9},
    align=[8, 32],
    longest_rows_per_batch=[2, 4, 8],
    graph_mode=["static"],
)
PLAIN = (("fp32", ()),)


def book_of(outcomes):
    """All that was measured up to here."""
    processes = [item.outcome.process("CPU") for item in outcomes if item.outcome.measured]
    return CostBook(processes)


def slow_estimate(setup, config, book):
    """Of a whole plan, row by row."""
    stats = count_plan(plan_batches(setup.data.lengths, config), config.train.tokens_per_update)
    return estimate_run(stats, config.train.epochs, book.known(CostKey.of(config, "CPU")))


def slow_config(setup, choice, book):
    """A point with its boundaries solved from the rows themselves."""
    config = configure(setup, choice)
    if choice.num_buckets is None:
        return config
    costs = book.known(CostKey.of(config, "CPU"))
    curve = solve_least_time(
        setup.data.lengths.tokens,
        config.batching,
        costs.run_cost(config.train.epochs),
        max_buckets=choice.num_buckets,
    )
    return with_boundaries(config, curve.best(choice.num_buckets))


def make(tmp_path, *, cost=COST, trials=1, space=SPACE, noise=0.0, seed=0, epochs=40):
    tokens = skewed_tokens(500, seed=seed, longest=800)
    setup = make_setup(
        tmp_path,
        tokens,
        space,
        base={"train.epochs": epochs},
        trials=trials,
        seed=seed,
        memory_limit_bytes=10**12,
    )
    return setup, search(setup, FakeRunner(cost, noise=noise))


@pytest.mark.parametrize("seed", range(2))
def test_the_first_proposal_is_the_optimum_of_the_model(tmp_path, seed):
    setup, result = make(tmp_path, seed=seed)
    (first,) = proposals(result)
    book = book_of(baselines(result).values())
    best = min(
        slow_estimate(setup, slow_config(setup, choice, book), book).estimated_run_s
        for choice in all_choices(SPACE)
        if choice.strategy != "packed"
    )
    assert first.outcome.config.batching.strategy == "bucketed"
    chosen = slow_estimate(setup, first.outcome.config, book).estimated_run_s
    # Of each curve only three numbers of buckets are planned in full.
    assert chosen == pytest.approx(best, rel=2e-3)
    assert chosen < min(
        slow_estimate(setup, item.outcome.config, book).estimated_run_s
        for item in baselines(result).values()
        if item.outcome.config.graph.mode == "static"
    )


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_its_boundaries_are_those_of_least_time_under_the_fit(tmp_path, noise):
    setup, result = make(tmp_path, noise=noise)
    (first,) = proposals(result)
    book = book_of(baselines(result).values())
    config = first.outcome.config
    curve = solve_least_time(
        setup.data.lengths.tokens,
        config.batching,
        book.known(CostKey.of(config, "CPU")).run_cost(40),
        max_buckets=9,
    )
    number = len(config.batching.boundaries)
    assert config.batching.boundaries == curve.boundaries[number - 1]
    assert config.batching.num_buckets == number


def test_a_point_is_proposed_again_when_the_model_has_changed_by_enough_and_only_then(tmp_path):
    """Rows cost far more than the fit knows: every measurement bends it."""
    cost = HiddenCost(row_s=0.15, packed_factor=4.0)
    space = SPACE.model_copy(
        update={"strategy": ("bucketed",), "longest_rows_per_batch": (8,), "align": (8,)}
    )
    setup, result = make(tmp_path, cost=cost, trials=60, space=space, epochs=60, noise=0.0)
    again = 0
    outcomes = result.outcomes
    for index, item in enumerate(outcomes):
        config = item.outcome.config
        if item.outcome.baseline is not None:
            continue
        book = book_of(outcomes[:index])
        before = [
            other.outcome.config
            for other in outcomes[:index]
            if with_boundaries(other.outcome.config, ()) == with_boundaries(config, ())
            and len(other.outcome.config.batching.boundaries) == len(config.batching.boundaries)
        ]
        again += bool(before)
        for other in before:
            run_s = slow_estimate(setup, config, book).estimated_run_s
            before_s = slow_estimate(setup, other, book).estimated_run_s
            assert run_s < (1.0 - WORTH_ANOTHER_TRIAL) * before_s * (1 + 1e-9)
    assert again >= 1
    # Once the study ends by itself there is no such point left, as far as the model sees.
    tried = [item.outcome.config for item in proposals(result)]
    best_s = min(slow_estimate(setup, config, result.book).estimated_run_s for config in tried)
    for choice in all_choices(space):
        config = slow_config(setup, choice, result.book)
        run_s = slow_estimate(setup, config, result.book).estimated_run_s
        assert run_s >= (1.0 - WORTH_ANOTHER_TRIAL) * best_s * (1 - 1e-9)


@pytest.mark.parametrize("mode, most", [("static", 3), ("dynamic", 9)])
def test_static_graphs_get_no_more_buckets_than_are_allowed(tmp_path, mode, most):
    space = SPACE.model_copy(update={"graph_mode": ("static", "dynamic"), "max_static_shapes": 3})
    tokens = skewed_tokens(500, seed=0, longest=800)
    setup = make_setup(tmp_path, tokens, space, base={"train.epochs": 10_000})
    choices = [
        choice
        for choice in all_choices(space)
        if (choice.num_buckets, choice.align, choice.graph_mode) == (9, 8, mode)
    ]
    assert choices
    for choice in choices:
        # So long a run would pay for every bucket.
        assert len(Guide(setup).resolve(choice, CostBook()).batching.boundaries) == most


def test_the_screened_estimate_is_that_of_the_plan(tmp_path):
    setup, result = make(tmp_path)
    guide = Guide(setup)
    compared = 0
    for choice in all_choices(SPACE):
        if choice.strategy == "packed":
            continue
        point = guide.point(choice, result.book)
        assert point is not None
        slow = slow_estimate(setup, point.config, result.book)
        assert point.estimate.estimated_run_s == pytest.approx(slow.estimated_run_s, rel=1e-3)
        assert point.boundaries == slow_config(setup, choice, result.book).batching.boundaries
        compared += 1
    assert compared == 2 * 3 * 9


def test_ranks_by_seconds_or_by_their_lower_end_and_says_what_does_not_fit(tmp_path):
    setup, result = make(tmp_path)
    guide = Guide(setup)
    choices = guide.candidates(result.book, PLAIN)
    points = guide.rank(result.book, choices)
    seconds = [point.estimate.estimated_run_s for point in points]
    assert seconds == sorted(seconds) and len(points) == len(choices)
    careful = guide.rank(result.book, choices, at_lower_end=True)
    ends = [point.estimate.low_run_s for point in careful]
    assert ends == sorted(ends) and len(careful) == len(choices)
    assert all(point.fits for point in points)
    # Of every curve three numbers of buckets: 2 alignments, 3 budgets; fixed as well, and packed
    # with the first alignment alone.
    assert len([choice for choice in choices if choice.num_buckets]) == 2 * 3 * 3
    assert len([choice for choice in choices if not choice.num_buckets]) == (2 + 1) * 3
    tight = dataclasses.replace(setup, memory_limit_bytes=600_000_000)
    ranked = Guide(tight).rank(result.book, choices)
    for point in ranked:
        tokens = sum(size * length for size, length in shapes_of(tight, point.config))
        # 500 MB and 50 kB a padded token; a tenth of error is assumed at least.
        if 5e4 * tokens > 1e8 / 0.85:
            assert not point.fits
        elif 5e4 * tokens < 1e8:
            assert point.fits
    assert {point.fits for point in ranked} == {True, False}


def shapes_of(setup, config):
    return plan_batches(setup.data.lengths, config).shapes


def test_what_cannot_be_planned_is_no_point(tmp_path):
    setup, _ = make(tmp_path)
    assert Guide(setup).point(all_choices(SPACE)[0], CostBook()) is not None
    # Your own boundaries cap the rows; a budget below the longest cannot be planned.
    base = {"data.max_length": 64, "data.overflow": "truncate"}
    cut = make_setup(tmp_path, skewed_tokens(50), SPACE, base=base)
    point = Guide(cut).point(all_choices(SPACE)[0], CostBook())
    assert point is not None and point.boundaries[-1] == 64


def test_precisions_that_are_looked_at():
    sets = {"fp16": [("softmax",), ()]}
    assert precisions_of(("fp32", "fp16", "bf16"), sets) == [
        ("fp32", ()),
        ("fp16", ("softmax",)),
        ("fp16", ()),
    ]


def test_looking_at_a_large_space_takes_well_under_a_second(tmp_path):
    """Own time of a guided proposal, with all curves of the space solved anew."""
    import time

    tokens = skewed_tokens(20_000, seed=1, longest=2048)
    setup = make_setup(tmp_path, tokens, SPACE, base={"train.epochs": 3})
    guide, book = Guide(setup), CostBook()
    started = time.process_time()
    points = guide.rank(book, guide.candidates(book, PLAIN))
    assert time.process_time() - started < 5.0
    assert np.isfinite(points[0].estimate.low_run_s)

"""The dynamic program against trying every set of boundaries."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import TABLE, align_rules, align_slowly, first_boundary, lengths

from tuner.batching.boundaries import solve_boundaries, solve_least_padding


def sets_of(candidates, size):
    """Every rising set of `size` candidates that covers the longest."""
    for others in itertools.combinations(candidates[:-1], size - 1):
        yield (*others, candidates[-1])


def cost_of(boundaries, rows, row_cost, shape_cost):
    """Total cost of rows (length -> how many), each padded to its first boundary."""
    padded = sum(
        count * row_cost[first_boundary(length, boundaries)] for length, count in rows.items()
    )
    return padded + sum(shape_cost[boundary] for boundary in boundaries)


@st.composite
def histograms(draw):
    """Padded lengths with counts, row costs and shape costs: small whole numbers, many ties."""
    candidates = sorted(draw(st.lists(st.integers(1, 60), min_size=1, max_size=8, unique=True)))
    same = {"min_size": len(candidates), "max_size": len(candidates)}
    counts = draw(st.lists(st.integers(1, 9), **same))
    row_cost = draw(st.lists(st.integers(0, 20), **same))
    shape_cost = draw(st.lists(st.integers(0, 40), **same))
    return candidates, counts, row_cost, shape_cost


def solve(candidates, counts, row_cost, shape_cost, max_buckets):
    return solve_boundaries(
        np.array(candidates),
        np.array(counts),
        row_cost=np.array(row_cost, dtype=float),
        shape_cost=np.array(shape_cost, dtype=float),
        max_buckets=max_buckets,
    )


@given(histograms())
@settings(max_examples=300)
def test_curve_is_the_optimum_for_every_number_of_buckets_at_once(histogram):
    candidates, counts, row_cost, shape_cost = histogram
    rows = dict(zip(candidates, counts, strict=True))
    row_costs = dict(zip(candidates, row_cost, strict=True))
    shape_costs = dict(zip(candidates, shape_cost, strict=True))
    curve = solve(*histogram, max_buckets=len(candidates) + 3)
    assert len(curve.boundaries) == len(curve.cost) == len(candidates)
    best = []
    for size in range(1, len(candidates) + 1):
        least = min(
            cost_of(chosen, rows, row_costs, shape_costs) for chosen in sets_of(candidates, size)
        )
        best.append(least)
        found = curve.boundaries[size - 1]
        assert len(found) == size
        assert list(found) == sorted(set(found))
        assert found[-1] == candidates[-1]
        assert set(found) <= set(candidates)
        assert curve.cost[size - 1] == least
        assert cost_of(found, rows, row_costs, shape_costs) == least
        assert curve.best(size) == curve.boundaries[best.index(min(best))]


@given(histograms(), st.integers(1, 8))
@settings(max_examples=60)
def test_smaller_limit_is_the_beginning_of_the_curve(histogram, max_buckets):
    whole = solve(*histogram, max_buckets=99)
    part = solve(*histogram, max_buckets=max_buckets)
    assert part.boundaries == whole.boundaries[:max_buckets]
    assert part.cost.tolist() == whole.cost[:max_buckets].tolist()
    assert part.best(max_buckets) == whole.best(max_buckets)


@pytest.mark.parametrize("seed", range(40))
def test_real_valued_costs_are_optimal_too(seed):
    rng = np.random.default_rng(seed)
    candidates = np.sort(rng.choice(np.arange(1, 500), size=rng.integers(1, 10), replace=False))
    counts = rng.integers(1, 1000, len(candidates))
    row_cost = 1e-6 * candidates + 1e-9 * candidates**2 + rng.random(len(candidates)) * 1e-5
    shape_cost = rng.random(len(candidates)) * 0.01
    curve = solve(candidates, counts, row_cost, shape_cost, 10)
    rows = dict(zip(candidates.tolist(), counts.tolist(), strict=True))
    row_costs = dict(zip(candidates.tolist(), row_cost.tolist(), strict=True))
    shape_costs = dict(zip(candidates.tolist(), shape_cost.tolist(), strict=True))
    for size, cost in enumerate(curve.cost.tolist(), start=1):
        least = min(
            cost_of(chosen, rows, row_costs, shape_costs)
            for chosen in sets_of(candidates.tolist(), size)
        )
        assert cost == pytest.approx(least, rel=1e-12)


@given(lengths(max_rows=25, longest=40, min_tokens=1), align_rules())
@settings(max_examples=100)
def test_least_padding_equals_brute_force_over_the_rows(tokens, align):
    """Rows one by one against every set of aligned lengths in use."""
    candidates = sorted({align_slowly(length, align) for length in tokens})
    curve = solve_least_padding(np.array(tokens), align, max_buckets=4)
    for size, (found, cost) in enumerate(zip(curve.boundaries, curve.cost, strict=True), start=1):
        least = min(
            sum(first_boundary(length, chosen) for length in tokens)
            for chosen in sets_of(candidates, size)
        )
        assert sum(first_boundary(length, found) for length in tokens) == cost == least
    assert len(curve.boundaries) == min(4, len(candidates))


@given(lengths(max_rows=12, longest=10, min_tokens=1), st.integers(1, 3))
@settings(max_examples=60)
def test_no_aligned_length_that_is_not_in_use_would_be_better(tokens, align):
    every_aligned = [n for n in range(1, 13) if n % align == 0]
    curve = solve_least_padding(np.array(tokens), align, max_buckets=3)
    for size, cost in enumerate(curve.cost, start=1):
        least = min(
            sum(first_boundary(length, chosen) for length in tokens)
            for chosen in itertools.combinations(every_aligned, size)
            if chosen[-1] >= max(tokens)
        )
        assert cost == least


@given(lengths(max_rows=60, min_tokens=1), align_rules())
def test_one_more_bucket_never_pads_more(tokens, align):
    curve = solve_least_padding(np.array(tokens), align, max_buckets=99)
    assert (np.diff(curve.cost) < 0).all()
    assert curve.cost[-1] == sum(align_slowly(length, align) for length in tokens)


def test_ties_take_the_fewest_buckets():
    curve = solve([8, 16, 24], [1, 1, 1], [5, 5, 5], [0, 0, 0], 3)
    assert curve.cost.tolist() == [15, 15, 15]
    assert curve.best(3) == (24,)


def test_shape_cost_limits_the_number_of_buckets():
    """Hand calculation: rows 10 and 20 tokens long, ten of each, a shape costs 120 or 90."""
    candidates, counts, row_cost = [10, 20], [10, 10], [10, 20]
    assert solve(candidates, counts, row_cost, [120, 120], 2).cost.tolist() == [520, 540]
    assert solve(candidates, counts, row_cost, [120, 120], 2).best(2) == (20,)
    assert solve(candidates, counts, row_cost, [90, 90], 2).cost.tolist() == [490, 480]
    assert solve(candidates, counts, row_cost, [90, 90], 2).best(2) == (10, 20)


def test_hand_calculated_padding():
    curve = solve_least_padding(np.array([3, 8, 9, 16, 60]), 8, 3)
    assert curve.boundaries == ((64,), (16, 64), (8, 16, 64))
    assert curve.cost.tolist() == [320, 128, 112]


def test_all_equal_lengths_are_one_bucket():
    curve = solve_least_padding(np.full(50, 33), 8, 5)
    assert curve.boundaries == ((40,),)
    assert curve.cost.tolist() == [2000]


def test_boundaries_follow_an_align_table():
    rng = np.random.default_rng(0)
    found = solve_least_padding(rng.integers(1, 2000, 500), TABLE, 12).best(12)
    assert len(found) == 12
    for boundary in found:
        assert align_slowly(boundary, TABLE) == boundary


def test_a_thousand_candidates_are_solved_exactly_enough():
    """8192 tokens aligned to 8: uniform rows have evenly spaced boundaries as their optimum."""
    tokens = np.repeat(np.arange(8, 8193, 8), 2)
    assert solve_least_padding(tokens, 8, 4).boundaries[3] == (2048, 4096, 6144, 8192)

"""The dynamic program against trying every set of boundaries."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import (
    TABLE,
    align_rules,
    align_slowly,
    first_boundary,
    lengths,
    make_config,
    make_lengths,
    skewed_tokens,
)

from tuner.batching import boundaries
from tuner.batching.boundaries import (
    count_aligned,
    solve_boundaries,
    solve_least_padding,
    solve_least_time,
)
from tuner.batching.bucket_time import RunCost
from tuner.batching.plan import plan_batches
from tuner.errors import BadInputError


@pytest.fixture(autouse=True, scope="module", params=[0, 10**6], ids=["bisected", "tried"])
def search(request):
    """Every test with both ways of search, whatever the number of candidates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boundaries, "TRY_EVERY_UP_TO", request.param)
        yield


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
def histograms(draw, *, rising=False):
    """Padded lengths with counts, row costs and shape costs: small whole numbers, many ties."""
    candidates = sorted(draw(st.lists(st.integers(1, 60), min_size=1, max_size=8, unique=True)))
    same = {"min_size": len(candidates), "max_size": len(candidates)}
    counts = draw(st.lists(st.integers(1, 9), **same))
    row_cost = draw(st.lists(st.integers(0, 20), **same))
    shape_cost = draw(st.lists(st.integers(0, 40), **same))
    return candidates, counts, sorted(row_cost) if rising else row_cost, shape_cost


def solve(candidates, counts, row_cost, shape_cost, max_buckets):
    return solve_boundaries(
        np.array(candidates),
        np.array(counts),
        row_cost=np.array(row_cost, dtype=float),
        shape_cost=np.array(shape_cost, dtype=float),
        max_buckets=max_buckets,
    )


def solve_by_plain_rows(candidates, counts, row_cost, shape_cost, max_buckets):
    """The recurrence column by column; among equal sums the longest last bucket."""
    rows_up_to = np.concatenate(([0], np.cumsum(counts)))
    ends = [[] for _ in candidates]
    best = [np.inf] * len(candidates)
    curve = []
    for _ in range(min(max_buckets, len(candidates))):
        before = np.array([np.inf if curve else 0.0, *best])
        ends_before = [[], *ends]
        best, ends = [], []
        for column in range(1, len(candidates) + 1):
            rows = rows_up_to[column] - rows_up_to[:column]
            sums = before[:column] + rows * row_cost[column - 1]
            origin = int(np.argmin(sums))
            best.append(sums[origin] + shape_cost[column - 1])
            ends.append([*ends_before[origin], int(candidates[column - 1])])
        curve.append((best[-1], tuple(ends[-1])))
    return curve


@given(st.booleans().flatmap(lambda rising: histograms(rising=rising)))
@settings(max_examples=500)
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


def random_problem(rng, num_candidates, rises):
    candidates = np.cumsum(rng.integers(1, 9, num_candidates))
    counts = rng.integers(1, 50, num_candidates)
    row_cost = candidates.astype(float)
    if not rises:
        row_cost += rng.integers(0, 300, num_candidates)
    return candidates, counts, row_cost, rng.integers(0, 4000, num_candidates).astype(float)


@pytest.mark.parametrize("rises", [True, False])
@pytest.mark.parametrize("num_candidates", [1, 2, 3, 4, 7, 8, 9, 63, 64, 65, 300, 1500])
def test_both_ways_of_search_equal_the_plain_recurrence(num_candidates, rises):
    """Whole numbers, so that sums and ties are exact; 1500 falling costs are several blocks."""
    problem = random_problem(np.random.default_rng(num_candidates), num_candidates, rises)
    curve = solve(*problem, 6)
    expected = solve_by_plain_rows(*problem, 6)
    assert curve.cost.tolist() == [cost for cost, _ in expected]
    assert list(curve.boundaries) == [ends for _, ends in expected]


@pytest.mark.parametrize("seed", range(200))
def test_rising_real_costs_equal_brute_force(seed):
    rng = np.random.default_rng(seed)
    candidates = np.sort(rng.choice(np.arange(1, 500), size=rng.integers(1, 9), replace=False))
    counts = rng.integers(1, 1000, len(candidates))
    row_cost = np.sort(rng.random(len(candidates))) * 1e-3
    shape_cost = rng.random(len(candidates)) * 0.2
    curve = solve(candidates, counts, row_cost, shape_cost, 9)
    for size, cost in enumerate(curve.cost.tolist(), start=1):
        least = min(
            cost_of(
                chosen,
                dict(zip(candidates.tolist(), counts.tolist(), strict=True)),
                dict(zip(candidates.tolist(), row_cost.tolist(), strict=True)),
                dict(zip(candidates.tolist(), shape_cost.tolist(), strict=True)),
            )
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


@given(lengths(max_rows=60, min_tokens=1), align_rules())
def test_counted_lengths_give_the_curve_of_the_rows(tokens, align):
    distinct = sorted(set(tokens), reverse=True)
    counts = np.array([tokens.count(length) for length in distinct])
    by_rows = solve_least_padding(np.array(tokens, dtype=np.int32), align, 5)
    by_counts = solve_least_padding(np.array(distinct), align, 5, counts)
    assert by_counts.boundaries == by_rows.boundaries
    assert by_counts.cost.tolist() == by_rows.cost.tolist()


@given(lengths(max_rows=60, min_tokens=1), align_rules())
def test_aligned_lengths_in_use_are_counted(tokens, align):
    candidates, counts = count_aligned(np.array(tokens), align)
    aligned = [align_slowly(length, align) for length in tokens]
    assert candidates.tolist() == sorted(set(aligned))
    assert counts.tolist() == [aligned.count(length) for length in candidates.tolist()]


# Least time


def step_seconds(overhead_s, token_s, attention_s):
    def step_s(shape):
        size, length = shape
        return overhead_s + token_s * size * length + attention_s * size * length * length

    return step_s


@st.composite
def run_costs(draw):
    seconds = step_seconds(
        draw(st.floats(0.0, 2.0)), draw(st.floats(1e-5, 1e-2)), draw(st.floats(0.0, 1e-5))
    )
    compile_s, compile_token_s = draw(st.floats(0.0, 20.0)), draw(st.floats(0.0, 0.1))
    return RunCost(
        step_s=seconds,
        compile_s=lambda shape: compile_s + compile_token_s * shape[1],
        epochs=draw(st.integers(1, 4)),
        world_size=draw(st.sampled_from([1, 2, 3])),
    )


SIZE_RULES = st.integers(256, 2000).map(lambda most: {"batching.tokens_per_batch": most}) | (
    st.integers(1, 12).map(
        lambda rows: {"batching.tokens_per_batch": None, "batching.samples_per_batch": rows}
    )
)


ONE_SIZE = st.booleans().map(lambda one: {"batching.one_size_per_length": one})


@pytest.fixture
def shared_steps(monkeypatch):
    """As for more candidates than are solved with whole steps."""
    monkeypatch.setattr(boundaries, "WHOLE_STEPS_UP_TO", 0)


def rows_slowly(batching, length):
    return batching.samples_per_batch or batching.tokens_per_batch // length


def shared_seconds(boundaries, tokens, batching, cost):
    """Every row pays its share of a full step at its boundary, every boundary its compile."""
    seconds = sum(cost.compile_s((rows_slowly(batching, end), end)) for end in boundaries)
    for length in tokens:
        end = first_boundary(length, boundaries)
        size = rows_slowly(batching, end)
        seconds += cost.epochs * cost.step_s((size, end)) / (size * cost.world_size)
    return seconds


def planned_seconds(boundaries, tokens, config, cost):
    """The run of the plan with these boundaries: whole steps."""
    changed = config.batching.model_copy(update={"boundaries": boundaries})
    plan = plan_batches(
        make_lengths(tokens),
        config.model_copy(update={"batching": changed}),
        world_size=cost.world_size,
    )
    steps_s = sum(cost.step_s(batch.shape) for batch in plan.steps_of_rank(0))
    return sum(map(cost.compile_s, plan.shapes)) + cost.epochs * steps_s


@given(lengths(max_rows=40, longest=150, min_tokens=1), run_costs(), SIZE_RULES, ONE_SIZE)
@settings(max_examples=150)
def test_least_time_is_that_of_the_fastest_of_all_plans(tokens, cost, size_rule, one_size):
    config = make_config({"batching.align": 24, **size_rule, **one_size})
    candidates = sorted({align_slowly(length, 24) for length in tokens})
    curve = solve_least_time(np.array(tokens), config.batching, cost, 8)
    least = [
        min(planned_seconds(ends, tokens, config, cost) for ends in sets_of(candidates, size))
        for size in range(1, len(candidates) + 1)
    ]
    assert curve.cost == pytest.approx(least, rel=1e-9)
    for ends, seconds in zip(curve.boundaries, least, strict=True):
        assert planned_seconds(ends, tokens, config, cost) == pytest.approx(seconds, rel=1e-9)


@given(lengths(max_rows=40, longest=150, min_tokens=1), run_costs(), SIZE_RULES)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_least_shared_time_equals_brute_force(shared_steps, tokens, cost, size_rule):
    batching = make_config({"batching.align": 24, **size_rule}).batching
    candidates = sorted({align_slowly(length, 24) for length in tokens})
    curve = solve_least_time(np.array(tokens), batching, cost, 8)
    least = [
        min(shared_seconds(ends, tokens, batching, cost) for ends in sets_of(candidates, size))
        for size in range(1, len(candidates) + 1)
    ]
    assert curve.cost == pytest.approx(least, rel=1e-9)
    chosen = curve.best(8)
    assert shared_seconds(chosen, tokens, batching, cost) == pytest.approx(min(least), rel=1e-9)


@given(lengths(max_rows=40, longest=150, min_tokens=1), run_costs(), SIZE_RULES)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_plan_of_least_shared_time_is_within_a_step_a_bucket_of_the_best(
    shared_steps, tokens, cost, size_rule
):
    config = make_config({"batching.align": 24, **size_rule})
    candidates = sorted({align_slowly(length, 24) for length in tokens})
    curve = solve_least_time(np.array(tokens), config.batching, cost, 8)
    chosen = curve.best(8)
    full_steps_s = cost.epochs * sum(
        cost.step_s((rows_slowly(config.batching, end), end)) for end in chosen
    )
    planned_s = planned_seconds(chosen, tokens, config, cost)
    solved_s = curve.cost.min()
    assert solved_s <= planned_s * (1 + 1e-9)
    assert planned_s <= (solved_s + full_steps_s) * (1 + 1e-9)
    best_plan_s = min(
        planned_seconds(ends, tokens, config, cost)
        for size in range(1, len(candidates) + 1)
        for ends in sets_of(candidates, size)
    )
    assert planned_s <= (best_plan_s + full_steps_s) * (1 + 1e-9)


def test_hand_calculated_time():
    """Four rows of 8 tokens and two of 16, budget 32: steps of 4 rows and of 2 rows.

    A step takes 1 s + 0.1 s a token: 4.2 s when full. All rows at 16: 6 / 2 * 4.2 = 12.6 s and one
    compile; two buckets: 4 / 4 * 4.2 + 2 / 2 * 4.2 = 8.4 s and two. Compile 5 s: 17.6 against
    18.4; over two epochs 30.2 against 26.8.
    """
    batching = make_config({"batching.align": 8, "batching.tokens_per_batch": 32}).batching
    tokens = np.array([8, 8, 8, 8, 16, 16])
    costs = [
        RunCost(
            step_s=step_seconds(1.0, 0.1, 0.0),
            compile_s=lambda shape: 5.0,
            epochs=epochs,
            world_size=1,
        )
        for epochs in (1, 2)
    ]
    once, twice = (solve_least_time(tokens, batching, cost, 8) for cost in costs)
    assert once.cost == pytest.approx([17.6, 18.4])
    assert once.best(8) == (16,)
    assert twice.cost == pytest.approx([30.2, 26.8])
    assert twice.best(8) == (8, 16)


def test_hand_calculated_whole_steps():
    """Five rows of 8 tokens and one of 16, budget 32: steps of at most 4 rows and of 2.

    A step takes 1 s + 0.1 s a token, a compile 5 s. All rows at 16: three steps of 2 x 16 tokens,
    3 * 4.2 + 5 = 17.6 s. Two buckets, one size for each: five rows make two steps of 3 with a
    filler, 2 * (1 + 2.4), the one row a step of 1 + 1.6, and two compiles: 19.4 s. With sizes that
    differ: steps of 3 and of 2 rows, 3.4 + 2.6 + 2.6 and three compiles: 23.6 s.
    """
    sizes = {"batching.align": 8, "batching.tokens_per_batch": 32}
    tokens = np.array([8, 8, 8, 8, 8, 16])
    cost = RunCost(
        step_s=step_seconds(1.0, 0.1, 0.0),
        compile_s=lambda shape: 5.0,
        epochs=1,
        world_size=1,
    )
    for one_size, two_buckets_s in [(True, 19.4), (False, 23.6)]:
        batching = make_config({**sizes, "batching.one_size_per_length": one_size}).batching
        curve = solve_least_time(tokens, batching, cost, 8)
        assert curve.cost == pytest.approx([17.6, two_buckets_s])


def test_longer_runs_afford_more_buckets_and_no_compile_affords_all():
    tokens = np.array(skewed_tokens(4000))
    # Batches without fillers, so that more buckets never take more tokens.
    changes = {"batching.tokens_per_batch": 4096, "batching.one_size_per_length": False}
    batching = make_config({"batching.align": 64, **changes}).batching
    chosen = []
    for compile_s, epochs in [(60.0, 1), (10.0, 1), (10.0, 30), (0.0, 1)]:
        cost = RunCost(
            step_s=step_seconds(0.0, 1e-4, 0.0),
            compile_s=lambda shape, seconds=compile_s: seconds,
            epochs=epochs,
            world_size=1,
        )
        chosen.append(len(solve_least_time(tokens, batching, cost, 99).best(99)))
    assert chosen == sorted(chosen)
    assert 1 <= chosen[0] < chosen[1] < chosen[2] < chosen[3]
    assert chosen[3] == len(count_aligned(tokens, 64)[0])


def test_budget_below_the_longest_row_is_refused():
    batching = make_config({"batching.tokens_per_batch": 32}).batching
    cost = RunCost(step_s=lambda shape: 1.0, compile_s=lambda shape: 1.0, epochs=1, world_size=1)
    with pytest.raises(BadInputError, match="at least the longest padded row"):
        solve_least_time(np.array([8, 40]), batching, cost, 4)

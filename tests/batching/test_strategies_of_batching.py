"""What each strategy promises beyond the contract: padding, batch sizes, boundaries."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import (
    admit_slowly,
    align_slowly,
    first_boundary,
    make_config,
    make_lengths,
    plan_cases,
    rows_of,
    skewed_tokens,
)

from tuner.batching.plan import plan_batches, resolve_boundaries
from tuner.config.override import override_config
from tuner.errors import BadInputError


def plan_of(case, config=None):
    return plan_batches(case.lengths, config or case.config, world_size=case.world_size)


def padded_length_of_row(plan):
    return {
        row: batch.padded_length
        for rank in range(plan.world_size)
        for batch in plan.steps_of_rank(rank)
        for row in batch.row_indices.tolist()
    }


def plan_with(tokens, world_size=1, **batching):
    changes = {f"batching.{name}": value for name, value in batching.items()}
    return plan_batches(make_lengths(tokens), make_config(changes), world_size=world_size)


@given(plan_cases("fixed"))
def test_fixed_has_one_length_that_of_the_longest_row(case):
    tokens_of_row = admit_slowly(case.tokens, case.config).tokens_of_row
    plan = plan_of(case)
    longest = align_slowly(max(tokens_of_row.values()), case.config.batching.align)
    assert {length for _, length in plan.shapes} == {longest}
    assert len(plan.shapes) == 1 or not case.config.batching.one_size_per_length


@given(plan_cases("dynamic"))
def test_dynamic_pads_each_global_batch_to_its_own_longest_row(case):
    tokens_of_row = admit_slowly(case.tokens, case.config).tokens_of_row
    plan = plan_of(case)
    ranks = [list(plan.steps_of_rank(rank)) for rank in range(plan.world_size)]
    for batches in zip(*ranks, strict=True):
        longest = max(
            tokens_of_row[row] for batch in batches for row in batch.row_indices.tolist()
        )
        assert batches[0].padded_length == align_slowly(longest, case.config.batching.align)


@given(plan_cases("dynamic", one_size=True))
def test_dynamic_has_one_batch_size_and_any_aligned_length_in_use(case):
    tokens_of_row = admit_slowly(case.tokens, case.config).tokens_of_row
    batching, plan = case.config.batching, plan_of(case)
    aligned = {align_slowly(length, batching.align) for length in tokens_of_row.values()}
    size = batching.samples_per_batch
    if size is None:
        most = batching.tokens_per_batch // max(aligned) * case.world_size
        num_batches = math.ceil(len(tokens_of_row) / most)
        size = math.ceil(len(tokens_of_row) / num_batches / case.world_size)
    assert set(plan.shapes) == {(size, length) for length in aligned}
    assert plan.num_steps == math.ceil(len(tokens_of_row) / (size * case.world_size))


@given(plan_cases("bucketed"))
@settings(max_examples=100)
def test_bucketed_row_goes_to_the_first_boundary_not_below_it(case):
    fate = admit_slowly(case.tokens, case.config)
    boundaries = resolve_boundaries(case.lengths, case.config).batching.boundaries
    assert list(boundaries) == sorted(set(boundaries))
    for row, length in padded_length_of_row(plan_of(case)).items():
        assert length == first_boundary(fate.tokens_of_row[row], boundaries)


@pytest.mark.parametrize("boundary", [8, 64, 100])
def test_length_on_a_boundary_stays_in_that_bucket(boundary):
    plan = plan_with([boundary - 1, boundary, boundary + 1], boundaries=[boundary, 128])
    assert padded_length_of_row(plan) == {0: boundary, 1: boundary, 2: 128}


def test_last_boundary_is_a_length_limit():
    lengths = make_lengths([63, 64, 65, 500])
    changes = {"batching.boundaries": [32, 64]}
    cut = plan_batches(lengths, make_config(changes))
    assert (sorted(rows_of(cut)), cut.num_truncated) == ([0, 1, 2, 3], 2)
    dropped = plan_batches(lengths, make_config({**changes, "data.overflow": "drop"}))
    assert (sorted(rows_of(dropped)), dropped.dropped["over_long"]) == ([0, 1], 2)
    with pytest.raises(BadInputError, match="2 rows are longer than 64 tokens"):
        plan_batches(lengths, make_config({**changes, "data.overflow": "error"}))


def test_boundaries_left_in_the_config_do_not_limit_other_strategies():
    for strategy in ("fixed", "dynamic"):
        plan = plan_with([5, 500], strategy=strategy, boundaries=[32, 64])
        assert plan.num_truncated == 0
        assert max(length for _, length in plan.shapes) == 504


@given(plan_cases("bucketed", size_rule="list", one_size=True))
def test_explicit_batch_sizes_are_taken_as_they_are(case):
    batching = case.config.batching
    size_at = dict(zip(batching.boundaries, batching.batch_sizes, strict=True))
    plan = plan_of(case)
    assert all(size == size_at[length] for size, length in plan.shapes)


@given(plan_cases("bucketed"))
def test_bucket_makes_as_many_batches_as_its_size_needs(case):
    """Never more than the budget would make at its largest B, and none without a row."""
    fate, plan = admit_slowly(case.tokens, case.config), plan_of(case)
    batching = case.config.batching
    boundaries = resolve_boundaries(case.lengths, case.config).batching.boundaries
    rows_in = Counter(first_boundary(length, boundaries) for length in fate.tokens_of_row.values())
    steps_at = Counter()
    for (_, length), count in plan.shape_counts().items():
        steps_at[length] += count
    assert set(steps_at) == set(rows_in)
    for length, num_rows in rows_in.items():
        if batching.batch_sizes:
            most = batching.batch_sizes[boundaries.index(length)]
        else:
            most = batching.samples_per_batch or batching.tokens_per_batch // length
        assert steps_at[length] == math.ceil(num_rows / (most * case.world_size))


@given(plan_cases("bucketed", size_rule="budget", one_size=True))
def test_even_spreading_leaves_no_batch_size_that_would_do_with_fewer_fillers(case):
    """B is the smallest with which the rows fit into that number of batches."""
    fate, plan = admit_slowly(case.tokens, case.config), plan_of(case)
    boundaries = resolve_boundaries(case.lengths, case.config).batching.boundaries
    rows_in = Counter(first_boundary(length, boundaries) for length in fate.tokens_of_row.values())
    for (size, length), steps in plan.shape_counts().items():
        assert size * steps * case.world_size >= rows_in[length]
        assert (size - 1) * steps * case.world_size < rows_in[length]


@pytest.mark.parametrize("strategy", ["fixed", "bucketed", "packed"])
@given(data=st.data())
def test_two_sizes_make_the_same_batches_without_fillers(strategy, data):
    case = data.draw(plan_cases(strategy, one_size=False))
    one_size = override_config(case.config, {"batching.one_size_per_length": True})
    plan, whole = plan_of(case), plan_of(case, one_size)
    sizes, whole_sizes = sizes_by_length(plan), sizes_by_length(whole)
    assert set(sizes) == set(whole_sizes)
    for length, found in sizes.items():
        (most,) = set(whole_sizes[length])
        assert len(found) == len(whole_sizes[length])
        assert max(found) - min(found) <= 1
        assert max(found) <= most
    # Slots that no rank can do without, as ranks step together.
    assert (plan.rows_per_slot == 0).sum() < case.world_size * len(sizes)


def sizes_by_length(plan):
    """B of every step of a rank, by padded length."""
    sizes = defaultdict(list)
    for batch in plan.steps_of_rank(0):
        size, length = batch.shape
        sizes[length].append(size)
    return sizes


@given(plan_cases("dynamic", one_size=False))
def test_dynamic_has_two_sizes_that_differ_by_one(case):
    plan = plan_of(case)
    sizes = {size for size, _ in plan.shapes}
    assert max(sizes) - min(sizes) == len(sizes) - 1 <= 1
    assert {batch.shape for batch in plan.steps_of_rank(0)} <= set(plan.shapes)
    assert (plan.rows_per_slot == 0).sum() < case.world_size


def test_hundred_rows_in_batches_of_eight_and_seven():
    plan = plan_with([8] * 100, tokens_per_batch=64, one_size_per_length=False)
    # 13 batches of at most 8: 9 of 8 and 4 of 7.
    assert plan.shape_counts() == {(8, 8): 9, (7, 8): 4}
    assert plan.rows_per_slot.tolist() == [1] * 100


@pytest.mark.parametrize("strategy", ["fixed", "bucketed"])
@given(data=st.data())
def test_under_a_budget_fillers_are_fewer_than_batches_times_ranks(strategy, data):
    plan = plan_of(data.draw(plan_cases(strategy, size_rule="budget")))
    for shape in plan.shapes:
        ranks = [list(plan.steps_of_rank(rank)) for rank in range(plan.world_size)]
        batches = [batch for steps in ranks for batch in steps if batch.shape == shape]
        assert sum(batch.rows_per_slot.tolist().count(0) for batch in batches) < len(batches)


def test_hundred_rows_at_a_budget_of_sixty_four_make_two_batches_of_fifty():
    plan = plan_with([8] * 100, tokens_per_batch=512)
    assert plan.shapes == ((50, 8),)
    assert plan.shape_counts() == {(50, 8): 2}
    assert int((plan.rows_per_slot == 0).sum()) == 0


def test_samples_per_batch_is_not_spread():
    plan = plan_with([8] * 100, tokens_per_batch=None, samples_per_batch=64)
    assert plan.shape_counts() == {(64, 8): 2}
    assert int((plan.rows_per_slot == 0).sum()) == 28


@given(plan_cases("bucketed"), st.integers(0, 3))
def test_written_out_boundaries_give_the_same_plan(case, epoch):
    resolved = resolve_boundaries(case.lengths, case.config)
    assert resolved.batching.boundaries
    plans = [
        plan_batches(case.lengths, config, epoch=epoch, world_size=case.world_size)
        for config in (case.config, resolved)
    ]
    assert plans[0].fingerprint == plans[1].fingerprint
    assert plans[0].dropped == plans[1].dropped
    assert plans[0].num_truncated == plans[1].num_truncated
    assert resolve_boundaries(case.lengths, resolved) == resolved


@given(plan_cases("bucketed", max_rows=25, size_rule="samples"))
def test_solved_boundaries_pad_least_of_all_with_so_many_buckets(case):
    batching = case.config.batching
    assume(not batching.boundaries and batching.boundary_rule == "least_padding")
    tokens = admit_slowly(case.tokens, case.config).tokens_of_row.values()
    candidates = sorted({align_slowly(length, batching.align) for length in tokens})
    assume(len(candidates) <= 12)
    least = min(
        sum(first_boundary(length, (*others, candidates[-1])) for length in tokens)
        for size in range(min(batching.num_buckets, len(candidates)))
        for others in itertools.combinations(candidates[:-1], size)
    )
    assert sum(padded_length_of_row(plan_of(case)).values()) == least


@pytest.mark.parametrize("strategy", ["fixed", "dynamic"])
def test_other_strategies_have_no_boundaries_to_write_out(strategy):
    config = make_config({"batching.strategy": strategy})
    assert resolve_boundaries(make_lengths([5, 50]), config) is config


def test_written_out_config_says_how_many_buckets_it_has():
    config = resolve_boundaries(make_lengths([5, 50]), make_config({"batching.num_buckets": 8}))
    assert config.batching.boundaries == (8, 56)
    assert config.batching.num_buckets == 2


def test_more_buckets_pad_less_on_skewed_rows():
    tokens = skewed_tokens(2000)
    padded = []
    for num_buckets in (1, 2, 4, 8, 16):
        plan = plan_with(tokens, num_buckets=num_buckets)
        padded.append(sum(padded_length_of_row(plan).values()))
    assert padded == sorted(padded, reverse=True)
    assert len(set(padded)) == 5


@pytest.mark.parametrize(
    ("rule", "boundaries"),
    [
        ("least_padding", (16, 104)),
        ("quantile", (16, 104)),
        ("equal_tokens", (96, 104)),
        ("exponential", (32, 104)),
        ("uniform", (56, 104)),
    ],
)
def test_the_named_rule_places_the_boundaries(rule, boundaries):
    """Rows of 9 (6 of them), 14, 90 and 102 tokens: 260 in all; half of them lie up to 90."""
    tokens = [9] * 6 + [14, 90, 102]
    config = make_config({"batching.boundary_rule": rule, "batching.num_buckets": 2})
    resolved = resolve_boundaries(make_lengths(tokens), config)
    assert resolved.batching.boundaries == boundaries

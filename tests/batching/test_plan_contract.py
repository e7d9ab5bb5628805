"""What every strategy's plan must hold, for any rows, config and number of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import (
    admit_slowly,
    align_slowly,
    make_config,
    make_lengths,
    plan_cases,
    rows_of,
    skewed_tokens,
    slots_of,
)

from tuner.batching.plan import STRATEGIES, plan_batches
from tuner.batching.rows import EMPTY, OVER_LONG
from tuner.errors import BadInputError

NAMES = sorted(STRATEGIES)


def plan_of(case, epoch=0, world_size=None):
    return plan_batches(
        case.lengths, case.config, epoch=epoch, world_size=world_size or case.world_size
    )


def small_plan(strategy, tokens, epoch=0, world_size=1, **batching):
    changes = {f"batching.{name}": value for name, value in batching.items()}
    config = make_config({"batching.strategy": strategy, **changes})
    return plan_batches(make_lengths(tokens), config, epoch=epoch, world_size=world_size)


def global_batches(plan):
    """For each step: the (B, L) of every rank, and the rows of all ranks."""
    ranks = [list(plan.steps_of_rank(rank)) for rank in range(plan.world_size)]
    for batches in zip(*ranks, strict=True):
        rows = [row for batch in batches for row in batch.row_indices.tolist()]
        yield [batch.shape for batch in batches], rows


def slots_and_lengths(plan):
    for rank in range(plan.world_size):
        for batch in plan.steps_of_rank(rank):
            assert len(batch.rows_per_slot) == batch.shape[0]
            assert len(batch.row_indices) == batch.rows_per_slot.sum()
            yield from ((slot, batch.padded_length) for slot in slots_of(batch))


@pytest.mark.parametrize("strategy", NAMES)
class TestEveryPlan:
    @given(data=st.data())
    @settings(max_examples=60)
    def test_every_row_stands_once_or_is_counted_as_dropped(self, strategy, data):
        case = data.draw(plan_cases(strategy, slabs=True))
        plan, fate = plan_of(case), admit_slowly(case.tokens, case.config)
        assert sorted(rows_of(plan)) == sorted(fate.tokens_of_row)
        assert plan.dropped == {EMPTY: fate.num_empty, OVER_LONG: fate.num_over_long}
        assert plan.num_truncated == fate.num_truncated
        assert plan.num_samples == len(case.tokens)
        assert len(rows_of(plan)) + sum(plan.dropped.values()) == plan.num_samples

    @given(data=st.data())
    @settings(max_examples=60)
    def test_batch_is_as_long_as_its_rows_need_and_within_the_budget(self, strategy, data):
        case = data.draw(plan_cases(strategy, slabs=True))
        batching, fate = case.config.batching, admit_slowly(case.tokens, case.config)
        plan = plan_of(case)
        for shapes, rows in global_batches(plan):
            (size, length), *others = shapes
            assert all(shape == (size, length) for shape in others)
            assert rows
            if batching.tokens_per_batch is not None:
                assert size * length <= batching.tokens_per_batch
            if batching.samples_per_batch is not None:
                assert size <= batching.samples_per_batch
                assert size == batching.samples_per_batch or not batching.one_size_per_length
            if strategy not in ("bucketed", "packed") or not batching.boundaries:
                assert length == align_slowly(length, batching.align)
        for slot, length in slots_and_lengths(plan):
            assert sum(fate.tokens_of_row[row] for row in slot) <= length
            assert strategy == "packed" or len(slot) <= 1

    @given(data=st.data())
    @settings(max_examples=60)
    def test_real_tokens_are_those_of_the_rows(self, strategy, data):
        case = data.draw(plan_cases(strategy, slabs=True))
        plan, fate = plan_of(case), admit_slowly(case.tokens, case.config)
        counted = [
            sum(fate.tokens_of_row[row] for row in rows) for _, rows in global_batches(plan)
        ]
        assert plan.real_tokens.tolist() == counted

    @given(data=st.data())
    @settings(max_examples=15)
    def test_shapes_are_the_same_in_every_epoch_and_hold_every_batch(self, strategy, data):
        case = data.draw(plan_cases(strategy, slabs=True))
        plans = [plan_of(case, epoch) for epoch in range(20)]
        assert {plan.shapes for plan in plans} == {plans[0].shapes}
        assert len(set(plans[0].shapes)) == len(plans[0].shapes)
        for plan in plans:
            seen = Counter(batch.shape for batch in plan.steps_of_rank(0))
            assert set(seen) <= set(plan.shapes)
            assert plan.shape_counts() == {shape: seen[shape] for shape in plan.shapes}
            assert plan.num_steps == plans[0].num_steps

    @given(data=st.data())
    @settings(max_examples=15)
    def test_ranks_are_disjoint_and_in_step(self, strategy, data):
        case = data.draw(plan_cases(strategy, slabs=True))
        expected = sorted(admit_slowly(case.tokens, case.config).tokens_of_row)
        for world_size in range(1, 10):
            plan = plan_of(case, world_size=world_size)
            assert plan.world_size == world_size
            assert sorted(rows_of(plan)) == expected
            ranks = [list(plan.steps_of_rank(rank)) for rank in range(world_size)]
            assert {len(steps) for steps in ranks} == {plan.num_steps}
            for batches in zip(*ranks, strict=True):
                assert len({batch.shape for batch in batches}) == 1
                fillers = [int((batch.rows_per_slot == 0).sum()) for batch in batches]
                assert max(fillers) - min(fillers) <= 1

    @given(data=st.data())
    @settings(max_examples=20)
    def test_starting_late_gives_the_tail(self, strategy, data):
        plan = plan_of(data.draw(plan_cases(strategy, slabs=True)))
        rank = data.draw(st.integers(0, plan.world_size - 1))
        whole = list(plan.steps_of_rank(rank))
        for start in range(plan.num_steps + 1):
            tail = list(plan.steps_of_rank(rank, start))
            assert len(tail) == len(whole) - start
            for ours, theirs in zip(tail, whole[start:], strict=True):
                assert ours.padded_length == theirs.padded_length
                assert ours.row_indices.tolist() == theirs.row_indices.tolist()
                assert ours.rows_per_slot.tolist() == theirs.rows_per_slot.tolist()

    @given(data=st.data())
    @settings(max_examples=20)
    def test_same_epoch_same_plan(self, strategy, data):
        case = data.draw(plan_cases(strategy, slabs=True))
        epoch = data.draw(st.integers(0, 10**9))
        assert plan_of(case, epoch).fingerprint == plan_of(case, epoch).fingerprint

    @given(data=st.data())
    @settings(max_examples=20)
    def test_warm_up_starts_with_the_most_padded_tokens(self, strategy, data):
        shapes = plan_of(data.draw(plan_cases(strategy, slabs=True))).shapes
        sizes = [(size * length, length) for size, length in shapes]
        assert sizes == sorted(sizes, reverse=True)

    def test_first_epoch_and_one_rank_are_what_is_left_unsaid(self, strategy):
        lengths = make_lengths(skewed_tokens(100))
        config = make_config({"batching.strategy": strategy})
        said = plan_batches(lengths, config, epoch=0, world_size=1)
        assert plan_batches(lengths, config).fingerprint == said.fingerprint

    def test_other_epoch_and_other_seed_have_another_order(self, strategy):
        tokens = skewed_tokens(200)
        orders = {
            small_plan(strategy, tokens, epoch=epoch, seed=seed).row_indices.tobytes()
            for epoch in range(4)
            for seed in range(4)
        }
        assert len(orders) == 16

    def test_batches_change_from_epoch_to_epoch_and_not_only_their_order(self, strategy):
        tokens = skewed_tokens(200)
        first, second = (
            {frozenset(rows) for _, rows in global_batches(small_plan(strategy, tokens, epoch))}
            for epoch in (0, 1)
        )
        assert len(first & second) < len(first) / 2

    def test_world_size_and_rows_are_in_the_fingerprint(self, strategy):
        tokens = skewed_tokens(64)
        prints = {
            small_plan(strategy, tokens, world_size=world_size).fingerprint
            for world_size in (1, 2, 3)
        }
        prints.add(small_plan(strategy, [*tokens, 8]).fingerprint)
        assert len(prints) == 4

    def test_rows_cut_shorter_within_the_same_shape_have_another_fingerprint(self, strategy):
        plans = [
            plan_batches(
                make_lengths([64] * 20),
                make_config({"batching.strategy": strategy, "data.max_length": limit}),
            )
            for limit in (60, 64)
        ]
        assert plans[0].shapes == plans[1].shapes
        assert plans[0].row_indices.tolist() == plans[1].row_indices.tolist()
        assert plans[0].fingerprint != plans[1].fingerprint

    def test_arrays_are_read_only(self, strategy):
        plan = small_plan(strategy, skewed_tokens(50))
        steps = (plan.batch_sizes, plan.padded_lengths, plan.real_tokens)
        for array in (plan.row_indices, plan.rows_per_slot, *steps):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1

    @pytest.mark.parametrize(
        ("tokens", "padded_length"),
        [([1], 8), ([8], 8), ([9], 16), ([2048], 2048), ([33] * 77, 40), ([0, 5, 0], 8)],
        ids=["one token", "on the boundary", "over it", "giant", "all equal", "with empty rows"],
    )
    @pytest.mark.parametrize("world_size", [1, 4])
    def test_small_sets(self, strategy, tokens, padded_length, world_size):
        plan = small_plan(strategy, tokens, world_size=world_size)
        assert {length for _, length in plan.shapes} == {padded_length}
        assert len(plan.shapes) == 1
        assert sorted(rows_of(plan)) == [row for row, length in enumerate(tokens) if length]
        assert plan.dropped[EMPTY] == tokens.count(0)
        assert int(plan.real_tokens.sum()) == sum(tokens)

    def test_one_giant_among_short_rows(self, strategy):
        plan = small_plan(strategy, [10] * 99 + [4000])
        assert sorted(rows_of(plan)) == list(range(100))
        assert max(length for _, length in plan.shapes) == 4000
        assert all(size * length <= 4096 for size, length in plan.shapes)

    @pytest.mark.parametrize("tokens", [[], [0], [0, 0, 0]])
    def test_set_without_tokens_is_refused(self, strategy, tokens):
        with pytest.raises(BadInputError, match="no row is left to batch"):
            small_plan(strategy, tokens)

    @pytest.mark.parametrize("overflow", ["truncate", "drop"])
    def test_over_long_rows_are_cut_or_dropped_and_counted(self, strategy, overflow):
        config = make_config(
            {
                "batching.strategy": strategy,
                "data.max_length": 64,
                "data.overflow": overflow,
            }
        )
        plan = plan_batches(make_lengths([64, 65, 0, 3, 900]), config)
        if overflow == "truncate":
            assert sorted(rows_of(plan)) == [0, 1, 3, 4]
            assert (plan.num_truncated, plan.dropped) == (2, {EMPTY: 1, OVER_LONG: 0})
            assert int(plan.real_tokens.sum()) == 64 * 3 + 3
        else:
            assert sorted(rows_of(plan)) == [0, 3]
            assert (plan.num_truncated, plan.dropped) == (0, {EMPTY: 1, OVER_LONG: 2})
            assert int(plan.real_tokens.sum()) == 67

    def test_over_long_rows_are_refused_under_error(self, strategy):
        config = make_config(
            {"batching.strategy": strategy, "data.max_length": 64, "data.overflow": "error"}
        )
        with pytest.raises(
            BadInputError, match=r"2 rows are longer than 64 tokens \(row 1 has 65\)"
        ):
            plan_batches(make_lengths([64, 65, 900]), config)
        assert plan_batches(make_lengths([64, 1]), config).num_truncated == 0

    def test_budget_under_one_padded_row_is_refused_with_both_numbers(self, strategy):
        with pytest.raises(BadInputError) as error:
            small_plan(strategy, [5, 101], tokens_per_batch=103)
        assert "(got 103, the longest is 104 tokens); raise it to 104" in str(error.value)
        assert "\n" not in str(error.value)
        assert small_plan(strategy, [5, 101], tokens_per_batch=104).num_samples == 2

    @pytest.mark.parametrize("align", [8, 1])
    def test_two_hundred_thousand_rows_are_planned_in_moments(self, strategy, align):
        lengths = make_lengths(skewed_tokens(200_000))
        config = make_config(
            {
                "batching.strategy": strategy,
                "batching.align": align,
                "batching.tokens_per_batch": 16384,
            }
        )
        started = time.process_time()
        plan = plan_batches(lengths, config, world_size=8)
        assert time.process_time() - started < 5.0
        assert plan.num_steps > 100


PRINT_FINGERPRINTS = """
from strategies import make_config, make_lengths, skewed_tokens
from tuner.batching.plan import STRATEGIES, plan_batches
for strategy in sorted(STRATEGIES):
    config = make_config({"batching.strategy": strategy})
    plan = plan_batches(make_lengths(skewed_tokens(300)), config, epoch=3, world_size=2)
    print(strategy, plan.fingerprint)
"""


def test_fresh_process_with_another_hash_seed_makes_the_same_plans():
    config = {name: make_config({"batching.strategy": name}) for name in NAMES}
    lengths = make_lengths(skewed_tokens(300))
    here = [
        f"{name} {plan_batches(lengths, config[name], epoch=3, world_size=2).fingerprint}"
        for name in NAMES
    ]
    for hash_seed in ("1", "4711"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        done = subprocess.run(
            [sys.executable, "-c", PRINT_FINGERPRINTS],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.splitlines() == here

"""Best-fit decreasing against the sample by sample rule, and what packed rows must hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import (
    admit_slowly,
    align_slowly,
    first_boundary,
    make_config,
    make_lengths,
    plan_cases,
    skewed_tokens,
    slots_of,
)

from tuner.batching.packed import pack_falling
from tuner.batching.plan import plan_batches, resolve_boundaries
from tuner.simulate.stats import count_plan


def pack_slowly(falling, capacities):
    """(capacity, room left) of each row, by the textbook's rule: the tightest row that fits.

    A sample that fits nowhere opens a row of the first capacity that holds it.
    """
    rows = []
    for length in falling:
        fitting = [index for index, (_, room) in enumerate(rows) if room >= length]
        if fitting:
            index = min(fitting, key=lambda index: rows[index][1])
            rows[index] = rows[index][0], rows[index][1] - length
        else:
            capacity = first_boundary(length, capacities)
            rows.append((capacity, capacity - length))
    return sorted(rows)


@st.composite
def falling_lengths(draw, max_capacities=1):
    capacities = draw(
        st.lists(st.integers(1, 60), min_size=1, max_size=max_capacities, unique=True)
    )
    longest = max(capacities)
    few = st.sampled_from(draw(st.lists(st.integers(1, longest), min_size=1, max_size=4)))
    tokens = draw(st.lists(st.integers(1, longest) | few, min_size=1, max_size=120))
    return sorted(tokens, reverse=True), tuple(sorted(capacities))


def rows_and_rooms(tokens, capacities):
    row_of_sample, packed = pack_falling(np.array(tokens), capacities)
    loads = np.bincount(row_of_sample, weights=tokens).astype(int)
    held = np.array(capacities)[packed.length_of_row]
    assert len(held) == len(loads) == packed.num_rows.sum()
    of_length = [int(loads[held == capacity].sum()) for capacity in capacities]
    assert packed.tokens.tolist() == of_length
    return sorted(zip(held.tolist(), (held - loads).tolist(), strict=True))


@given(falling_lengths())
@settings(max_examples=400)
def test_rows_are_as_full_as_those_of_the_sample_by_sample_rule(case):
    tokens, capacities = case
    assert rows_and_rooms(tokens, capacities) == pack_slowly(tokens, capacities)


@given(falling_lengths(max_capacities=4))
@settings(max_examples=400)
def test_rows_of_several_lengths_hold_every_sample_and_no_more_than_they_can(case):
    """Ties between rows of one room and different length may fall otherwise than sample by sample.

    So only what must hold is held against the slow rule: as many rows of the longest length, since
    these are opened before any tie between lengths can be.
    """
    tokens, capacities = case
    rows = rows_and_rooms(tokens, capacities)
    assert all(0 <= room < capacity for capacity, room in rows)
    assert sum(capacity - room for capacity, room in rows) == sum(tokens)
    longest = capacities[-1]
    slow = pack_slowly(tokens, capacities)
    assert sum(c == longest for c, _ in rows) == sum(c == longest for c, _ in slow)


def test_hand_calculated_rows_of_two_lengths():
    """Rows of 10 and 4. The 9 and the 7 open rows of 10; the 3 goes into the 7's room; of four 2s

    none fits beside the 9, so they fill two rows of 4; the 1 goes beside the 9.
    """
    assert rows_and_rooms([9, 7, 3, 2, 2, 2, 2, 1], (4, 10)) == [(4, 0), (4, 0), (10, 0), (10, 0)]


@pytest.mark.parametrize(
    ("tokens", "num_rows"),
    [([10], 1), ([10, 10, 10], 3), ([5] * 5, 3), ([1] * 25, 3), ([7, 6, 4, 3], 2), ([6] * 4, 4)],
)
def test_hand_calculated_rows_of_ten_tokens(tokens, num_rows):
    assert pack_falling(np.array(tokens), (10,))[0].max() + 1 == num_rows


@given(plan_cases("packed"))
def test_rows_are_as_long_as_said_or_as_the_longest_sample(case):
    tokens = admit_slowly(case.tokens, case.config).tokens_of_row.values()
    batching = case.config.batching
    plan = plan_batches(case.lengths, case.config, world_size=case.world_size)
    expected = batching.boundaries or (align_slowly(max(tokens), batching.align),)
    assert {length for _, length in plan.shapes} <= set(expected)
    # The longest sample opens a row of the first length that holds it.
    assert first_boundary(max(tokens), expected) in {length for _, length in plan.shapes}


@given(plan_cases("packed"))
def test_steps_and_fillers_follow_from_the_number_of_rows(case):
    tokens = admit_slowly(case.tokens, case.config).tokens_of_row.values()
    plan = plan_batches(case.lengths, case.config, world_size=case.world_size)
    capacities = resolve_boundaries(case.lengths, case.config).batching.boundaries
    _, packed = pack_falling(np.array(sorted(tokens, reverse=True)), capacities)
    batching, num_steps = case.config.batching, 0
    for entry, num_rows in enumerate(packed.num_rows.tolist()):
        if batching.batch_sizes:
            most = batching.batch_sizes[entry]
        else:
            most = batching.samples_per_batch or batching.tokens_per_batch // capacities[entry]
        num_steps += math.ceil(num_rows / (most * case.world_size))
    assert plan.num_steps == num_steps
    assert int((plan.rows_per_slot > 0).sum()) == packed.num_rows.sum()
    assert len(plan.rows_per_slot) == plan.batch_sizes.sum() * case.world_size


def test_which_samples_of_a_length_share_a_row_changes_with_the_epoch():
    tokens = [length // 8 * 8 + 8 for length in skewed_tokens(2000)]

    def shared(epoch):
        config = make_config({"batching.strategy": "packed"})
        plan = plan_batches(make_lengths(tokens), config, epoch=epoch)
        return {frozenset(slot) for step in plan.steps_of_rank(0) for slot in slots_of(step)}

    assert len(shared(0) & shared(1)) < len(shared(0)) / 2


def test_written_out_length_gives_the_same_plan():
    lengths = make_lengths(skewed_tokens(300))
    config = make_config({"batching.strategy": "packed"})
    resolved = resolve_boundaries(lengths, config)
    assert resolved.batching.boundaries == (2048,)
    assert plan_batches(lengths, config).fingerprint == plan_batches(lengths, resolved).fingerprint


def test_short_rows_beside_long_ones_take_less_attention_and_hardly_more_padding():
    """Chat-like lengths in rows of 2,048, or of 256 and 2,048: the sum of rows times length^2."""
    lengths = make_lengths(skewed_tokens(4000))

    def figures(boundaries):
        config = make_config(
            {
                "batching.strategy": "packed",
                "batching.boundaries": boundaries,
                "batching.tokens_per_batch": 8192,
            }
        )
        plan = plan_batches(lengths, config)
        stats = count_plan(plan, None)
        return stats.effective_token_fraction, sum(
            count * size * length**2 for (size, length), count in stats.shape_counts.items()
        )

    one_fraction, one_attention = figures([2048])
    two_fraction, two_attention = figures([256, 2048])
    assert two_attention < 0.75 * one_attention
    assert two_fraction > one_fraction - 0.03


def test_natural_lengths_fill_the_rows():
    """Chat-like lengths leave nothing over but the last rows; a figure of its own: 99.9 %."""
    tokens = np.sort(skewed_tokens(20_000))[::-1]
    rows, _ = pack_falling(tokens, (2048,))
    assert tokens.sum() / ((rows.max() + 1) * 2048) > 0.999

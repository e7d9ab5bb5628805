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
    make_config,
    make_lengths,
    plan_cases,
    skewed_tokens,
    slots_of,
)

from tuner.batching.packed import pack_falling
from tuner.batching.plan import plan_batches, resolve_boundaries
from tuner.errors import BadInputError


def pack_slowly(falling, capacity):
    """Room left in each row, by the rule as the textbook has it: the tightest row that fits."""
    rooms = []
    for length in falling:
        fitting = [index for index, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda index: rooms[index])] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@st.composite
def falling_lengths(draw):
    capacity = draw(st.integers(1, 60))
    few = st.sampled_from(draw(st.lists(st.integers(1, capacity), min_size=1, max_size=4)))
    tokens = draw(st.lists(st.integers(1, capacity) | few, min_size=1, max_size=120))
    return sorted(tokens, reverse=True), capacity


@given(falling_lengths())
@settings(max_examples=400)
def test_rows_are_as_full_as_those_of_the_sample_by_sample_rule(case):
    tokens, capacity = case
    rows = pack_falling(np.array(tokens), capacity)
    loads = np.bincount(rows, weights=tokens)
    assert sorted((capacity - loads).astype(int).tolist()) == pack_slowly(tokens, capacity)
    assert loads.min() > 0


@pytest.mark.parametrize(
    ("tokens", "num_rows"),
    [([10], 1), ([10, 10, 10], 3), ([5] * 5, 3), ([1] * 25, 3), ([7, 6, 4, 3], 2), ([6] * 4, 4)],
)
def test_hand_calculated_rows_of_ten_tokens(tokens, num_rows):
    assert pack_falling(np.array(tokens), 10).max() + 1 == num_rows


@given(plan_cases("packed"))
def test_rows_are_as_long_as_said_or_as_the_longest_sample(case):
    tokens = admit_slowly(case.tokens, case.config).tokens_of_row.values()
    batching = case.config.batching
    plan = plan_batches(case.lengths, case.config, world_size=case.world_size)
    ((_, length),) = plan.shapes
    expected = batching.boundaries or (align_slowly(max(tokens), batching.align),)
    assert (length,) == tuple(expected)


@given(plan_cases("packed"))
def test_steps_and_fillers_follow_from_the_number_of_rows(case):
    tokens = admit_slowly(case.tokens, case.config).tokens_of_row.values()
    plan = plan_batches(case.lengths, case.config, world_size=case.world_size)
    ((size, length),) = plan.shapes
    num_rows = len(pack_slowly(sorted(tokens, reverse=True), length))
    most = case.config.batching.samples_per_batch or (
        case.config.batching.tokens_per_batch // length
    )
    assert plan.num_steps == math.ceil(num_rows / (most * case.world_size))
    assert int((plan.rows_per_slot > 0).sum()) == num_rows
    assert len(plan.rows_per_slot) == plan.num_steps * size * case.world_size


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


def test_several_boundaries_are_refused():
    with pytest.raises(BadInputError, match=r"one entry at most \(got 2\)"):
        make_config({"batching.strategy": "packed", "batching.boundaries": [8, 16]})


def test_natural_lengths_fill_the_rows():
    """Chat-like lengths leave nothing over but the last rows; a figure of its own: 99.9 %."""
    tokens = np.sort(skewed_tokens(20_000))[::-1]
    rows = pack_falling(tokens, 2048)
    assert tokens.sum() / ((rows.max() + 1) * 2048) > 0.999

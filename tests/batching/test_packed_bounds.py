"""The most that a batch of packed rows holds, against counting the batches of many epochs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from strategies import admit_slowly, make_config, make_lengths, plan_cases, slots_of

from tuner.batching.packed_bounds import PackedBounds, packed_bounds
from tuner.batching.plan import plan_batches

EPOCHS = range(4)


def sequences_of(step, tokens_of_row):
    """Samples of every row, and 1 more where they do not fill it."""
    return sum(
        len(slot) + (sum(tokens_of_row[row] for row in slot) < step.padded_length)
        for slot in slots_of(step)
    )


@given(plan_cases("packed"), st.data())
def test_no_batch_of_any_epoch_and_rank_holds_more(case, data):
    admitted = admit_slowly(case.tokens, case.config).tokens_of_row
    rank = data.draw(st.integers(0, case.world_size - 1))
    bounds = None
    for epoch in EPOCHS:
        plan = plan_batches(case.lengths, case.config, epoch=epoch, world_size=case.world_size)
        found = packed_bounds(plan, case.config.batching)
        assert bounds in (None, found), "graphs that hold one epoch hold the next"
        bounds = found
        for step in plan.steps_of_rank(rank):
            size, length = step.shape
            assert sequences_of(step, admitted) <= bounds.sequences
            assert size * length <= bounds.tokens


def test_hand_calculated_bounds():
    """Rows of 10, two a batch: three of one sample, and one of the ten 1s; all are full.

    The fullest two have 10 + 1 and 1 + 1, as every row counts as if it had padding.
    """
    config = make_config(
        {
            "batching.strategy": "packed",
            "batching.boundaries": [10],
            "batching.samples_per_batch": 2,
            "batching.tokens_per_batch": None,
        }
    )
    plan = plan_batches(make_lengths([10, 10, 10, *[1] * 10]), config)
    assert packed_bounds(plan, config.batching) == PackedBounds(sequences=13, tokens=20)


def test_rows_that_are_not_packed_have_no_bounds():
    config = make_config()
    plan = plan_batches(make_lengths([5, 9]), config)
    assert packed_bounds(plan, config.batching) is None

"""Seconds of a bucket against the batches that are filled with its rows."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import make_config

from tuner.batching.bucket_time import BucketTime, RunCost
from tuner.batching.grouping import fill_buckets
from tuner.errors import BadInputError


def cost_of(*, epochs=1, world_size=1, compile_s=(3.0, 0.5)):
    """A step of 1 s + 0.01 s a token, a compile of some seconds and some more a row."""
    return RunCost(
        step_s=lambda shape: 1.0 + 0.01 * shape[0] * shape[1],
        compile_s=lambda shape: compile_s[0] + compile_s[1] * shape[0],
        epochs=epochs,
        world_size=world_size,
    )


SIZES = st.integers(64, 2000).map(lambda most: {"batching.tokens_per_batch": most}) | (
    st.integers(1, 12).map(
        lambda rows: {"batching.tokens_per_batch": None, "batching.samples_per_batch": rows}
    )
)


@given(
    rows=st.integers(1, 300),
    length=st.integers(1, 64),
    sizes=SIZES,
    one_size=st.booleans(),
    epochs=st.integers(1, 3),
    world_size=st.sampled_from([1, 2, 3]),
)
def test_it_is_the_time_of_the_batches_that_are_filled(
    rows, length, sizes, one_size, epochs, world_size
):
    batching = make_config({**sizes, "batching.one_size_per_length": one_size}).batching
    cost = cost_of(epochs=epochs, world_size=world_size)
    rng = np.random.default_rng(0)
    filled = fill_buckets(np.full(rows, length), np.array([length]), batching, rng, world_size)
    steps = Counter(zip(filled.batch_sizes.tolist(), filled.padded_lengths.tolist(), strict=True))
    wanted = sum(epochs * count * cost.step_s(shape) for shape, count in steps.items())
    wanted += sum(map(cost.compile_s, steps))
    time = BucketTime(np.array([length]), batching, cost)
    assert time.bucket_s(np.array([rows]), np.array([0])) == pytest.approx([wanted], rel=1e-9)


def test_a_table_of_rows_and_lengths_is_worked_out_at_once():
    """Budget 32: of 8 tokens 4 rows a batch, of 16 tokens 2. A step 1 s + 0.01 s a token."""
    batching = make_config({"batching.tokens_per_batch": 32}).batching
    time = BucketTime(np.array([8, 16]), batching, cost_of(compile_s=(0.0, 0.0)))
    rows, columns = np.array([[1, 4, 5]]), np.array([[0], [1]])
    # Five rows of 8: two steps of 3 x 8 with a filler; of 16: three of 2 x 16.
    wanted = [[1.08, 1.32, 2 * 1.24], [1.16, 2 * 1.32, 3 * 1.32]]
    assert time.bucket_s(rows, columns) == pytest.approx(np.array(wanted))
    assert time.shared_row_s() == pytest.approx([1.32 / 4, 1.32 / 2])


def test_a_sample_count_makes_full_batches_of_one_size():
    """Batches of 4: five rows take two, of 8 tokens 2 * 1.32 s, of 16 tokens 2 * 1.64 s."""
    sizes = {"batching.tokens_per_batch": None, "batching.samples_per_batch": 4}
    time = BucketTime(
        np.array([8, 16]), make_config(sizes).batching, cost_of(compile_s=(0.0, 0.0))
    )
    rows, columns = np.array([[4, 5]]), np.array([[0], [1]])
    assert time.bucket_s(rows, columns) == pytest.approx(np.array([[1.32, 2.64], [1.64, 3.28]]))


def test_the_compile_is_that_of_the_largest_batch():
    batching = make_config({"batching.tokens_per_batch": 32}).batching
    time = BucketTime(np.array([8, 16]), batching, cost_of())
    assert time.full_compile_s() == pytest.approx([3.0 + 0.5 * 4, 3.0 + 0.5 * 2])


def test_a_budget_below_the_longest_row_is_refused():
    batching = make_config({"batching.tokens_per_batch": 32}).batching
    with pytest.raises(BadInputError, match="at least the longest padded row"):
        BucketTime(np.array([8, 40]), batching, cost_of())

"""Every weight has one rank, and no rank has much more than it must."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tuner.train.weight_shares import owners_of_weights


def fullest(sizes, owners, num_ranks):
    return max(
        sum(s for s, o in zip(sizes, owners, strict=True) if o == r) for r in range(num_ranks)
    )


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_the_fullest_rank_is_within_a_third_of_the_best_split(sizes, num_ranks):
    owners = owners_of_weights(sizes, num_ranks)
    assert len(owners) == len(sizes)
    assert set(owners) <= set(range(num_ranks))
    best = min(
        fullest(sizes, split, num_ranks)
        for split in itertools.product(range(num_ranks), repeat=len(sizes))
    )
    # Graham 1969: 4/3 - 1/(3m), in whole numbers.
    assert 3 * num_ranks * fullest(sizes, owners, num_ranks) <= (4 * num_ranks - 1) * best


def test_by_hand():
    assert owners_of_weights([5, 3, 3, 2, 2, 1], 2) == (0, 1, 1, 0, 1, 0)
    assert owners_of_weights([4, 4], 4) == (0, 1)
    assert owners_of_weights([7, 1, 2], 1) == (0, 0, 0)

"""Blocks of the epoch hold every length in its share, in random order."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.batching.order import BLOCK_STEPS, shuffle_in_blocks


def shuffled_lengths(lengths, seed=0):
    lengths = np.array(lengths)
    return lengths[shuffle_in_blocks(lengths, np.random.default_rng(seed))]


def correlation(values):
    return np.corrcoef(values[:-1], values[1:])[0, 1]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=500), st.integers(0, 99))
def test_every_batch_comes_once(lengths, seed):
    order = shuffle_in_blocks(np.array(lengths), np.random.default_rng(seed))
    assert sorted(order.tolist()) == list(range(len(lengths)))


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=6),
    st.integers(0, 99),
)
def test_any_first_part_of_an_epoch_has_its_share_of_every_length(steps_of_length, seed):
    """Within a block's own share, and one batch for the rounding at its edge."""
    lengths = np.repeat(np.arange(1, len(steps_of_length) + 1) * 8, steps_of_length)
    order = shuffled_lengths(lengths, seed)
    num_blocks = max(1, len(lengths) // BLOCK_STEPS)
    for length, steps in Counter(lengths.tolist()).items():
        share = np.arange(1, len(lengths) + 1) * steps / len(lengths)
        # A block holds share + 1 of a length at most, and ends that many lengths of steps early.
        allowed = steps / num_blocks + 2 + len(steps_of_length) * steps / len(lengths)
        assert np.abs(np.cumsum(order == length) - share).max() <= allowed


def test_a_plain_shuffle_would_not_keep_the_shares():
    """The check above can fail: half the shuffles leave a rare length further from its share."""
    lengths = np.repeat([8, 512], [6000, 400])
    worst = []
    for seed in range(10):
        plain = np.random.default_rng(seed).permutation(lengths)
        blocks = shuffled_lengths(lengths, seed)
        share = np.arange(1, 6401) * 400 / 6400
        worst.append([np.abs(np.cumsum(o == 512) - share).max() for o in (plain, blocks)])
    plain, blocks = np.array(worst).T
    assert blocks.max() <= 400 / 100 + 2
    assert np.median(plain) > 2 * blocks.max()


@pytest.mark.parametrize("num_lengths", [2, 8, 32])
def test_neighbours_are_not_of_like_length(num_lengths):
    lengths = np.repeat(np.arange(1, num_lengths + 1) * 64, 3200 // num_lengths)
    found = [correlation(shuffled_lengths(lengths, seed)) for seed in range(20)]
    # 1 / BLOCK_STEPS below zero on average; one epoch of 3200 spreads by 1 / sqrt(3200).
    assert np.mean(found) == pytest.approx(-1 / BLOCK_STEPS, abs=0.02)
    assert np.abs(found).max() < 0.1
    assert correlation(np.sort(lengths)) > 0.9


def test_inside_a_block_the_order_is_random():
    """The first step of an epoch is any length with the odds of its share."""
    lengths = np.repeat([8, 16, 32], [32, 16, 16])
    first = Counter(int(shuffled_lengths(lengths, seed)[0]) for seed in range(2000))
    assert first[8] == pytest.approx(1000, abs=100)
    assert first[16] == pytest.approx(500, abs=80)

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from tuner.simulate.advice import judge_lengths
from tuner.simulate.histogram import LengthHistogram
from tuner.simulate.waste import expected_padded_tokens, profile_lengths


def profile_of(tokens, batch_size):
    return profile_lengths(LengthHistogram.from_tokens(np.array(tokens)), batch_size)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("lengths", [[1, 4, 9, 9, 20], [3], [7, 7, 7], [1, 2, 3, 4, 5, 60]])
def test_expected_padding_is_the_mean_over_all_shuffles(lengths, batch_size):
    totals = []
    for order in permutations(lengths):
        batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        totals.append(sum(len(batch) * max(batch) for batch in batches))
    expected = sum(totals) / len(totals)
    histogram = LengthHistogram.from_tokens(np.array(lengths))
    assert expected_padded_tokens(histogram, batch_size) == pytest.approx(expected)


def test_expected_padding_is_what_real_shuffles_come_to():
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5, 1, 5000).astype(np.int32) + 1
    means = []
    for _ in range(20):
        batches = rng.permutation(lengths)[: 5000 // 16 * 16].reshape(-1, 16)
        means.append(16 * batches.max(axis=1).sum())
    whole = expected_padded_tokens(LengthHistogram.from_tokens(lengths), 16)
    assert whole == pytest.approx(np.mean(means) * 5000 / (5000 // 16 * 16), rel=0.01)


def test_profile_of_a_few_lengths_by_hand():
    profile = profile_of([10, 2, 4, 4], batch_size=2)
    assert (profile.num_samples, profile.total_tokens) == (4, 20)
    assert (profile.shortest, profile.longest, profile.num_distinct_lengths) == (2, 10, 3)
    assert profile.fraction_when_padded_to_longest == 0.5
    # 6 pairs: {10,x} three times 10, {4,4}, {4,2}, {4,2}: mean longest 42 / 6 = 7, 2 batches.
    assert profile.fraction_of_random_batches == pytest.approx(20 / 28)
    assert profile.percentiles[50] == 4
    assert profile.percentiles[25] == 2
    assert profile.percentiles[99] == 10


def test_percentiles_are_lengths_that_occur():
    lengths = np.random.default_rng(1).integers(1, 1000, 777)
    profile = profile_of(lengths, 16)
    for percent, size in profile.percentiles.items():
        assert size == np.percentile(lengths, percent, method="inverted_cdf")


def lengths_with_padding(percent: int) -> np.ndarray:
    """100 rows, the longest has 100 tokens; so many percent of the padded tokens are padding."""
    return np.array([100] * (100 - percent) + [0] * percent, np.int32)


@pytest.mark.parametrize(
    ("percent", "decision"),
    [(0, "fixed"), (19, "fixed"), (20, "depends"), (30, "depends"), (31, "variable_length")],
)
def test_the_verdict_follows_the_padding_of_fixed_length(percent, decision):
    verdict = judge_lengths(profile_of(lengths_with_padding(percent), 16))
    assert verdict.decision == decision
    assert f"wastes {percent}.0% of the tokens" in verdict.reason


def test_between_the_limits_the_reason_says_what_decides():
    verdict = judge_lengths(profile_of(lengths_with_padding(25), 16))
    assert "What decides is the length of the run" in verdict.reason


def test_random_batches_that_still_waste_are_pointed_out():
    long_tail = np.array([1000, *[10] * 99], np.int32)
    assert "group rows of like length" in judge_lengths(profile_of(long_tail, 50)).reason
    assert "group rows" not in judge_lengths(profile_of(long_tail, 1)).reason

"""Who has won: known winners, known noise, the truth inside the interval as often as said."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.study.verdict import Candidate, judge

A = Candidate(name="a", simplicity=(8, 2))
B = Candidate(name="b", simplicity=(1, 0))
C = Candidate(name="c", simplicity=(3, 2))


def test_a_lead_far_beyond_noise_is_significant():
    verdict = judge([A, B], {"a": [100.0, 101.0, 99.5], "b": [200.0, 203.0, 198.0]})
    assert (verdict.winner, verdict.fastest, verdict.is_significant) == ("a", "a", True)
    # Geometric means: (100 * 101 * 99.5)^(1/3) over (200 * 203 * 198)^(1/3).
    expected = (100 * 101 * 99.5 / (200 * 203 * 198)) ** (1 / 3)
    assert verdict.of("b").speed_ratio == pytest.approx(expected)
    assert verdict.of("b").low < expected < verdict.of("b").high < 1.0
    assert verdict.of("b").is_slower
    assert verdict.of("a").speed_ratio == verdict.of("a").low == verdict.of("a").high == 1.0


def test_a_lead_within_noise_goes_to_the_simpler_config():
    verdict = judge([A, B], {"a": [100.0, 108.0, 99.0], "b": [103.0, 101.0, 106.0]})
    assert verdict.fastest == "a"
    assert not verdict.is_significant
    assert verdict.winner == "b"
    assert not verdict.of("b").is_slower


def test_of_three_the_simplest_of_the_equal_ones_wins_and_the_slow_one_does_not():
    run_s = {"a": [100.0, 107.0], "b": [300.0, 310.0], "c": [104.0, 101.0]}
    verdict = judge([A, B, C], run_s)
    assert verdict.winner == "c"
    assert [item.name for item in verdict.compared][-1] == "b"
    assert verdict.of("b").is_slower


def test_what_slows_a_whole_round_slows_all_and_tells_nothing():
    """The machine takes twice as long in round 2; the ratio is 1.1 in both."""
    verdict = judge([A, B], {"a": [100.0, 200.0], "b": [110.0, 220.0]})
    assert verdict.of("b").speed_ratio == pytest.approx(1 / 1.1)
    assert verdict.is_significant and verdict.winner == "a"


def test_one_round_assumes_a_noise_and_calls_nothing_significant():
    """3 % a side: 1.96 * 0.03 * sqrt(2) = 0.0832 of the log ratio."""
    verdict = judge([A, B], {"a": [100.0], "b": [150.0]})
    assert not verdict.is_significant
    assert verdict.of("b").low == pytest.approx(2 / 3 * np.exp(-0.08316), rel=1e-4)
    assert verdict.of("b").high == pytest.approx(2 / 3 * np.exp(0.08316), rel=1e-4)
    assert verdict.winner == "a"
    near = judge([A, B], {"a": [100.0], "b": [107.0]})
    assert near.winner == "b"


def test_a_candidate_alone_wins():
    verdict = judge([A], {"a": [100.0, 101.0]})
    assert verdict.winner == "a"
    assert [item.name for item in verdict.compared] == ["a"]


def test_figures_that_agree_to_the_last_digit_still_have_the_least_noise():
    verdict = judge([A, B], {"a": [100.0] * 3, "b": [100.1] * 3})
    assert not verdict.is_significant and verdict.winner == "b"
    far = judge([A, B], {"a": [100.0] * 3, "b": [120.0] * 3})
    assert far.is_significant and far.winner == "a"


@pytest.mark.parametrize(("num_candidates", "num_rounds"), [(6, 2), (6, 3), (3, 2), (2, 4)])
def test_the_truth_is_inside_the_interval_as_often_as_said(num_candidates, num_rounds):
    """Two equal candidates among slower ones, noise 2 %, rounds that differ by 5 %."""
    rng = np.random.default_rng([num_candidates, num_rounds])
    candidates = [Candidate(name=str(i), simplicity=(i,)) for i in range(num_candidates)]
    inside = 0
    for _ in range(300):
        level = np.where(np.arange(num_candidates) < 2, 0.0, 0.3)[:, None]
        logs = level + rng.normal(0.0, 0.05, num_rounds)
        logs = logs + rng.normal(0.0, 0.02, (num_candidates, num_rounds))
        verdict = judge(candidates, {str(i): np.exp(row).tolist() for i, row in enumerate(logs)})
        other = verdict.of("1" if verdict.fastest == "0" else "0")
        inside += other.low <= 1.0 <= other.high
    # 95 % of 300 with the binomial's three standard deviations: 274 at least.
    assert inside >= 274


def test_the_noise_that_is_stated_is_the_true_one():
    rng = np.random.default_rng(4)
    candidates = [Candidate(name=str(i), simplicity=(i,)) for i in range(20)]
    logs = rng.normal(0.0, 0.2, 10) + rng.normal(0.0, 0.03, (20, 10))
    verdict = judge(candidates, {str(i): np.exp(row).tolist() for i, row in enumerate(logs)})
    assert verdict.noise == pytest.approx(0.03, rel=0.15)

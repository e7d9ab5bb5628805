"""The baselines: what they set, and that every study measures them once, before its trials."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from search_case import COST, HUNDRED_ROWS, SMALL, TEN_ROWS, baselines, proposals, search
from strategies import skewed_tokens
from study_case import Seen, make_setup, make_space

from tuner.study.baselines import (
    PACKED,
    PAD_TO_LONGEST,
    RANDOM_BATCHES,
    TEN_QUANTILES,
    YOUR_CONFIG,
    baseline_names,
)
from tuner.study.choose import pad_to_longest
from tuner.trial.fake import FakeRunner

IN_ORDER = [PAD_TO_LONGEST, RANDOM_BATCHES, TEN_QUANTILES, PACKED]


def test_all_run_first_in_order_and_do_not_count_as_trials(tmp_path):
    seen = Seen()
    result = search(make_setup(tmp_path, HUNDRED_ROWS, SMALL, trials=3), FakeRunner(COST), seen)
    named = [item.outcome.baseline for item in result.outcomes]
    assert named == [*IN_ORDER, None, None, None]
    assert [item.number for item in result.outcomes[:4]] == [0, 1, 2, 3]
    configs = [item.outcome.config for item in result.outcomes]
    assert seen.started == configs
    found = pad_to_longest(result.outcomes)
    assert found is not None and found.number == 0


def test_they_are_what_they_say(tmp_path):
    result = search(make_setup(tmp_path, HUNDRED_ROWS, SMALL, trials=1), FakeRunner(COST))
    told = [
        (name, item.outcome.config.batching.strategy, item.outcome.config.graph.mode)
        for name, item in baselines(result).items()
    ]
    assert told == [
        (PAD_TO_LONGEST, "fixed", "static"),
        (RANDOM_BATCHES, "dynamic", "dynamic"),
        (TEN_QUANTILES, "bucketed", "static"),
        (PACKED, "packed", "static"),
    ]
    for item in baselines(result).values():
        batching = item.outcome.config.batching
        # The largest budget of the space: 4 rows of 500, padded to 512.
        assert (batching.align, batching.tokens_per_batch) == (32, 4 * 512)
    # Every row of 512 tokens, 4 a batch: 25 steps.
    assert baselines(result)[PAD_TO_LONGEST].outcome.figures.shape_counts == {(4, 512): 25}


def test_your_config_comes_last_as_it_is_and_only_if_there_is_one(tmp_path):
    assert baseline_names(has_own_config=False) == tuple(IN_ORDER)
    assert baseline_names(has_own_config=True) == (*IN_ORDER, YOUR_CONFIG)
    base = {
        "batching.strategy": "bucketed",
        "batching.boundaries": [100, 500],
        "batching.tokens_per_batch": 1500,
        "graph.mode": "static",
    }
    setup = make_setup(tmp_path, HUNDRED_ROWS, SMALL, base=base, trials=2, has_own_config=True)
    result = search(setup, FakeRunner(COST))
    assert [item.outcome.baseline for item in result.outcomes][:5] == [*IN_ORDER, YOUR_CONFIG]
    assert len(proposals(result)) == 2
    own = baselines(result)[YOUR_CONFIG].outcome.config
    assert own.batching == setup.base.batching and own.graph == setup.base.graph
    # Only the update is that of all, so that it trains the same.
    assert own.train.tokens_per_update == 4 * 500


@pytest.mark.parametrize("seed", range(4))
def test_ten_quantiles_are_those_of_numpy_aligned_to_32(tmp_path, seed):
    tokens = skewed_tokens(700, seed=seed, longest=1500)
    setup = make_setup(tmp_path, tokens, make_space(), trials=1, memory_limit_bytes=10**12)
    result = search(setup, FakeRunner(COST))
    ends = np.quantile(tokens, np.arange(1, 11) / 10, method="inverted_cdf")
    expected = sorted({-(-int(end) // 32) * 32 for end in ends})
    outcome = baselines(result)[TEN_QUANTILES].outcome
    assert list(outcome.config.batching.boundaries) == expected
    assert 5 <= len(expected) <= 10
    # All of its shapes are measured, so that its figure rests on no fit.
    assert outcome.estimate is not None and outcome.estimate.measured_time_fraction == 1.0


def test_all_gather_the_same_tokens_for_an_update(tmp_path):
    own = {"batching.tokens_per_batch": 600}
    setup = make_setup(tmp_path, HUNDRED_ROWS, SMALL, base=own, trials=4, has_own_config=True)
    result = search(setup, FakeRunner(COST))
    gathered = {item.outcome.config.train.tokens_per_update for item in result.outcomes}
    assert gathered == {4 * 500}
    # 9,300 tokens in updates of at least 2,000: 4 or 5, whatever the batches are.
    updates = {item.outcome.figures.num_updates for item in result.outcomes}
    assert updates <= {4, 5}


def test_the_base_keeps_its_own_tokens_per_update(tmp_path):
    base = {"train.tokens_per_update": 900}
    result = search(make_setup(tmp_path, HUNDRED_ROWS, SMALL, base=base, trials=2),
                    FakeRunner(COST))  # fmt: skip
    assert {item.outcome.config.train.tokens_per_update for item in result.outcomes} == {900}


def test_short_rows_are_not_padded_to_32_for_nothing(tmp_path):
    result = search(make_setup(tmp_path, [9] * 20, make_space(), trials=1), FakeRunner(COST))
    assert baselines(result)[PAD_TO_LONGEST].outcome.shapes == ((4, 16),)


def test_are_measured_once_over_two_starts(tmp_path):
    setup = make_setup(tmp_path, TEN_ROWS, SMALL, trials=1)
    first, second = FakeRunner(COST), FakeRunner(COST)
    search(setup, first)
    result = search(dataclasses.replace(setup, trials=3), second)
    assert [item.outcome.baseline for item in result.outcomes if item.outcome.baseline] == IN_ORDER
    strategies = {config.batching.strategy for config in second.configs}
    assert "packed" not in strategies


def test_a_baseline_that_runs_out_of_memory_is_run_with_half_the_budget(tmp_path):
    """No process may hold more than two rows of the longest; the first one cannot know that."""
    tokens = skewed_tokens(300, seed=0, longest=500)

    def fails(config):
        is_large = (config.batching.tokens_per_batch or 0) > 2 * 512
        return ("oom", "2.00 GB, over the limit of 1.00 GB") if is_large else None

    runner = FakeRunner(COST, fails=fails)
    result = search(make_setup(tmp_path, tokens, make_space(), trials=1), runner)
    found = {name: item.outcome for name, item in baselines(result).items() if name in IN_ORDER}
    assert set(found) == set(IN_ORDER)
    for outcome in found.values():
        assert outcome.status == "ok", outcome.reason
        assert outcome.config.batching.tokens_per_batch == 2 * 512
    # What does not run with one row either has the reason of that.
    alone = FakeRunner(COST, fails=lambda config: ("oom", "not even that"))
    (tmp_path / "none").mkdir()
    result = search(make_setup(tmp_path / "none", tokens, make_space(), trials=1), alone)
    failed = baselines(result)[PAD_TO_LONGEST].outcome
    assert (failed.status, failed.reason) == ("oom", "not even that")
    assert failed.config.batching.tokens_per_batch == 512


def test_half_the_budget_keeps_what_was_found_of_the_precision(tmp_path):
    def fails(config):
        return ("oom", "9 GB") if (config.batching.tokens_per_batch or 0) > 512 else None

    setup = make_setup(tmp_path, HUNDRED_ROWS, make_space(compute_dtype=["fp16"]), trials=1)
    result = search(setup, FakeRunner(COST, fails=fails))
    padded = baselines(result)[PAD_TO_LONGEST].outcome
    assert (padded.status, padded.config.batching.tokens_per_batch) == ("ok", 512)
    assert padded.precision is not None and padded.precision.violation <= 0


def test_a_baseline_too_large_for_memory_takes_a_smaller_token_budget(tmp_path):
    """A process takes 0.5 GB and 50,000 bytes a token of every shape, so 2,048 tokens 0.1 GB."""
    tokens = skewed_tokens(700, seed=0, longest=500)
    setup = make_setup(tmp_path, tokens, make_space(), trials=1, memory_limit_bytes=1_150_000_000)
    result = search(setup, FakeRunner(COST))
    padded, buckets = (baselines(result)[name].outcome for name in (PAD_TO_LONGEST, TEN_QUANTILES))
    assert padded.config.batching.tokens_per_batch == 4 * 512
    assert buckets.num_shapes >= 8
    # At 4 * 512 that many shapes take over 1.3 GB, at half of it under 1 GB.
    assert buckets.config.batching.tokens_per_batch == 2 * 512
    assert buckets.status == "ok"
    assert buckets.expected_peak_bytes < 1_150_000_000
    # The update is that of all the same.
    assert buckets.config.train.tokens_per_update == padded.config.train.tokens_per_update

"""Batches that fill the memory of the made-up device, and plans that would not fit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from search_case import COST, HUNDRED_ROWS, baselines, proposals, search
from study_case import Seen, make_setup, make_space

from tuner.simulate.cost_book import CostBook
from tuner.study.baselines import PAD_TO_LONGEST, TEN_QUANTILES
from tuner.study.fill import FILLED, config_to_fill, measure_filled, needs_filling
from tuner.study.memory_search import CLOSE_ENOUGH
from tuner.study.unit import plan_unit
from tuner.trial.fake import FakeRunner

SPACE = make_space(
    strategy=["bucketed", "fixed"],
    num_buckets={"low": 1, "high": 4},
    longest_rows_per_batch=[1, 2, 4],
)
TOKENS_THAT_FIT = 4000
# 500 MB of the process, 50 kB a padded token of every static shape.
LIMIT = 500_000_000 + 50_000 * TOKENS_THAT_FIT


def tokens_of(shapes):
    return sum(size * length for size, length in shapes)


def test_after_an_oom_the_largest_batches_that_fit_are_found(tmp_path):
    seen, runner = Seen(), FakeRunner(COST)
    setup = make_setup(tmp_path, HUNDRED_ROWS, SPACE, trials=4, memory_limit_bytes=LIMIT)
    result = search(setup, runner, seen)
    assert baselines(result)[PAD_TO_LONGEST].outcome.status == "ok"
    # 1,280 to 2,048 tokens for each of four shapes would be too many: half of the budget fits.
    assert baselines(result)[TEN_QUANTILES].outcome.config.batching.tokens_per_batch == 2 * 512
    filled = baselines(result)[FILLED].outcome
    assert filled.status == "ok" and len(proposals(result)) == 4
    batching = filled.config.batching
    assert batching.tokens_per_batch is None
    assert len(batching.batch_sizes) == len(batching.boundaries)
    assert tokens_of(filled.shapes) <= TOKENS_THAT_FIT
    assert filled.peak_bytes == 500_000_000 + 50_000 * tokens_of(filled.shapes) <= LIMIT
    # Every bucket was tried by real steps, one shape a process.
    tries = [spec for spec in runner.specs if spec.timed_steps == 2]
    assert tries and {len(spec.shapes) for spec in tries} == {1}
    names = [item.outcome.baseline for item in result.outcomes]
    assert names.count(FILLED) == 1


@pytest.mark.parametrize("tokens_that_fit", [3000, 4000, 9000])
def test_batch_sizes_are_those_by_hand_to_within_the_stated_share(tmp_path, tokens_that_fit):
    limit = 500_000_000 + 50_000 * tokens_that_fit
    base = {"train.tokens_per_update": 10_000}
    setup = make_setup(tmp_path, HUNDRED_ROWS, SPACE, base=base, memory_limit_bytes=limit)
    np.save(setup.folder.lengths, setup.data.lengths.tokens)
    config = dataclasses.replace(setup).base.model_copy(
        update={"batching": setup.base.batching.model_copy(
            update={
                "strategy": "bucketed",
                "boundaries": (32, 96, 160, 320, 512),
                "num_buckets": 5,
                "tokens_per_batch": 2048,
            }
        )}
    )  # fmt: skip
    runner = FakeRunner(COST)
    unit = plan_unit(setup, 0, config, CostBook(), FILLED)
    outcome = measure_filled(setup, runner, unit, CostBook())
    assert outcome.status == "ok"
    sizes = dict(zip(outcome.config.batching.boundaries, outcome.config.batching.batch_sizes,
                     strict=True))  # fmt: skip
    rows = {32: 40, 96: 30, 160: 20, 320: 8, 512: 2}
    left = tokens_that_fit
    for index, length in enumerate((512, 320, 160, 96, 32)):
        # An equal part of what those before it, as they were found, have left.
        most = min(left // (5 - index) // length, rows[length])
        assert most - max(1.0, CLOSE_ENOUGH * most) <= sizes[length] <= most
        left -= sizes[length] * length
    assert left >= 0
    assert tokens_of(outcome.shapes) == tokens_that_fit - left


def test_not_one_row_beside_the_others_is_an_oom_that_says_so(tmp_path):
    limit = 500_000_000 + 50_000 * 2000
    setup = make_setup(tmp_path, HUNDRED_ROWS, SPACE, trials=2, memory_limit_bytes=limit)
    result = search(setup, FakeRunner(COST))
    filled = baselines(result)[FILLED].outcome
    # 2,000 tokens for four shapes: 500 for the one of 512.
    assert filled.status == "oom"
    assert filled.reason == "not one row of 512 tokens fits in memory beside the other shapes"


def test_memory_that_is_not_short_is_filled_only_if_asked_for(tmp_path):
    result = search(make_setup(tmp_path, HUNDRED_ROWS, SPACE, trials=3), FakeRunner(COST))
    assert FILLED not in baselines(result)
    assert not needs_filling(make_setup(tmp_path, HUNDRED_ROWS, SPACE), result.outcomes)
    asked = SPACE.model_copy(update={"fill_memory": True})
    (tmp_path / "asked").mkdir()
    setup = make_setup(
        tmp_path / "asked", HUNDRED_ROWS, asked, trials=3, memory_limit_bytes=10**12
    )
    result = search(setup, FakeRunner(COST))
    filled = baselines(result)[FILLED].outcome
    assert filled.status == "ok"
    # All rows of a bucket, or the 2,000 tokens of an update.
    for length, size in zip(
        filled.config.batching.boundaries, filled.config.batching.batch_sizes, strict=True
    ):
        below = [end for end in filled.config.batching.boundaries if end < length]
        rows = sum(max(below, default=0) < row <= length for row in HUNDRED_ROWS)
        most = min(rows, 2000 // length)
        assert most - max(1.0, CLOSE_ENOUGH * most) <= size <= most


def test_the_fastest_static_buckets_are_filled(tmp_path):
    result = search(make_setup(tmp_path, HUNDRED_ROWS, SPACE, trials=5), FakeRunner(COST))
    config = config_to_fill(result.outcomes)
    bucketed = [item for item in result.outcomes
                if item.outcome.config.batching.strategy == "bucketed"]  # fmt: skip
    fastest = max(bucketed, key=lambda item: item.outcome.real_tokens_per_s or 0.0)
    assert config == fastest.outcome.config
    assert config_to_fill([]) is None


def test_a_plan_that_does_not_fit_by_the_fitted_memory_is_refused_before_it_is_run(tmp_path):
    runner = FakeRunner(COST)
    space = make_space(
        strategy=["bucketed"],
        num_buckets={"low": 1, "high": 4},
        longest_rows_per_batch=[1, 2, 4],
    )
    setup = make_setup(
        tmp_path, HUNDRED_ROWS, space, trials=60, memory_limit_bytes=LIMIT,
        base={"train.epochs": 100},
    )  # fmt: skip
    result = search(setup, runner)
    refused = [item.outcome for item in result.outcomes if item.outcome.is_over_memory]
    assert refused
    # The tries for the largest batches have their boundaries, but one shape each.
    whole = [spec.config for spec in runner.specs if spec.timed_steps != 2]
    for outcome in refused:
        assert outcome.config not in whole and outcome.wall_s == 0.0
        # The fit knows it to a tenth.
        assert tokens_of(outcome.shapes) * 1.15 > TOKENS_THAT_FIT
        gigabytes = (500_000_000 + 50_000 * tokens_of(outcome.shapes)) / 1e9
        assert outcome.reason == (
            f"its {outcome.num_shapes} shapes together would take {gigabytes:.2f} GB "
            "(estimated; 0.70 GB are allowed), over the memory limit"
        )
    for item in result.outcomes:
        if item.outcome.status == "ok" and item.outcome.config.graph.mode == "static":
            assert tokens_of(item.outcome.shapes) <= 1.15 * TOKENS_THAT_FIT
    best = result.best
    assert best is not None
    assert best.outcome.expected_peak_bytes == pytest.approx(
        500_000_000 + 50_000 * tokens_of(best.outcome.shapes), rel=0.02
    )


def test_truncated_rows_count_as_rows_of_the_last_bucket(tmp_path):
    """30 rows are cut to 64 tokens: all of them may be in one batch."""
    base = {
        "data.max_length": 64,
        "data.overflow": "truncate",
        "batching.strategy": "bucketed",
        "batching.boundaries": [32, 64],
        "batching.tokens_per_batch": 128,
        "train.tokens_per_update": 10_000,
    }
    tokens = [20] * 10 + [200] * 30
    setup = make_setup(tmp_path, tokens, SPACE, base=base, memory_limit_bytes=10**12)
    np.save(setup.folder.lengths, setup.data.lengths.tokens)
    unit = plan_unit(setup, 0, setup.base, CostBook(), FILLED)
    outcome = measure_filled(setup, FakeRunner(COST), unit, CostBook())
    assert outcome.config.batching.batch_sizes == (10, 30)

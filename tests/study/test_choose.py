"""Which candidate is the best, which is the simpler one, and where a config comes from."""

from __future__ import annotations

import dataclasses

import pytest
from search_case import COST, HUNDRED_ROWS, SMALL, baselines, search
from study_case import make_setup

from tuner.simulate.measurement import CostKey
from tuner.study.baselines import PACKED, PAD_TO_LONGEST, RANDOM_BATCHES, TEN_QUANTILES
from tuner.study.choose import (
    choose_best,
    is_feasible,
    pad_to_longest,
    simplicity,
    with_provenance,
)
from tuner.study.outcome import NumberedOutcome, PrecisionCheck
from tuner.trial.fake import FakeRunner
from tuner.trial.record import Installation


@pytest.fixture
def setup(tmp_path):
    return make_setup(tmp_path, HUNDRED_ROWS, SMALL, base={"train.epochs": 100}, trials=8)


@pytest.fixture
def result(setup):
    return search(setup, FakeRunner(COST))


def with_speed(item, number, speed, **changes):
    estimate = dataclasses.replace(item.outcome.estimate, estimated_real_tokens_per_s=speed)
    outcome = dataclasses.replace(item.outcome, estimate=estimate, **changes)
    return NumberedOutcome(number=number, outcome=outcome)


def test_the_most_real_tokens_per_second_of_equals_the_earliest(result):
    any_one = result.outcomes[0]
    items = [with_speed(any_one, n, speed) for n, speed in enumerate([5.0, 9.0, 9.0, 7.0])]
    best = choose_best(items)
    assert best is not None and best.number == 1
    assert choose_best([]) is None


def test_what_breaks_a_tolerance_is_not_the_best_however_fast(result):
    check = PrecisionCheck(
        loss_deviation=0.1, gradient_deviation=0.1, num_nonfinite=0, violation=0.01
    )
    exact = dataclasses.replace(check, violation=0.0)
    items = [
        with_speed(result.outcomes[0], 0, 5.0),
        with_speed(result.outcomes[0], 1, 9.0, precision=check),
        with_speed(result.outcomes[0], 2, 7.0, precision=exact),
    ]
    assert [is_feasible(item.outcome) for item in items] == [True, False, True]
    best = choose_best(items)
    assert best is not None and best.number == 2


def test_what_has_no_figure_is_not_feasible(result):
    failed = dataclasses.replace(result.outcomes[0].outcome, status="oom", estimate=None)
    assert not is_feasible(failed)
    assert choose_best([NumberedOutcome(number=0, outcome=failed)]) is None


def test_padding_to_the_longest_is_found_wherever_it_was_tried(result):
    found = pad_to_longest(result.outcomes)
    assert found is not None and found.outcome.config.batching.strategy == "fixed"
    fixed = [
        item.outcome.real_tokens_per_s or 0.0
        for item in result.outcomes
        if item.outcome.config.batching.strategy == "fixed"
    ]
    assert found.outcome.real_tokens_per_s == max(fixed)


def test_the_simpler_has_fewer_graphs_then_plainer_batches(result):
    named = baselines(result)
    by_name = {name: simplicity(item.outcome) for name, item in named.items()}
    # One graph each but for four buckets; then the plainer batching.
    assert sorted(by_name, key=lambda name: by_name[name]) == [
        PAD_TO_LONGEST,
        RANDOM_BATCHES,
        PACKED,
        TEN_QUANTILES,
    ]
    assert by_name[TEN_QUANTILES][0] == 4
    low = named[PAD_TO_LONGEST].outcome
    precision = low.config.precision.model_copy(
        update={"compute_dtype": "fp16", "fp32_ops": ("softmax",)}
    )
    config = low.config.model_copy(update={"precision": precision})
    low = dataclasses.replace(low, config=config)
    assert by_name[PAD_TO_LONGEST] < simplicity(low) < by_name[RANDOM_BATCHES]


def provenance_of(best, result, setup):
    return with_provenance(
        best,
        data=setup.data,
        costs=result.book.known(CostKey.of(best.outcome.config, "CPU")),
        study_name="varseq-tune",
        installation=Installation(device="CPU", versions={"mindspore": "2.10.0"}),
    )


def test_the_config_says_where_it_comes_from(result, setup):
    best = result.best
    assert best is not None
    config = provenance_of(best, result, setup)
    provenance = config.provenance
    assert provenance is not None
    assert config.model_copy(update={"provenance": None}) == best.outcome.config
    assert (provenance.trial, provenance.num_samples) == (best.number, 100)
    assert provenance.data_fingerprint == setup.data.dataset.fingerprint
    assert provenance.shapes == best.outcome.shapes
    prediction, estimate = provenance.prediction, best.outcome.estimate
    assert prediction is not None and estimate is not None
    assert prediction.estimated_run_s == estimate.estimated_run_s
    assert prediction.estimated_real_tokens_per_s == best.outcome.real_tokens_per_s
    # 500 MB and 50 kB a padded token of every static shape.
    tokens = sum(size * length for size, length in best.outcome.shapes)
    assert prediction.peak_bytes == pytest.approx(5e8 + 5e4 * tokens, rel=0.02)
    failed = dataclasses.replace(best.outcome, estimate=None)
    with pytest.raises(ValueError, match="was not measured"):
        provenance_of(NumberedOutcome(number=3, outcome=failed), result, setup)


def test_the_config_says_what_steps_and_compiles_cost_and_how_long_the_rows_were(result, setup):
    """On a device whose costs are known: 0.02 + 1.3e-4 B L + 2.8e-7 B L^2, a compile 5 s."""
    best = result.best
    assert best is not None
    provenance = provenance_of(best, result, setup).provenance
    assert provenance is not None and provenance.cost is not None
    assert len(provenance.prediction.step_s) == len(provenance.shapes)
    factor = 1.9 if best.outcome.config.graph.mode == "dynamic" else 1.0
    for (size, length), seconds in zip(
        provenance.shapes, provenance.prediction.step_s, strict=True
    ):
        by_hand = 0.02 + 1.3e-4 * size * length + 2.8e-7 * size * length**2
        assert seconds == pytest.approx(factor * by_hand, rel=0.03)
        a, b, c = provenance.cost.step_s
        fitted = a + b * size * length + c * size * length**2
        assert fitted == pytest.approx(factor * by_hand, rel=0.05)
    base_s, per_step_s = provenance.cost.compile_s
    assert base_s + per_step_s * provenance.prediction.step_s[0] == pytest.approx(5.0, rel=0.1)
    # 40 rows of 20, 30 of 70, 20 of 150, 8 of 300, 2 of 500: a row is a percent.
    assert provenance.length_percentiles == (
        *[20] * 41, *[70] * 30, *[150] * 20, *[300] * 8, *[500] * 2
    )  # fmt: skip

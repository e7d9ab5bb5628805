"""The end of a run and the drift of its data, as a person reads them."""

from __future__ import annotations

import dataclasses

import pytest
from strategies import make_config, make_lengths, skewed_tokens

from tuner.batching.plan import plan_batches, resolve_boundaries
from tuner.cli.train_drift import describe_drift
from tuner.cli.train_end import format_end
from tuner.cli.train_view import describe_evaluation
from tuner.config.schema import CostRecord, PredictionRecord, ProvenanceConfig
from tuner.simulate.drift import find_drift
from tuner.simulate.length_shift import length_percentiles
from tuner.train.metrics import EvaluationRecord, LengthLoss
from tuner.train.run_summary import Check, RunSummary, ShapeFigures

PREDICTION = PredictionRecord(
    estimated_run_s=10.0, estimated_real_tokens_per_s=5000.0,
    estimated_steady_real_tokens_per_s=6000.0, estimated_compile_s=9.0,
    effective_token_fraction=0.9, peak_bytes=10**9,
)  # fmt: skip

EVALUATION = EvaluationRecord(
    step=40, seconds=1.25, rows=30, label_tokens=1234, loss=2.5, perplexity=12.1825,
    by_length=(
        LengthLoss(up_to=64, rows=20, label_tokens=400, loss=2.25, perplexity=9.488),
        LengthLoss(up_to=512, rows=10, label_tokens=834, loss=2.62, perplexity=13.74),
    ),
)  # fmt: skip

SUMMARY = RunSummary(
    num_steps=40, num_updates=10, run_s=21.0, step_s=19.0, predicted_step_s=17.5,
    observed_step_s=18.25, warm_up_s=11.5, evaluation_s=1.25, data_wait_s=1.0,
    real_tokens=100_000, real_tokens_per_s=5_000.0, effective_token_fraction=0.75,
    recompiles=0, recompile_s=0.0, num_slow=2, slow_excess_s=1.75, peak_bytes=2 * 10**9,
    memory_kind="resident set of the process", first_loss=5.5, last_loss=2.125,
    shapes=(
        ShapeFigures(
            batch_size=4, padded_length=512, num_steps=30, predicted_step_s=0.5,
            median_step_s=0.55, p95_step_s=0.6, trend=0.2, is_flat=False,
        ),
        ShapeFigures(
            batch_size=16, padded_length=64, num_steps=10, predicted_step_s=None,
            median_step_s=0.175, p95_step_s=0.18, trend=None, is_flat=None,
        ),
    ),
    checks=(
        Check(name="padding", is_passed=False, found="75.0%", advice="do this"),
        Check(name="compiles", is_passed=True, found="none"),
        Check(name="curve", is_passed=None, found="too few steps"),
    ),
    evaluation=EVALUATION,
)  # fmt: skip


def end(summary=SUMMARY, predicted=PREDICTION):
    return format_end(summary, predicted, planned_steps=100, done_steps=60)


def line(text, start):
    (found,) = [item for item in text.splitlines() if item.startswith(start)]
    return " ".join(found.removeprefix(start).split())


def test_predicted_stands_beside_observed():
    text = end()
    assert line(text, "steps of the run") == "100 60"
    assert line(text, "steps of this process") == "40"
    assert line(text, "effective token fraction") == "0.900 0.750"
    assert line(text, "real tokens/s, steps and waiting") == "6,000 5,000"
    assert line(text, "seconds of these steps, without updates") == "17.5 18.2"
    assert line(text, "slow steps") == "2 (1.8 s too long)"
    assert line(text, "evaluation perplexity") == "12.182"
    rows = [" ".join(item.split()) for item in text.splitlines()]
    assert "4 x 512 30 0.500 0.550 0.600 1.10 not flat (trend +20%)" in rows
    assert "16 x 64 10 0.175 0.180 too few steps" in rows


def test_of_many_shapes_those_that_took_most_time_are_shown():
    one = SUMMARY.shapes[1]
    shapes = tuple(
        dataclasses.replace(one, padded_length=8 * number, num_steps=number)
        for number in range(40, 0, -1)
    )
    lines = end(dataclasses.replace(SUMMARY, shapes=shapes)).splitlines()
    shown = [int(line.split("x")[1].split()[0]) for line in lines if " 16 x" in f" {line}"]
    assert shown == [8 * number for number in range(40, 24, -1)]
    assert "24 other shapes took less time: summary.json has all" in lines


def test_checks_say_what_to_do():
    lines = end().splitlines()
    assert "[look] padding: 75.0%; do this" in lines
    assert "[ok]   compiles: none" in lines
    assert "[?]    curve: too few steps" in lines


def test_waiting_for_data_is_pointed_out_when_it_is_much():
    assert "waits for data" not in end()
    assert "waits for data 24% of the time" in end(dataclasses.replace(SUMMARY, data_wait_s=6.0))


def test_what_was_predicted_for_other_data_is_not_shown():
    assert line(end(predicted=None), "effective token fraction") == "0.750"


def test_an_evaluation_is_a_line():
    assert describe_evaluation(EVALUATION) == (
        "evaluation after step 40: loss 2.5000, perplexity 12.18 over 1,234 labels of 30 rows in "
        "1.2 s; by length up to 64: 2.250, up to 512: 2.620"
    )
    none = dataclasses.replace(EVALUATION, loss=None, label_tokens=0)
    assert "no labels" in describe_evaluation(none)
    assert "no number" in describe_evaluation(dataclasses.replace(EVALUATION, loss=None))
    huge = dataclasses.replace(EVALUATION, loss=1000.0, perplexity=None)
    assert "beyond all numbers" in describe_evaluation(huge)


def tuned_to(boundaries):
    tokens = skewed_tokens(800)
    config = make_config(
        {
            "batching.num_buckets": 8,
            "batching.tokens_per_batch": 8192,
            "batching.boundaries": boundaries,
        }
    )
    config = resolve_boundaries(make_lengths(tokens), config)
    return config, ProvenanceConfig(
        data_fingerprint="f", num_samples=800, device="CPU", versions={}, study="s", trial=0,
        shapes=plan_batches(make_lengths(tokens), config).shapes, prediction=PREDICTION,
        length_percentiles=length_percentiles(make_lengths(tokens).tokens),
        cost=CostRecord(step_s=(0.02, 1.3e-4, 2.8e-7), compile_s=(0.0, 0.0)),
    )  # fmt: skip


@pytest.fixture
def tuned():
    return tuned_to([])


def described(tuned, tokens):
    config, provenance = tuned
    drift = find_drift(config, provenance, make_lengths(tokens))
    return drift, "\n".join(describe_drift(drift, "best.yaml", "new.mindrecord"))


def test_drift_is_told_in_words_with_both_figures_and_the_command(tuned):
    tokens = [max(1, length // 8) for length in skewed_tokens(2000, seed=4)] + [4000] * 3
    drift, text = described(tuned, tokens)
    assert f"{drift.tuned.real_tokens_per_s:,.0f} real tokens/s" in text
    assert f"{drift.anew.real_tokens_per_s:,.0f} real tokens/s" in text
    assert f"statistic {drift.shift.statistic:.2f}" in text
    assert f"{drift.shift.share_now:.0%} of the rows now" in text
    assert "3 rows are longer than every tuned shape" in text
    assert "retune: " in text
    assert text.endswith("varseq-tune --data new.mindrecord --config best.yaml")


def test_like_rows_keep_the_config(tuned):
    drift, _ = described(tuned, skewed_tokens(800))
    tuned = tuned_to(list(drift.anew.padded_lengths))
    _, text = described(tuned, skewed_tokens(800))
    assert "the same as far as the percentiles" in text
    assert "keep: the tuned shapes lose" in text
    assert "varseq-tune" not in text
    config, provenance = tuned
    old = provenance.model_copy(update={"length_percentiles": (), "cost": None})
    _, text = described((config, old), skewed_tokens(800))
    assert "does not say how long its rows were" in text
    assert "costs of a small decoder measured on a 2-core CPU" in text

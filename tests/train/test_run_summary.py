"""Predicted against observed, and the three checks, on figures made up by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest
from step_records import record

from tuner.config.schema import PredictionRecord, ProvenanceConfig
from tuner.train.run_log import RunLog
from tuner.train.run_summary import RunFigures, sum_up, write_summary

RUN = RunFigures(run_s=30.0, warm_up_s=12.0, peak_bytes=2 * 10**9, memory_kind="made up")
SHAPES = ((2, 32), (4, 8))


def tuned(step_s=(0.5, 0.2)):
    return ProvenanceConfig(
        data_fingerprint="f", num_samples=10, device="CPU", versions={}, study="s", trial=0,
        shapes=SHAPES,
        prediction=PredictionRecord(
            estimated_run_s=10.0, estimated_real_tokens_per_s=100.0,
            estimated_steady_real_tokens_per_s=120.0, estimated_compile_s=9.0,
            effective_token_fraction=0.9, peak_bytes=10**9, step_s=step_s,
        ),
    )  # fmt: skip


def summary_of(tmp_path, steps, provenance=None, run=RUN):
    log = RunLog(tmp_path, 0)
    for number, (shape, changes) in enumerate(steps, start=1):
        log.append(record(number, shape, **changes))
    log.close()
    return sum_up(log.figures(), run, provenance)


def checks(summary):
    return [check.is_passed for check in summary.checks]


def test_shapes_stand_beside_what_the_study_said(tmp_path):
    steps = [((2, 32), {"step_s": 0.75 + 0.25, "update_s": 0.25})] * 3
    steps += [((4, 8), {"step_s": 0.1})] * 2
    summary = summary_of(tmp_path, steps, tuned())
    large, small = summary.shapes
    assert (large.batch_size, large.padded_length, large.num_steps) == (2, 32, 3)
    assert (large.predicted_step_s, large.median_step_s, large.ratio) == (0.5, 0.75, 1.5)
    assert small.predicted_step_s == 0.2
    assert small.ratio == pytest.approx(0.5)
    # Of just these steps, without the updates: 3 * 0.5 + 2 * 0.2 and 3 * 0.75 + 2 * 0.1.
    assert summary.predicted_step_s == pytest.approx(1.9)
    assert summary.observed_step_s == pytest.approx(2.45)


def test_a_process_that_takes_several_batches_a_step_is_predicted_so(tmp_path):
    run = dataclasses.replace(RUN, batches_per_step=3)
    summary = summary_of(tmp_path, [((2, 32), {"step_s": 1.5})] * 2, tuned(), run)
    assert (summary.shapes[0].predicted_step_s, summary.shapes[0].ratio) == (1.5, 1.0)
    assert summary.predicted_step_s == 3.0


def test_what_the_study_did_not_say_is_left_open(tmp_path):
    steps = [((2, 32), {}), ((8, 8), {})]
    for provenance in (None, tuned(step_s=()), tuned()):
        summary = summary_of(tmp_path, steps, provenance)
        assert summary.predicted_step_s is None
        assert [shape.ratio is None for shape in summary.shapes][1]


def test_the_whole_is_of_the_steps_of_this_process(tmp_path):
    steps = [((4, 8), {"step_s": 0.4, "data_wait_s": 0.1, "real_tokens": 20})] * 10
    summary = summary_of(tmp_path, steps)
    assert summary.real_tokens_per_s == pytest.approx(200 / 5.0)
    assert summary.data_wait_fraction == pytest.approx(0.2)
    assert summary.effective_token_fraction == pytest.approx(20 / 32)
    assert (summary.run_s, summary.warm_up_s, summary.peak_bytes) == (30.0, 12.0, 2 * 10**9)


def test_a_run_that_is_set_up_well_passes_all_checks(tmp_path):
    summary = summary_of(tmp_path, [((2, 8), {"real_tokens": 13})] * 12)
    assert checks(summary) == [True, True, True]
    assert all(not check.advice for check in summary.checks)


def test_every_check_fails_on_its_own_and_says_what_to_do(tmp_path):
    full = {"real_tokens": 16}
    padded = summary_of(tmp_path / "a", [((2, 8), {"real_tokens": 12})] * 12)
    assert checks(padded) == [False, True, True]
    assert "75.0%" in padded.checks[0].found and "varseq-tune" in padded.checks[0].advice
    compiled = summary_of(
        tmp_path / "b", [((2, 8), {**full, "recompiles": 2, "recompile_s": 3.5})] * 12
    )
    assert checks(compiled) == [True, False, True]
    assert compiled.checks[1].found == "2, 3.5 s"
    slowing = [((2, 8), {**full, "step_s": 0.1 if step < 16 else 0.2}) for step in range(24)]
    uneven = summary_of(tmp_path / "c", slowing)
    assert checks(uneven) == [True, True, False]
    assert "B=2 L=8 (trend +100%" in uneven.checks[2].found
    assert "profile" in uneven.checks[2].advice


def test_too_few_steps_are_not_judged(tmp_path):
    steps = [((2, 8), {"step_s": 0.1 * (1 + step)}) for step in range(11)]
    summary = summary_of(tmp_path, steps)
    assert summary.checks[2].is_passed is None
    assert "too few steps" in summary.checks[2].found
    assert checks(summary_of(tmp_path / "none", [])) == [None, None, None]


def test_the_file_has_the_same_figures(tmp_path):
    summary = summary_of(tmp_path, [((2, 32), {"step_s": 0.75})] * 12, tuned())
    write_summary(tmp_path, summary)
    plain = json.loads((tmp_path / "summary.json").read_text())
    assert plain["num_steps"] == 12
    assert plain["shapes"][0]["ratio"] == 1.5
    assert plain["data_wait_fraction"] == 0.0
    assert [check["is_passed"] for check in plain["checks"]] == checks(summary)
    assert plain["real_tokens_per_s"] == summary.real_tokens_per_s

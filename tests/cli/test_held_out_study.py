"""Rows held out for evaluation: what a study plans is what the training then runs."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
from search_case import COST, search
from strategies import make_config, rows_of, skewed_tokens

from tuner.batching.plan import plan_batches
from tuner.cli.tune_setup import set_up_study
from tuner.config.codec import format_config
from tuner.data.held_out import HELD_OUT, is_held_out
from tuner.data.mindrecord import MindRecordWriter
from tuner.errors import BadInputError
from tuner.report.gather import best_config
from tuner.simulate.stats import count_plan
from tuner.train.provenance import check_provenance
from tuner.train.run_inputs import open_inputs
from tuner.trial.fake import FakeRunner
from tuner.trial.folder import StudyFolder

pytestmark = pytest.mark.mindspore

TOKENS = skewed_tokens(300, longest=200)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "data.mindrecord"
    return write(path, TOKENS)


def write(path, tokens):
    with MindRecordWriter(path, description={"length_of": "input_ids"}) as writer:
        for length in tokens:
            ids = np.ones(length, np.int32)
            writer.write([{"input_ids": ids, "labels": ids, "length": length}])
    return path


@pytest.fixture(scope="module")
def tuned(data, tmp_path_factory):
    """A study on a made-up device with a base config that holds rows out; its best config."""
    folder = tmp_path_factory.mktemp("study")
    base = make_config(
        {
            "data.path": str(data),
            "train.epochs": 200,
            "train.out": str(folder / "run"),
            "evaluation.fraction": 0.25,
            "evaluation.seed": 3,
        }
    )
    (folder / "base.yaml").write_text(format_config(base))
    options = argparse.Namespace(
        config=str(folder / "base.yaml"), data=None, assignments=[], space="default", study="s",
        storage=None, new_study=False, cost_model=None, dry_run=False, jobs=1, trials=6, seed=0,
        confirm=0, confirm_seconds=8.0, timeout=None, trial_timeout=60.0, memory_limit="64GB",
    )  # fmt: skip
    notices: list[str] = []
    runner = FakeRunner(COST)
    setup = set_up_study(options, StudyFolder(folder), runner, notices.append)
    result = search(setup, runner)
    config = best_config(result, setup)
    assert config is not None
    return setup, result, config, notices


def test_the_training_runs_exactly_what_the_study_planned(tuned):
    setup, result, config, notices = tuned
    held_out = is_held_out(len(TOKENS), config.evaluation)
    assert 40 < held_out.sum() < 110
    assert f"{held_out.sum()} rows are held out for evaluation and not tuned on" in notices
    inputs = open_inputs(config, None)
    assert inputs.plan.fingerprint == plan_batches(setup.data.lengths, config).fingerprint
    assert set(inputs.plan.shapes) == set(config.provenance.shapes)
    figures = count_plan(inputs.plan, config.train.tokens_per_update)
    assert figures == result.best.outcome.figures
    assert inputs.plan.dropped[HELD_OUT] == held_out.sum()
    assert not held_out[rows_of(inputs.plan)].any()
    assert len(rows_of(inputs.plan)) == (~held_out).sum()


def test_what_is_evaluated_is_what_was_held_out(tuned):
    _, _, config, _ = tuned
    inputs = open_inputs(config, None)
    held_out = np.flatnonzero(is_held_out(len(TOKENS), config.evaluation)).tolist()
    evaluated = [
        row for item in inputs.evaluation.plan.classes for row in item.row_indices.tolist()
    ]
    assert sorted(evaluated) == held_out
    assert any("evaluation: " in line for line in inputs.notices())


def test_percentiles_are_of_the_rows_tuned_on(tuned):
    _, _, config, _ = tuned
    held_out = is_held_out(len(TOKENS), config.evaluation)
    own = sorted(np.array(TOKENS)[~held_out].tolist())
    percentiles = config.provenance.length_percentiles
    assert (percentiles[0], percentiles[100]) == (own[0], own[-1])
    assert percentiles[50] == own[-(-len(own) // 2) - 1]


def test_other_data_is_refused_or_has_the_tuned_shapes_alone(tuned, tmp_path):
    _, _, config, _ = tuned
    path = write(tmp_path / "new.mindrecord", skewed_tokens(150, seed=8, longest=400))
    other = config.model_copy(update={"data": config.data.model_copy(update={"path": str(path)})})
    with pytest.raises(BadInputError, match=r"not the data this config was tuned on.*--accept"):
        open_inputs(other, None)
    told = []
    inputs = open_inputs(other, lambda *heard: told.append(heard))
    assert inputs.is_other_data
    assert set(inputs.plan.shapes) <= set(config.provenance.shapes)
    assert {batch.shape for batch in inputs.plan.steps_of_rank(0)} <= set(config.provenance.shapes)
    longest = max(length for _, length in config.provenance.shapes)
    own = ~is_held_out(150, config.evaluation)
    too_long = int((np.array(skewed_tokens(150, seed=8, longest=400))[own] > longest).sum())
    assert inputs.plan.num_truncated == too_long > 0
    ((heard, lengths),) = told
    assert heard == other
    assert lengths.num_samples == 150
    # Some of the tuned shapes may be missing, but only where other data is accepted.
    fewer = inputs.plan.shapes[:1]
    check_provenance(other, shapes=fewer, accepts_fewer=True, device="CPU", notice=told.append)
    with pytest.raises(BadInputError, match="other shapes than were tuned"):
        check_provenance(
            other, shapes=fewer, accepts_fewer=False, device="CPU", notice=told.append
        )
    with pytest.raises(BadInputError, match="other shapes than were tuned"):
        check_provenance(
            other, shapes=((1, 7),), accepts_fewer=True, device="CPU", notice=told.append
        )

"""Trials and comparisons of a user's own Cell and of a checkpoint with adapters."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from strategies import make_config

from tuner.batching.plan import plan_batches, resolve_boundaries
from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import MindRecordWriter, open_mindrecord
from tuner.trial.folder import TrialFolder
from tuner.trial.record import TrialSpec
from tuner.trial.runner import ProcessRunner

pytestmark = [pytest.mark.mindspore, pytest.mark.slow]

CASES = Path(__file__).resolve().parents[1] / "train"
VOCAB = 23


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "data.mindrecord"
    rng = np.random.default_rng(3)
    with MindRecordWriter(path, description={"length_of": "input_ids"}) as writer:
        for length in [3, 5, 7, 8] * 6 + [12, 15] * 4:
            ids = rng.integers(0, VOCAB, length).astype(np.int32)
            writer.write([{"input_ids": ids, "labels": ids, "length": length}])
    return path


def run(data, tmp_path, monkeypatch, **changes):
    monkeypatch.syspath_prepend(CASES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    lengths = scan_lengths(open_mindrecord(data))
    np.save(tmp_path / "lengths.npy", lengths.tokens)
    plain = {"data.path": str(data), "batching.num_buckets": 2, "batching.tokens_per_batch": 64}
    config = resolve_boundaries(lengths, make_config({**plain, **changes}))
    counts = plan_batches(lengths, config).shape_counts()
    spec = TrialSpec(
        config=config,
        lengths_file=str(tmp_path / "lengths.npy"),
        shapes=tuple(sorted(filter(counts.get, counts), key=lambda shape: -shape[0] * shape[1])),
        timed_steps=2,
        time_limit_s=240.0,
        memory_limit_bytes=8 * 10**9,
    )
    return ProcessRunner().run(spec, TrialFolder(tmp_path / "trial")), spec


@pytest.mark.parametrize(
    ("strategy", "mode"), [("bucketed", "static"), ("packed", "static"), ("dynamic", "dynamic")]
)
def test_a_users_own_cell_is_measured(data, tmp_path, monkeypatch, strategy, mode):
    own = {"model.factory": "factories:one_layer", "model.vocab_size": VOCAB}
    changes = {"batching.strategy": strategy, "graph.mode": mode, **own}
    found, spec = run(data, tmp_path, monkeypatch, **changes)
    assert (found.status, found.reason) == ("ok", "")
    assert [item.shape for item in found.shapes] == list(spec.shapes)
    compiled = [item.has_compiled for item in found.shapes]
    assert compiled == (
        [True] * len(compiled) if mode == "static" else [True] + [False] * (len(compiled) - 1)
    )
    # An untrained model of 23 ids is not far from log 23 = 3.1 a label.
    assert all(2.5 < item.loss < 4.5 for item in found.shapes)


def test_a_cell_that_breaks_the_contract_is_a_refusal_with_its_reason(data, tmp_path, monkeypatch):
    own = {"model.factory": "factories:too_narrow", "model.vocab_size": VOCAB}
    found, _ = run(data, tmp_path, monkeypatch, **own)
    assert found.status == "refused"
    assert "must return logits [B, T, vocab_size]" in found.reason


def test_adapters_on_a_checkpoint_are_measured(data, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(CASES)
    from hf_case import write_family

    source = write_family(tmp_path / "source", "qwen2")
    model = {"source": str(source), "lora": {"rank": 2, "projections": ["q_proj"]}}
    found, spec = run(data, tmp_path, monkeypatch, model=model)
    assert (found.status, found.reason) == ("ok", "")
    assert [item.shape for item in found.shapes] == list(spec.shapes)


def test_rows_longer_than_the_positions_are_a_refusal(data, tmp_path, monkeypatch):
    found, _ = run(
        data, tmp_path, monkeypatch, **{"model.vocab_size": VOCAB, "model.max_positions": 8}
    )
    assert found.status == "refused"
    assert "model.max_positions is 8" in found.reason

"""metrics.jsonl: one line a step, and no step twice after a resume."""

from __future__ import annotations

import json

import pytest

from tuner.errors import BadInputError
from tuner.train.metrics import MetricsFile, StepRecord


def record(step):
    return StepRecord(
        step=step, epoch=0, batch_size=2, padded_length=8, step_s=0.1, data_wait_s=0.0,
        real_tokens=10, padded_tokens=16, label_tokens=8, loss=1.5, updates=step,
        grad_norm=0.5, learning_rate=1e-3, recompiles=0, memory_bytes=1,
    )  # fmt: skip


def steps_in(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_records_are_appended_and_seen_at_once(tmp_path):
    metrics = MetricsFile(tmp_path / "run", keep_steps=0)
    metrics.append(record(1))
    assert steps_in(tmp_path / "run") == [1]
    metrics.append(record(2))
    metrics.close()
    assert steps_in(tmp_path / "run") == [1, 2]


def test_resuming_takes_out_what_the_checkpoint_does_not_hold(tmp_path):
    metrics = MetricsFile(tmp_path, keep_steps=0)
    for step in range(1, 6):
        metrics.append(record(step))
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "los')
    metrics = MetricsFile(tmp_path, keep_steps=3)
    metrics.append(record(4))
    metrics.close()
    assert steps_in(tmp_path) == [1, 2, 3, 4]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match="cannot write"):
        MetricsFile(tmp_path / "file" / "run", keep_steps=0)

"""Records as JSON lines: one a step, and no step twice after a resume."""

from __future__ import annotations

import json

import pytest
from step_records import evaluation_record, record

from tuner.errors import BadInputError
from tuner.train.metrics import METRICS_FILE, RecordFile


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_records_are_appended_and_seen_at_once(tmp_path):
    path = tmp_path / "run" / METRICS_FILE
    metrics = RecordFile(path, keep_steps=0)
    metrics.append(record(1))
    assert steps_in(path) == [1]
    metrics.append(record(2))
    metrics.close()
    assert steps_in(path) == [1, 2]


def test_resuming_takes_out_what_the_checkpoint_does_not_hold(tmp_path):
    path = tmp_path / METRICS_FILE
    metrics = RecordFile(path, keep_steps=0)
    for step in range(1, 6):
        metrics.append(record(step))
    metrics.close()
    with path.open("a") as file:
        file.write('{"step": 6, "los')
    metrics = RecordFile(path, keep_steps=3)
    metrics.append(record(4))
    metrics.close()
    assert steps_in(path) == [1, 2, 3, 4]


def test_an_evaluation_is_a_line_too(tmp_path):
    evaluations = RecordFile(tmp_path / "evaluation.jsonl", keep_steps=0)
    evaluations.append(evaluation_record(5, loss=1.0, perplexity=2.718))
    evaluations.close()
    (line,) = (tmp_path / "evaluation.jsonl").read_text().splitlines()
    assert json.loads(line)["by_length"] == [
        {"up_to": 64, "rows": 2, "label_tokens": 9, "loss": 1.0, "perplexity": 2.718}
    ]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match="cannot write"):
        RecordFile(tmp_path / "file" / "run" / METRICS_FILE, keep_steps=0)

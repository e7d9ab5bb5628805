"""varseq-train with an evaluation, watched, and on data it was not tuned on: as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml
from checkpoint_case import parameter_bytes
from run_case import small_run, write_counting_rows
from test_event_file import scalars

from tuner.batching.plan import plan_batches, resolve_boundaries
from tuner.config.codec import load_config, to_plain
from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import open_mindrecord
from tuner.simulate.length_shift import length_percentiles

pytestmark = pytest.mark.mindspore

STEPS = 20


def write_rows(path, num_rows, longest=16, seed=0):
    return write_counting_rows(path, num_rows, (3, longest + 1), seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    write_rows(folder / "data.mindrecord", 150)
    write_rows(folder / "other.mindrecord", 60, seed=1)
    write_rows(folder / "longer.mindrecord", 90, longest=40, seed=2)
    plain = small_run(folder, "run", STEPS)
    (folder / "config.yaml").write_text(yaml.safe_dump(plain))
    return folder


BESIDE = (
    "--set",
    "evaluation.every_steps=6",
    "--set",
    "evaluation.path={folder}/other.mindrecord",
)


def command(folder, out, *more, config="config.yaml"):
    return [
        sys.executable, "-m", "tuner.cli.train", "--config", str(folder / config),
        "--set", f"train.out={folder / out}", *(text.format(folder=folder) for text in more),
    ]  # fmt: skip


def run(folder, out, *more, **changes):
    done = subprocess.run(
        command(folder, out, *more, **changes), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def lines(folder, out, name="evaluation.jsonl"):
    return [json.loads(line) for line in (folder / out / name).open()]


def losses(folder, out):
    return [
        {name: record[name] for name in ("step", "loss", "perplexity", "by_length")}
        for record in lines(folder, out)
    ]


def final_parameters(folder, out):
    return parameter_bytes(folder / out, STEPS)


@pytest.fixture(scope="module")
def evaluated(folder):
    return run(folder, "evaluated", *BESIDE)


@pytest.mark.slow
class TestEvaluatedRun:
    def test_it_is_evaluated_at_the_next_update_and_at_the_end(self, folder, evaluated):
        records = lines(folder, "evaluated")
        updates = [
            r["step"] for r in lines(folder, "evaluated", "metrics.jsonl") if r["grad_norm"]
        ]
        expected = [min(step for step in updates if step >= due) for due in (6, 12, 18)]
        assert [record["step"] for record in records] == sorted({*expected, STEPS})
        assert records[-1]["loss"] < records[0]["loss"]
        assert records[0]["perplexity"] == pytest.approx(np.exp(records[0]["loss"]))
        assert sum(part["rows"] for part in records[0]["by_length"]) == records[0]["rows"] == 60
        assert "[evaluation 2/2]" in evaluated.stderr
        assert "evaluation after step 20: loss" in evaluated.stderr
        assert " left" in evaluated.stderr
        assert "evaluation perplexity" in evaluated.stdout

    def test_the_weights_are_those_of_a_run_without(self, folder, evaluated):
        run(folder, "alone")
        assert final_parameters(folder, "evaluated") == final_parameters(folder, "alone")
        assert not (folder / "alone" / "evaluation.jsonl").read_text()

    def test_after_a_kill_the_same_records_and_events_are_there(self, folder, evaluated):
        process = subprocess.Popen(command(folder, "killed", *BESIDE), stderr=subprocess.DEVNULL)
        metrics = folder / "killed" / "metrics.jsonl"
        while process.poll() is None:
            if metrics.exists() and metrics.read_text().count("\n") >= 13:
                os.kill(process.pid, signal.SIGKILL)
                break
            time.sleep(0.005)
        process.wait()
        run(folder, "killed", *BESIDE, "--resume")
        assert losses(folder, "killed") == losses(folder, "evaluated")
        assert final_parameters(folder, "killed") == final_parameters(folder, "evaluated")
        found, whole = scalars(folder / "killed"), scalars(folder / "evaluated")
        for tag in ("train/loss", "evaluation/loss", "evaluation/perplexity"):
            assert found[tag] == whole[tag]
        assert set(whole["train/loss"]) == set(range(1, STEPS + 1))

    def test_the_end_is_of_the_steps_of_each_process(self, folder, evaluated):
        summary = json.loads((folder / "evaluated" / "summary.json").read_text())
        records = lines(folder, "evaluated", "metrics.jsonl")
        assert summary["num_steps"] == STEPS == sum(s["num_steps"] for s in summary["shapes"])
        assert summary["real_tokens"] == sum(record["real_tokens"] for record in records)
        assert summary["step_s"] == pytest.approx(sum(record["step_s"] for record in records))
        assert summary["recompiles"] == 0
        for shape in summary["shapes"]:
            own = [
                record["step_s"] - record["update_s"]
                for record in records
                if record["padded_length"] == shape["padded_length"]
            ]
            assert shape["median_step_s"] == pytest.approx(np.median(own), rel=1e-4)
        assert "effective tokens at least 80%" in evaluated.stdout

    def test_without_tensorboard_nothing_is_written_for_it(self, folder):
        run(folder, "plain", "--set", "train.tensorboard=false", "--set", "train.max_steps=2")
        assert not (folder / "plain" / "events").exists()


def tune_by_hand(folder):
    """A config as a study leaves it, for the data of this folder."""
    config = load_config(folder / "config.yaml")
    dataset = open_mindrecord(config.data.path)
    lengths = scan_lengths(dataset)
    config = resolve_boundaries(lengths, config)
    shapes = plan_batches(lengths, config).shapes
    plain = to_plain(config)
    plain["provenance"] = {
        "data_fingerprint": dataset.fingerprint, "num_samples": 150, "device": "CPU",
        "versions": {}, "study": "s", "trial": 3, "shapes": [list(shape) for shape in shapes],
        "prediction": {
            "estimated_run_s": 1.0, "estimated_real_tokens_per_s": 5000.0,
            "estimated_steady_real_tokens_per_s": 6000.0, "estimated_compile_s": 7.0,
            "effective_token_fraction": 0.9, "peak_bytes": 10**9,
            "step_s": [0.01] * len(shapes),
        },
        "length_percentiles": list(length_percentiles(lengths.tokens)),
        "cost": {"step_s": [0.001, 1e-5, 0.0], "compile_s": [0.0, 0.0]},
    }  # fmt: skip
    (folder / "best.yaml").write_text(yaml.safe_dump(plain))
    return shapes


@pytest.mark.slow
def test_other_data_is_trained_with_the_tuned_shapes_when_that_is_asked_for(folder):
    shapes = tune_by_hand(folder)
    other = ("--set", "data.path={folder}/longer.mindrecord", "--set", "train.max_steps=6")
    refused = subprocess.run(
        command(folder, "drifted", *other, config="best.yaml"), capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "--accept-data" in refused.stderr
    assert not (folder / "drifted").exists()
    done = run(folder, "drifted", *other, "--accept-data", config="best.yaml")
    assert "rows are longer than every tuned shape" in done.stderr
    assert "retune: " in done.stderr
    assert f"varseq-tune --data {folder}/longer.mindrecord --config {folder}/best.yaml" in (
        done.stderr
    )
    records = lines(folder, "drifted", "metrics.jsonl")
    met = {(record["batch_size"], record["padded_length"]) for record in records}
    assert met <= set(shapes)
    assert {record["recompiles"] for record in records} == {0}
    # What was predicted of other data is not compared, steps of the same shapes are.
    assert "6,000" not in done.stdout
    assert "0.010" in done.stdout
    resumed = run(
        folder, "drifted", *other, "--accept-data", "--resume", "--set", "train.max_steps=8",
        config="best.yaml",
    )  # fmt: skip
    assert "resumed after step 6" in resumed.stderr
    assert " ".join(resumed.stdout.split()).count("steps of this process 2") == 1


@pytest.mark.slow
def test_the_tuned_data_is_no_drift(folder):
    tune_by_hand(folder)
    short = ("--set", "train.max_steps=2", "--accept-data")
    done = run(folder, "same", *short, config="best.yaml")
    assert "not the data" not in done.stderr
    assert "6,000" in done.stdout

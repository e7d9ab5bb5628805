"""varseq-train as a user runs it: it learns, stops when told, and resumes to the same bits."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml
from checkpoint_case import parameter_bytes
from run_case import VOCAB, small_run

from tuner.cli.train import main
from tuner.data.mindrecord import MindRecordWriter

pytestmark = pytest.mark.mindspore

STEPS = 24


def write_rows(path, rows, **description):
    with MindRecordWriter(path, description={"length_of": "input_ids", **description}) as writer:
        for ids, labels in rows:
            writer.write(
                [
                    {
                        "input_ids": np.array(ids, np.int32),
                        "labels": np.array(labels, np.int32),
                        "length": len(ids),
                    }
                ]
            )


def counting_rows(num_rows, seed=0):
    """Rows that count upwards modulo the vocabulary: soon learnt."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num_rows):
        ids = (rng.integers(VOCAB) + np.arange(rng.integers(3, 17))) % VOCAB
        rows.append((ids, ids))
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with data and a config of two shapes, several steps a window, two epochs."""
    folder = tmp_path_factory.mktemp("run")
    write_rows(folder / "data.mindrecord", counting_rows(150))
    config = small_run(folder, "whole", STEPS)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def command(folder, out, *more):
    return [
        sys.executable, "-m", "tuner.cli.train", "--config", str(folder / "config.yaml"),
        "--set", f"train.out={folder / out}", *more,
    ]  # fmt: skip


def run(folder, out, *more):
    return subprocess.run(command(folder, out, *more), capture_output=True, text=True)


@pytest.fixture(scope="module")
def whole(folder):
    """An uninterrupted run: its finished process."""
    done = run(folder, "whole")
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def records(folder, out):
    lines = (folder / out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def course(folder, out):
    """What two runs of the same plan must share; timings they do not."""
    keys = ("step", "epoch", "batch_size", "padded_length", "real_tokens", "label_tokens",
            "loss", "updates", "grad_norm", "learning_rate", "clip_norm", "clipped")  # fmt: skip
    return [{key: record[key] for key in keys} for record in records(folder, out)]


def assert_same_run(folder, out):
    assert course(folder, out) == course(folder, "whole")
    mine, theirs = (parameter_bytes(folder / run, STEPS) for run in (out, "whole"))
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert mine[name] == value, name


def test_a_run_learns_and_says_what_it_did(folder, whole):
    steps = records(folder, "whole")
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["loss"] < 0.6 * steps[0]["loss"]
    assert {record["recompiles"] for record in steps} == {0}
    assert len({(record["batch_size"], record["padded_length"]) for record in steps}) == 2
    assert all(record["padded_tokens"] >= record["real_tokens"] for record in steps)
    assert "[warm-up 1/2]" in whole.stderr
    assert "[warm-up 2/2]" in whole.stderr
    assert "recompiles after warm-up" in whole.stdout
    assert "Traceback" not in whole.stderr


@pytest.mark.slow
def test_a_packed_run_learns_with_one_shape_and_hardly_any_padding(folder):
    done = run(folder, "packed", "--set", "batching.strategy=packed")
    assert done.returncode == 0, done.stderr[-3000:]
    steps = records(folder, "packed")
    assert steps[-1]["loss"] < 0.6 * steps[0]["loss"]
    assert {(record["batch_size"], record["padded_length"]) for record in steps} == {(8, 16)}
    assert {record["recompiles"] for record in steps} == {0}
    first_epoch = [record for record in steps if record["epoch"] == 0]
    real, padded = (
        sum(record[name] for record in first_epoch) for name in ("real_tokens", "padded_tokens")
    )
    # Most rows of 16 tokens are full, less the fillers of the last batch.
    assert real > 0.9 * padded


def test_updates_come_nearest_to_the_asked_tokens_and_at_the_end_of_an_epoch(folder, whole):
    """Of the running total of the first epoch, at 150 real tokens an update."""
    steps = [record for record in records(folder, "whole") if record["epoch"] == 0]
    running = list(itertools.accumulate(record["real_tokens"] for record in steps))
    expected = {len(steps) - 1}
    for update in range(1, math.floor(running[-1] / 150 + 0.5)):
        distances = [abs(total - update * 150) for total in running]
        expected.add(distances.index(min(distances)))
    found = {i for i, record in enumerate(steps) if record["grad_norm"] is not None}
    assert found == expected
    assert 0 < len(found) < len(steps) < STEPS


# Written when the step ends, so that a test knows which checkpoint is the newest.
AT_ONCE = ("--set", "train.async_checkpoint=false")


def kill_after(folder, out, step, signal_number, *more):
    """Start a run and send it a signal once it has recorded a step; its exit code."""
    process = subprocess.Popen(
        command(folder, out, *more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = folder / out / "metrics.jsonl"
    while process.poll() is None:
        if metrics.exists() and metrics.read_text().count("\n") >= step:
            os.kill(process.pid, signal_number)
            break
        time.sleep(0.005)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


# With the slow ones, as test_kills.py: test_course.py stops after every step, in one process.
@pytest.mark.slow
@pytest.mark.parametrize("step", [7, 13])
def test_a_killed_run_resumes_to_the_same_bits(folder, whole, step):
    out = f"killed{step}"
    code, _, _ = kill_after(folder, out, step, signal.SIGKILL, *AT_ONCE)
    assert code == -signal.SIGKILL
    done = run(folder, out, "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed after step" in done.stderr
    assert_same_run(folder, out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signal_number", "step", "code"), [(signal.SIGTERM, 3, 143), (signal.SIGINT, 8, 130)]
)
def test_a_signal_finishes_the_step_saves_and_resumes_inside_the_window(
    folder, whole, signal_number, step, code
):
    out = f"signal{step}"
    # With a save after every step, so that one is in flight.
    returned, output, errors = kill_after(
        folder, out, step, signal_number, "--set", "train.checkpoint_every_steps=1"
    )
    assert returned == code, errors[-3000:]
    assert "go on with --resume" in output
    done_steps = len(records(folder, out))
    assert done_steps < STEPS
    pointer = (folder / out / "checkpoints" / "latest").read_text().strip()
    assert pointer == f"step_{done_steps:08d}"
    done = run(folder, out, "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_run(folder, out)


def test_a_signal_while_warming_up_ends_the_run_with_nothing_written(folder):
    process = subprocess.Popen(
        command(folder, "early"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "[warm-up 1/2]" in line:
            os.kill(process.pid, signal.SIGINT)
            break
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "stopped before the first step" in errors
    assert not (folder / "early").exists()


@pytest.mark.slow
@pytest.mark.slow
def test_a_damaged_checkpoint_costs_steps_but_no_bits(folder, whole):
    out = "damaged"
    kill_after(folder, out, 13, signal.SIGKILL, *AT_ONCE)
    checkpoints = folder / out / "checkpoints"
    newest = checkpoints / (checkpoints / "latest").read_text().strip() / "parameters.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 4
    newest.write_bytes(bytes(content))
    done = run(folder, out, "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "damaged and passed over" in done.stderr
    assert_same_run(folder, out)


def test_a_loss_or_norm_that_is_no_number_stops_the_run_and_nothing_of_it_is_saved(folder):
    done = run(folder, "diverged", "--set", "optimizer.learning_rate=1e30",
               "--set", "train.clip_norm=null")  # fmt: skip
    assert done.returncode == 1
    assert re.search("the (loss|gradient norm) is (nan|inf)", done.stderr)
    assert not list((folder / "diverged").glob("checkpoints/step_*"))
    assert "learning_rate" in done.stderr
    assert "Traceback" not in done.stderr


def refused(capsys, *arguments):
    """The one error line of a call that must exit with 2."""
    code = main(list(arguments))
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if "error:" in line]
    assert code == 2, captured.err
    assert len(errors) == 1
    assert "Traceback" not in captured.err
    return errors[0]


@pytest.fixture
def config_file(folder):
    return str(folder / "config.yaml")


def test_other_runs_are_not_overwritten(folder, whole, capsys, config_file):
    before = (folder / "whole" / "metrics.jsonl").read_bytes()
    line = refused(capsys, "--config", config_file)
    assert "already holds a run" in line
    assert "--resume" in line
    assert (folder / "whole" / "metrics.jsonl").read_bytes() == before


def test_resuming_needs_a_checkpoint_and_the_same_run(folder, whole, capsys, config_file):
    arguments = ("--config", config_file, "--resume", "--set")
    assert "no checkpoint" in refused(capsys, *arguments, f"train.out={folder / 'nothing'}")
    line = refused(capsys, *arguments, "optimizer.learning_rate=0.5")
    assert "another config: optimizer.learning_rate 0.5, the checkpoint has 0.02" in line
    write_rows(folder / "other.mindrecord", counting_rows(150, seed=1))
    assert "other data" in refused(capsys, *arguments, f"data.path={folder / 'other.mindrecord'}")


def test_a_finished_run_has_nothing_left_to_do(folder, whole, capsys, config_file):
    before = (folder / "whole" / "metrics.jsonl").read_bytes()
    assert main(["--config", config_file, "--resume"]) == 0
    captured = capsys.readouterr()
    assert f"nothing left to do: all {STEPS} steps are done" in captured.out
    assert "warm-up" not in captured.err
    assert (folder / "whole" / "metrics.jsonl").read_bytes() == before


def test_bad_input_is_one_line_and_exit_code_2(folder, capsys, config_file, tmp_path):
    def set_to(*assignments):
        flags = [part for text in assignments for part in ("--set", text)]
        return refused(capsys, "--config", config_file, "--set", f"train.out={tmp_path}/r", *flags)

    assert "no such file" in refused(capsys, "--config", str(tmp_path / "none.yaml"))
    assert "did you mean max_steps" in set_to("train.max_step=3")
    assert "none.mindrecord" in set_to(f"data.path={tmp_path}/none.mindrecord")
    assert "vocabulary size 15" in set_to("model.vocab_size=15")
    assert "answer" in set_to("data.label_column=answer")
    assert "at least the longest padded row" in set_to("batching.tokens_per_batch=8")
    assert "O2 needs Ascend" in set_to("graph.jit_level=O2")
    assert "no Ascend device" in set_to("device=ascend")
    assert "cannot write" in refused(
        capsys, "--config", config_file, "--set", f"train.out={config_file}/r"
    )


def test_bad_rows_are_named(capsys, config_file, tmp_path):
    rows = [*counting_rows(20), ([1, 2, 3], [1, 2, 3, 4])]
    write_rows(tmp_path / "long.mindrecord", rows)
    line = refused(capsys, "--config", config_file,
                   "--set", f"data.path={tmp_path / 'long.mindrecord'}",
                   "--set", f"train.out={tmp_path / 'r'}")  # fmt: skip
    assert "row 20: labels is longer than input_ids" in line
    assert not (tmp_path / "r").exists()


def provenance(folder, **changes):
    from tuner.batching.plan import plan_batches
    from tuner.config.codec import load_config
    from tuner.data.lengths import scan_lengths
    from tuner.data.mindrecord import open_mindrecord
    from tuner.train.device import installed_versions

    config = load_config(folder / "config.yaml")
    dataset = open_mindrecord(config.data.path)
    return {
        "data_fingerprint": dataset.fingerprint, "num_samples": 150, "device": "CPU",
        "versions": installed_versions(), "study": "s", "trial": 3,
        "shapes": [list(s) for s in plan_batches(scan_lengths(dataset), config).shapes],
        "prediction": {
            "estimated_run_s": 1.0, "estimated_real_tokens_per_s": 5000.0,
            "estimated_steady_real_tokens_per_s": 6000.0, "estimated_compile_s": 7.0,
            "effective_token_fraction": 0.9, "peak_bytes": 10**9,
        },
        **changes,
    }  # fmt: skip


def with_provenance(folder, tmp_path, **changes):
    plain = yaml.safe_load((folder / "config.yaml").read_text())
    plain["provenance"] = provenance(folder, **changes)
    plain["train"] |= {"out": str(tmp_path / "out"), "max_steps": 2}
    path = tmp_path / "best.yaml"
    path.write_text(yaml.safe_dump(plain))
    return str(path)


def test_a_tuned_config_is_refused_on_other_data_and_other_shapes(folder, tmp_path, capsys):
    other_data = with_provenance(folder, tmp_path, data_fingerprint="0" * 64)
    assert "not the data this config was tuned on" in refused(capsys, "--config", other_data)
    other_shapes = with_provenance(folder, tmp_path, shapes=[[1, 8]])
    assert "other shapes than were tuned" in refused(capsys, "--config", other_shapes)


@pytest.mark.slow
def test_another_device_or_version_is_only_warned_about(folder, tmp_path):
    path = with_provenance(
        folder, tmp_path, device="Ascend", versions={"mindspore": "2.7.0", "numpy": np.__version__}
    )
    done = subprocess.run(
        [sys.executable, "-m", "tuner.cli.train", "--config", path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tuned on Ascend, running on CPU" in done.stderr
    assert "tuned with mindspore 2.7.0" in done.stderr
    assert "tuned with numpy" not in done.stderr
    assert "6,000" in done.stdout

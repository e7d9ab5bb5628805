"""A disk that is really full: a small file system in memory, filled from outside."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import yaml
from checkpoint_case import parameter_bytes
from run_case import VOCAB, write_counting_rows

pytestmark = [pytest.mark.mindspore, pytest.mark.slow]

STEPS = 30
DISK_BYTES = 3_000_000


@pytest.fixture
def disk(tmp_path):
    """A file system of a few megabytes."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def config_file(tmp_path):
    write_counting_rows(tmp_path / "data.mindrecord", 40, (3, 17))
    config = {
        "data": {"path": str(tmp_path / "data.mindrecord")},
        "batching": {"strategy": "fixed", "samples_per_batch": 2, "tokens_per_batch": None},
        # 46,000 weights: a checkpoint of 0.75 MB.
        "model": {
            "vocab_size": VOCAB, "width": 64, "num_layers": 1, "num_heads": 2,
            "num_kv_heads": 1, "ffn_width": 170,
        },
        # A rate that does not depend on the steps of the whole run, so that it can be extended.
        "schedule": {"kind": "constant", "warmup_fraction": 0.0},
        "train": {"epochs": 9, "max_steps": STEPS, "checkpoint_every_steps": 3,
                  "keep_last": 1, "tensorboard": False},
    }  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def train(config_file, out, *more):
    return subprocess.run(
        [sys.executable, "-m", "tuner.cli.train", "--config", str(config_file),
         "--set", f"train.out={out}", *more],
        capture_output=True, text=True,
    )  # fmt: skip


def error_line(done):
    assert done.returncode == 2, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if "error:" in line]
    assert len(lines) == 1
    return lines[0]


def fill(disk, leave):
    free = shutil.disk_usage(disk).free
    (disk / "filling").write_bytes(b"x" * max(0, free - leave))


@pytest.mark.parametrize("in_background", ["true", "false"])
def test_a_full_disk_stops_the_run_with_one_line_and_costs_only_steps(
    disk, config_file, tmp_path, in_background
):
    out = disk / "run"
    how = ("--set", f"train.async_checkpoint={in_background}")
    first = train(config_file, out, *how, "--set", "train.max_steps=6")
    assert first.returncode == 0, first.stderr[-3000:]
    whole = parameter_bytes(out, 6)
    fill(disk, leave=200_000)
    line = error_line(train(config_file, out, *how, "--resume"))
    assert "cannot save a checkpoint" in line
    assert "No space left on device" in line
    assert "--resume" in line
    assert (out / "checkpoints" / "latest").read_text().strip() == "step_00000006"
    assert parameter_bytes(out, 6) == whole
    (disk / "filling").unlink()
    assert train(config_file, out, *how, "--resume").returncode == 0
    assert train(config_file, tmp_path / "whole", *how).returncode == 0
    assert parameter_bytes(out, STEPS) == parameter_bytes(tmp_path / "whole", STEPS)


def test_no_room_for_the_records_of_steps(disk, config_file):
    out = disk / "run"
    assert train(config_file, out, "--set", "train.max_steps=6").returncode == 0
    fill(disk, leave=0)
    assert "No space left on device" in error_line(train(config_file, out, "--resume"))
    assert (out / "checkpoints" / "latest").read_text().strip() == "step_00000006"
    (disk / "filling").unlink()
    assert train(config_file, out, "--resume").returncode == 0

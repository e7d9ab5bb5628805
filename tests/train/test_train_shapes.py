"""A user's Cell whose shapes do not fit, through the command: explained, in one exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from run_case import small_run, write_counting_rows

CELLS = Path(__file__).resolve().parents[1] / "diagnose"

pytestmark = pytest.mark.mindspore


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    write_counting_rows(folder / "data.mindrecord", 24, (9, 30))
    return folder


def train(folder, factory):
    plain = small_run(folder, factory, 4)
    plain["model"] = {
        "vocab_size": plain["model"]["vocab_size"],
        "factory": f"broken_cells:{factory}",
    }
    config = folder / f"{factory}.yaml"
    config.write_text(yaml.safe_dump(plain))
    return subprocess.run(
        [sys.executable, "-m", "tuner.cli.train", "--config", str(config)],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": f"{CELLS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip


@pytest.mark.slow
def test_a_length_in_a_reshape_is_named_and_the_raw_text_is_kept(folder):
    done = train(folder, "fixed_sizes")
    assert done.returncode == 2, done.stderr
    assert "layers.1.attention" in done.stderr
    assert "> 3." in done.stderr and "Traceback" not in done.stderr
    # The explanation has at most ten lines; the stack of MindSpore is in the file.
    out = folder / "fixed_sizes"
    assert (out / "shape_error.txt").stat().st_size > 500
    assert str(out / "shape_error.txt") in done.stderr
    assert list(out.glob(".shape_error*")) == []


@pytest.mark.slow
def test_a_sound_cell_trains(folder):
    done = train(folder, "sound")
    assert done.returncode == 0, done.stderr
    assert not (folder / "sound" / "shape_error.txt").exists()

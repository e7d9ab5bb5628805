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


def train(folder, factory, *more, out=None, module="broken_cells"):
    out = out or factory
    plain = small_run(folder, out, 4)
    plain["model"] = {
        "vocab_size": plain["model"]["vocab_size"],
        "factory": f"{module}:{factory}",
    }
    config = folder / f"{out}.yaml"
    config.write_text(yaml.safe_dump(plain))
    places = [str(CELLS), str(folder), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", "tuner.cli.train", "--config", str(config), *more],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))},
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


@pytest.mark.slow
def test_of_several_ranks_that_fail_of_the_same_the_first_explains(folder):
    done = train(folder, "fixed_sizes", "--workers", "2", out="together")
    out = folder / "together"
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("> 3.") == 1
    assert "Traceback" not in done.stderr
    assert (out / "shape_error.txt").stat().st_size > 500
    assert not list((out / "ranks").glob("shape_error*"))


BROKEN_ON_RANK_1 = """
import os
import broken_cells

def cell(config, max_length):
    is_broken = os.environ.get("RANK_ID") == "1"
    make = broken_cells.fixed_sizes if is_broken else broken_cells.sound
    return make(config, max_length)
"""


@pytest.mark.slow
def test_a_rank_that_fails_alone_explains_and_is_shown(folder):
    (folder / "half_broken.py").write_text(BROKEN_ON_RANK_1)
    done = train(folder, "cell", "--workers", "2", out="half", module="half_broken")
    out = folder / "half"
    assert done.returncode == 2, done.stderr
    assert "varseq-train: rank 1: " in done.stderr
    assert done.stderr.count("> 3.") == 1
    assert not (out / "shape_error.txt").exists()
    assert (out / "ranks" / "shape_error_00001.txt").stat().st_size > 500

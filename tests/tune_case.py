"""varseq-tune as a process of its own, on data and a space that need few compiles."""

from __future__ import annotations

import contextlib
import csv
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from tuner.data.mindrecord import MindRecordWriter

REPOSITORY = Path(__file__).resolve().parents[1]
LENGTHS = [3] * 20 + [7] * 20 + [14] * 8 + [30] * 4
# Aligned to 32 all rows are of one length, so that a baseline has one shape, and the quantile
# buckets have that of padding to the longest. Each of the two points adds one more.
SPACE = {
    "strategy": ["bucketed"],
    "num_buckets": {"low": 2, "high": 2},
    "align": [8, 16],
    "longest_rows_per_batch": [4],
    "graph_mode": ["static"],
    "jit_level": ["O0"],
}
BASELINES = [
    "pad to the longest",
    "random batches, one dynamic graph",
    "ten quantile buckets, aligned to 32",
    "packed rows",
]
TINY_MODEL = (
    "--set", "model={vocab_size: 32, width: 16, num_layers: 1, num_heads: 2, num_kv_heads: 1, "
    "ffn_width: 16}",
    # Long enough that two compiles pay.
    "--set", "train.epochs=300",
)  # fmt: skip


def command(*arguments: object) -> list[str]:
    """The command line of varseq-tune with these arguments."""
    return [sys.executable, "-m", "tuner.cli.tune", *map(str, arguments)]


def standard(out: object, *more: object) -> tuple[object, ...]:
    """The arguments of a study of one trial without a confirmation; more ones win."""
    return (
        "--data", "data.mindrecord", "--space", "space.yaml", "--out", out,
        "--trials", 1, "--confirm", 0, *TINY_MODEL, *more,
    )  # fmt: skip


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run varseq-tune to its end."""
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )


def environment() -> dict[str, str]:
    """Of a process that imports this checkout."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUTF8": "1"}


class Tuner:
    """A running varseq-tune."""

    def __init__(self, process: subprocess.Popen[str], out: Path) -> None:
        self.process = process
        self.out = out

    def worker(self, folder: str, before: Sequence[str] = ()) -> int:
        """The process that works in a folder of `folder`, once it has started.

        Args:
            folder: trials or confirmation.
            before: Names of folders in it that are not waited for.
        """

        def find() -> int | None:
            assert self.process.poll() is None, self.process.communicate()
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(self.process.pid).children():
                    place = Path((child.cmdline() or [""])[-1])
                    if place.parent == self.out / folder and place.name not in before:
                        return child.pid
            return None

        found: int = wait_for(find)
        return found


@contextlib.contextmanager
def begun(work: Path, out: Path, *more: object) -> Iterator[Tuner]:
    """varseq-tune in the background; what is left of it at the end is killed."""
    process = subprocess.Popen(
        command(*standard(out, *more)),
        cwd=work,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Tuner(process, out)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def write_data(path: Path, rows: Sequence[dict[str, Any]], **description: Any) -> Path:
    """Write rows to a MindRecord file."""
    noted = {"length_of": "input_ids", "vocab_size": 32, "pad_id": 0, **description}
    with MindRecordWriter(path, description=noted) as writer:
        for row in rows:
            writer.write([row])
    return path


def make_row(ids: Sequence[int], num_labels: int | None = None) -> dict[str, Any]:
    """A row of these tokens, which are their own labels unless a number of labels is given."""
    labels = list(ids) if num_labels is None else [1] * num_labels
    return {
        "input_ids": np.array(ids, np.int32),
        "labels": np.array(labels, np.int32),
        "length": len(ids),
    }


def fill_work_folder(folder: Path) -> Path:
    """Data and a space, for `standard`."""
    rng = np.random.default_rng(0)
    # MindRecord files refuse some characters, so only the folder may be called oddly.
    rows = [make_row(rng.integers(1, 32, length).tolist()) for length in LENGTHS]
    write_data(folder / "data.mindrecord", rows)
    (folder / "space.yaml").write_text(yaml.safe_dump(SPACE))
    return folder


def wait_for(happens: Callable[[], Any], seconds: float = 90.0) -> Any:
    """What `happens` returns once it is true."""
    deadline = time.monotonic() + seconds
    while not (value := happens()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return value


def is_gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def read_trials(out: Path) -> list[dict[str, str]]:
    """The lines of trials.csv."""
    return list(csv.DictReader((out / "trials.csv").open(encoding="utf-8")))


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder: path in it -> content."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }

"""A study of the shared mix on this machine, as a user runs it, and true runs of its configs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from length_sets import write_mix

from tuner.cli.tune import parse_options
from tuner.cli.tune_setup import set_up_study
from tuner.config.codec import format_config, write_text
from tuner.config.schema import TrainConfig
from tuner.study.result import StudyResult
from tuner.study.run import run_study
from tuner.study.setup import StudySetup
from tuner.study.watch import StudyWatch
from tuner.trial.folder import StudyFolder
from tuner.trial.runner import ProcessRunner

CONFIRM_S = 60
"""Steady steps of each candidate in a round: over 15 s this machine's speed varies by 10 %."""

VOCABULARY = 2048
"""GPT-2's 50,257 ids folded, so that the logits do not hide everything else."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A finished study with its confirmation."""

    setup: StudySetup
    result: StudyResult


@cache
def tune_mix(folder: Path, max_length: int, trials: int, rounds: int) -> Tuned:
    """Tune the mix cut to a length: two layers, width 128, three planned epochs."""
    data = write_mix(folder / f"mix{max_length}.mindrecord", max_length, VOCABULARY)
    arguments = [
        "--data", str(data), "--out", str(folder / f"results{max_length}"),
        "--trials", str(trials), "--confirm", str(rounds), "--confirm-seconds", str(CONFIRM_S),
    ]  # fmt: skip
    # As a user: the command in a process of its own. It goes on where an earlier one has stopped.
    subprocess.run([sys.executable, "-m", "tuner.cli.tune", *arguments], check=True)
    return _read_back(arguments)


def _read_back(arguments: list[str]) -> Tuned:
    """The same study again in this process: everything is told, so nothing runs."""
    options = parse_options(arguments)
    folder = StudyFolder(Path(options.out))
    runner = ProcessRunner()
    setup = set_up_study(options, folder, runner, lambda _: None)
    runner.stop()
    watch = StudyWatch(
        on_notice=lambda _: None, on_trial=lambda *_: None, on_result=lambda _: None
    )
    return Tuned(setup=setup, result=run_study(setup, runner, watch))


@dataclass(frozen=True, kw_only=True)
class TrueRun:
    """What a training run took, by its own clock.

    Attributes:
        warm_up_s: Seconds of all compiles.
        steps_s: Seconds of all steps, their updates and their waiting for data.
        shapes: (B, L) of every step, in order.
        num_updates: Optimizer updates.
    """

    warm_up_s: float
    steps_s: float
    shapes: tuple[tuple[int, int], ...]
    num_updates: int

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.warm_up_s + self.steps_s


def train_for(config: TrainConfig, folder: Path, steps: int) -> TrueRun:
    """Train a config for some steps with varseq-train."""
    write_text(folder / "config.yaml", format_config(config))
    command = [
        sys.executable, "-m", "tuner.cli.train", "--config", str(folder / "config.yaml"),
        "--set", f"train.out={folder / 'run'}", "--set", f"train.max_steps={steps}",
        "--set", f"train.checkpoint_every_steps={10 * steps}",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    records: list[Mapping[str, Any]] = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    return TrueRun(
        warm_up_s=summary["warm_up_s"],
        steps_s=sum(record["step_s"] + record["data_wait_s"] for record in records),
        shapes=tuple((record["batch_size"], record["padded_length"]) for record in records),
        num_updates=records[-1]["updates"],
    )

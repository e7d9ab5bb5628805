"""Every path of a study and of its trials: the file system is the protocol.

results/
  best.yaml trials.csv summary.txt report.html what users read, each replaced at once
  cost_model.yaml                              what was learned about costs
  study.db                                     Optuna's storage
  lengths.npy                                  int32 [N], read by every trial
  lock                                         held while a tuner works in this folder
  trials/0007/spec.json                        written by the tuner
  trials/0007/measured.jsonl result.json       written by the trial
  trials/0007/stdout.log stderr.log            what the trial printed
  confirmation/0003/                           the same of a round of the confirmation
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TrialFolder:
    """One trial's files."""

    path: Path

    @property
    def spec(self) -> Path:
        """TrialSpec as JSON."""
        return self.path / "spec.json"

    @property
    def measured(self) -> Path:
        """One ShapeMeasurement a line, added as they come."""
        return self.path / "measured.jsonl"

    @property
    def result(self) -> Path:
        """TrialResult as JSON; there once the trial has ended by itself."""
        return self.path / "result.json"

    @property
    def stdout(self) -> Path:
        """Standard output of the trial."""
        return self.path / "stdout.log"

    @property
    def stderr(self) -> Path:
        """Standard error of the trial."""
        return self.path / "stderr.log"


@dataclass(frozen=True)
class StudyFolder:
    """A study's files."""

    path: Path

    @property
    def best_config(self) -> Path:
        """The best config so far."""
        return self.path / "best.yaml"

    @property
    def trials_table(self) -> Path:
        """One line a trial."""
        return self.path / "trials.csv"

    @property
    def summary(self) -> Path:
        """The result in one page of text."""
        return self.path / "summary.txt"

    @property
    def report(self) -> Path:
        """The result with its reasons."""
        return self.path / "report.html"

    @property
    def costs(self) -> Path:
        """What was learned about costs, reusable."""
        return self.path / "cost_model.yaml"

    @property
    def storage(self) -> Path:
        """Optuna's SQLite file."""
        return self.path / "study.db"

    @property
    def lengths(self) -> Path:
        """Length of every row, for the trials."""
        return self.path / "lengths.npy"

    @property
    def lock(self) -> Path:
        """Locked while a tuner works here."""
        return self.path / "lock"

    @property
    def trials(self) -> Path:
        """Parent of the trials' folders."""
        return self.path / "trials"

    def confirmation(self, number: int) -> TrialFolder:
        """The folder of one round of the confirmation, by its number there."""
        return TrialFolder(self.confirmations / f"{number:04d}")

    @property
    def confirmations(self) -> Path:
        """Parent of the folders of the confirmation's rounds."""
        return self.path / "confirmation"

    def trial(self, number: int) -> TrialFolder:
        """The folder of a trial by its number in the study."""
        return TrialFolder(self.trials / f"{number:04d}")

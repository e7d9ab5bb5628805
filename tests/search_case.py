"""A search on the made-up device, and what its seconds must be by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial
from study_case import Seen, make_space

from tuner.batching.grouping import Shape
from tuner.config.schema import TrainConfig
from tuner.simulate.measurement import CostKey
from tuner.study.baselines import baseline_names
from tuner.study.optuna_study import OptunaStudy
from tuner.study.outcome import NumberedOutcome
from tuner.study.result import StudyResult
from tuner.study.search import Search
from tuner.study.setup import StudySetup, study_identity
from tuner.trial.fake import FakeRunner, HiddenCost
from tuner.trial.folder import TrialFolder
from tuner.trial.record import TrialResult, TrialSpec
from tuner.trial.runner import OnMeasured, TrialRunner, go_on

COST = HiddenCost(
    compile_s=5.0,
    overhead_s=0.02,
    token_s=1.3e-4,
    attention_s=2.8e-7,
    dynamic_factor=1.9,
    packed_factor=4.0,
)
"""Packing does not pay, so that what a test is about is not ended early for it."""
# 5 rows of 3 tokens, 4 of 10, 1 of 30: 85 tokens.
TEN_ROWS = [3] * 5 + [10] * 4 + [30]
# Tenths of the rows end at 20, 70, 150 and 500 tokens.
HUNDRED_ROWS = [20] * 40 + [70] * 30 + [150] * 20 + [300] * 8 + [500] * 2
NUM_BASELINES = len(baseline_names(has_own_config=False))
SMALL = make_space(
    strategy=["bucketed", "dynamic", "fixed"],
    num_buckets={"low": 1, "high": 3},
    longest_rows_per_batch=[1, 2, 4],
    graph_mode=["static", "dynamic"],
)


def search(setup: StudySetup, runner: TrialRunner, seen: Seen | None = None) -> StudyResult:
    """One tuner's search, as a start of the command makes it.

    In a journal where the setup names no storage: SQLite takes 0.3 s a trial.
    """
    storage = setup.storage or journal_of(setup.folder.path)
    study = OptunaStudy(storage, setup.study_name, setup.space, setup.seed)
    study.check_identity(study_identity(setup))
    np.save(setup.folder.lengths, setup.data.lengths.tokens)
    return Search(setup, runner, (seen or Seen()).watch, study).run()


def proposals(result: StudyResult) -> list[NumberedOutcome]:
    """All outcomes but those of the baselines."""
    return [item for item in result.outcomes if item.outcome.baseline is None]


def baselines(result: StudyResult) -> dict[str, NumberedOutcome]:
    """Name -> outcome, in the order of the trials."""
    return {item.outcome.baseline: item for item in result.outcomes if item.outcome.baseline}


def keys(outcomes: Sequence[NumberedOutcome]) -> list[str]:
    """The whole config of each as text."""
    return [item.outcome.config.model_dump_json() for item in outcomes]


def journal_of(folder: Path) -> str:
    """The storage of `search`, as the command takes it."""
    return f"journal:{folder / 'study.journal'}"


def frozen_trials(folder: Path) -> list[FrozenTrial]:
    """The trials as Optuna itself reads them."""
    backend = JournalFileBackend(str(folder / "study.journal"))
    storage = JournalStorage(backend)
    return optuna.load_study(study_name="varseq-tune", storage=storage).trials


def step_s(size: int, length: int) -> float:
    """Of a static fp32 step of single rows under COST."""
    return 0.02 + 1.3e-4 * size * length + 2.8e-7 * size * length * length


def measured_under(result: StudyResult) -> Counter[tuple[str, Shape]]:
    """How often each shape was measured under each key of costs; by what was told."""
    return Counter(
        (str(CostKey.of(item.outcome.config, "CPU")), measured.shape)
        for item in result.outcomes
        for measured in item.outcome.measured
    )


def figures(result: StudyResult) -> Mapping[str, Any]:
    """Config -> its estimate."""
    return {
        key: item.outcome.estimate
        for key, item in zip(keys(result.outcomes), result.outcomes, strict=True)
    }


class InterruptedRunner(FakeRunner):
    """Is interrupted in its n-th process, as by Ctrl-C."""

    def __init__(self, cost: HiddenCost, in_process: int, **more: Any) -> None:
        super().__init__(cost, **more)
        self._left = in_process
        self.interrupted: TrainConfig | None = None
        self.was_stopped = False

    def run(
        self, spec: TrialSpec, folder: TrialFolder, on_measured: OnMeasured = go_on
    ) -> TrialResult:
        self._left -= 1
        if self._left == 0:
            self.interrupted = spec.config
            raise KeyboardInterrupt
        return super().run(spec, folder, on_measured)

    def stop(self) -> None:
        self.was_stopped = True

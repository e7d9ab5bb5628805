"""A whole study: search, then confirmation, by one tuner or by several on one storage."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Mapping

import numpy as np

from tuner.study.confirm import (
    Confirmation,
    choose_candidates,
    is_late,
    read_confirmation,
    run_confirmation,
)
from tuner.study.optuna_board import ConfirmationBoard
from tuner.study.optuna_study import OptunaStudy
from tuner.study.outcome import NumberedOutcome, estimate_again
from tuner.study.result import StudyResult
from tuner.study.search import Search
from tuner.study.setup import StudySetup, study_identity
from tuner.study.watch import StudyWatch
from tuner.trial.runner import TrialRunner

CONFIRMED_KEY = "confirmed"
"""Note of the study: the boards on which a confirmation has begun, by name."""
WAIT_S = 1.0


def run_study(setup: StudySetup, runner: TrialRunner, watch: StudyWatch) -> StudyResult:
    """Run a study, or the rest of it.

    Args:
        setup: What it is about.
        runner: Runs trials.
        watch: Told what happens.

    Returns:
        All that is known, what other tuners have told included.

    Raises:
        BadInputError: the storage holds the study of something else.
    """
    storage = setup.storage or setup.folder.storage
    study = OptunaStudy(storage, setup.study_name, setup.space, setup.seed)
    study.check_identity(study_identity(setup))
    np.save(setup.folder.lengths, setup.data.lengths.tokens)
    boards = _Boards(setup, study)

    def on_result(result: StudyResult) -> None:
        earlier = boards.earlier(choose_candidates(result.outcomes))
        watch.on_result(_with_rounds(result, earlier, setup))

    result = Search(setup, runner, dataclasses.replace(watch, on_result=on_result), study).run()
    candidates = choose_candidates(result.outcomes)
    if not candidates or not setup.confirm_rounds:
        return _with_rounds(result, boards.earlier(candidates), setup)
    board = boards.begin(candidates)
    confirmation = run_confirmation(setup, runner, board, candidates, watch.on_notice)
    while not confirmation.is_complete and board.running() and not is_late(setup):
        # Another tuner has the last rounds.
        time.sleep(WAIT_S)
        confirmation = read_confirmation(board, candidates, setup.confirm_rounds)
    result = _with_rounds(result, confirmation, setup)
    watch.on_result(result)
    return result


def _with_rounds(
    result: StudyResult, confirmation: Confirmation | None, setup: StudySetup
) -> StudyResult:
    """The result with a confirmation; its measurements are known like those of trials.

    The outcomes stay as the trials alone have them: from them follows what is confirmed.
    """
    if confirmation is None:
        return result
    device = setup.installation.device
    book = result.book.plus(*confirmation.processes(device))
    names = list(confirmation.candidates)
    known = estimate_again(list(confirmation.candidates.values()), book, device)
    confirmation = dataclasses.replace(
        confirmation, candidates=dict(zip(names, known, strict=True))
    )
    return dataclasses.replace(result, book=book, confirmation=confirmation)


class _Boards:
    """The confirmations of a study: one for each choice of candidates."""

    def __init__(self, setup: StudySetup, study: OptunaStudy) -> None:
        self._setup = setup
        self._study = study
        self._opened: dict[str, ConfirmationBoard] = {}

    def begin(self, candidates: Mapping[str, NumberedOutcome]) -> ConfirmationBoard:
        """The board of these candidates, noted so that a later start finds it."""
        name = self._name(candidates)
        known = self._study.note(CONFIRMED_KEY) or []
        if name not in known:
            self._study.set_note(CONFIRMED_KEY, [*known, name])
        return self._open(name)

    def earlier(self, candidates: Mapping[str, NumberedOutcome]) -> Confirmation | None:
        """What an earlier start has confirmed of just these candidates."""
        name = self._name(candidates)
        if not candidates or name not in (self._study.note(CONFIRMED_KEY) or []):
            return None
        return read_confirmation(self._open(name), candidates, self._setup.confirm_rounds)

    def _open(self, name: str) -> ConfirmationBoard:
        if name not in self._opened:
            storage = self._setup.storage or self._setup.folder.storage
            self._opened[name] = ConfirmationBoard(storage, name)
        return self._opened[name]

    def _name(self, candidates: Mapping[str, NumberedOutcome]) -> str:
        numbers = " ".join(str(item.number) for item in candidates.values())
        digest = hashlib.sha256(numbers.encode()).hexdigest()[:8]
        return f"{self._setup.study_name}-{digest}"

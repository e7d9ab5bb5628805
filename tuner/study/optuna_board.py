"""The confirmation of a study's best: each candidate once per round, over all processes.

Kept as a study of its own beside the first, so that the dashboard shows it: a trial is one run of
one candidate, its value the real tokens per second. Who takes a run enters it in the ledger; of
two that took the same the lower number stays. Rounds are interleaved, and each begins with another
candidate: a machine that warms up or slows down does so for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from tuner.study.liveness import this_process
from tuner.study.optuna_json import join_attribute, split_attribute
from tuner.study.optuna_ledger import Ledger
from tuner.study.optuna_owner import BEAT_KEY, OWNER_KEY, Beats, dead_trials, give_up, is_dead
from tuner.study.optuna_storage import (
    cannot_open,
    describe_storage,
    open_storage,
    with_storage_errors,
)
from tuner.study.optuna_trials import TOLD_STATES
from tuner.study.proposal import ConfirmationResult, ConfirmationRun

SUFFIX = "-confirmation"
CANDIDATE_KEY = "candidate"
ROUND_KEY = "round"
RESULT_KEY = "result"


class ConfirmationBoard:
    """The confirmation runs of one study, as one process sees them.

    A process makes one of these for a study.
    """

    def __init__(self, storage: str | Path, study_name: str) -> None:
        """Open or create.

        Args:
            storage: As in `open_storage`.
            study_name: Of the study whose candidates are confirmed.

        Raises:
            BadInputError: the storage cannot be opened, or is not one of Optuna.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.place = describe_storage(storage)
        self._storage = open_storage(storage)
        try:
            self._ledger = Ledger(self._storage, study_name + SUFFIX)
        except Exception as error:
            raise cannot_open(storage, error) from None
        self._own: dict[int, FrozenTrial] = {}
        self._beats = Beats()

    @with_storage_errors
    def take(
        self, candidates: Sequence[str], rounds: int, only_round: int | None = None
    ) -> ConfirmationRun | None:
        """Take the next run that nobody has done or is doing; runs of dead processes count as new.

        Args:
            candidates: Names that mean the same in all processes.
            rounds: Runs of each.
            only_round: A run of this round, from 1; None: of the first that has one.

        Returns:
            None if there is nothing to take; others may still be `running`.
        """
        for dead in dead_trials(self._ledger.study, self._own):
            give_up(self._ledger.study, dead)
        for run in _interleaved(candidates, rounds):
            if only_round not in (None, run[1]) or self._holders(run):
                continue
            owner = this_process()
            entry = {CANDIDATE_KEY: run[0], ROUND_KEY: run[1], OWNER_KEY: owner}
            taken = self._ledger.append(entry, TrialState.RUNNING)
            if self._holders(run)[0] == taken.number:
                self._own[taken.number] = taken
                return ConfirmationRun(number=taken.number, candidate=run[0], round=run[1])
            give_up(self._ledger.study, taken)
        return None

    @with_storage_errors
    def beat(self, number: int) -> bool:
        """Say that a run is being worked on; cheap enough to be called every second.

        Returns:
            False if another process has taken it over.
        """
        try:
            if self._beats.is_due(number):
                self._write(number, BEAT_KEY, time.time())
        except optuna.exceptions.UpdateFinishedTrialError:
            return False
        return True

    @with_storage_errors
    def put(self, number: int, real_tokens_per_s: float | None, result: Mapping[str, Any]) -> bool:
        """Put the result of a run.

        Args:
            number: Of the run.
            real_tokens_per_s: None if it failed; it is not run again then.
            result: Plain JSON of any size.

        Returns:
            False if another process has taken the run over: then nothing is kept.
        """
        state = TrialState.PRUNED if real_tokens_per_s is None else TrialState.COMPLETE
        try:
            for key, part in split_attribute(RESULT_KEY, dict(result)):
                self._write(number, key, part)
            self._ledger.study.tell(number, real_tokens_per_s, state=state)
        except (optuna.exceptions.UpdateFinishedTrialError, ValueError):
            # Another process held this one for dead and closed its run; else it is our error.
            if self._ledger.entries()[number].state == TrialState.RUNNING:
                raise
            return False
        finally:
            self._own.pop(number)
        return True

    @with_storage_errors
    def results(self) -> list[ConfirmationResult]:
        """The runs of all processes that have a result, in the order in which they were taken."""
        return [
            ConfirmationResult(
                number=entry.number,
                candidate=entry.user_attrs[CANDIDATE_KEY],
                round=entry.user_attrs[ROUND_KEY],
                real_tokens_per_s=entry.value if entry.state == TrialState.COMPLETE else None,
                result=join_attribute(entry.user_attrs, RESULT_KEY),
            )
            for entry in self._ledger.entries()
            if entry.state in TOLD_STATES
        ]

    @with_storage_errors
    def running(self) -> list[ConfirmationRun]:
        """The runs that live processes are busy with, this one's included."""
        return [
            ConfirmationRun(
                number=entry.number,
                candidate=entry.user_attrs[CANDIDATE_KEY],
                round=entry.user_attrs[ROUND_KEY],
            )
            for entry in self._ledger.entries()
            if entry.state == TrialState.RUNNING and not is_dead(entry, self._own)
        ]

    def _holders(self, run: tuple[str, int]) -> list[int]:
        """Numbers of the entries for a run that were not given up, in order."""
        return [
            entry.number
            for entry in self._ledger.entries()
            if entry.state != TrialState.FAIL
            and (entry.user_attrs[CANDIDATE_KEY], entry.user_attrs[ROUND_KEY]) == run
        ]

    def _write(self, number: int, key: str, value: Any) -> None:
        self._storage.set_trial_user_attr(self._own[number]._trial_id, key, value)


def _interleaved(candidates: Sequence[str], rounds: int) -> Iterator[tuple[str, int]]:
    for index in range(rounds):
        first = index % len(candidates) if candidates else 0
        for candidate in (*candidates[first:], *candidates[:first]):
            yield candidate, index + 1

"""Who measures what, so that two processes never measure the same.

A claim is entered in a ledger; what an earlier entry of a running trial holds is not free. What an
entry was granted is then written into the trial itself, so that the part of it that it did not get
is free again when the one who had it is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from tuner.study.optuna_ledger import Ledger
from tuner.study.optuna_trials import CLAIM_KEY

CLAIMS_SUFFIX = "-claims"
TRIAL_KEY = "trial"
ITEMS_KEY = "items"
GRANTED_KEY = "granted"


class Claims:
    """The claims of a study, in a study of their own beside it."""

    def __init__(self, storage: BaseStorage, study_name: str) -> None:
        """Open or create at the first use.

        Args:
            storage: Of the study.
            study_name: Its name.
        """
        self._storage = storage
        self._name = study_name + CLAIMS_SUFFIX
        self._opened: Ledger | None = None

    def enter(self, number: int, wanted: Sequence[str]) -> FrozenTrial:
        """Enter what a trial wants to measure; the entry has its place in the order.

        Args:
            number: Of the trial.
            wanted: Names of what it wants.
        """
        entry = {TRIAL_KEY: number, ITEMS_KEY: list(wanted)}
        # As a complete trial: nobody has to close it, and the dashboard shows how much was wanted.
        return self._ledger.append(entry, TrialState.COMPLETE, value=float(len(wanted)))

    def free_items(self, entry: FrozenTrial, others: Mapping[int, FrozenTrial]) -> tuple[str, ...]:
        """What of an entry no earlier one holds.

        Args:
            entry: As `enter` gave it.
            others: The trials that other processes are alive and busy with, by number; read after
                the entry was made.
        """
        held = {
            item
            for earlier in self._ledger.entries()
            if earlier.number < entry.number and earlier.user_attrs[TRIAL_KEY] in others
            for item in _held(earlier, others[earlier.user_attrs[TRIAL_KEY]])
        }
        return tuple(item for item in entry.user_attrs[ITEMS_KEY] if item not in held)

    @property
    def _ledger(self) -> Ledger:
        if self._opened is None:
            self._opened = Ledger(self._storage, self._name)
        return self._opened


def with_claim(attributes: Mapping[str, Any], claim: Mapping[str, Any]) -> dict[str, Any]:
    """The claim of a trial that is to be written.

    Args:
        attributes: The trial's.
        claim: Takes the place of the present one; what was granted stays.
    """
    granted = attributes.get(CLAIM_KEY, {}).get(GRANTED_KEY)
    return {**claim, GRANTED_KEY: granted} if granted else dict(claim)


def with_granted(
    attributes: Mapping[str, Any], entry_number: int, items: Sequence[str]
) -> dict[str, Any]:
    """The claim of a trial with what an entry was granted.

    Args:
        attributes: The trial's.
        entry_number: Of the entry.
        items: What it was granted.
    """
    claim = attributes.get(CLAIM_KEY, {})
    return {**claim, GRANTED_KEY: {**claim.get(GRANTED_KEY, {}), str(entry_number): list(items)}}


def _held(entry: FrozenTrial, trial: FrozenTrial) -> Sequence[str]:
    granted = trial.user_attrs.get(CLAIM_KEY, {}).get(GRANTED_KEY, {})
    items: Sequence[str] = granted.get(str(entry.number), entry.user_attrs[ITEMS_KEY])
    return items

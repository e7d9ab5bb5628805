"""A list in the storage that all processes append to and whose order they agree on.

Every storage of Optuna numbers the trials of a study one after the other, and whoever has a number
sees all lower ones. That is the only thing in it that two processes cannot both be first at; what
they must not do twice (measure a shape, confirm a candidate) is therefore entered here, and the
lowest number wins. Comparing attributes of trials instead would not do: the later writer cannot
know whether the earlier one has looked before or after.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

TOKEN_KEY = "token"


class Ledger:
    """A study whose trials are entries."""

    def __init__(self, storage: BaseStorage, name: str) -> None:
        """Open or create.

        Args:
            storage: Of the study that it belongs to.
            name: Of this list.
        """
        self.study = optuna.create_study(
            storage=storage, study_name=name, direction="maximize", load_if_exists=True
        )

    def append(
        self, entry: Mapping[str, Any], state: TrialState, value: float | None = None
    ) -> FrozenTrial:
        """Append an entry as a trial; what comes back has its number.

        Args:
            entry: Plain JSON; its keys become user attributes.
            state: Of the trial.
            value: Of the trial, for a complete one.
        """
        token = uuid.uuid4().hex
        self.study.add_trial(
            optuna.create_trial(state=state, value=value, user_attrs={**entry, TOKEN_KEY: token})
        )
        return next(
            trial for trial in reversed(self.entries()) if trial.user_attrs.get(TOKEN_KEY) == token
        )

    def entries(self) -> list[FrozenTrial]:
        """All entries, in order."""
        return self.study.get_trials(deepcopy=False)  # type: ignore[no-any-return]

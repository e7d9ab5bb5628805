"""Which running trials of a storage have lost their process."""

from __future__ import annotations

import time
from collections.abc import Container

import optuna
from optuna.trial import FrozenTrial, TrialState

from tuner.study.liveness import BEAT_INTERVAL_S, is_alive, is_this_process

OWNER_KEY = "owner"
BEAT_KEY = "beat"
# Between taking a trial that waited and writing the owner into it lie milliseconds.
OWNERLESS_S = 2.0


class Beats:
    """When each trial of this process was last said to be alive; monotonic seconds."""

    def __init__(self) -> None:
        self._written: dict[int, float] = {}

    def is_due(self, number: int) -> bool:
        """Whether a trial's beat is to be written now; if so it counts as written."""
        now = time.monotonic()
        if now - self._written.get(number, -BEAT_INTERVAL_S) < BEAT_INTERVAL_S:
            return False
        self._written[number] = now
        return True


def is_dead(trial: FrozenTrial, own: Container[int]) -> bool:
    """Whether nobody works on a running trial any more.

    Args:
        trial: A running trial.
        own: Numbers of the trials that the asking object works on. Any other trial of this
            process is left over from an earlier search in it.
    """
    if trial.number in own:
        return False
    owner = trial.user_attrs.get(OWNER_KEY)
    if owner is None or is_this_process(owner):
        return True
    return not is_alive(owner, trial.user_attrs.get(BEAT_KEY))


def dead_trials(study: optuna.Study, own: Container[int]) -> list[FrozenTrial]:
    """The running trials of a study on which nobody works any more.

    Waits for two seconds if one has no owner: its process may be about to write it.

    Args:
        study: To look at.
        own: As in `is_dead`.
    """
    found = _dead(study, own)
    if any(OWNER_KEY not in trial.user_attrs for trial in found):
        time.sleep(OWNERLESS_S)
        found = _dead(study, own)
    return found


def give_up(study: optuna.Study, trial: FrozenTrial) -> bool:
    """Mark a trial of a dead process as failed.

    Returns:
        False if another process was first, or the owner told it after all.
    """
    try:
        study.tell(trial.number, state=TrialState.FAIL)
    except (optuna.exceptions.UpdateFinishedTrialError, ValueError):
        return False
    return True


def _dead(study: optuna.Study, own: Container[int]) -> list[FrozenTrial]:
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return [trial for trial in running if is_dead(trial, own)]

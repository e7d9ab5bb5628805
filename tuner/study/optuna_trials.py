"""What a trial in the storage means to a study, whatever state it is in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from tuner.study.optuna_json import join_attribute
from tuner.study.optuna_owner import BEAT_KEY, OWNER_KEY
from tuner.study.optuna_params import NEEDED, to_choice, to_params
from tuner.study.optuna_sampler import BASELINE_KEY
from tuner.study.proposal import Proposal, RunningTrial, ToldTrial
from tuner.study.space import Choice

OUTCOME_KEY = "outcome"
REPEAT_KEY = "repeat_of"
ENQUEUED_KEY = "enqueued"
ATTRIBUTES_KEY = "attributes"
CLAIM_KEY = "claim"
TOLD_STATES = (TrialState.COMPLETE, TrialState.PRUNED)


def known_choice(trial: FrozenTrial) -> Choice | None:
    """The point of a trial; None for a baseline, and if its process died before it was known."""
    attributes = trial.user_attrs
    params: Mapping[str, Any] = attributes.get(ENQUEUED_KEY, trial.params)
    is_half_known = OWNER_KEY in attributes and BEAT_KEY not in attributes
    if BASELINE_KEY in attributes or (is_half_known and ENQUEUED_KEY not in attributes):
        return None
    return to_choice(params) if set(params) >= NEEDED else None


def unit_of(trial: FrozenTrial) -> str | None:
    """What a trial is about, as a text that is equal for equal work; None if it is not known."""
    attributes = trial.user_attrs
    if BASELINE_KEY in attributes:
        return baseline_unit(attributes[BASELINE_KEY])
    choice = known_choice(trial)
    return point_unit(choice, attributes.get(ATTRIBUTES_KEY, {})) if choice else None


def baseline_unit(name: str) -> str:
    """A baseline as `unit_of` writes it."""
    return f"baseline {name}"


def point_unit(choice: Choice, attributes: Mapping[str, Any]) -> str:
    """A point as `unit_of` writes it.

    Args:
        choice: The point.
        attributes: What was enqueued with it.
    """
    return json.dumps([to_params(choice), attributes], sort_keys=True)


def is_second(number: int, trials: Sequence[FrozenTrial]) -> bool:
    """Whether an enqueued trial repeats one of a lower number.

    Args:
        number: Of a trial among these.
        trials: All that were not given up, in order.
    """
    trial = next(trial for trial in trials if trial.number == number)
    if not {BASELINE_KEY, ENQUEUED_KEY} & set(trial.user_attrs):
        return False
    unit = unit_of(trial)
    return any(unit_of(other) == unit for other in trials if other.number < number)


def violation_of(trial: FrozenTrial) -> float:
    """By how much a told trial breaks its constraints; feasible at 0 or below."""
    return float(max(trial.constraints.values(), default=0.0))


def counts_as_trial(trial: FrozenTrial) -> bool:
    """Whether a trial is one of those that the user asked for: no baseline and no repeat."""
    return (
        trial.state in (*TOLD_STATES, TrialState.RUNNING)
        and BASELINE_KEY not in trial.user_attrs
        and REPEAT_KEY not in trial.user_attrs
    )


def read_proposal(number: int, choice: Choice | None, attributes: Mapping[str, Any]) -> Proposal:
    """A trial that was taken, as a unit of work.

    Args:
        number: Of the trial.
        choice: Its point; None for a baseline.
        attributes: The trial's.
    """
    attached = attributes.get(ATTRIBUTES_KEY, {})
    boundaries = attached.get("boundaries")
    return Proposal(
        number=number,
        choice=choice,
        baseline=attributes.get(BASELINE_KEY),
        boundaries=None if boundaries is None else tuple(boundaries),
        attributes=attached,
    )


def read_told(trial: FrozenTrial) -> ToldTrial:
    """A finished trial that has its outcome."""
    violation = violation_of(trial)
    return ToldTrial(
        number=trial.number,
        choice=known_choice(trial),
        baseline=trial.user_attrs.get(BASELINE_KEY),
        pruned=trial.state == TrialState.PRUNED and violation <= 0,
        violation=violation,
        outcome=join_attribute(trial.user_attrs, OUTCOME_KEY),
    )


def read_running(trial: FrozenTrial, own: bool) -> RunningTrial:
    """A trial that some process is busy with.

    Args:
        trial: In the running state.
        own: Whether the asking process is.
    """
    return RunningTrial(
        number=trial.number,
        choice=known_choice(trial),
        baseline=trial.user_attrs.get(BASELINE_KEY),
        claim=trial.user_attrs.get(CLAIM_KEY, {}),
        own=own,
    )

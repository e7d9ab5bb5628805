"""What a study hands out and gives back: proposals, trials that run, trials that are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.study.space import Choice


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The next unit of work: a point of the space, or a baseline.

    Attributes:
        number: Of the trial.
        choice: The point; None for a baseline.
        baseline: Its name; None for a point.
        boundaries: Padded lengths that were solved for this point when it was enqueued; None if
            they are to be solved now.
        attributes: All that was enqueued with it, boundaries included.
    """

    number: int
    choice: Choice | None = None
    baseline: str | None = None
    boundaries: tuple[int, ...] | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunningTrial:
    """A trial that some process is busy with.

    Attributes:
        number: In the study.
        choice: The point; None for a baseline, or if it is not known yet.
        baseline: Name of the baseline, if it is one.
        claim: What it is going to measure, as its process has written it; empty so far.
        own: Whether it is this process's.
    """

    number: int
    choice: Choice | None
    baseline: str | None
    claim: Mapping[str, Any]
    own: bool


@dataclass(frozen=True, kw_only=True)
class ToldTrial:
    """A trial that has its outcome.

    Attributes:
        number: In the study.
        choice: The point that was tried; None for a baseline.
        baseline: Name of the baseline, if it is one.
        pruned: Ended early because it was slow; a failure is not pruned but violated.
        violation: By how much it breaks the constraints; feasible at 0 or below.
        outcome: The plain data that was told with it.
    """

    number: int
    choice: Choice | None
    baseline: str | None
    pruned: bool
    violation: float
    outcome: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ConfirmationRun:
    """One run of one candidate, to be done by the process that took it.

    Attributes:
        number: Of the run.
        candidate: Its name.
        round: From 1 on.
    """

    number: int
    candidate: str
    round: int


@dataclass(frozen=True, kw_only=True)
class ConfirmationResult:
    """A run that is done.

    Attributes:
        number: Of the run.
        candidate: Its name.
        round: From 1 on.
        real_tokens_per_s: What it reached; None if it failed.
        result: The plain data that was put with it.
    """

    number: int
    candidate: str
    round: int
    real_tokens_per_s: float | None
    result: Mapping[str, Any]

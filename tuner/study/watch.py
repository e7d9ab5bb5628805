"""How a study talks to its caller, always from the thread that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tuner.config.schema import TrainConfig
from tuner.study.result import StudyResult


@dataclass(frozen=True, kw_only=True)
class StudyWatch:
    """What is called when.

    Attributes:
        on_notice: With a line for the user.
        on_trial: With the number and config of a trial that starts.
        on_result: With all that is known whenever there is more: at the start of a study that goes
            on, after every trial and every round of the confirmation.
    """

    on_notice: Callable[[str], None]
    on_trial: Callable[[int, TrainConfig], None]
    on_result: Callable[[StudyResult], None]

"""What a study has found so far, for everything that is written about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.simulate.cost_book import CostBook
from tuner.study.choose import choose_best
from tuner.study.confirm import Confirmation
from tuner.study.outcome import NumberedOutcome

if TYPE_CHECKING:
    from tuner.study.sensitivity import PrecisionFindings


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """All that is known.

    Attributes:
        outcomes: Estimated from all measurements of trials, by trial number.
        book: All measurements, those of the confirmation's rounds too.
        findings: Of the sensitivity pass, one a compute dtype below fp32 that was looked at.
        confirmation: None as long as none has begun.
    """

    outcomes: tuple[NumberedOutcome, ...]
    book: CostBook
    findings: Sequence[PrecisionFindings] = ()
    confirmation: Confirmation | None = None

    @property
    def best(self) -> NumberedOutcome | None:
        """The confirmed winner, before there is one the best estimate; None if none is left."""
        winner = self.confirmation.winner if self.confirmation else None
        return winner or choose_best(self.outcomes)

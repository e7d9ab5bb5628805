"""All that one tuner knows of its study: outcomes, measurements, precisions, also of others."""

from __future__ import annotations

from tuner.config.schema import PrecisionConfig
from tuner.simulate.cost_book import CostBook
from tuner.study.guide import precisions_of
from tuner.study.outcome import (
    NumberedOutcome,
    Outcome,
    PrecisionCheck,
    estimate_again,
    outcome_from_plain,
)
from tuner.study.precision import groups_to_decide, known_check, sets_to_try
from tuner.study.proposal import ToldTrial
from tuner.study.result import StudyResult
from tuner.study.sensitivity import PrecisionFindings, findings_from_plain
from tuner.study.setup import StudySetup

FINDINGS = "findings"
"""Under this a sensitivity pass tells what it found, in place of an outcome."""


class Knowledge:
    """What is known by now.

    Attributes:
        book: All measurements. A new one whenever there is more, so that threads may go on reading
            the one that they have.
        findings: Compute dtype -> what its sensitivity pass found.
    """

    def __init__(self, setup: StudySetup) -> None:
        self._device = setup.installation.device
        self._dtypes = setup.space.compute_dtype
        self._seen: dict[int, NumberedOutcome] = {}
        self._checked: dict[PrecisionConfig, tuple[PrecisionCheck, str]] = {}
        self.book = CostBook(models=setup.models)
        self.findings: dict[str, PrecisionFindings] = {}

    def read(self, told: ToldTrial) -> None:
        """Take in what some tuner has told, once."""
        if FINDINGS in told.outcome:
            self.keep_findings(findings_from_plain(told.outcome[FINDINGS]))
        elif told.number not in self._seen:
            self.keep(told.number, outcome_from_plain(told.outcome))

    def keep(self, number: int, outcome: Outcome) -> None:
        """Take in an outcome, its measurements and its precision."""
        self._seen[number] = NumberedOutcome(number=number, outcome=outcome)
        if outcome.precision is not None:
            problem = outcome.reason if outcome.precision.violation > 0 else ""
            self._checked[outcome.config.precision] = outcome.precision, problem
        if outcome.measured:
            self.book = self.book.plus(outcome.process(self._device))

    def keep_findings(self, findings: PrecisionFindings) -> None:
        """Take in a sensitivity pass; of two the first stays."""
        self.findings.setdefault(findings.dtype, findings)

    def outcomes(self) -> tuple[NumberedOutcome, ...]:
        """All, estimated from all that is known by now."""
        seen = [self._seen[number] for number in sorted(self._seen)]
        return estimate_again(seen, self.book, self._device)

    def outcome(self, number: int) -> Outcome:
        """One of them."""
        return estimate_again([self._seen[number]], self.book, self._device)[0].outcome

    def tried(self) -> list[NumberedOutcome]:
        """All outcomes as they were told."""
        return list(self._seen.values())

    def best_speed(self) -> float:
        """Most real tokens per second so far; 0 before any."""
        speeds = [item.outcome.real_tokens_per_s or 0.0 for item in self.outcomes()]
        return max(speeds, default=0.0)

    def result(self) -> StudyResult:
        """For the caller of the study."""
        findings = tuple(self.findings[dtype] for dtype in sorted(self.findings))
        return StudyResult(outcomes=self.outcomes(), book=self.book, findings=findings)

    def check_of(self, precision: PrecisionConfig) -> tuple[PrecisionCheck, str] | None:
        """How far a precision is from fp32, and what is wrong with it; None if not known."""
        return known_check(self.findings, precision) or self._checked.get(precision)

    def precisions(self) -> list[tuple[str, tuple[str, ...]]]:
        """(compute dtype, op groups in fp32) that may hold the tolerances."""
        sets = {dtype: sets_to_try(found) for dtype, found in self.findings.items()}
        return precisions_of(self._dtypes, sets)

    def groups_to_decide(self) -> dict[str, tuple[str, ...]]:
        """Compute dtype -> the op groups that a proposal decides about."""
        return {dtype: groups_to_decide(found) for dtype, found in self.findings.items()}

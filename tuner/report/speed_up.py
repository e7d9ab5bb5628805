"""How much faster the best config is, in figures and in sentences; pure.

A confirmation that has a verdict is what counts. Before it, estimates stand in, and the sentences
say so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tuner.report.contents import Answer
from tuner.study.baselines import PAD_TO_LONGEST
from tuner.study.confirm import Confirmation, name_of
from tuner.study.outcome import NumberedOutcome, Outcome
from tuner.study.result import StudyResult
from tuner.study.verdict import Verdict

LONGER_RUN = "Compile time weighs less in a longer run (--set train.epochs=N)."


@dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """Real tokens per second of the best config over those of a baseline.

    Attributes:
        value: Above 1: the best config is faster.
        low: Lower end of its 95 % interval; None if nothing is known about noise.
        high: Upper end of the same.
        num_rounds: Of the confirmation that it comes from; 0: from estimates.
    """

    value: float
    low: float | None
    high: float | None
    num_rounds: int

    @property
    def interval(self) -> str:
        """`95 % interval 2.24 to 2.38`."""
        if self.low is None or self.high is None:
            return "interval not known"
        return f"95 % interval {self.low:.2f} to {self.high:.2f}"

    @property
    def source(self) -> str:
        """What it follows from, in a few words."""
        if not self.num_rounds:
            return "by the estimates"
        return f"{self.num_rounds} round{'s' if self.num_rounds > 1 else ''}"


def find_baseline(result: StudyResult, baseline: str) -> NumberedOutcome | None:
    """The trial of a baseline, measured or failed; None if it has not run yet."""
    return next((item for item in result.outcomes if item.outcome.baseline == baseline), None)


def is_measured(outcome: Outcome) -> bool:
    """Whether there are figures of its run."""
    return outcome.estimate is not None


def speed_up_over(result: StudyResult, baseline: str) -> SpeedUp | None:
    """The best config against a baseline.

    Args:
        result: Of the study.
        baseline: One of `baseline_names`.

    Returns:
        None if one of the two has no figure, or the baseline is the best config itself.
    """
    best, other = result.best, find_baseline(result, baseline)
    if best is None or other is None or best.outcome.config == other.outcome.config:
        return None
    confirmation = result.confirmation
    if confirmation is None or confirmation.verdict is None:
        return _by_estimates(best.outcome, other.outcome)
    name = candidate_of(confirmation, other)
    return None if name is None else _confirmed(confirmation.verdict, name)


def candidate_of(confirmation: Confirmation, item: NumberedOutcome) -> str | None:
    """The name under which a config was confirmed; None if it was not, or failed there."""
    verdict = confirmation.verdict
    standing = {one.name for one in verdict.compared} if verdict else set()
    same = (
        name
        for name, candidate in confirmation.candidates.items()
        if name in standing and candidate.outcome.config == item.outcome.config
    )
    return next(same, None)


def log_half_width(verdict: Verdict) -> float | None:
    """Half of the 95 % interval of the log of a ratio of any two; None where it is not known.

    Noise is pooled over the candidates, so that it is the same for every pair.
    """
    if verdict.num_rounds < 2:
        # The noise that the verdict assumes then is no measurement.
        return None
    others = (item for item in verdict.compared if item.name != verdict.fastest)
    return next((math.log(item.high / item.low) / 2 for item in others), None)


def describe_verdict(result: StudyResult) -> tuple[Answer, str]:
    """Whether the best config is faster than padding everything to the longest: the headline."""
    best = result.best
    if best is None:
        total = len(result.outcomes)
        return "unknown", (
            "Not known: the only trial could not be measured."
            if total == 1
            else f"Not known: none of {total} trials could be measured."
        )
    if best.outcome.config.batching.strategy == "fixed":
        return _padding_is_best(result)
    gain = speed_up_over(result, PAD_TO_LONGEST)
    if gain is None:
        return "unknown", f"Not known: {why_no_baseline(result)}."
    return _compare_with_padding(describe_best(best), gain)


def describe_best(best: NumberedOutcome) -> str:
    """The best config as it stands in the headline: `14 buckets (trial 18)`."""
    if best.outcome.baseline is not None:
        return best.outcome.baseline
    batching = best.outcome.config.batching
    if batching.strategy == "bucketed":
        many = len(batching.boundaries)
        kind = f"{many} bucket{'' if many == 1 else 's'}"
    else:
        kind = {"packed": "packed rows", "dynamic": "random batches"}[batching.strategy]
    return f"{kind} ({name_of(best)})"


def why_no_baseline(result: StudyResult) -> str:
    """Why there is no figure of padding to the longest, as the end of a sentence."""
    missing = (
        "padding to the longest was not measured, so there is nothing to hold the best against"
    )
    fixed = find_baseline(result, PAD_TO_LONGEST)
    if fixed is None:
        return missing
    failures = [(fixed.outcome.status, fixed.outcome.reason)]
    if result.confirmation is not None:
        failures += [
            (item.status, item.reason)
            for item in result.confirmation.rounds
            if item.candidate == PAD_TO_LONGEST
        ]
    failed = [f"{status}: {reason}" for status, reason in failures if status != "ok"]
    return f"padding to the longest could not be measured ({failed[0]})" if failed else missing


def describe_ranking(result: StudyResult) -> str:
    """Which of the confirmed candidates is taken, and why: the sentence under the comparison."""
    confirmation = result.confirmation
    if confirmation is None or confirmation.verdict is None:
        return ""
    verdict = confirmation.verdict
    if len(verdict.compared) == 1:
        return f"Only {verdict.winner} came through all rounds; there was nothing to compare."
    half_width = log_half_width(verdict)
    if half_width is None:
        return (
            f"One round says nothing about noise, so no difference is significant; "
            f"{verdict.winner} is taken. --confirm 3 would tell more."
        )
    if verdict.is_significant:
        return _clear_winner(verdict, half_width)
    winner, fastest = verdict.of(verdict.winner), verdict.of(verdict.fastest)
    equal = [item.name for item in verdict.compared if not item.is_slower]
    if winner is fastest:
        return (
            f"No significant difference between {_listed(equal)}: the simpler config is taken, "
            f"{winner.name}, which also has the shortest mean run."
        )
    behind = 1.0 - winner.speed_ratio
    return (
        f"No significant difference between {_listed(equal)}: the simpler config is taken, "
        f"{winner.name}, though {fastest.name} was faster by "
        f"{100 * behind:.1f} % in the mean, which is within noise."
    )


def _by_estimates(best: Outcome, other: Outcome) -> SpeedUp | None:
    ours, theirs = best.estimate, other.estimate
    if ours is None or theirs is None:
        return None
    value = ours.estimated_real_tokens_per_s / theirs.estimated_real_tokens_per_s
    error = math.hypot(
        ours.estimated_run_error_s / ours.estimated_run_s,
        theirs.estimated_run_error_s / theirs.estimated_run_s,
    )
    if error == 0.0:
        return SpeedUp(value=value, low=None, high=None, num_rounds=0)
    return SpeedUp(
        value=value, low=value * math.exp(-error), high=value * math.exp(error), num_rounds=0
    )


def _confirmed(verdict: Verdict, name: str) -> SpeedUp:
    value = verdict.of(name).run_s / verdict.of(verdict.winner).run_s
    half_width = log_half_width(verdict)
    return SpeedUp(
        value=value,
        low=None if half_width is None else value * math.exp(-half_width),
        high=None if half_width is None else value * math.exp(half_width),
        num_rounds=verdict.num_rounds,
    )


def _padding_is_best(result: StudyResult) -> tuple[Answer, str]:
    verdict = result.confirmation.verdict if result.confirmation else None
    if verdict is None:
        return "unknown", (
            "By the estimates padding everything to the longest is the fastest here; that was not "
            f"confirmed. {LONGER_RUN}"
        )
    if verdict.fastest != verdict.winner and log_half_width(verdict) is None:
        lead = verdict.of(verdict.winner).run_s / verdict.of(verdict.fastest).run_s
        return "unknown", (
            f"Not certain: {verdict.fastest} was {lead:.2f} times as fast as padding everything "
            "to the longest, but one round says nothing about noise, so the simpler config is "
            "taken. --confirm 3 would tell more."
        )
    if verdict.fastest == verdict.winner:
        return "no_difference", (
            f"No: padding everything to the longest is the fastest here. {LONGER_RUN}"
        )
    return "no_difference", (
        "No: nothing is faster than padding everything to the longest beyond noise, and that is "
        f"the simpler config. {LONGER_RUN}"
    )


def _compare_with_padding(name: str, gain: SpeedUp) -> tuple[Answer, str]:
    trains = (
        f"training with {name} is {gain.value:.2f} times as fast as with every row padded to the "
        "longest"
    )
    if not gain.num_rounds:
        return "unknown", (
            f"Not confirmed: by the estimates {trains} ({gain.interval}), compile time included."
        )
    if gain.low is None:
        return "unknown", (
            f"Not certain: {trains}, compile time included, but one round says nothing about "
            "noise."
        )
    if gain.low > 1.0:
        return "faster", f"Yes: {trains} ({gain.interval}), compile time included."
    return "no_difference", (
        f"No difference beyond noise: {trains} ({gain.interval}), compile time included."
    )


def _clear_winner(verdict: Verdict, half_width: float) -> str:
    winner, second = verdict.compared[:2]
    lead = second.run_s / winner.run_s
    low, high = lead * math.exp(-half_width), lead * math.exp(half_width)
    return (
        f"{winner.name} wins beyond noise: {lead:.3f} times the real tokens a second of the next, "
        f"{second.name} (95 % interval {low:.3f} to {high:.3f})."
    )


def _listed(names: list[str]) -> str:
    """`a, b and c`."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]

"""The winner against the baselines, as the report page shows it; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tuner.report.contents import Absent, ComparedConfig, Comparison, SpeedRatio
from tuner.report.speed_up import (
    describe_ranking,
    find_baseline,
    is_measured,
    log_half_width,
    speed_up_over,
)
from tuner.report.study import describe_config
from tuner.study.baselines import baseline_names
from tuner.study.confirm import Confirmation, name_of
from tuner.study.confirm_round import Round
from tuner.study.outcome import NumberedOutcome, Outcome
from tuner.study.result import StudyResult
from tuner.study.setup import StudySetup
from tuner.study.verdict import Compared, Verdict

GO_ON = "The same command goes on with it."


def gather_comparison(result: StudyResult, setup: StudySetup) -> Comparison | Absent:
    """The confirmed candidates; before a confirmation the best and the baselines by estimates."""
    confirmation = result.confirmation
    if confirmation is None or confirmation.verdict is None:
        why = _why_not_confirmed(result, setup)
        rows = _estimated_rows(result)
        return Comparison(rows=rows, verdict=why) if rows else Absent(reason=why)
    rows = tuple(_confirmed_rows(confirmation, confirmation.verdict))
    return Comparison(
        rows=(*rows, *_failed_baselines(result, confirmation)),
        verdict=_told(result, confirmation, setup),
    )


def failure_in(confirmation: Confirmation, name: str) -> Round | None:
    """The first round of a candidate that failed; None if none did."""
    return next(
        (item for item in confirmation.rounds if item.candidate == name and item.status != "ok"),
        None,
    )


def _told(result: StudyResult, confirmation: Confirmation, setup: StudySetup) -> str:
    told = describe_ranking(result)
    if confirmation.is_complete:
        return told
    num_rounds = confirmation.verdict.num_rounds if confirmation.verdict else 0
    return (
        f"{told} Only {num_rounds} of {setup.confirm_rounds} rounds are complete: interrupted, or "
        f"cut short by --timeout. {GO_ON}"
    )


def _why_not_confirmed(result: StudyResult, setup: StudySetup) -> str:
    estimates = "Figures are estimates from what the trials measured"
    if result.best is None:
        return "There was nothing to compare: no trial could be measured."
    if not setup.confirm_rounds:
        return f"The winner was not measured again: --confirm 0. {estimates}."
    confirmation = result.confirmation
    if confirmation is not None and all(
        failure_in(confirmation, name) for name in confirmation.candidates
    ):
        return f"Every candidate failed when it was measured again. {estimates}."
    or_timeout = " or cut short by --timeout" if setup.deadline_s is not None else ""
    return (
        f"The winner was not measured again: the study was interrupted{or_timeout} before a round "
        f"of the confirmation was whole. {estimates}. {GO_ON}"
    )


def _estimated_rows(result: StudyResult) -> tuple[ComparedConfig, ...]:
    best = result.best
    if best is None:
        return ()
    others = [
        item
        for item in _baselines(result)
        if item.number != best.number and is_measured(item.outcome)
    ]
    others.sort(key=lambda item: -(item.outcome.real_tokens_per_s or 0.0))
    return (
        _estimated_row(result, best, is_winner=True),
        *(_estimated_row(result, item, is_winner=False) for item in others),
        *_failed_baselines(result, None),
    )


def _estimated_row(
    result: StudyResult, item: NumberedOutcome, *, is_winner: bool
) -> ComparedConfig:
    estimate = item.outcome.estimate
    assert estimate is not None
    gain = None if is_winner else speed_up_over(result, item.outcome.baseline or "")
    ratio = None
    if gain is not None:
        low = None if gain.high is None else 1.0 / gain.high
        high = None if gain.low is None else 1.0 / gain.low
        ratio = SpeedRatio(value=1.0 / gain.value, low=low, high=high)
    return ComparedConfig(
        name=_title(name_of(item), is_winner=is_winner),
        config=describe_config(item.outcome.config),
        run_s=estimate.estimated_run_s,
        real_tokens_per_s=estimate.estimated_real_tokens_per_s,
        ratio_to_winner=ratio,
        is_significant=_leaves_out_1(ratio),
        num_rounds=0,
        is_winner=is_winner,
    )


def _confirmed_rows(confirmation: Confirmation, verdict: Verdict) -> list[ComparedConfig]:
    """The winner, then the others, the fastest first, then those that failed."""
    order = sorted(verdict.compared, key=lambda item: (item.name != verdict.winner, item.run_s))
    rows = [_confirmed_row(confirmation, verdict, item) for item in order]
    for name, candidate in confirmation.candidates.items():
        failure = failure_in(confirmation, name)
        if failure is not None:
            num_ok = sum(r.candidate == name and r.status == "ok" for r in confirmation.rounds)
            rows.append(_failed_row(name, candidate.outcome, failure, num_ok))
    return rows


def _confirmed_row(confirmation: Confirmation, verdict: Verdict, item: Compared) -> ComparedConfig:
    outcome = confirmation.candidates[item.name].outcome
    is_winner = item.name == verdict.winner
    ratio = None if is_winner else _ratio_to_winner(verdict, item)
    return ComparedConfig(
        name=_title(item.name, is_winner=is_winner),
        config=describe_config(outcome.config),
        run_s=item.run_s,
        real_tokens_per_s=real_tokens_of_run(outcome) / item.run_s,
        ratio_to_winner=ratio,
        is_significant=_leaves_out_1(ratio),
        num_rounds=verdict.num_rounds,
        is_winner=is_winner,
    )


def real_tokens_of_run(outcome: Outcome) -> int:
    """Real tokens of all planned epochs."""
    assert outcome.figures is not None
    return outcome.config.train.epochs * outcome.figures.real_tokens


def _ratio_to_winner(verdict: Verdict, item: Compared) -> SpeedRatio:
    value = verdict.of(verdict.winner).run_s / item.run_s
    half_width = log_half_width(verdict)
    if half_width is None:
        return SpeedRatio(value=value, low=None, high=None)
    return SpeedRatio(
        value=value, low=value * math.exp(-half_width), high=value * math.exp(half_width)
    )


def _leaves_out_1(ratio: SpeedRatio | None) -> bool | None:
    if ratio is None or ratio.low is None or ratio.high is None:
        return None
    return ratio.high < 1.0 or ratio.low > 1.0


def _failed_row(
    name: str, outcome: Outcome, failure: Outcome | Round, num_ok: int
) -> ComparedConfig:
    return ComparedConfig(
        name=name,
        config=describe_config(outcome.config),
        run_s=None,
        real_tokens_per_s=None,
        num_rounds=num_ok,
        status=failure.status,
        reason=failure.reason,
    )


def _failed_baselines(
    result: StudyResult, confirmation: Confirmation | None
) -> Sequence[ComparedConfig]:
    """Baselines that could not be measured at all, so that none is missing without a word."""
    shown = set(confirmation.candidates) if confirmation else set()
    return [
        _failed_row(name_of(item), item.outcome, item.outcome, 0)
        for item in _baselines(result)
        if name_of(item) not in shown and not is_measured(item.outcome)
    ]


def _baselines(result: StudyResult) -> list[NumberedOutcome]:
    found = (find_baseline(result, name) for name in baseline_names(has_own_config=True))
    return [item for item in found if item is not None]


def _title(name: str, *, is_winner: bool) -> str:
    return f"winner: {name}" if is_winner else name

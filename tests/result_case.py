"""Results of a study without its search: chosen configs, planned and measured on a made-up device.

The device follows HIDDEN to the last digit, so that a test can compute every figure itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strategies import skewed_tokens
from study_case import make_setup, make_space

from tuner.config.override import override_config
from tuner.report.study import StudyContext
from tuner.simulate.cost_book import CostBook
from tuner.study.baselines import PACKED, PAD_TO_LONGEST, RANDOM_BATCHES, TEN_QUANTILES
from tuner.study.choose import simplicity
from tuner.study.confirm import Confirmation
from tuner.study.confirm_round import Round
from tuner.study.outcome import NumberedOutcome, Outcome, estimate_again
from tuner.study.result import StudyResult
from tuner.study.setup import StudySetup
from tuner.study.unit import measure_unit, plan_unit
from tuner.study.verdict import Candidate, judge
from tuner.trial.fake import FakeRunner, HiddenCost

HIDDEN = HiddenCost(compile_s=0.5)
TOKENS = skewed_tokens(900, seed=3, longest=256)
EPOCHS = 4
BUDGET = 2048
START_S = 1_700_000_000.0

FIXED = {"batching.strategy": "fixed"}
EIGHT = {"batching.num_buckets": 8}
FOUR = {"batching.num_buckets": 4}
QUANTILES = {"batching.num_buckets": 10, "batching.boundary_rule": "quantile"}
PACKED_ROWS = {"batching.strategy": "packed"}
RANDOM = {"batching.strategy": "dynamic", "graph.mode": "dynamic"}
TOO_LARGE = {"batching.strategy": "dynamic", "batching.align": 1}

Chosen = tuple[str | None, Mapping[str, Any]]
ALL: tuple[Chosen, ...] = (
    (PAD_TO_LONGEST, FIXED),
    (RANDOM_BATCHES, RANDOM),
    (TEN_QUANTILES, QUANTILES),
    (PACKED, PACKED_ROWS),
    (None, EIGHT),
    (None, FOUR),
    (None, TOO_LARGE),
)
"""(baseline, what it sets), by trial number: trial 4 has eight buckets, trial 6 is refused."""


def result_setup(folder: Path, **changes: Any) -> StudySetup:
    """Some hundred rows of at most 256 tokens, four epochs."""
    base = {
        "train.epochs": EPOCHS,
        "batching.tokens_per_batch": BUDGET,
        "train.tokens_per_update": BUDGET,
    }
    space = make_space(strategy=["bucketed"], num_buckets={"low": 2, "high": 8})
    setup = make_setup(folder, TOKENS, space, base=base)
    limits = {"confirm_rounds": 3, "memory_limit_bytes": 4 * 10**9}
    return dataclasses.replace(setup, **{**limits, **changes})


def measured_result(
    setup: StudySetup, chosen: Sequence[Chosen] = ALL, runner: FakeRunner | None = None
) -> StudyResult:
    """Every chosen config planned and measured in order; a trial ends every two minutes."""
    device = FakeRunner(HIDDEN) if runner is None else runner
    book = CostBook()
    items = []
    for number, (baseline, changes) in enumerate(chosen):
        config = override_config(setup.base, dict(changes), source="test")
        unit = plan_unit(setup, number, config, book, baseline)
        outcome = unit.outcome or measure_unit(setup, device, unit)
        outcome = dataclasses.replace(
            outcome, finished_at_s=START_S + 120.0 * (number + 1), wall_s=60.0
        )
        if outcome.measured:
            book = book.plus(outcome.process(setup.installation.device))
        items.append(NumberedOutcome(number=number, outcome=outcome))
    outcomes = estimate_again(items, book, setup.installation.device)
    return StudyResult(outcomes=outcomes, book=book)


def with_failure(result: StudyResult, number: int, status: str, reason: str) -> StudyResult:
    """The same, but that trial failed."""
    return StudyResult(
        outcomes=tuple(
            NumberedOutcome(number=item.number, outcome=_failed(item.outcome, status, reason))
            if item.number == number
            else item
            for item in result.outcomes
        ),
        book=result.book,
    )


def confirmed(
    result: StudyResult,
    run_s: Mapping[str, Sequence[float]],
    failed: Mapping[str, tuple[str, str]] | None = None,
    *,
    is_complete: bool = True,
) -> StudyResult:
    """The same with a confirmation.

    Args:
        result: Of the search.
        run_s: Baseline or `trial N` -> seconds of each round.
        failed: The same -> status and reason of its first round.
        is_complete: No round is still to be run.
    """
    failures = failed or {}
    candidates = {name: _named(result, name) for name in (*run_s, *failures)}
    rounds = [
        Round(candidate=name, number=number, status="ok", run_s=seconds)
        for name, of_rounds in run_s.items()
        for number, seconds in enumerate(of_rounds)
    ]
    rounds += [
        Round(candidate=name, number=0, status=status, reason=reason)
        for name, (status, reason) in failures.items()
    ]
    judged = [
        Candidate(name=name, simplicity=simplicity(candidates[name].outcome)) for name in run_s
    ]
    return dataclasses.replace(
        result,
        confirmation=Confirmation(
            candidates=candidates,
            rounds=tuple(rounds),
            verdict=judge(judged, run_s) if run_s else None,
            is_complete=is_complete,
        ),
    )


def context_of(setup: StudySetup, **changes: Any) -> StudyContext:
    """What the command line would say."""
    context = StudyContext(
        data_path="/data/chat.mindrecord",
        num_samples=len(TOKENS),
        longest=max(TOKENS),
        device="CPU",
        versions={"varseq-tuner": "0.1.0", "mindspore": "2.10.0", "numpy": "1.26.4"},
        notes=("no --config: a small decoder",),
        command="varseq-tune --data chat.mindrecord --trials 60",
        best_config_path="results/best.yaml",
        num_cores=2,
    )
    return dataclasses.replace(context, **changes)


def _named(result: StudyResult, name: str) -> NumberedOutcome:
    return next(
        item for item in result.outcomes if name in (item.outcome.baseline, f"trial {item.number}")
    )


def _failed(outcome: Outcome, status: str, reason: str) -> Outcome:
    return dataclasses.replace(outcome, status=status, reason=reason, estimate=None)

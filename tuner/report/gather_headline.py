"""The two answers at the head of the report page: is it faster, can it be believed; pure."""

from __future__ import annotations

import numpy as np

from tuner.batching.plan import length_limit
from tuner.batching.rows import admit_rows
from tuner.report.contents import Absent, Headline, KeyFigure
from tuner.report.gather_comparison import real_tokens_of_run
from tuner.report.gather_figures import confirmed_steps_s
from tuner.report.gather_notes import disturbed_by
from tuner.report.markup import count, percent, seconds
from tuner.report.points import PredictionFigure
from tuner.report.speed_up import describe_verdict, find_baseline, speed_up_over
from tuner.simulate.estimate import zero_padding_run_s
from tuner.simulate.measurement import CostKey
from tuner.study.baselines import PAD_TO_LONGEST, TEN_QUANTILES
from tuner.study.outcome import NumberedOutcome, Outcome
from tuner.study.result import StudyResult
from tuner.study.setup import StudySetup


def gather_headline(
    result: StudyResult, setup: StudySetup, prediction: PredictionFigure | Absent
) -> Headline:
    """Verdict, trust and key figures.

    Args:
        result: Of the study.
        setup: What it is about.
        prediction: How well steps were foretold.
    """
    answer, verdict = describe_verdict(result)
    best = result.best
    if best is None:
        return Headline(answer=answer, verdict=verdict, trust="There is no figure to believe yet.")
    return Headline(
        answer=answer,
        verdict=verdict,
        trust=" ".join(
            filter(
                None,
                (
                    _repeated(result),
                    _measured(result, best.outcome),
                    _foretold(prediction),
                    _disturbed(result, setup),
                ),
            )
        ),
        key_figures=(
            *_gains(result, best),
            _effective_tokens(result, best.outcome),
            _share_of_limit(result, setup, best),
        ),
    )


def run_seconds(result: StudyResult, best: NumberedOutcome) -> float:
    """Of the planned run: mean of the confirmation's rounds, before it the estimate."""
    confirmation = result.confirmation
    if confirmation is not None and confirmation.verdict is not None:
        return confirmation.verdict.of(confirmation.verdict.winner).run_s
    assert best.outcome.estimate is not None
    return best.outcome.estimate.estimated_run_s


def _repeated(result: StudyResult) -> str:
    verdict = result.confirmation.verdict if result.confirmation else None
    if verdict is None:
        return "Winner and baselines were not measured again, so noise is not known."
    told = (
        f"{count(len(verdict.compared), 'config')} {_were(len(verdict.compared))} measured again "
        f"in {count(verdict.num_rounds, 'interleaved round')}, each in a fresh process"
    )
    if verdict.noise == 0.0:
        return f"{told}; how much processes differ by chance is not known from that."
    return f"{told}; run times differ by {percent(verdict.noise)} between processes by chance."


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _measured(result: StudyResult, best: Outcome) -> str:
    assert best.estimate is not None and best.figures is not None
    met = {shape for shape, steps in best.figures.shape_counts.items() if steps}
    share = best.estimate.measured_time_fraction
    if share >= 1.0 or met <= set(confirmed_steps_s(result.confirmation, best)):
        return "Every shape of the best config was timed."
    return (
        f"{percent(share)} of the best config's step time is that of timed shapes; the rest "
        "follows from the cost model."
    )


def _foretold(prediction: PredictionFigure | Absent) -> str:
    if isinstance(prediction, Absent):
        return ""
    return (
        f"The cost model foretells the steps of {count(len(prediction.shapes), 'shape')}, each "
        "from the measurements of all others, within "
        f"{percent(prediction.median_relative_error)} in the median, "
        f"{percent(prediction.max_relative_error)} at most."
    )


def _disturbed(result: StudyResult, setup: StudySetup) -> str:
    """A warning where other programs worked on the machine; several trials at a time also do."""
    disturbed = disturbed_by(result)
    if not disturbed or setup.jobs > 1:
        return ""
    return (
        f"Other programs took up to {max(disturbed.values()):.1f} cores meanwhile: times may be "
        "too long."
    )


def _gains(result: StudyResult, best: NumberedOutcome) -> list[KeyFigure]:
    found = []
    for label, baseline in (
        ("speed, padding to the longest = 1", PAD_TO_LONGEST),
        ("speed, ten quantile buckets = 1", TEN_QUANTILES),
    ):
        gain = speed_up_over(result, baseline)
        if gain is None:
            continue
        run_s = run_seconds(result, best)
        found.append(
            KeyFigure(
                label=label,
                value=f"{gain.value:.2f} x",
                detail=(
                    f"{gain.interval}, {gain.source}; a run of {seconds(run_s)} instead of "
                    f"{seconds(gain.value * run_s)}"
                ),
                basis="estimated",
            )
        )
    return found


def _effective_tokens(result: StudyResult, best: Outcome) -> KeyFigure:
    fixed = find_baseline(result, PAD_TO_LONGEST)
    detail = ""
    if fixed is not None and fixed.outcome.figures is not None:
        fraction = fixed.outcome.effective_token_fraction
        detail = f"padding to the longest: {percent(fraction)}"
    return KeyFigure(
        label="tokens that are not padding",
        value=percent(best.effective_token_fraction),
        detail=detail,
        basis="exact",
    )


def _share_of_limit(result: StudyResult, setup: StudySetup, best: NumberedOutcome) -> KeyFigure:
    limit_s = limit_run_s(result, setup, best.outcome)
    speed = real_tokens_of_run(best.outcome) / limit_s
    return KeyFigure(
        label="of the speed without any padding or compile",
        value=percent(limit_s / run_seconds(result, best)),
        detail=f"that limit: {speed:,.0f} real tokens a second",
        basis="estimated",
    )


def limit_run_s(result: StudyResult, setup: StudySetup, best: Outcome) -> float:
    """Seconds of a run in which every row has its own length: no plan can be shorter.

    Batches have the largest token budget that was planned for, since a larger batch shares its
    overhead among more rows.
    """
    config = best.config
    key = CostKey.of(
        config.model_copy(
            update={
                "graph": config.graph.model_copy(update={"mode": "static"}),
                "batching": config.batching.model_copy(update={"strategy": "bucketed"}),
            }
        ),
        setup.installation.device,
    )
    tokens = admit_rows(setup.data.lengths, config.data, length_limit(config)).tokens
    budget = max(size * length for item in result.outcomes for size, length in item.outcome.shapes)
    cost = result.book.known(key).model.step
    return zero_padding_run_s(np.asarray(tokens), budget, config.train.epochs, cost)

"""What the report's figures draw, from a study's result; pure.

Cost: the curves screen at most MAX_SHAPES plans and solve one dynamic program; a second or two.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from tuner.batching.boundaries import solve_least_time
from tuner.batching.grouping import Shape
from tuner.batching.plan import length_limit
from tuner.config.schema import TrainConfig
from tuner.errors import BadInputError
from tuner.report.contents import Absent
from tuner.report.points import (
    LengthFigure,
    PredictionFigure,
    RunTimeFigure,
    RunTimePoint,
    ShapePrediction,
    TimedRun,
    TrialPoint,
    WasteFigure,
    WastePoint,
)
from tuner.simulate.break_even import BreakEven, find_break_even
from tuner.simulate.cost_book import LEAST_SHAPES, KnownCosts
from tuner.simulate.estimate import Estimate, estimate_run
from tuner.simulate.histogram import LengthHistogram
from tuner.simulate.measurement import CostKey
from tuner.simulate.screen import Screen, ScreenedPlan
from tuner.study.choose import is_feasible, pad_to_longest
from tuner.study.confirm import Confirmation
from tuner.study.guide import with_boundaries
from tuner.study.outcome import NumberedOutcome, Outcome
from tuner.study.result import StudyResult
from tuner.study.setup import StudySetup

MAX_SHAPES = 32
"""Numbers of shapes that the curves go up to; to those of the best config if it has more."""

MAX_BINS = 64
BIN_MULTIPLE = 8
"""Edges of bins are multiples of this many tokens, as alignments are."""

LONG_TAIL = 16
"""Longest over median length from which on bins of equal width would hold nearly all in one."""

LEAST_TIMED = 0.95
"""Share of a run's step seconds that must come from measured shapes to call the run timed."""


def gather_prediction(result: StudyResult, setup: StudySetup) -> PredictionFigure | Absent:
    """Every measured shape of the best config, foretold by a fit without it.

    Where the best config has fewer than LEAST_SHAPES, all shapes measured under its key stand in.
    """
    best = result.best
    if best is None:
        return Absent()
    key = CostKey.of(best.outcome.config, setup.installation.device)
    measured = dict(result.book.known(key).steps_s)
    measured |= confirmed_steps_s(result.confirmation, best.outcome)
    planned = {shape: measured[shape] for shape in best.outcome.shapes if shape in measured}
    shown = planned if len(planned) >= LEAST_SHAPES else measured
    if not shown:
        return Absent()
    points = []
    for shape, step_s in shown.items():
        predicted_s, half_width_s = result.book.predict_without(key, shape)
        points.append(_predicted(shape, predicted_s, half_width_s, step_s))
    errors = [abs(point.relative_error) for point in points]
    return PredictionFigure(
        shapes=tuple(points),
        median_relative_error=statistics.median(errors),
        max_relative_error=max(errors),
        source="the cost model, fitted to all measurements but those of the shape itself",
    )


def gather_trials(outcomes: Sequence[NumberedOutcome]) -> tuple[TrialPoint, ...]:
    """Trials in the order in which they ended."""
    ended = sorted(outcomes, key=lambda item: (item.outcome.finished_at_s, item.number))
    start_s = min((o.outcome.finished_at_s - o.outcome.wall_s for o in ended), default=0.0)
    points: list[TrialPoint] = []
    best = None
    for item in ended:
        outcome = item.outcome
        if outcome.real_tokens_per_s is not None and is_feasible(outcome):
            best = max(best or 0.0, outcome.real_tokens_per_s)
        points.append(
            TrialPoint(
                number=item.number,
                minutes=(outcome.finished_at_s - start_s) / 60.0,
                real_tokens_per_s=outcome.real_tokens_per_s,
                status=outcome.status,
                is_baseline=outcome.baseline is not None,
                best_so_far=best,
            )
        )
    return tuple(points)


def gather_lengths(best: Outcome, setup: StudySetup) -> LengthFigure:
    """The rows that are batched, with the boundaries of the best config."""
    config = best.config
    rows = LengthHistogram.from_tokens(setup.data.lengths.own_tokens)
    rows = rows.admit(config.data, length_limit(config))
    edges = _bin_edges(rows)
    counts, _ = np.histogram(rows.lengths, edges, weights=rows.counts)
    has_boundaries = config.batching.strategy in ("bucketed", "fixed")
    return LengthFigure(
        bin_edges=edges,
        num_rows=tuple(int(count) for count in counts),
        boundaries=tuple(sorted({length for _, length in best.shapes})) if has_boundaries else (),
    )


def gather_waste(best: Outcome, setup: StudySetup) -> WasteFigure | Absent:
    """Plans of least padding at the best config's alignment and budget, by number of shapes."""
    screen = Screen(LengthHistogram.from_tokens(setup.data.lengths.own_tokens))
    points = []
    try:
        for num_buckets in range(1, _most_shapes(best) + 1):
            plan = screen.plan(_bucketed(best, num_buckets))
            if len(plan.shape_counts) < num_buckets:
                break
            points.append(
                WastePoint(num_shapes=num_buckets, padding_fraction=plan.padding_fraction)
            )
    except BadInputError as error:
        return Absent(reason=f"Padding was not computed: {error}")
    return WasteFigure(points=tuple(points), chosen_num_shapes=_chosen(best, len(points)))


def gather_run_time(result: StudyResult, setup: StudySetup) -> RunTimeFigure | Absent:
    """Plans of least time at the best config's alignment, budget and graph mode."""
    best = result.best
    if best is None:
        return Absent()
    key = CostKey.of(_bucketed(best.outcome, 1), setup.installation.device)
    costs = result.book.known(key)
    epochs = best.outcome.config.train.epochs
    try:
        plans = _least_time_plans(best.outcome, setup, costs)
    except BadInputError as error:
        return Absent(reason=f"Run times were not estimated: {error}")
    estimates = [estimate_run(plan, epochs, costs) for plan in plans]
    optimum = min(range(len(plans)), key=lambda index: estimates[index].estimated_run_s)
    ahead = _break_even(result, plans[optimum], estimates[optimum], estimates[0])
    return RunTimeFigure(
        points=tuple(
            _run_time_point(plan, estimate)
            for plan, estimate in zip(plans, estimates, strict=True)
        ),
        timed_runs=_timed_runs(result, setup, key),
        optimum_num_shapes=len(plans[optimum].shape_counts),
        epochs=epochs,
        break_even_steps=None if ahead is None else ahead.steps,
        cost_source=f"fitted to {costs.model.source}",
    )


def confirmed_steps_s(
    confirmation: Confirmation | None, outcome: Outcome
) -> Mapping[Shape, float]:
    """(B, L) -> median step seconds over the rounds that confirmed it; empty without one."""
    if confirmation is None:
        return {}
    found: dict[Shape, list[float]] = {}
    for item in confirmation.rounds:
        candidate = confirmation.candidates.get(item.candidate)
        if candidate is not None and candidate.outcome.config == outcome.config:
            for shape in item.shapes:
                found.setdefault(shape.shape, []).append(shape.step_s)
    return {shape: statistics.median(steps_s) for shape, steps_s in found.items()}


def _predicted(
    shape: Shape, predicted_s: float, half_width_s: float, measured_s: float
) -> ShapePrediction:
    return ShapePrediction(
        batch_size=shape[0],
        padded_length=shape[1],
        predicted_step_s=predicted_s,
        low_s=max(0.0, predicted_s - half_width_s),
        high_s=predicted_s + half_width_s,
        measured_step_s=measured_s,
        relative_error=predicted_s / measured_s - 1.0,
    )


def _bin_edges(rows: LengthHistogram) -> tuple[int, ...]:
    """Aligned bins of equal width; of a long tail bins that grow."""
    longest = rows.longest
    middle = int(rows.lengths[np.searchsorted(np.cumsum(rows.counts), (rows.num_rows + 1) // 2)])
    if longest > LONG_TAIL * middle:
        drawn = np.geomspace(max(1, int(rows.lengths[0])), longest, MAX_BINS + 1)
        distinct = np.unique(np.round(drawn).astype(np.int64))
        return tuple(int(edge) for edge in distinct)
    width = BIN_MULTIPLE * -(-longest // (BIN_MULTIPLE * MAX_BINS))
    return tuple(range(0, width * (-(-longest // width) + 1), width))


def _most_shapes(best: Outcome) -> int:
    is_drawn = best.config.batching.strategy in ("bucketed", "fixed")
    return max(MAX_SHAPES, best.num_shapes) if is_drawn else MAX_SHAPES


def _chosen(best: Outcome, most: int) -> int | None:
    """Shapes of the best config where they are comparable: one a padded length, no more."""
    if best.config.batching.strategy not in ("bucketed", "fixed") or best.figures is None:
        return None
    return best.figures.num_shapes if best.figures.num_shapes <= most else None


def _bucketed(best: Outcome, num_buckets: int) -> TrainConfig:
    """The best config with so many buckets of least padding; all else as it is."""
    batching = best.config.batching
    update = {
        "strategy": "bucketed",
        "boundaries": (),
        "boundary_rule": "least_padding",
        "num_buckets": num_buckets,
    }
    if batching.batch_sizes:
        # Sizes belong to their boundaries; a budget as large as the largest takes their place.
        budget = max(size * length for size, length in best.shapes)
        update |= {"batch_sizes": (), "tokens_per_batch": budget}
    return best.config.model_copy(update={"batching": batching.model_copy(update=update)})


def _least_time_plans(best: Outcome, setup: StudySetup, costs: KnownCosts) -> list[ScreenedPlan]:
    config = _bucketed(best, 1)
    histogram = LengthHistogram.from_tokens(setup.data.lengths.own_tokens)
    rows = histogram.admit(config.data, length_limit(config))
    curve = solve_least_time(
        rows.lengths,
        config.batching,
        costs.run_cost(config.train.epochs),
        _most_shapes(best),
        rows.counts,
    )
    screen = Screen(histogram)
    return [screen.plan(with_boundaries(config, ends)) for ends in curve.boundaries]


def _run_time_point(plan: ScreenedPlan, estimate: Estimate) -> RunTimePoint:
    is_error_known = estimate.estimated_run_error_s > 0.0
    return RunTimePoint(
        num_shapes=len(plan.shape_counts),
        estimated_run_s=estimate.estimated_run_s,
        low_s=estimate.low_run_s if is_error_known else None,
        high_s=estimate.high_run_s if is_error_known else None,
        compile_s=estimate.estimated_compile_s,
    )


def _break_even(
    result: StudyResult, plan: ScreenedPlan, estimate: Estimate, one_shape: Estimate
) -> BreakEven | None:
    """Against padding to the longest: as it was measured, else as one shape is estimated."""
    fixed = pad_to_longest(result.outcomes)
    measured = fixed.outcome.estimate if fixed else None
    return find_break_even(estimate, measured or one_shape, plan.real_tokens / plan.num_steps)


def _timed_runs(result: StudyResult, setup: StudySetup, key: CostKey) -> tuple[TimedRun, ...]:
    """Trials under the key whose steps were measured: confirmed, or nearly all in the search."""
    confirmed_s = _confirmed_run_s(result.confirmation)
    runs = []
    for item in result.outcomes:
        outcome, estimate = item.outcome, item.outcome.estimate
        if estimate is None or outcome.figures is None:
            continue
        is_timed = item.number in confirmed_s or estimate.measured_time_fraction >= LEAST_TIMED
        if is_timed and CostKey.of(outcome.config, setup.installation.device) == key:
            runs.append(
                TimedRun(
                    trial=item.number,
                    num_shapes=outcome.figures.num_shapes,
                    run_s=confirmed_s.get(item.number, estimate.estimated_run_s),
                )
            )
    return tuple(runs)


def _confirmed_run_s(confirmation: Confirmation | None) -> Mapping[int, float]:
    """Trial -> mean seconds of its run over the rounds."""
    if confirmation is None or confirmation.verdict is None:
        return {}
    return {
        confirmation.candidates[item.name].number: item.run_s
        for item in confirmation.verdict.compared
    }

"""One unit of work: a config planned, the shapes that it is to measure, and its outcome."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from tuner.batching.align import align_length
from tuner.batching.grouping import Shape, rows_per_batch
from tuner.batching.plan import plan_batches, resolve_boundaries
from tuner.config.override import override_config
from tuner.config.schema import BatchingConfig, TrainConfig
from tuner.errors import BadInputError
from tuner.simulate.cost_book import CostBook
from tuner.simulate.estimate import Estimate, estimate_run
from tuner.simulate.measurement import CostKey, ProcessMeasurement, ShapeMeasurement
from tuner.simulate.stats import PlanStats, count_plan
from tuner.simulate.to_measure import choose_shapes, far_shapes, largest_first
from tuner.study.guide import why_not_run
from tuner.study.outcome import Outcome, PrecisionCheck
from tuner.study.precision import check_precision
from tuner.study.setup import StudySetup
from tuner.trial.record import TrialResult, TrialSpec
from tuner.trial.runner import OnMeasured, TrialRunner, go_on

MAX_SHAPES_A_TRIAL = 6
"""Of a proposal, and of every plan on one dynamic graph: between a few shapes the fit does."""

COMMON_LENGTHS = (0.1, 0.5)
"""Quantiles of the rows' lengths at which a dynamic graph is measured if nothing near is known."""

TIMED_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A planned config on its way.

    Attributes:
        number: Of the trial.
        config: Boundaries resolved.
        key: What its costs are kept under.
        baseline: Its name if it is one.
        figures: One epoch of the plan; None if it could not be planned.
        planned_shapes: In the order of warm-up.
        shapes: To be measured, largest first.
        precision: What is known of how far it is from fp32.
        checks_precision: That is to be measured first.
        outcome: Where no process is needed to know it.
        device_id: Of several devices the one to run on.
    """

    number: int
    config: TrainConfig
    key: CostKey
    baseline: str | None = None
    figures: PlanStats | None = None
    planned_shapes: tuple[Shape, ...] = ()
    shapes: tuple[Shape, ...] = ()
    precision: PrecisionCheck | None = None
    checks_precision: bool = False
    outcome: Outcome | None = None
    device_id: int = 0

    @property
    def needs_process(self) -> bool:
        """Whether there is anything to measure."""
        return self.outcome is None and (bool(self.shapes) or self.checks_precision)

    def claim_of(self, shape: Shape) -> str:
        """The name under which a shape is measured once over all tuners."""
        return f"{self.key} {shape[0]}x{shape[1]}"

    def finish(self, result: TrialResult) -> Outcome:
        """The outcome of a result; it is estimated together with all others."""
        return Outcome(
            config=self.config,
            status=result.status,
            reason=result.reason,
            baseline=self.baseline,
            figures=self.figures,
            shapes=self.planned_shapes,
            asked=self.shapes,
            measured=result.shapes,
            update=result.update,
            precision=self.precision,
            base_bytes=result.base_bytes,
            peak_bytes=result.peak_bytes,
            memory_kind=result.memory_kind,
            wall_s=result.wall_s,
            other_cores=result.other_cores,
            finished_at_s=time.time(),
        )


def plan_unit(
    setup: StudySetup,
    number: int,
    config: TrainConfig,
    book: CostBook,
    baseline: str | None = None,
) -> Unit:
    """Plan a config and choose what to measure; what cannot run has its outcome at once.

    Args:
        setup: Data and limits.
        number: Of the trial.
        config: Boundaries resolved, or none to resolve.
        book: All that is known.
        baseline: Its name if it is one: then all of its static shapes are measured.
    """
    device = setup.installation.device
    try:
        config = resolve_boundaries(setup.data.lengths, config)
        plan = plan_batches(setup.data.lengths, config)
    except BadInputError as error:
        unit = Unit(
            number=number, config=config, key=CostKey.of(config, device), baseline=baseline
        )
        return refused(unit, str(error))
    unit = Unit(
        number=number,
        config=config,
        key=CostKey.of(config, device),
        baseline=baseline,
        figures=count_plan(plan, config.train.tokens_per_update, config.train.steps_per_update),
        planned_shapes=plan.shapes,
    )
    reason = why_not_run(setup, config, plan.shapes, book)
    if reason is not None:
        return refused(unit, reason)
    return replace(unit, shapes=_to_measure(setup, unit, book))


def measure_unit(
    setup: StudySetup, runner: TrialRunner, unit: Unit, on_measured: OnMeasured = go_on
) -> Outcome:
    """Run the process of a unit; whatever goes wrong is an outcome."""
    folder = setup.folder.trial(unit.number)
    if unit.checks_precision:
        check, problem = check_precision(setup, runner, unit.config, folder)
        unit = replace(unit, precision=check)
        if problem:
            return unit.finish(TrialResult(status="refused", reason=problem))
        if not unit.shapes:
            return unit.finish(TrialResult(status="ok"))
    spec = TrialSpec(
        config=unit.config,
        lengths_file=str(setup.folder.lengths.absolute()),
        shapes=unit.shapes,
        timed_steps=TIMED_STEPS,
        time_limit_s=setup.time_limit_s,
        memory_limit_bytes=setup.memory_limit_bytes,
        device_id=unit.device_id,
    )
    return unit.finish(runner.run(spec, folder, on_measured))


def measure_smaller(
    setup: StudySetup, runner: TrialRunner, unit: Unit, outcome: Outcome, book: CostBook
) -> Outcome:
    """A baseline again, with half the token budget as often as it is out of memory.

    One that cannot run is none to hold against.

    Args:
        setup: Data and limits.
        runner: Runs its processes.
        unit: What was run.
        outcome: Of that; returned if it had the memory.
        book: What was known before.
    """
    config = half_budget(unit.config, setup)
    while config is not None and (outcome.status == "oom" or outcome.is_over_memory):
        smaller = plan_unit(setup, unit.number, config, book, unit.baseline)
        # Found by the first run, which looks at it before anything else.
        smaller = replace(smaller, precision=outcome.precision, device_id=unit.device_id)
        outcome = smaller.outcome or measure_unit(setup, runner, smaller)
        config = half_budget(config, setup)
    return outcome


def half_budget(config: TrainConfig, setup: StudySetup) -> TrainConfig | None:
    """The config with half the token budget; None where the longest row would not fit in it."""
    smaller = (config.batching.tokens_per_batch or 0) // 2
    if smaller < align_length(setup.data.longest, config.batching.align):
        return None
    return override_config(config, {"batching.tokens_per_batch": smaller}, source="baseline")


def partial_estimate(
    unit: Unit, measured: tuple[ShapeMeasurement, ...], book: CostBook
) -> Estimate:
    """What the run of a unit would take, as far as its trial has come.

    Args:
        unit: Planned.
        measured: Its shapes so far.
        book: What was known before; it stays as it is.
    """
    assert unit.figures is not None
    process = ProcessMeasurement(
        key=unit.key, shapes=measured, update=None, base_bytes=0, peak_bytes=0
    )
    costs = book.plus(process).known(unit.key)
    return estimate_run(unit.figures, unit.config.train.epochs, costs)


def is_hopeless(estimate: Estimate, best_real_tokens_per_s: float) -> bool:
    """Whether a run would be slower than the best even at the lower end of its seconds."""
    real_tokens = estimate.estimated_real_tokens_per_s * estimate.estimated_run_s
    return real_tokens < best_real_tokens_per_s * estimate.low_run_s


def _to_measure(setup: StudySetup, unit: Unit, book: CostBook) -> tuple[Shape, ...]:
    assert unit.figures is not None
    costs = book.known(unit.key)
    counts = unit.figures.shape_counts
    if unit.baseline is not None and unit.key.graph_mode == "static":
        return tuple(
            shape
            for shape in unit.planned_shapes
            if counts.get(shape) and shape not in costs.steps_s
        )
    chosen = choose_shapes(counts, unit.config.train.epochs, costs, MAX_SHAPES_A_TRIAL)
    if not chosen or unit.key.graph_mode == "static":
        return chosen
    full = _full_batches(setup, unit.config.batching)
    return largest_first([*chosen, *far_shapes(full, [*costs.steps_s, *chosen])])


def _full_batches(setup: StudySetup, batching: BatchingConfig) -> list[Shape]:
    """Batches of the whole token budget at common lengths of rows."""
    common = np.quantile(setup.data.lengths.own_tokens, COMMON_LENGTHS, method="inverted_cdf")
    lengths = np.minimum(common, setup.data.longest).tolist()
    padded = [align_length(int(length), batching.align) for length in lengths]
    return [(rows_per_batch(batching, length), length) for length in padded]


def refused(unit: Unit, reason: str) -> Unit:
    """The unit with the outcome that it cannot run, and why."""
    return replace(unit, outcome=unit.finish(TrialResult(status="refused", reason=reason)))

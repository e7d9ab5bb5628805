"""One measurement of a candidate: every shape of its plan compiled and stepped in one process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from tuner.batching.grouping import Shape
from tuner.simulate.cost_book import CostBook
from tuner.simulate.estimate import estimate_run
from tuner.simulate.measurement import CostKey, ProcessMeasurement, ShapeMeasurement
from tuner.simulate.to_measure import largest_first
from tuner.study.outcome import Outcome
from tuner.study.setup import StudySetup
from tuner.study.unit import TIMED_STEPS
from tuner.trial.folder import TrialFolder
from tuner.trial.record import TrialSpec
from tuner.trial.runner import OnMeasured, TrialRunner, go_on

MANY_SHAPES = 12
FEW_TIMED_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Round:
    """One measurement of one candidate.

    Attributes:
        candidate: Its name.
        number: Of the round, from 1.
        status: As in TrialResult.
        reason: Why it failed; empty if it did not.
        run_s: Seconds of the planned run by this process's measurements; 0 if it failed.
        compile_s: Of that, all compiles.
        real_tokens_per_s: Real tokens of the run over run_s; 0 if it failed.
        shapes: All that were measured.
        peak_bytes: Largest memory of the process.
        wall_s: Wall seconds of the process.
        other_cores: Cores that other programs took meanwhile, on average.
    """

    candidate: str
    number: int
    status: str
    reason: str = ""
    run_s: float = 0.0
    compile_s: float = 0.0
    real_tokens_per_s: float = 0.0
    shapes: tuple[ShapeMeasurement, ...] = ()
    peak_bytes: int = 0
    wall_s: float = 0.0
    other_cores: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a process of a round measures.

    Attributes:
        candidate: Its name.
        number: Of the round, from 1.
        outcome: Of a config that was planned.
        folder: For its files.
    """

    candidate: str
    number: int
    outcome: Outcome
    folder: TrialFolder


@dataclass(frozen=True, kw_only=True)
class InTurn:
    """Processes that step in turn.

    Attributes:
        file: Whose lock is the turn.
        num_processes: That share it, >= 1.
        turn_s: Seconds of this one's turns, at least, > 0.
    """

    file: Path
    num_processes: int
    turn_s: float


def met_shapes(outcome: Outcome) -> tuple[Shape, ...]:
    """The shapes of a planned config that an epoch meets, the largest first."""
    assert outcome.figures is not None
    return largest_first([shape for shape, count in outcome.figures.shape_counts.items() if count])


def timed_steps(outcome: Outcome) -> int:
    """Steady steps of each shape: few where a dynamic graph has many, whose errors even out."""
    is_dynamic = outcome.config.graph.mode == "dynamic"
    has_many = is_dynamic and len(met_shapes(outcome)) > MANY_SHAPES
    return FEW_TIMED_STEPS if has_many else TIMED_STEPS


def mean_step_s(outcome: Outcome) -> float:
    """Estimated seconds of a step of a planned config, on average over an epoch."""
    assert outcome.estimate is not None and outcome.figures is not None
    steps = max(1.0, float(sum(outcome.figures.shape_counts.values())))
    running_s = outcome.estimate.estimated_run_s - outcome.estimate.estimated_compile_s
    return running_s / outcome.config.train.epochs / steps


def steady_seconds(outcome: Outcome, timed_s: float) -> float:
    """About how long the steady steps of a round take.

    Args:
        outcome: Of a planned config.
        timed_s: That are wanted at least.
    """
    steps_s = timed_steps(outcome) * len(met_shapes(outcome)) * mean_step_s(outcome)
    return max(timed_s, steps_s)


def measure_whole(
    setup: StudySetup,
    runner: TrialRunner,
    task: Task,
    in_turn: InTurn | None = None,
    on_measured: OnMeasured = go_on,
) -> Round:
    """Measure every shape of a plan in one process; whatever goes wrong is a value.

    Args:
        setup: Limits.
        runner: Runs it.
        task: What is measured.
        in_turn: It steps in turn with others, and waits for them; None: alone.
        on_measured: Told what is measured, as of a trial.
    """
    outcome = task.outcome
    assert outcome.figures is not None
    key = CostKey.of(outcome.config, setup.installation.device)
    spec = TrialSpec(
        config=outcome.config,
        lengths_file=str(setup.folder.lengths.absolute()),
        shapes=met_shapes(outcome),
        timed_steps=timed_steps(outcome),
        timed_s=setup.timed_s,
        time_limit_s=setup.time_limit_s,
        memory_limit_bytes=setup.memory_limit_bytes,
    )
    if in_turn is not None:
        spec = dataclasses.replace(
            spec,
            # Its own time, and that of all for whom it waits.
            time_limit_s=in_turn.num_processes * setup.time_limit_s,
            turns_file=str(in_turn.file.absolute()),
            turn_s=in_turn.turn_s,
        )
    result = runner.run(spec, task.folder, on_measured)
    measured = Round(
        candidate=task.candidate,
        number=task.number,
        status=result.status,
        reason=result.reason,
        shapes=result.shapes,
        peak_bytes=result.peak_bytes,
        wall_s=result.wall_s,
        other_cores=result.other_cores,
    )
    if result.status != "ok":
        return measured
    process = ProcessMeasurement(
        key=key, shapes=result.shapes, update=result.update, base_bytes=0, peak_bytes=0
    )
    costs = CostBook([process]).known(key)
    estimate = estimate_run(outcome.figures, outcome.config.train.epochs, costs)
    return dataclasses.replace(
        measured,
        run_s=estimate.estimated_run_s,
        compile_s=estimate.estimated_compile_s,
        real_tokens_per_s=estimate.estimated_real_tokens_per_s,
    )

"""Seconds of a whole run, from the measurements of a trial or from a fitted cost model.

estimated_run_s = compile seconds of every shape + epochs * (steady seconds of every step +
update seconds of every update). Steps are counted exactly on epoch 0 of the plan, every epoch
having the same number of steps. What was measured is taken as it is; a shape that was not is
estimated from the fit, and `measured_time_fraction` says how much of the run that concerns.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.batching.grouping import Shape
from tuner.config.schema import TrainConfig
from tuner.simulate.cost import CostModel, fit_step_cost
from tuner.simulate.stats import EpochFigures


@dataclass(frozen=True, kw_only=True)
class ShapeMeasurement:
    """What one shape cost in a trial.

    Attributes:
        batch_size: B.
        padded_length: L in tokens.
        first_call_s: Seconds of the first call: compile, memory, and one step.
        step_s: Median seconds of the steady steps; the first two calls are left out.
        step_spread_s: Largest minus smallest of the steady steps.
        num_timed_steps: Steady steps that were timed.
        memory_bytes: Memory of the process after this shape.
        loss: Summed loss of the first call divided by its labels; None without labels.
    """

    batch_size: int
    padded_length: int
    first_call_s: float
    step_s: float
    step_spread_s: float
    num_timed_steps: int
    memory_bytes: int
    loss: float | None

    @property
    def shape(self) -> Shape:
        """(B, L)."""
        return self.batch_size, self.padded_length

    @property
    def compile_s(self) -> float:
        """What the first call took beyond a steady step, seconds, >= 0."""
        return max(0.0, self.first_call_s - self.step_s)


@dataclass(frozen=True, kw_only=True)
class UpdateMeasurement:
    """What an optimizer update cost in a trial: seconds of the first call and of a steady one."""

    first_call_s: float
    update_s: float

    @property
    def compile_s(self) -> float:
        """What the first call took beyond a steady update, seconds, >= 0."""
        return max(0.0, self.first_call_s - self.update_s)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A planned run in seconds.

    Attributes:
        estimated_run_s: All epochs, compile time included.
        estimated_compile_s: Compile seconds of all shapes and of the update.
        estimated_real_tokens_per_s: Real tokens of all epochs over estimated_run_s.
        estimated_steady_real_tokens_per_s: The same without compile time.
        measured_time_fraction: Share of the steady step seconds whose shapes were measured, 0..1.
        max_fit_error: Largest relative error of the fit on the measured shapes.
    """

    estimated_run_s: float
    estimated_compile_s: float
    estimated_real_tokens_per_s: float
    estimated_steady_real_tokens_per_s: float
    measured_time_fraction: float
    max_fit_error: float

    @classmethod
    def of_run(
        cls,
        *,
        compile_s: float,
        running_s: float,
        real_tokens: int,
        measured_time_fraction: float,
        max_fit_error: float,
    ) -> Estimate:
        """From the seconds of compiling and of running all epochs, and their real tokens."""
        return cls(
            estimated_run_s=compile_s + running_s,
            estimated_compile_s=compile_s,
            estimated_real_tokens_per_s=real_tokens / (compile_s + running_s),
            estimated_steady_real_tokens_per_s=real_tokens / running_s,
            measured_time_fraction=measured_time_fraction,
            max_fit_error=max_fit_error,
        )


def estimate_run(
    stats: EpochFigures,
    config: TrainConfig,
    shapes: Sequence[ShapeMeasurement],
    update: UpdateMeasurement,
) -> Estimate:
    """Estimate the run of a plan from a trial's measurements.

    Args:
        stats: One epoch of the plan, counted or screened; every planned shape is compiled before
            step 1.
        config: Epochs of the run; whether one dynamic graph serves all shapes.
        shapes: Measured shapes, in the order in which they were first called; at least one.
        update: The measured update.
    """
    fit = fit_step_cost({item.shape: item.step_s for item in shapes})
    measured = {item.shape: item.step_s for item in shapes}
    steady_s = measured_s = 0.0
    for shape, count in stats.shape_counts.items():
        seconds = count * measured.get(shape, fit.step_s(shape))
        steady_s += seconds
        measured_s += seconds if shape in measured else 0.0
    one_graph = config.graph.mode == "dynamic"
    compile_s = _compile_s(shapes, len(stats.shape_counts), one_graph) + update.compile_s
    epochs = config.train.epochs
    return Estimate.of_run(
        compile_s=compile_s,
        running_s=epochs * (steady_s + stats.num_updates * update.update_s),
        real_tokens=epochs * stats.real_tokens,
        measured_time_fraction=measured_s / steady_s,
        max_fit_error=fit.max_relative_error,
    )


def estimate_from_model(stats: EpochFigures, cost: CostModel, epochs: int) -> Estimate:
    """Estimate a run of static graphs of which nothing was measured; updates are left out.

    Args:
        stats: One epoch of the plan; each shape that it meets is compiled once.
        cost: Seconds of steps and compiles.
        epochs: >= 1.
    """
    shapes = [shape for shape, count in stats.shape_counts.items() if count]
    steady_s = sum(stats.shape_counts[shape] * cost.step.step_s(shape) for shape in shapes)
    return Estimate.of_run(
        compile_s=sum(cost.compile_s(shape) for shape in shapes),
        running_s=epochs * steady_s,
        real_tokens=epochs * stats.real_tokens,
        measured_time_fraction=0.0,
        max_fit_error=cost.step.max_relative_error,
    )


def _compile_s(
    shapes: Sequence[ShapeMeasurement], num_planned_shapes: int, one_graph: bool
) -> float:
    """Compile seconds of all planned shapes; those not measured cost the median of the others.

    Of one dynamic graph the first call holds the compile; later shapes only take memory, so the
    median there leaves the first out (and is 0 if that is all that was measured).
    """
    costs = [item.compile_s for item in shapes]
    missing = max(0, num_planned_shapes - len(costs))
    typical = costs[1:] if one_graph else costs
    return sum(costs) + missing * (statistics.median(typical) if typical else 0.0)

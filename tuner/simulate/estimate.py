"""Seconds of a whole run, from what is known about costs.

estimated_run_s = compile seconds of every shape + epochs * (steady seconds of every step +
update seconds of every update). Steps are counted exactly on epoch 0 of the plan, every epoch
having the same number of steps. What was measured is taken as it is; a shape that was not is
estimated from the fit, and `measured_time_fraction` says how much of the run that concerns.

The interval: measured shapes err on their own, so their half widths add as squares; fitted ones
err together, so theirs add up; all err together as the machine was faster or slower while they
were measured. These three and the compiles are independent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.simulate.cost import CostModel, StepCost
from tuner.simulate.cost_book import KnownCosts
from tuner.simulate.stats import EpochFigures

IntArray = NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A planned run in seconds.

    Attributes:
        estimated_run_s: All epochs, compile time included.
        estimated_run_error_s: Half of its 95 % interval; 0 where the costs have none.
        estimated_compile_s: Compile seconds of all shapes and of the update.
        estimated_real_tokens_per_s: Real tokens of all epochs over estimated_run_s.
        estimated_steady_real_tokens_per_s: The same without compile time.
        measured_time_fraction: Share of the steady step seconds whose shapes were measured, 0..1.
        max_fit_error: Largest relative error of the fit on the measured shapes.
        estimated_peak_bytes: Memory with all shapes of the plan; None where it is not known.
    """

    estimated_run_s: float
    estimated_run_error_s: float
    estimated_compile_s: float
    estimated_real_tokens_per_s: float
    estimated_steady_real_tokens_per_s: float
    measured_time_fraction: float
    max_fit_error: float
    estimated_peak_bytes: float | None

    @property
    def low_run_s(self) -> float:
        """Lower end of the 95 % interval of estimated_run_s."""
        return max(0.0, self.estimated_run_s - self.estimated_run_error_s)

    @property
    def high_run_s(self) -> float:
        """Upper end of the 95 % interval of estimated_run_s."""
        return self.estimated_run_s + self.estimated_run_error_s

    @classmethod
    def of_run(
        cls, *, compile_s: float, running_s: float, real_tokens: int, max_fit_error: float
    ) -> Estimate:
        """From the seconds of compiling and of running all epochs, nothing measured."""
        return cls(
            estimated_run_s=compile_s + running_s,
            estimated_run_error_s=0.0,
            estimated_compile_s=compile_s,
            estimated_real_tokens_per_s=real_tokens / (compile_s + running_s),
            estimated_steady_real_tokens_per_s=real_tokens / running_s,
            measured_time_fraction=0.0,
            max_fit_error=max_fit_error,
            estimated_peak_bytes=None,
        )


def estimate_run(stats: EpochFigures, epochs: int, costs: KnownCosts) -> Estimate:
    """Estimate the run of a plan.

    Args:
        stats: One epoch of the plan, counted or screened; every planned shape is compiled before
            step 1.
        epochs: >= 1.
        costs: What is known about the steps that the plan takes.
    """
    steady_s = measured_s = fitted_error_s = measured_square = 0.0
    for shape, count in stats.shape_counts.items():
        seconds, error_s = count * costs.step_s(shape), count * costs.half_width_s(shape)
        steady_s += seconds
        if shape in costs.steps_s:
            measured_s += seconds
            measured_square += error_s**2
        else:
            fitted_error_s += error_s
    compile_s = costs.compile_s(stats.shape_counts)
    compile_error_s = costs.model.compile_error * sum(
        costs.shape_s(shape) for shape in stats.shape_counts if shape not in costs.first_calls_s
    )
    running_s = epochs * (steady_s + stats.num_updates * costs.update.update_s)
    process_error_s = costs.process_error * steady_s
    squares = measured_square + fitted_error_s**2 + process_error_s**2
    steps_error_s = epochs * float(np.sqrt(squares))
    real_tokens = epochs * stats.real_tokens
    memory = costs.memory
    return Estimate(
        estimated_run_s=compile_s + running_s,
        estimated_run_error_s=float(np.hypot(steps_error_s, compile_error_s)),
        estimated_compile_s=compile_s,
        estimated_real_tokens_per_s=real_tokens / (compile_s + running_s),
        estimated_steady_real_tokens_per_s=real_tokens / running_s,
        measured_time_fraction=measured_s / steady_s,
        max_fit_error=costs.model.step.max_relative_error,
        estimated_peak_bytes=memory.peak_bytes(tuple(stats.shape_counts)) if memory else None,
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
        compile_s=cost.plan_compile_s(shapes),
        running_s=epochs * steady_s,
        real_tokens=epochs * stats.real_tokens,
        max_fit_error=cost.step.max_relative_error,
    )


def zero_padding_run_s(
    tokens: IntArray, tokens_per_batch: int, epochs: int, cost: StepCost
) -> float:
    """The limit: every sample at its own length in full batches, no padding and no compile.

    A batch of rows of length L holds tokens_per_batch / L of them, a fraction too, so a row takes
    step_s(tokens_per_batch / L, L) * L / tokens_per_batch.

    Args:
        tokens: int [N], lengths of all rows after truncation, >= 1.
        tokens_per_batch: Real tokens of a batch.
        epochs: >= 1.
        cost: Of a static step.
    """
    lengths, counts = np.unique(tokens, return_counts=True)
    batches = lengths / tokens_per_batch
    row_s = cost.overhead_s * batches + cost.token_s * lengths + cost.attention_s * lengths**2.0
    return float(epochs * counts @ row_s)

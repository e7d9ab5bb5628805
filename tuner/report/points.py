"""What the report's figures draw, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Basis = Literal["measured", "estimated", "exact"]
"""measured: timed on the device; estimated: follows from measurements or a cost model;
exact: counted on the plan or the data."""


@dataclass(frozen=True, kw_only=True)
class LengthFigure:
    """How long the rows are and where the best config puts its boundaries.

    Attributes:
        bin_edges: Tokens, strictly rising, one more than num_rows; bin i holds the rows of
            bin_edges[i] <= tokens < bin_edges[i + 1], the last bin its upper edge too.
        num_rows: Rows of each bin.
        boundaries: Padded lengths of the best config in tokens, rising; empty if it has none.
    """

    bin_edges: tuple[int, ...]
    num_rows: tuple[int, ...]
    boundaries: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WastePoint:
    """A plan.

    Attributes:
        num_shapes: Shapes (B, L) of the plan, each compiled once.
        padding_fraction: Padding tokens / all tokens of the plan, 0..1, exact.
    """

    num_shapes: int
    padding_fraction: float


@dataclass(frozen=True, kw_only=True)
class WasteFigure:
    """Padding against the number of shapes.

    Attributes:
        points: By num_shapes, rising; at least one.
        chosen_num_shapes: Of the best config; None if it is none of these plans.
    """

    points: tuple[WastePoint, ...]
    chosen_num_shapes: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunTimePoint:
    """What the cost model says of a plan.

    Attributes:
        num_shapes: Shapes of the plan.
        estimated_run_s: Seconds of the planned epochs, compile time included.
        low_s: Lower end of the 95 % interval of estimated_run_s; None if its error is not known.
        high_s: Upper end of the same.
        compile_s: Estimated compile seconds, part of estimated_run_s.
    """

    num_shapes: int
    estimated_run_s: float
    low_s: float | None = None
    high_s: float | None = None
    compile_s: float


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """A trial's run: its compiles and steps were measured, the sum over the run follows.

    Attributes:
        trial: Number of the trial.
        num_shapes: Shapes of its plan.
        run_s: Seconds of the planned epochs from measured compiles and steps.
    """

    trial: int
    num_shapes: int
    run_s: float


@dataclass(frozen=True, kw_only=True)
class RunTimeFigure:
    """Run time against the number of shapes: more shapes pad less and compile more.

    Attributes:
        points: Estimated by the cost model, by num_shapes, rising; at least one.
        timed_runs: Trials, to hold the curve against; may be empty.
        optimum_num_shapes: Of the point of least estimated_run_s.
        epochs: Of the planned run.
        break_even_steps: Steps of the optimum after which it is ahead of padding to the longest;
            0: from the start; None: never.
        cost_source: What the cost model was fitted to, in a few words.
    """

    points: tuple[RunTimePoint, ...]
    timed_runs: tuple[TimedRun, ...] = ()
    optimum_num_shapes: int
    epochs: int
    break_even_steps: int | None
    cost_source: str


@dataclass(frozen=True, kw_only=True)
class TrialPoint:
    """A trial in the order of the search.

    Attributes:
        number: Of the trial.
        minutes: Wall-clock minutes from the start of the search to the end of the trial.
        real_tokens_per_s: Of the planned run, compile time included; None if it failed.
        status: ok, oom, timeout, crashed, diverged, refused or pruned.
        is_baseline: Run for comparison, not proposed by the search.
        best_so_far: Largest real_tokens_per_s up to this trial; None before the first.
    """

    number: int
    minutes: float
    real_tokens_per_s: float | None
    status: str
    is_baseline: bool = False
    best_so_far: float | None


@dataclass(frozen=True, kw_only=True)
class ShapePrediction:
    """One shape, predicted before it was measured.

    Attributes:
        batch_size: B, rows.
        padded_length: L, tokens.
        predicted_step_s: Seconds of a steady step.
        low_s: Lower end of the 95 % interval of the prediction; None if it is not known.
        high_s: Upper end of the same.
        measured_step_s: Median seconds of the steady steps.
        relative_error: (predicted - measured) / measured.
    """

    batch_size: int
    padded_length: int
    predicted_step_s: float
    low_s: float | None = None
    high_s: float | None = None
    measured_step_s: float
    relative_error: float


@dataclass(frozen=True, kw_only=True)
class PredictionFigure:
    """How well the cost model foretells what is then measured.

    Attributes:
        shapes: At least one, in any order.
        median_relative_error: Of the absolute errors, >= 0.
        max_relative_error: The largest of them.
        source: What predicted: "the cost model, fitted without the trial it predicts".
    """

    shapes: tuple[ShapePrediction, ...]
    median_relative_error: float
    max_relative_error: float
    source: str

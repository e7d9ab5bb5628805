"""The end of a run: predicted against observed, shape by shape and as a whole, and three checks.

The checks are those by which one sees that variable lengths are set up well: few padding tokens,
no compile after warm-up, even step times. Everything is of the steps of this process alone, also
after a resumption or with fewer steps than planned, so that predicted and observed are of the
same steps.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.batching.grouping import Shape
from tuner.config.codec import write_text
from tuner.config.schema import ProvenanceConfig
from tuner.train.metrics import EvaluationRecord
from tuner.train.run_log import StepFigures
from tuner.train.step_times import FLAT_SPREAD, FLAT_STEPS, FLAT_TREND, StepCurve

SUMMARY_FILE = "summary.json"

LEAST_EFFECTIVE = 0.80
"""Effective token fraction from which on padding is kept in check."""

MOST_DATA_WAIT = 0.05
"""Share of waiting for data above which the device is held up."""


@dataclass(frozen=True, kw_only=True)
class ShapeFigures:
    """Steps of one shape; seconds of forward and backward, updates left out.

    Attributes:
        batch_size: B.
        padded_length: L in tokens.
        num_steps: Observed.
        predicted_step_s: By the study; None where it did not say.
        median_step_s: Observed.
        p95_step_s: Observed, 95th percentile.
        trend: Median of the last third over that of the first, minus 1; None of too few steps.
        is_flat: Whether the steps are even; None of too few steps.
    """

    batch_size: int
    padded_length: int
    num_steps: int
    predicted_step_s: float | None
    median_step_s: float
    p95_step_s: float
    trend: float | None
    is_flat: bool | None

    @property
    def ratio(self) -> float | None:
        """Observed median over predicted."""
        return (
            None if self.predicted_step_s is None else self.median_step_s / self.predicted_step_s
        )


@dataclass(frozen=True, kw_only=True)
class Check:
    """One question about the run.

    Attributes:
        name: What is asked.
        is_passed: None where it cannot be said.
        found: What was found, for people.
        advice: What to do about it; empty if nothing.
    """

    name: str
    is_passed: bool | None
    found: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """What the loop does not know of itself.

    Attributes:
        run_s: Seconds of the loop: steps, data, evaluations and checkpoints.
        warm_up_s: Seconds of compiling before the first step.
        peak_bytes: Largest memory of the process.
        memory_kind: What that is.
        batches_per_step: That this process takes in a step, one after another; >= 1.
    """

    run_s: float
    warm_up_s: float
    peak_bytes: int
    memory_kind: str
    batches_per_step: int = 1


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Figures of the steps of this process.

    Attributes:
        num_steps: Steps.
        num_updates: Optimizer updates.
        run_s: Seconds of the loop.
        step_s: Of these, of steps and updates.
        predicted_step_s: Of just these steps by the study, updates left out; None where it does
            not know all their shapes.
        observed_step_s: The same, observed.
        warm_up_s: Seconds of compiling before the first step.
        evaluation_s: Seconds of all evaluations.
        data_wait_s: Seconds that the loop waited for data.
        real_tokens: Tokens of rows.
        real_tokens_per_s: Over steps and waiting, evaluations and checkpoints left out.
        effective_token_fraction: Real tokens over padded tokens.
        recompiles: Compiles that no warm-up planned.
        recompile_s: Their seconds.
        num_slow: Steps far slower than others of their shape.
        slow_excess_s: Seconds that these took over their medians.
        peak_bytes: Largest memory of the process.
        memory_kind: What that is.
        first_loss: Mean of the first steps; None without a loss.
        last_loss: Mean of the last steps.
        shapes: Largest first.
        checks: The three.
        evaluation: The last one; None if there was none.
    """

    num_steps: int
    num_updates: int
    run_s: float
    step_s: float
    predicted_step_s: float | None
    observed_step_s: float
    warm_up_s: float
    evaluation_s: float
    data_wait_s: float
    real_tokens: int
    real_tokens_per_s: float
    effective_token_fraction: float
    recompiles: int
    recompile_s: float
    num_slow: int
    slow_excess_s: float
    peak_bytes: int
    memory_kind: str
    first_loss: float | None
    last_loss: float | None
    shapes: tuple[ShapeFigures, ...]
    checks: tuple[Check, ...]
    evaluation: EvaluationRecord | None = None

    @property
    def data_wait_fraction(self) -> float:
        """Share of waiting in the seconds of steps and waiting."""
        busy_s = self.step_s + self.data_wait_s
        return self.data_wait_s / busy_s if busy_s else 0.0


def sum_up(steps: StepFigures, run: RunFigures, provenance: ProvenanceConfig | None) -> RunSummary:
    """Put the figures of a run together.

    Args:
        steps: Of this process.
        run: Of the run around them.
        provenance: With what the study predicted; None for a config written by hand.
    """
    shapes = _shape_figures(steps.curves, _predicted_steps(provenance, run.batches_per_step))
    busy_s = steps.step_s + steps.data_wait_s
    return RunSummary(
        num_steps=steps.num_steps,
        num_updates=steps.num_updates,
        run_s=run.run_s,
        step_s=steps.step_s,
        predicted_step_s=_predicted_of_all(shapes),
        observed_step_s=steps.step_s - steps.update_s,
        warm_up_s=run.warm_up_s,
        evaluation_s=steps.evaluation_s,
        data_wait_s=steps.data_wait_s,
        real_tokens=steps.real_tokens,
        real_tokens_per_s=steps.real_tokens / busy_s if busy_s else 0.0,
        effective_token_fraction=steps.effective_token_fraction,
        recompiles=steps.recompiles,
        recompile_s=steps.recompile_s,
        num_slow=steps.num_slow,
        slow_excess_s=steps.slow_excess_s,
        peak_bytes=run.peak_bytes,
        memory_kind=run.memory_kind,
        first_loss=_mean(steps.first_losses),
        last_loss=_mean(steps.last_losses),
        shapes=shapes,
        checks=(_check_padding(steps), _check_compiles(steps), _check_curves(shapes)),
        evaluation=steps.evaluation,
    )


def write_summary(folder: Path, summary: RunSummary) -> None:
    """Write summary.json into the folder of the run.

    Raises:
        BadInputError: the folder cannot be written.
    """
    plain = dataclasses.asdict(summary)
    plain["data_wait_fraction"] = summary.data_wait_fraction
    for shape, entry in zip(summary.shapes, plain["shapes"], strict=True):
        entry["ratio"] = shape.ratio
    write_text(folder / SUMMARY_FILE, json.dumps(plain, indent=1) + "\n")


def _predicted_steps(
    provenance: ProvenanceConfig | None, batches_per_step: int
) -> dict[Shape, float]:
    if provenance is None or not provenance.prediction.step_s:
        return {}
    of_batches = zip(provenance.shapes, provenance.prediction.step_s, strict=True)
    return {shape: seconds * batches_per_step for shape, seconds in of_batches}


def _shape_figures(
    curves: Mapping[Shape, StepCurve], predicted: Mapping[Shape, float]
) -> tuple[ShapeFigures, ...]:
    largest_first = sorted(curves, key=lambda shape: (-shape[0] * shape[1], -shape[1]))
    return tuple(
        ShapeFigures(
            batch_size=shape[0],
            padded_length=shape[1],
            num_steps=curves[shape].num_steps,
            predicted_step_s=predicted.get(shape),
            median_step_s=curves[shape].median_s,
            p95_step_s=curves[shape].p95_s,
            trend=curves[shape].trend,
            is_flat=curves[shape].is_flat,
        )
        for shape in largest_first
    )


def _predicted_of_all(shapes: Sequence[ShapeFigures]) -> float | None:
    seconds = 0.0
    for shape in shapes:
        if shape.predicted_step_s is None:
            return None
        seconds += shape.num_steps * shape.predicted_step_s
    return seconds if shapes else None


def _check_padding(steps: StepFigures) -> Check:
    found = steps.effective_token_fraction
    is_passed = found >= LEAST_EFFECTIVE
    return Check(
        name=f"effective tokens at least {LEAST_EFFECTIVE:.0%}",
        is_passed=is_passed if steps.num_steps else None,
        found=f"{found:.1%}",
        advice=""
        if is_passed
        else "padding takes the rest: more buckets, a finer align or packed rows; "
        "varseq-data inspect shows what each would save, varseq-tune what is fastest",
    )


def _check_compiles(steps: StepFigures) -> Check:
    is_passed = not steps.recompiles
    found = "none" if is_passed else f"{steps.recompiles}, {steps.recompile_s:.1f} s"
    return Check(
        name="no compile after warm-up",
        is_passed=is_passed if steps.num_steps else None,
        found=found,
        advice=""
        if is_passed
        else "each is named above with its cause and a way out; most come from a shape that was "
        "not planned, so look at how rows are aligned",
    )


def _check_curves(shapes: Sequence[ShapeFigures]) -> Check:
    name = (
        f"step times flat (last third within {FLAT_TREND:.0%} of the first, 95th percentile "
        f"below {FLAT_SPREAD} medians)"
    )
    judged = [shape for shape in shapes if shape.is_flat is not None]
    if not judged:
        few = f"too few steps: no shape has {FLAT_STEPS}"
        return Check(name=name, is_passed=None, found=few)
    uneven = [shape for shape in judged if not shape.is_flat]
    if not uneven:
        found = f"{len(judged)} of {len(shapes)} shapes have enough steps, all are flat"
        return Check(name=name, is_passed=True, found=found)
    return Check(
        name=name,
        is_passed=False,
        found=f"{len(uneven)} of {len(judged)} shapes are not: "
        + ", ".join(_describe_curve(shape) for shape in uneven[:3]),
        advice="look for other programs on the machine and for swapped memory first; if it is "
        "none of these, profile a step: an operator may have fallen back to a slower device or "
        "kernel",
    )


def _describe_curve(shape: ShapeFigures) -> str:
    trend = 0.0 if shape.trend is None else shape.trend
    return (
        f"B={shape.batch_size} L={shape.padded_length} (trend {trend:+.0%}, "
        f"p95 {shape.p95_step_s / shape.median_step_s:.2f} medians)"
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

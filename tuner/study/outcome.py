"""A tried candidate: what was planned, what was measured, what follows for the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from tuner.batching.grouping import Shape
from tuner.config.codec import parse_model, to_plain
from tuner.config.schema import TrainConfig
from tuner.simulate.cost_book import CostBook
from tuner.simulate.estimate import Estimate, estimate_run
from tuner.simulate.measurement import (
    CostKey,
    ProcessMeasurement,
    ShapeMeasurement,
    UpdateMeasurement,
)
from tuner.simulate.stats import PlanStats

OVER_MEMORY = "over the memory limit"
"""End of the reason of a plan that was not run for memory."""


@dataclass(frozen=True, kw_only=True)
class PrecisionCheck:
    """How far a precision is from fp32 on the same batches and initial weights.

    Attributes:
        loss_deviation: |loss - reference| / |reference|; None if it is not a number.
        gradient_deviation: Norm of the difference over the norm of the fp32 gradient; None
            if it is not a number.
        num_nonfinite: Elements of gradients and losses that are not finite.
        violation: Largest deviation over its tolerance, minus 1; above 0 is infeasible.
    """

    loss_deviation: float | None
    gradient_deviation: float | None
    num_nonfinite: int
    violation: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One line of the study's table; kept in Optuna's storage.

    Attributes:
        config: The whole config of the trial, boundaries resolved.
        status: As in TrialResult.
        reason: Why it failed; empty if it did not.
        baseline: Its name if it is one, else None.
        figures: One epoch of the plan, exact; None if it could not be planned.
        shapes: Planned (B, L), in the order of warm-up.
        asked: Shapes that it was to measure, largest first.
        measured: What the trial itself measured; other trials' measurements are shared.
        update: What it measured of the update; None if it ran no process.
        precision: How far from fp32; None where that was not checked.
        estimate: None unless status is ok.
        base_bytes: Memory before the first shape.
        peak_bytes: Largest memory of the trial; 0 if it ran no process.
        memory_kind: What peak_bytes is.
        wall_s: Wall seconds of the trial.
        other_cores: Cores that other programs took while it ran, on average.
        finished_at_s: When it was told, seconds since 1970 UTC.
    """

    config: TrainConfig
    status: str
    reason: str = ""
    baseline: str | None = None
    figures: PlanStats | None = None
    shapes: tuple[Shape, ...] = ()
    asked: tuple[Shape, ...] = ()
    measured: tuple[ShapeMeasurement, ...] = ()
    update: UpdateMeasurement | None = None
    precision: PrecisionCheck | None = None
    estimate: Estimate | None = None
    base_bytes: int = 0
    peak_bytes: int = 0
    memory_kind: str = ""
    wall_s: float = 0.0
    other_cores: float = 0.0
    finished_at_s: float = 0.0

    @property
    def num_shapes(self) -> int:
        """Planned shapes."""
        return len(self.shapes)

    @property
    def effective_token_fraction(self) -> float:
        """Real tokens / padded tokens of the plan, exact; 0 if it could not be planned."""
        return self.figures.effective_token_fraction if self.figures else 0.0

    @property
    def num_steps(self) -> int:
        """Steps of an epoch; 0 if it could not be planned."""
        return self.figures.num_steps if self.figures else 0

    @property
    def length_autocorrelation(self) -> float:
        """Of padded lengths of neighbouring steps of the first epoch."""
        return self.figures.length_autocorrelation if self.figures else 0.0

    @property
    def is_over_memory(self) -> bool:
        """It was not run, since its shapes together would not fit."""
        return self.status == "refused" and self.reason.endswith(OVER_MEMORY)

    @property
    def real_tokens_per_s(self) -> float | None:
        """What is maximised: real tokens of the planned run over its seconds, compile included."""
        return self.estimate.estimated_real_tokens_per_s if self.estimate else None

    @property
    def expected_peak_bytes(self) -> int:
        """Memory of a run with all shapes: estimated where it is known, else the trial's own."""
        estimated = self.estimate.estimated_peak_bytes if self.estimate else None
        return self.peak_bytes if estimated is None else max(self.peak_bytes, round(estimated))

    def process(self, device: str) -> ProcessMeasurement:
        """What others may share of it."""
        return ProcessMeasurement(
            key=CostKey.of(self.config, device),
            shapes=self.measured,
            update=self.update,
            base_bytes=self.base_bytes,
            # Of a trial that failed the peak says how it died, not what its shapes take.
            peak_bytes=self.peak_bytes if self.status == "ok" else 0,
        )


@dataclass(frozen=True, kw_only=True)
class NumberedOutcome:
    """An outcome with its trial number."""

    number: int
    outcome: Outcome


def estimate_again(
    outcomes: Sequence[NumberedOutcome], book: CostBook, device: str
) -> tuple[NumberedOutcome, ...]:
    """The outcomes with estimates from all that is known by now.

    A figure of the table so follows from the measurements, not from the order of the trials.

    Args:
        outcomes: Of any status.
        book: All measurements.
        device: That the trials ran on.
    """
    return tuple(
        dataclasses.replace(item, outcome=_estimated(item.outcome, book, device))
        for item in outcomes
    )


def _estimated(outcome: Outcome, book: CostBook, device: str) -> Outcome:
    if outcome.status != "ok" or outcome.figures is None:
        return dataclasses.replace(outcome, estimate=None)
    costs = book.known(CostKey.of(outcome.config, device))
    estimate = estimate_run(outcome.figures, outcome.config.train.epochs, costs)
    return dataclasses.replace(outcome, estimate=estimate)


_RECORDS: dict[str, TypeAdapter[Any]] = {
    "measured": TypeAdapter(tuple[ShapeMeasurement, ...]),
    "update": TypeAdapter(UpdateMeasurement | None),
    "precision": TypeAdapter(PrecisionCheck | None),
    "estimate": TypeAdapter(Estimate | None),
    "shapes": TypeAdapter(tuple[Shape, ...]),
    "asked": TypeAdapter(tuple[Shape, ...]),
}


def outcome_to_plain(outcome: Outcome) -> dict[str, Any]:
    """JSON-ready; the inverse of `outcome_from_plain`."""
    plain = {field.name: getattr(outcome, field.name) for field in dataclasses.fields(outcome)}
    plain["config"] = to_plain(outcome.config)
    plain["figures"] = _figures_to_plain(outcome.figures)
    for name, adapter in _RECORDS.items():
        plain[name] = adapter.dump_python(plain[name], mode="json")
    return plain


def outcome_from_plain(plain: Mapping[str, Any]) -> Outcome:
    """Read an outcome back from Optuna's storage."""
    records = {name: adapter.validate_python(plain[name]) for name, adapter in _RECORDS.items()}
    config = parse_model(TrainConfig, plain["config"], source="study")
    figures = _figures_from_plain(plain["figures"])
    return Outcome(**{**plain, **records, "config": config, "figures": figures})


BY_SHAPE = ("shape_counts", "real_tokens_of_shape")
"""Figures whose keys are shapes, which JSON takes as [B, L, figure] alone."""


def _figures_to_plain(figures: PlanStats | None) -> dict[str, Any] | None:
    if figures is None:
        return None
    plain = dataclasses.asdict(figures)
    for name in BY_SHAPE:
        plain[name] = [[*shape, value] for shape, value in getattr(figures, name).items()]
    return plain


def _figures_from_plain(plain: Mapping[str, Any] | None) -> PlanStats | None:
    if plain is None:
        return None
    by_shape = {
        name: {(size, length): value for size, length, value in plain[name]} for name in BY_SHAPE
    }
    return PlanStats(**{**plain, **by_shape})

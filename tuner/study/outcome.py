"""A tried candidate: what was planned, what was measured, what follows for the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.config.codec import parse_model, to_plain
from tuner.config.schema import TrainConfig
from tuner.simulate.estimate import Estimate


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One line of the study's table; kept in Optuna's storage.

    Attributes:
        config: The whole config of the trial, boundaries resolved.
        status: As in TrialResult.
        reason: Why it failed; empty if it did not.
        num_measured_shapes: Shapes that the trial measured.
        shapes: Planned (B, L), in the order of warm-up.
        effective_token_fraction: Of the plan, exact.
        num_steps: Steps of an epoch.
        length_autocorrelation: Of padded lengths of neighbouring steps of the first epoch.
        estimate: None unless status is ok.
        peak_bytes: Largest memory of the trial.
        memory_kind: What peak_bytes is.
        wall_s: Wall seconds of the trial.
    """

    config: TrainConfig
    status: str
    reason: str
    num_measured_shapes: int
    shapes: tuple[tuple[int, int], ...]
    effective_token_fraction: float
    num_steps: int
    length_autocorrelation: float
    estimate: Estimate | None
    peak_bytes: int
    memory_kind: str
    wall_s: float

    @property
    def num_shapes(self) -> int:
        """Planned shapes."""
        return len(self.shapes)

    @property
    def real_tokens_per_s(self) -> float | None:
        """What is maximised: real tokens of the planned run over its seconds, compile included."""
        return self.estimate.estimated_real_tokens_per_s if self.estimate else None


@dataclass(frozen=True, kw_only=True)
class NumberedOutcome:
    """An outcome with its trial number."""

    number: int
    outcome: Outcome


def outcome_to_plain(outcome: Outcome) -> dict[str, Any]:
    """JSON-ready; the inverse of `outcome_from_plain`."""
    plain = {field.name: getattr(outcome, field.name) for field in dataclasses.fields(outcome)}
    plain["config"] = to_plain(outcome.config)
    plain["shapes"] = [list(shape) for shape in outcome.shapes]
    plain["estimate"] = dataclasses.asdict(outcome.estimate) if outcome.estimate else None
    return plain


def outcome_from_plain(plain: Mapping[str, Any]) -> Outcome:
    """Read an outcome back from Optuna's storage."""
    estimate = plain["estimate"]
    return Outcome(
        **{
            **plain,
            "config": parse_model(TrainConfig, plain["config"], source="study"),
            "shapes": tuple((size, length) for size, length in plain["shapes"]),
            "estimate": Estimate(**estimate) if estimate else None,
        }
    )

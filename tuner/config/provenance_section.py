"""The provenance section: what the tuner found and by which figures."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from tuner.config.sections import Fraction, PositiveFloat, PositiveInt, Section

Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class PredictionRecord(Section):
    """What the study predicted for this config: estimated from measured compiles and steps."""

    estimated_run_s: float
    """Seconds for all epochs, compile time included."""
    estimated_real_tokens_per_s: float
    """Real tokens per second over those seconds."""
    estimated_steady_real_tokens_per_s: float
    """The same without compile time."""
    estimated_compile_s: float
    """Compile seconds of all shapes and of the update."""
    effective_token_fraction: Fraction
    """Real tokens / padded tokens of the plan, exact."""
    peak_bytes: int
    """Largest memory seen in the trial (resident set on CPU)."""
    step_s: tuple[PositiveFloat, ...] = ()
    """Seconds of a step of each of the shapes, measured or by the fit; [] in older files."""


class CostRecord(Section):
    """The fitted seconds of this config's steps and compiles, for what was not measured.

    A step of B rows of L padded tokens takes a + b * B * L + c * B * L^2 seconds.
    """

    step_s: tuple[Seconds, Seconds, Seconds]
    """a, b, c; each >= 0."""
    compile_s: tuple[Seconds, Seconds]
    """Seconds of a compile: the first number, plus the second times the seconds of a step."""


class ProvenanceConfig(Section):
    """Where this config comes from; `varseq-train` compares it with the world."""

    data_fingerprint: str
    """Content fingerprint of the MindRecord set that was tuned on."""
    num_samples: Annotated[int, Field(ge=0)]
    """Rows of that set."""
    device: str
    """Device the trials ran on."""
    versions: dict[str, str]
    """Versions of varseq-tuner, MindSpore, NumPy and Python."""
    study: str
    """Name of the Optuna study."""
    trial: Annotated[int, Field(ge=0)]
    """Number of the trial in that study."""
    shapes: tuple[tuple[PositiveInt, PositiveInt], ...]
    """Planned (batch size, padded length), in the order of warm-up."""
    prediction: PredictionRecord
    """The figures that the study chose by."""
    length_percentiles: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Tokens of the rows tuned on: shortest, percentiles 1 to 99, longest; [] in older files."""
    cost: CostRecord | None = None
    """The study's fit for this config; null in older files."""

    @model_validator(mode="after")
    def _has_whole_lists(self) -> ProvenanceConfig:
        if len(self.length_percentiles) not in (0, 101):
            raise ValueError(
                f"length_percentiles must be 101 or none (got {len(self.length_percentiles)})"
            )
        if len(self.prediction.step_s) not in (0, len(self.shapes)):
            raise ValueError(
                "prediction.step_s must have one entry for each of the shapes, or none "
                f"(got {len(self.prediction.step_s)} for {len(self.shapes)})"
            )
        return self

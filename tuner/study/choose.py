"""Which candidate is the best, and the config that carries it."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.config.schema import PredictionRecord, ProvenanceConfig, TrainConfig
from tuner.study.outcome import NumberedOutcome
from tuner.trial.record import Installation


def choose_best(outcomes: Sequence[NumberedOutcome]) -> NumberedOutcome | None:
    """The measured outcome of most real tokens per second, of equals the earliest; or None."""
    measured = [item for item in outcomes if item.outcome.real_tokens_per_s is not None]
    return max(measured, key=lambda item: item.outcome.real_tokens_per_s or 0.0, default=None)


def pad_to_longest(outcomes: Sequence[NumberedOutcome]) -> NumberedOutcome | None:
    """The best measured outcome that pads everything to the longest; None if none was measured."""
    fixed = [item for item in outcomes if item.outcome.config.batching.strategy == "fixed"]
    return choose_best(fixed)


def with_provenance(
    best: NumberedOutcome,
    *,
    data_fingerprint: str,
    num_samples: int,
    study_name: str,
    installation: Installation,
) -> TrainConfig:
    """The config of an outcome with a record of where it comes from.

    Args:
        best: A measured outcome.
        data_fingerprint: Of the MindRecord set.
        num_samples: Its rows.
        study_name: Name of the study.
        installation: What the trials ran on.
    """
    outcome = best.outcome
    if outcome.estimate is None:
        raise ValueError(f"trial {best.number} was not measured")
    provenance = ProvenanceConfig(
        data_fingerprint=data_fingerprint,
        num_samples=num_samples,
        device=installation.device,
        versions=installation.versions,
        study=study_name,
        trial=best.number,
        shapes=outcome.shapes,
        prediction=PredictionRecord(
            estimated_run_s=outcome.estimate.estimated_run_s,
            estimated_compile_s=outcome.estimate.estimated_compile_s,
            estimated_real_tokens_per_s=outcome.estimate.estimated_real_tokens_per_s,
            estimated_steady_real_tokens_per_s=outcome.estimate.estimated_steady_real_tokens_per_s,
            effective_token_fraction=outcome.effective_token_fraction,
            peak_bytes=outcome.peak_bytes,
        ),
    )
    return outcome.config.model_copy(update={"provenance": provenance})

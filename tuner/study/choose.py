"""Which candidate is the best, and the config that carries it."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.config.schema import PredictionRecord, ProvenanceConfig, TrainConfig
from tuner.study.outcome import NumberedOutcome, Outcome
from tuner.trial.record import Installation

STRATEGIES_BY_SIMPLICITY = ("fixed", "dynamic", "bucketed", "packed")


def is_feasible(outcome: Outcome) -> bool:
    """Whether a run of this config could be the answer: measured, and within its tolerances."""
    is_exact = outcome.precision is None or outcome.precision.violation <= 0.0
    return outcome.real_tokens_per_s is not None and is_exact


def choose_best(outcomes: Sequence[NumberedOutcome]) -> NumberedOutcome | None:
    """The feasible outcome of most real tokens per second, of equals the earliest; or None."""
    feasible = [item for item in outcomes if is_feasible(item.outcome)]
    return max(feasible, key=lambda item: item.outcome.real_tokens_per_s or 0.0, default=None)


def pad_to_longest(outcomes: Sequence[NumberedOutcome]) -> NumberedOutcome | None:
    """The best measured outcome that pads everything to the longest; None if none was measured."""
    fixed = [item for item in outcomes if item.outcome.config.batching.strategy == "fixed"]
    return choose_best(fixed)


def simplicity(outcome: Outcome) -> tuple[int, ...]:
    """Sorts the simpler config first: fewer graphs, then plainer batching, then full precision."""
    config = outcome.config
    num_graphs = outcome.num_shapes if config.graph.mode == "static" else 1
    return (
        num_graphs,
        STRATEGIES_BY_SIMPLICITY.index(config.batching.strategy),
        int(config.precision.compute_dtype != "fp32"),
        len(config.precision.fp32_ops),
    )


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
            peak_bytes=outcome.expected_peak_bytes,
        ),
    )
    return outcome.config.model_copy(update={"provenance": provenance})

"""Which candidate is the best, and the config that carries it."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.batching.rows import admit_rows
from tuner.config.schema import (
    CostRecord,
    DataConfig,
    PredictionRecord,
    ProvenanceConfig,
    TrainConfig,
)
from tuner.data.lengths import Lengths
from tuner.simulate.cost_book import KnownCosts
from tuner.simulate.length_shift import length_percentiles
from tuner.study.base import TunedData
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
    data: TunedData,
    costs: KnownCosts,
    study_name: str,
    installation: Installation,
) -> TrainConfig:
    """The config of an outcome with a record of where it comes from.

    Args:
        best: A measured outcome.
        data: The data of the study.
        costs: All that is known about the steps of this config.
        study_name: Name of the study.
        installation: What the trials ran on.
    """
    outcome = best.outcome
    if outcome.estimate is None:
        raise ValueError(f"trial {best.number} was not measured")
    provenance = ProvenanceConfig(
        data_fingerprint=data.dataset.fingerprint,
        num_samples=data.lengths.num_samples,
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
            step_s=tuple(float(costs.step_s(shape)) for shape in outcome.shapes),
        ),
        length_percentiles=_length_percentiles(data.lengths, outcome.config.data),
        cost=_cost_record(costs),
    )
    return outcome.config.model_copy(update={"provenance": provenance})


def _length_percentiles(lengths: Lengths, data: DataConfig) -> tuple[int, ...]:
    """Of the rows tuned on, after data.max_length; the last boundary holds them all."""
    tokens = admit_rows(lengths, data, data.max_length).tokens
    return length_percentiles(tokens)


def _cost_record(costs: KnownCosts) -> CostRecord:
    step = costs.model.step
    return CostRecord(
        step_s=(float(step.overhead_s), float(step.token_s), float(step.attention_s)),
        compile_s=(float(costs.model.compile_base_s), float(costs.model.compile_per_step_s)),
    )

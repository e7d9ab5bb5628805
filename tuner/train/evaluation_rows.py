"""The rows of an evaluation: opened, checked and planned before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tuner.batching.evaluation_plan import EvaluationPlan, plan_evaluation
from tuner.batching.plan import EpochPlan
from tuner.config.override import override_config
from tuner.config.schema import TrainConfig
from tuner.data.held_out import held_out_part, row_draws
from tuner.data.lengths import Lengths, scan_lengths
from tuner.data.mindrecord import MindRecordSet, open_mindrecord
from tuner.errors import BadInputError
from tuner.train.loader import check_some_rows


@dataclass(frozen=True, kw_only=True)
class EvaluationRows:
    """What is evaluated.

    Attributes:
        config: The run's, with the path of these rows and the shapes of their batches.
        dataset: The set that they are in.
        plan: Their batches.
    """

    config: TrainConfig
    dataset: MindRecordSet
    plan: EvaluationPlan


def open_rows(
    config: TrainConfig, dataset: MindRecordSet, lengths: Lengths, training: EpochPlan
) -> EvaluationRows:
    """Open, check and plan the rows of an evaluation.

    Args:
        config: With an evaluation, boundaries resolved.
        dataset: That is trained on.
        lengths: Of all its rows.
        training: The plan of the training; its shapes are used.

    Raises:
        BadInputError: the rows cannot be read, are not fit for the model, or none is left.
    """
    section = config.evaluation
    if section is None:
        raise ValueError("the config has no evaluation")
    if section.path is None:
        rows = held_out_part(lengths, section)
        own = config
    else:
        own = override_config(config, {"data.path": section.path}, source="evaluation")
        dataset = open_mindrecord(own.data.path)
        check_some_rows(dataset, own)
        rows = scan_lengths(dataset, config.data.input_column)
    draws = row_draws(rows.num_samples, section.seed)
    with _told_apart():
        plan = plan_evaluation(rows, own, training.shapes, draws)
    return EvaluationRows(config=_padded_config(own, plan), dataset=dataset, plan=plan)


@contextmanager
def _told_apart() -> Iterator[None]:
    """Errors of the plan say that they are about the evaluation."""
    try:
        yield
    except BadInputError as error:
        raise BadInputError(f"evaluation: {error.problem}", fix=error.fix) from None


def _padded_config(config: TrainConfig, plan: EvaluationPlan) -> TrainConfig:
    """Rows one by one in the shapes of the plan: what the loader needs to know."""
    by_length = {length: size for size, length in plan.shapes}
    lengths = sorted(by_length)
    changes = {
        "batching.strategy": "bucketed",
        "batching.boundaries": lengths,
        "batching.num_buckets": len(lengths),
        "batching.batch_sizes": [by_length[length] for length in lengths],
        "batching.tokens_per_batch": None,
        "batching.samples_per_batch": None,
    }
    return override_config(config, changes, source="evaluation")

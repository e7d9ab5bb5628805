"""Which rows are evaluated in which padded batch: always the same ones, in the same order.

A batch holds rows of one class of lengths, so that its loss counts for that class; padding and
filler rows count for nothing. No shape is new to a run where that can be: with strategy bucketed
the classes are the buckets of the training plan; with dynamic a few of its padded lengths; with
fixed all classes are padded to its one length. Packed rows would mix lengths, so with packed the
rows are padded, to a few lengths of their own.

Rows longer than the longest row of the training plan meet the overflow rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.batching.align import align_lengths
from tuner.batching.boundaries import count_lengths, solve_boundaries
from tuner.batching.grouping import IntArray, Shape, fill_slots
from tuner.batching.plan import PlannedBatch
from tuner.batching.rows import admit_rows
from tuner.config.schema import BatchingConfig, TrainConfig
from tuner.data.lengths import Lengths

MOST_CLASSES = 8
MOST_OWN_SHAPES = 4
"""Padded lengths of an evaluation beside packed rows: each costs a compile and memory."""


@dataclass(frozen=True, kw_only=True)
class LengthClass:
    """Rows of like length.

    Attributes:
        up_to: Longest of them can have so many tokens.
        shape: (B, L) of their batches; L >= up_to.
        row_indices: int64 [R], rows of the set, rising; R >= 1.
    """

    up_to: int
    shape: Shape
    row_indices: IntArray

    def batches(self) -> Iterator[PlannedBatch]:
        """Whole batches of the shape; the last one is filled up."""
        size, length = self.shape
        num_rows = len(self.row_indices)
        slots = fill_slots(num_rows, -(-num_rows // size) * size)
        for start in range(0, len(slots), size):
            yield PlannedBatch(
                row_indices=self.row_indices[start : start + size],
                rows_per_slot=slots[start : start + size],
                padded_length=length,
            )


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """All batches of an evaluation.

    Attributes:
        classes: By rising length.
        num_truncated: Rows cut to the limit.
        dropped: Reason -> rows left out.
    """

    classes: tuple[LengthClass, ...]
    num_truncated: int
    dropped: Mapping[str, int]

    @property
    def num_rows(self) -> int:
        """Rows evaluated."""
        return sum(len(item.row_indices) for item in self.classes)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Every (B, L), most padded tokens first: the order of warm-up."""
        shapes = {item.shape for item in self.classes}
        return tuple(sorted(shapes, key=lambda shape: (-shape[0] * shape[1], -shape[1])))


def plan_evaluation(
    lengths: Lengths,
    config: TrainConfig,
    training_shapes: Sequence[Shape],
    draws: NDArray[np.float64],
) -> EvaluationPlan:
    """Plan an evaluation on one rank.

    Args:
        lengths: Of the set that is evaluated, other rows left out; its rows are named in errors
            by config.data.path.
        config: Sections `data`, `batching` and `evaluation`, with its max_rows.
        training_shapes: (B, L) of the training plan; at least one.
        draws: float64 [N], a number for every row of the set; of more rows than max_rows those
            with the smallest take part.

    Raises:
        BadInputError: a row is over the limit and the rule is `error`, or no row is left.
    """
    longest = max(length for _, length in training_shapes)
    limit = min(longest, config.data.max_length or longest)
    admitted = admit_rows(lengths, config.data, limit)
    rows, tokens = admitted.row_indices, admitted.tokens
    most = config.evaluation.max_rows if config.evaluation else None
    if most is not None and len(rows) > most:
        chosen = np.sort(np.argsort(draws[rows], kind="stable")[:most])
        rows, tokens = rows[chosen], tokens[chosen]
    ends, shapes = _classes(tokens, config.batching, training_shapes)
    class_of_row = np.searchsorted(ends, tokens)
    return EvaluationPlan(
        classes=tuple(
            LengthClass(up_to=int(ends[index]), shape=shapes[index], row_indices=members)
            for index in range(len(ends))
            if len(members := rows[class_of_row == index])
        ),
        num_truncated=admitted.num_truncated,
        dropped=admitted.dropped,
    )


def _classes(
    tokens: IntArray, batching: BatchingConfig, training_shapes: Sequence[Shape]
) -> tuple[IntArray, list[Shape]]:
    """Upper ends of the classes in tokens, rising, and the shape of each."""
    by_length = sorted(training_shapes, key=lambda shape: shape[1])
    planned = np.array([length for _, length in by_length])
    longest = by_length[-1]
    if batching.strategy == "bucketed":
        return planned, by_length
    if batching.strategy == "dynamic":
        ends = _fewest(planned[np.searchsorted(planned, tokens)], MOST_CLASSES)
        return ends, [(longest[0], int(end)) for end in ends]
    aligned = np.minimum(align_lengths(tokens, batching.align), longest[1])
    if batching.strategy == "fixed":
        ends = _fewest(aligned, MOST_CLASSES)
        return ends, [longest] * len(ends)
    budget = max(size * length for size, length in training_shapes)
    ends = _fewest(aligned, MOST_OWN_SHAPES)
    return ends, [(max(1, budget // int(end)), int(end)) for end in ends]


def _fewest(padded: IntArray, most: int) -> IntArray:
    """At most so many of these lengths, the last among them, of least padding; rising."""
    candidates, counts = count_lengths(padded)
    curve = solve_boundaries(
        candidates,
        counts,
        row_cost=candidates.astype(np.float64),
        shape_cost=np.zeros(len(candidates)),
        max_buckets=most,
    )
    return np.array(curve.best(most))

"""What a plan is, counted exactly; no model and no estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.batching.grouping import Shape
from tuner.batching.plan import EpochPlan
from tuner.batching.windows import update_after_step


@dataclass(frozen=True, kw_only=True)
class EpochFigures:
    """Figures of one epoch over all ranks; whole numbers where they are counted.

    Attributes:
        num_steps: Steps of every rank.
        num_updates: Optimizer updates.
        real_tokens: Tokens of rows, after truncation.
        padded_tokens: Tokens computed, padding and filler rows included.
        shape_counts: (B, L) -> steps, for every planned shape.
        real_tokens_of_shape: (B, L) -> tokens of rows in these steps.
        num_filler_rows: Rows without a sample, in last batches.
    """

    num_steps: int
    num_updates: int
    real_tokens: int
    padded_tokens: float
    shape_counts: Mapping[Shape, float]
    real_tokens_of_shape: Mapping[Shape, float]
    num_filler_rows: int

    @property
    def effective_token_fraction(self) -> float:
        """real_tokens / padded_tokens, 0..1."""
        return self.real_tokens / self.padded_tokens

    @property
    def padding_fraction(self) -> float:
        """1 - effective_token_fraction."""
        return 1.0 - self.effective_token_fraction


@dataclass(frozen=True, kw_only=True)
class PlanStats(EpochFigures):
    """Figures of a plan, counted; shapes that this epoch does not meet count 0.

    Attributes:
        length_autocorrelation: Correlation of padded lengths of neighbouring steps, -1..1; 0 if
            all are equal. Near 1, the loss waves with the length.
    """

    length_autocorrelation: float

    @property
    def num_shapes(self) -> int:
        """Shapes that this epoch meets."""
        return sum(count > 0 for count in self.shape_counts.values())


def count_plan(
    plan: EpochPlan, tokens_per_update: int | None, steps_per_update: int = 1
) -> PlanStats:
    """Count a plan.

    Args:
        plan: One epoch.
        tokens_per_update: Real tokens of an update, on average; None: steps are counted.
        steps_per_update: Steps of an update then, >= 1.
    """
    ends_window = update_after_step(plan.real_tokens, tokens_per_update, steps_per_update)
    slots = plan.batch_sizes * plan.world_size
    return PlanStats(
        num_steps=plan.num_steps,
        num_updates=int(ends_window.sum()),
        real_tokens=int(plan.real_tokens.sum()),
        padded_tokens=int((slots * plan.padded_lengths).sum()),
        shape_counts=plan.shape_counts(),
        real_tokens_of_shape=plan.real_tokens_of_shape(),
        num_filler_rows=plan.num_fillers,
        length_autocorrelation=_neighbour_correlation(plan.padded_lengths),
    )


def _neighbour_correlation(values: NDArray[np.int64]) -> float:
    before, after = values[:-1].astype(float), values[1:].astype(float)
    if len(values) < 3 or before.std() == 0.0 or after.std() == 0.0:
        return 0.0
    return float(np.corrcoef(before, after)[0, 1])

"""What the loop asks of the other ranks; a run on one device has none.

Shapes: W ranks, K numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tuner.errors import BadInputError
from tuner.train.loader import Batch
from tuner.train.world import ALONE, World

Numbers = NDArray[np.float64]


class Ranks(Protocol):
    """All ranks of a run. Every method but `at` has to be called by all of them, in one order."""

    @property
    def world(self) -> World:
        """Which one this is."""

    def gather(self, values: Sequence[float]) -> Numbers:
        """The values of every rank: float64 [W, K], exactly as given."""

    def sum_gradients(self) -> None:
        """Make every rank's gradient buffers the sum of all."""

    def share_weights(self) -> None:
        """After an update: give every rank the weights that another has updated."""

    def moments_of_others(self) -> Mapping[str, NDArray[Any]]:
        """Moments that ranks 1 and up keep, by name.

        The first rank gets them; the others get nothing.
        """

    def gradients_of_others(self) -> Mapping[str, NDArray[Any]]:
        """Buffers of ranks 1 and up, by `rank_names.name_of_rank`; they are left unchanged.

        The first rank gets them; the others get nothing.
        """

    def at(self, place: str, step: int) -> None:
        """Tell the others what is being done, after so many steps."""


class OneRank:
    """The run of one process."""

    world = ALONE

    def gather(self, values: Sequence[float]) -> Numbers:
        """Its own values: float64 [1, K]."""
        return np.array([values], dtype=np.float64)

    def sum_gradients(self) -> None:
        """The buffers are the sum already."""

    def share_weights(self) -> None:
        """It has updated them all."""

    def moments_of_others(self) -> Mapping[str, NDArray[Any]]:
        """It keeps them all."""
        return {}

    def gradients_of_others(self) -> Mapping[str, NDArray[Any]]:
        """There are no others."""
        return {}

    def at(self, place: str, step: int) -> None:
        """Nobody asks."""


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """One step over all ranks.

    Attributes:
        loss_sum: Over all labels; not finite if that of any rank is not.
        label_tokens: Targets that count.
        real_tokens: Tokens of rows.
        padded_tokens: B * L of all their batches.
        stop_requested: Whether any rank was asked to stop.
    """

    loss_sum: float
    label_tokens: int
    real_tokens: int
    padded_tokens: int
    stop_requested: bool


def total_step(
    ranks: Ranks, batches: Sequence[Batch], loss_sum: float, *, step: int, stop_requested: bool
) -> StepTotals:
    """Add up a step; the same on every rank.

    Args:
        ranks: All of them make this step.
        batches: That this rank has trained on; as many on every rank, of one shape.
        loss_sum: Over their labels.
        step: Its number.
        stop_requested: Of this rank.

    Raises:
        BadInputError: the ranks are not at the same step, or it has not the same shape.
    """
    size, length = batches[0].shape
    label_tokens = sum(batch.label_tokens for batch in batches)
    real_tokens = sum(batch.real_tokens for batch in batches)
    found = ranks.gather([step, size, length, loss_sum, label_tokens, real_tokens, stop_requested])
    for rank, theirs in enumerate(found[:, :3].astype(np.int64).tolist()):
        if theirs != [step, size, length]:
            raise BadInputError(
                f"rank {rank} is at step {theirs[0]} (B={theirs[1]} L={theirs[2]}), rank "
                f"{ranks.world.rank} at step {step} (B={size} L={length})",
                fix="give all ranks the same data and config",
            )
    sums = found.sum(axis=0)
    return StepTotals(
        loss_sum=float(sums[3]),
        label_tokens=int(sums[4]),
        real_tokens=int(sums[5]),
        padded_tokens=size * length * len(batches) * ranks.world.size,
        stop_requested=bool(sums[6]),
    )

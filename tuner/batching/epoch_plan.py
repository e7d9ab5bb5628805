"""What every plan of an epoch has, whether its rows are in memory as a whole or slab by slab."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tuner.batching.grouping import IntArray, Shape

STEPS_AT_A_TIME = 1_000_000


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """One step of one rank.

    Attributes:
        row_indices: int64 [R]; rows of the data set, slot after slot.
        rows_per_slot: int64 [B]; their sum is R; 0: filler, above 1: packed.
        padded_length: L in tokens.
    """

    row_indices: IntArray
    rows_per_slot: IntArray
    padded_length: int

    @property
    def shape(self) -> Shape:
        """(B, L)."""
        return len(self.rows_per_slot), self.padded_length


@dataclass(frozen=True, kw_only=True)
class EpochPlan(ABC):
    """The steps of one epoch, for all ranks; arrays are read-only.

    Attributes:
        batch_sizes: int64 [S]; B, slots of one rank.
        padded_lengths: int64 [S]; L in tokens.
        real_tokens: int64 [S]; tokens of real rows over all ranks, after truncation.
        shapes: Every (B, L) of any epoch, most padded tokens first: the order of warm-up.
        num_samples: Rows of the data set.
        num_truncated: Rows cut to the limit.
        dropped: Reason -> rows left out.
        world_size: Ranks, W.
    """

    batch_sizes: IntArray
    padded_lengths: IntArray
    real_tokens: IntArray
    shapes: tuple[Shape, ...]
    num_samples: int
    num_truncated: int
    dropped: Mapping[str, int]
    world_size: int

    @property
    def num_steps(self) -> int:
        """Steps of the epoch, the same on every rank."""
        return len(self.batch_sizes)

    @abstractmethod
    def steps_of_rank(self, rank: int, start_step: int = 0) -> Iterator[PlannedBatch]:
        """The steps of one rank in order.

        Args:
            rank: In [0, world_size).
            start_step: First step, in [0, num_steps].
        """

    @property
    @abstractmethod
    def num_fillers(self) -> int:
        """Slots without a row over all ranks."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """sha256 of the order, rows, their tokens after truncation, and shapes."""

    def shape_counts(self) -> dict[Shape, int]:
        """Steps of this epoch for each planned shape; shapes it does not meet count 0."""
        return self._sum_by_shape(np.broadcast_to(np.int64(1), self.num_steps))

    def real_tokens_of_shape(self) -> dict[Shape, int]:
        """Real tokens over all ranks in the steps of each planned shape."""
        return self._sum_by_shape(self.real_tokens)

    def _sum_by_shape(self, value_of_step: IntArray) -> dict[Shape, int]:
        sums = dict.fromkeys(self.shapes, 0)
        # One number for (B, L): unique over pairs takes five times as long.
        stride = int(self.padded_lengths.max()) + 1
        # Some steps at a time: unique takes four times their memory.
        for start in range(0, self.num_steps, STEPS_AT_A_TIME):
            part = slice(start, start + STEPS_AT_A_TIME)
            keys, index = np.unique(
                self.batch_sizes[part] * stride + self.padded_lengths[part], return_inverse=True
            )
            # Sums in float64 are exact below 2^53.
            totals = np.bincount(index, weights=value_of_step[part]).astype(np.int64)
            for key, total in zip(keys.tolist(), totals.tolist(), strict=True):
                sums[divmod(key, stride)] += total
        return sums


def in_warm_up_order(shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    """Shapes sorted, most padded tokens first."""
    return tuple(sorted(shapes, key=lambda shape: (-shape[0] * shape[1], -shape[1])))

"""Seconds of a length bucket: the whole steps of its rows, and the compiles of its shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.batching.grouping import IntArray, Shape, rows_per_batch
from tuner.config.schema import BatchingConfig

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """What a run costs in seconds.

    Attributes:
        step_s: (B, L) -> seconds of a steady step of one rank, finite, > 0.
        compile_s: (B, L) -> seconds of compiling the shape, once a run, finite, >= 0.
        epochs: Epochs of the run, >= 1.
        world_size: Ranks, W >= 1.
    """

    step_s: Callable[[Shape], float]
    compile_s: Callable[[Shape], float]
    epochs: int
    world_size: int


class BucketTime:
    """Seconds that rows cost in a bucket, for many buckets at once.

    Both costs are taken to be linear in B at any one L, as the cost model has them: they are asked
    for B = 1 and for the largest B, and lie on the line between.
    """

    def __init__(self, padded_lengths: IntArray, batching: BatchingConfig, cost: RunCost) -> None:
        """Ask for the costs of all lengths.

        Args:
            padded_lengths: int64 [U], tokens.
            batching: A token budget or a sample count, and whether all batches of a length have
                one size.
            cost: Seconds of steps and compiles.

        Raises:
            BadInputError: the longest padded row is over the token budget.
        """
        lengths = padded_lengths.tolist()
        self._most = np.array([rows_per_batch(batching, length) for length in lengths])
        self._step = _Lines(cost.step_s, self._most, lengths)
        self._compile = _Lines(cost.compile_s, self._most, lengths)
        self._batching = batching
        self._epochs = cost.epochs
        self._world_size = cost.world_size

    def shared_row_s(self) -> FloatArray:
        """A row's share of full steps of all epochs, float64 [U]: what it costs at least."""
        full_s = self._step.at(self._most, np.arange(len(self._most)))
        row_s: FloatArray = self._epochs * full_s / (self._most * self._world_size)
        return row_s

    def full_compile_s(self) -> FloatArray:
        """Seconds of the compile at the largest B, float64 [U]."""
        return self._compile.at(self._most, np.arange(len(self._most)))

    def bucket_s(self, num_rows: IntArray, index: IntArray) -> FloatArray:
        """Seconds of buckets: all steps, as `fill_buckets` makes them, and compiles.

        Args:
            num_rows: int64, rows of each bucket, >= 1.
            index: int64, which of the padded lengths each has; broadcast against num_rows.
        """
        slots = -(-num_rows // self._world_size)
        num_steps = -(-slots // self._most[index])
        if not self._batching.one_size_per_length:
            size, num_larger = np.divmod(slots, num_steps)
            seconds = self._steps_s(num_steps, slots, index) + self._compile.at(size, index)
            seconds += np.where(num_larger > 0, self._compile.at(size + 1, index), 0.0)
            return seconds
        size = -(-slots // num_steps)
        if self._batching.samples_per_batch is not None:
            size = np.broadcast_to(self._most[index], num_steps.shape)
        steps_s = self._steps_s(num_steps, num_steps * size, index)
        return steps_s + self._compile.at(size, index)

    def _steps_s(self, num_steps: IntArray, slots: IntArray, index: IntArray) -> FloatArray:
        """Steps of any sizes that hold so many slots in all."""
        seconds: FloatArray = self._epochs * self._step.sum_of(num_steps, slots, index)
        return seconds


class _Lines:
    """A cost at each length, linear in B."""

    def __init__(
        self, cost_s: Callable[[Shape], float], most: IntArray, lengths: list[int]
    ) -> None:
        one = np.array([cost_s((1, length)) for length in lengths], dtype=np.float64)
        shapes = zip(most.tolist(), lengths, strict=True)
        full = np.array([cost_s(shape) for shape in shapes], dtype=np.float64)
        # Of a largest B of one the slope does not matter.
        self._slope = (full - one) / np.maximum(most - 1, 1)
        self._base = one - self._slope

    def at(self, size: IntArray, index: IntArray) -> FloatArray:
        """Of one B."""
        return self.sum_of(np.int64(1), size, index)

    def sum_of(
        self, num_sizes: IntArray | np.int64, sum_of_sizes: IntArray, index: IntArray
    ) -> FloatArray:
        """The sum over several B at one length."""
        total: FloatArray = num_sizes * self._base[index] + sum_of_sizes * self._slope[index]
        return total

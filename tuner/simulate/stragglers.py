"""What several devices lose by waiting for the slowest, and what equal shapes cost instead.

W ranks that train on parts of the same data add their gradients, so none goes on before the
slowest has ended its step. Two ways of dealing out batches are compared:

Other shapes: every rank takes the batches of a plan for one rank in an order of its own. With F(s)
the share of steps of at most s seconds, the slowest of W independent draws is at most s with
probability F(s)^W, so over the different step seconds s_1 < s_2 < ... of the shapes
    E[max] = sum over i of s_i * (F(s_i)^W - F(s_{i-1})^W),
exactly and without sampling. Of it 1 - mean / E[max] is waiting. N steps of the plan are
ceil(N / W) steps of each rank.

Same shape: the plan for W ranks, which gives all ranks one shape at every step. Nobody waits; in
exchange the last batch of every shape is filled up over all ranks at once, with more fillers.

Step seconds follow from the fitted cost model alone: measured medians have errors of their own,
and a maximum seeks the largest of them out. Left out are communication, updates, the spread of
one shape's step from time to time, and devices of different speed; so is accumulation: ranks that
add gradients only every few steps wait less with other shapes than is said here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tuner.batching.grouping import Shape
from tuner.config.schema import TrainConfig
from tuner.simulate.cost import StepCost
from tuner.simulate.screen import Screen, ScreenedPlan

WORLD_SIZES = (8, 64, 512)
"""Ranks that are looked at: one server, a rack of eight, a cluster."""


@dataclass(frozen=True, kw_only=True)
class StragglerCost:
    """An epoch of one config on some ranks, dealt out in both ways.

    Attributes:
        world_size: Ranks, W >= 1.
        num_batches: Batches of the plan for one rank; expected ones are rounded.
        mean_step_s: Mean seconds of its steps: what a rank computes in a step on average.
        slowest_step_s: Expected seconds of a step of W ranks with other shapes, E[max].
        same_shape_num_steps: Steps of the plan for W ranks.
        same_shape_step_s: Mean seconds of its steps.
        filler_fraction: Share of its slots that hold no row, 0..1.
    """

    world_size: int
    num_batches: int
    mean_step_s: float
    slowest_step_s: float
    same_shape_num_steps: int
    same_shape_step_s: float
    filler_fraction: float

    @property
    def num_steps(self) -> int:
        """Steps of each rank with other shapes; the last may give some ranks nothing."""
        return -(-self.num_batches // self.world_size)

    @property
    def wait_s(self) -> float:
        """Seconds of a step in which a rank waits on average, with other shapes."""
        return max(0.0, self.slowest_step_s - self.mean_step_s)

    @property
    def wait_fraction(self) -> float:
        """Share of the time that is lost to waiting with other shapes, 0..1."""
        return self.wait_s / self.slowest_step_s

    @property
    def epoch_s(self) -> float:
        """Seconds of the epoch's steps with other shapes."""
        return self.num_steps * self.slowest_step_s

    @property
    def same_shape_epoch_s(self) -> float:
        """Seconds of the epoch's steps with the same shape on all ranks."""
        return self.same_shape_num_steps * self.same_shape_step_s

    @property
    def same_shape_speed(self) -> float:
        """Speed with the same shape, that with other shapes = 1."""
        return self.epoch_s / self.same_shape_epoch_s


def expected_slowest(step_s: ArrayLike, num_steps: ArrayLike, world_size: int) -> float:
    """Expected seconds of the slowest of some ranks, each at a step drawn on its own.

    Args:
        step_s: float [G], seconds of a step of each shape, >= 0, in any order; ties are allowed.
        num_steps: float [G], steps of each shape, >= 0, at least one above 0; only their
            proportions count.
        world_size: Draws, W >= 1; of one the mean is left.

    Returns:
        E[max] in seconds, by the formula of the module.
    """
    seconds, group = np.unique(np.asarray(step_s, dtype=np.float64), return_inverse=True)
    at_most = np.cumsum(np.bincount(group, weights=np.asarray(num_steps, dtype=np.float64)))
    chance = (at_most / at_most[-1]) ** world_size
    return float(np.diff(chance, prepend=0.0) @ seconds)


def simulate_stragglers(
    screen: Screen,
    config: TrainConfig,
    cost: StepCost,
    world_sizes: Sequence[int] = WORLD_SIZES,
) -> tuple[StragglerCost, ...]:
    """Both ways of dealing out batches, for each number of ranks.

    Args:
        screen: Of the rows.
        config: Its budget or batch sizes are those of one rank, whatever the number of ranks.
        cost: Fitted seconds of a steady step.
        world_sizes: Ranks, each >= 1.

    Raises:
        BadInputError: as `plan_batches`.
    """
    alone = screen.plan(config)
    step_s, num_steps = _seconds_and_steps(alone.shape_counts, cost)
    found = []
    for world_size in world_sizes:
        together = screen.plan(config, world_size)
        same_s, same_steps = _seconds_and_steps(together.shape_counts, cost)
        found.append(
            StragglerCost(
                world_size=world_size,
                num_batches=alone.num_steps,
                mean_step_s=expected_slowest(step_s, num_steps, 1),
                slowest_step_s=expected_slowest(step_s, num_steps, world_size),
                same_shape_num_steps=together.num_steps,
                same_shape_step_s=expected_slowest(same_s, same_steps, 1),
                filler_fraction=_filler_fraction(together, world_size),
            )
        )
    return tuple(found)


def _seconds_and_steps(
    shape_counts: Mapping[Shape, float], cost: StepCost
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    seconds = [cost.step_s(shape) for shape in shape_counts]
    return np.array(seconds), np.array(list(shape_counts.values()), dtype=np.float64)


def _filler_fraction(plan: ScreenedPlan, world_size: int) -> float:
    num_slots = sum(size * count for (size, _), count in plan.shape_counts.items()) * world_size
    return plan.num_filler_rows / num_slots

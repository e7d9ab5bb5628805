"""Measuring one config: how shapes are timed. Runs inside the trial's process.

The first call of a shape holds its compile and the taking of its memory, and the next ones are not
typical yet: they are kept apart from the steady timings. Every call ends with the result on the
host, so a timing is of the work and not of the queue.

On CPU a new graph needs some calls to settle. MindSpore searches for the number of threads of most
kernels while they run: five calls on one thread, five on two, five on four and so on, and then
stays at the fastest (ParallelLaunchAutoSearch in its CPU kernels). Measured with 2.10 on two
cores, 8 x 512: the first five calls 0.75 s, the next five 0.57 s, the 26th 0.48 s; a real run
takes hundreds of steps of every shape. So the steady calls are the five that run on all cores.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

from tuner.batching.grouping import Shape
from tuner.batching.plan import EpochPlan, PlannedBatch
from tuner.config.schema import TrainConfig
from tuner.data.mindrecord import MindRecordSet
from tuner.simulate.measurement import ShapeMeasurement, UpdateMeasurement
from tuner.train.device import CPU, Device, memory_bytes
from tuner.train.engine import Engine
from tuner.train.loader import Batch, read_batches

UNTYPICAL_CALLS = 2
"""Of a shape whose graph is there already, or on a device that does not search."""
SEARCH_CALLS = 5
"""Calls of a kernel with each number of threads that MindSpore's search on CPU tries."""
MOST_SEARCH_CALLS = 30
# Long steps are measured well by few: after this many seconds two of them do.
ENOUGH_S = 3.0
LEAST_TIMED_STEPS = 2


class DivergedError(Exception):
    """A loss that is not a number."""


def read_one_batch_each(
    dataset: MindRecordSet, plan: EpochPlan, shapes: Sequence[Shape], config: TrainConfig
) -> list[Batch]:
    """The first batch of the epoch at each shape, of real rows.

    Args:
        dataset: The rows.
        plan: Of the config.
        shapes: Those that the epoch does not meet get full rows of random ids.
        config: The config.
    """
    first: dict[Shape, PlannedBatch] = {}
    for step in plan.steps_of_rank(0):
        first.setdefault(step.shape, step)
        if len(first) == len(plan.shapes):
            break
    planned = [first[shape] for shape in shapes if shape in first]
    batches = {batch.shape: batch for batch in read_batches(dataset, planned, config)}
    return [batches.get(shape) or Batch.full(shape, config) for shape in shapes]


def measure_shapes(
    engine: Engine,
    batches: Iterable[Batch],
    timed_steps: int,
    on_measured: Callable[[ShapeMeasurement], None],
) -> tuple[ShapeMeasurement, ...]:
    """Time every batch's shape.

    Args:
        engine: Fresh.
        batches: One of each shape, largest first.
        timed_steps: Steady steps of each at most, >= 2; fewer where they are long.
        on_measured: Told every measurement at once, so that a later failure keeps it.

    Raises:
        DivergedError: a loss that is not a number.
    """
    measured = []
    for batch in batches:
        measurement = _measure_shape(engine, batch, timed_steps)
        on_measured(measurement)
        measured.append(measurement)
    return tuple(measured)


def calls_before_steady(device: Device, num_cores: int) -> int:
    """Calls of a new graph, its first included, that are not typical yet.

    Args:
        device: What it runs on.
        num_cores: Cores of the machine, >= 1.
    """
    if device.name != CPU:
        return UNTYPICAL_CALLS
    doublings = max(1, math.ceil(math.log2(num_cores)))
    return min(SEARCH_CALLS * doublings, MOST_SEARCH_CALLS)


def measure_update(engine: Engine, learning_rate: float, timed_updates: int) -> UpdateMeasurement:
    """Time the optimizer update; the parameters move."""
    seconds = []
    untypical = _calls_before_steady(engine)
    for number in range(1, timed_updates + untypical + 1):
        started = time.perf_counter()
        engine.run_update(learning_rate, number, label_tokens=1)
        seconds.append(time.perf_counter() - started)
    return UpdateMeasurement(
        first_call_s=seconds[0], update_s=statistics.median(seconds[untypical:])
    )


def _calls_before_steady(engine: Engine) -> int:
    return calls_before_steady(engine.device, os.cpu_count() or 1)


def _measure_shape(engine: Engine, batch: Batch, timed_steps: int) -> ShapeMeasurement:
    seconds: list[float] = []
    losses: list[float] = []
    bytes_before, graphs_before = memory_bytes(engine.device), engine.num_graphs()
    untypical, has_compiled = UNTYPICAL_CALLS, False
    while not _is_enough(seconds[untypical:], timed_steps):
        started = time.perf_counter()
        losses.append(engine.run_step(batch))
        seconds.append(time.perf_counter() - started)
        # Where MindSpore does not count its graphs, a shape is taken to compile.
        if len(seconds) == 1 and (graphs_before is None or engine.num_graphs() != graphs_before):
            untypical, has_compiled = _calls_before_steady(engine), True
    size, length = batch.shape
    if not all(math.isfinite(loss) for loss in losses):
        raise DivergedError(f"the loss at B={size} L={length} is {losses[0]}")
    bytes_after = memory_bytes(engine.device)
    return ShapeMeasurement(
        batch_size=size,
        padded_length=length,
        first_call_s=seconds[0],
        settling_s=tuple(seconds[1:untypical]),
        steady_s=tuple(seconds[untypical:]),
        has_compiled=has_compiled,
        memory_bytes=bytes_after,
        added_bytes=max(0, bytes_after - bytes_before),
        loss=losses[0] / batch.label_tokens if batch.label_tokens else None,
    )


def _is_enough(steady_s: list[float], timed_steps: int) -> bool:
    if len(steady_s) < LEAST_TIMED_STEPS:
        return False
    return len(steady_s) >= timed_steps or sum(steady_s) >= ENOUGH_S

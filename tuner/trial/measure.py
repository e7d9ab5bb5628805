"""Measuring one config: how shapes are timed. Runs inside the trial's process.

The first call of a shape holds its compile and the taking of its memory, and the next ones are not
typical yet: they are kept apart from the steady timings. Every call ends with the result on the
host, so a timing is of the work and not of the queue.

On CPU a new graph needs some calls to settle. MindSpore searches for the number of threads of most
kernels while they run: five calls on one thread, five on two, five on four and so on, and then
stays at the fastest (ParallelLaunchAutoSearch in its CPU kernels). Measured with 2.10 on two
cores, 8 x 512: the first five calls 0.75 s, the next five 0.57 s, the 26th 0.48 s; a real run
takes hundreds of steps of every shape. So calls count as steady from the first on all cores.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tuner.batching.grouping import Shape
from tuner.batching.plan import EpochPlan, PlannedBatch
from tuner.config.schema import TrainConfig
from tuner.data.mindrecord import MindRecordSet
from tuner.simulate.measurement import ShapeMeasurement, UpdateMeasurement
from tuner.train.device import CPU, Device, memory_bytes
from tuner.train.engine import Engine
from tuner.train.loader import Batch, read_batches
from tuner.trial.turns import Turns

UNTYPICAL_CALLS = 2
"""Of a graph on a device that does not search."""
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


@dataclass(frozen=True, kw_only=True)
class Steady:
    """Which steady steps are timed.

    Attributes:
        steps: Of each shape at most, >= 2; fewer where they are long, more where `seconds` asks
            for them.
        seconds: Of all shapes together, at least; for them all shapes are stepped at as often.
        turns: They are taken in these, and of the visits none counts as steady; the last turn is
            not given up. None: nobody else takes turns.
    """

    steps: int
    seconds: float = 0.0
    turns: Turns | None = None


def measure_shapes(
    engine: Engine,
    batches: Iterable[Batch],
    steady: Steady,
    on_measured: Callable[[ShapeMeasurement], None],
) -> tuple[ShapeMeasurement, ...]:
    """Time every batch's shape.

    Steps of one shape that follow each other are disturbed alike, by whatever else the machine
    does in that second. So every shape is visited and timed once, and then all of them in turn,
    as a run meets them. A machine that others share is faster and slower for seconds on end: over
    `steady.seconds` that evens out.

    Args:
        engine: Fresh.
        batches: One of each shape, largest first.
        steady: What is timed.
        on_measured: Told of every shape after its visit, so that a later failure keeps it, and
            again when all of its steps are timed.

    Raises:
        DivergedError: a loss that is not a number.
    """
    timings = [_Timing(engine, batch, steady.steps) for batch in batches]
    for timing in timings:
        timing.visit()
        on_measured(timing.measurement())
    turns = steady.turns or Turns(None)
    if turns.are_shared:
        # The visits were not in turn: the machine may have been another one then.
        for timing in timings:
            timing.begin_anew()
    turns.take()
    for timing in _due(timings, steady.seconds):
        turns.pass_on()
        timing.time_step()
    measured = tuple(timing.measurement() for timing in timings)
    for item in measured:
        on_measured(item)
    return measured


def _due(timings: Sequence[_Timing], timed_s: float) -> Iterator[_Timing]:
    """What to step at next, until all have been timed enough; a step follows each."""
    waiting = timings
    while waiting := [timing for timing in waiting if not timing.is_enough]:
        yield from waiting
    while timings and sum(sum(timing.steady_s) for timing in timings) < timed_s:
        yield from timings


def calls_before_steady(device: Device, num_cores: int, *, is_new_graph: bool = True) -> int:
    """Calls of a shape, its first included, that are not typical yet.

    Args:
        device: What it runs on.
        num_cores: Cores of the machine, >= 1.
        is_new_graph: The first call has compiled. On CPU a shape whose graph is there already
            takes its memory in the first call, and the second is typical: 1.00 times the steady
            ones, median of 411 shapes of one dynamic graph (0.89 to 1.10 the middle 80 %).
    """
    if device.name != CPU:
        return UNTYPICAL_CALLS
    if not is_new_graph:
        return 1
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


def _calls_before_steady(engine: Engine, *, is_new_graph: bool = True) -> int:
    return calls_before_steady(engine.device, os.cpu_count() or 1, is_new_graph=is_new_graph)


class _Timing:
    """One shape's calls so far."""

    def __init__(self, engine: Engine, batch: Batch, timed_steps: int) -> None:
        self._engine = engine
        self._batch = batch
        self._timed_steps = timed_steps
        self._seconds: list[float] = []
        self._untypical, self._has_compiled = 0, False
        self._loss = 0.0
        self._memory_bytes = self._added_bytes = 0

    def visit(self) -> None:
        """Call until the calls are typical, and once more."""
        device = self._engine.device
        bytes_before, graphs_before = memory_bytes(device), self._engine.num_graphs()
        self._loss = self.time_step()
        # Where MindSpore does not count its graphs, a shape is taken to compile.
        self._has_compiled = graphs_before is None or self._engine.num_graphs() != graphs_before
        self._untypical = _calls_before_steady(self._engine, is_new_graph=self._has_compiled)
        for _ in range(self._untypical):
            self.time_step()
        self._memory_bytes = memory_bytes(device)
        self._added_bytes = max(0, self._memory_bytes - bytes_before)

    def begin_anew(self) -> None:
        """Count no call so far as steady."""
        self._untypical = len(self._seconds)

    @property
    def steady_s(self) -> list[float]:
        """Seconds of the steady steps so far."""
        return self._seconds[self._untypical :]

    @property
    def is_enough(self) -> bool:
        """Whether no more steps are to be timed."""
        steady_s = self.steady_s
        if len(steady_s) < LEAST_TIMED_STEPS:
            return False
        return len(steady_s) >= self._timed_steps or sum(steady_s) >= ENOUGH_S

    def time_step(self) -> float:
        """Take one step and its time; gives its loss."""
        started = time.perf_counter()
        loss = self._engine.run_step(self._batch)
        self._seconds.append(time.perf_counter() - started)
        if not math.isfinite(loss):
            size, length = self._batch.shape
            raise DivergedError(f"the loss at B={size} L={length} is {loss}")
        return loss

    def measurement(self) -> ShapeMeasurement:
        """What is known so far, after the visit."""
        size, length = self._batch.shape
        label_tokens = self._batch.label_tokens
        return ShapeMeasurement(
            batch_size=size,
            padded_length=length,
            first_call_s=self._seconds[0],
            settling_s=tuple(self._seconds[1 : self._untypical]),
            steady_s=tuple(self.steady_s),
            has_compiled=self._has_compiled,
            memory_bytes=self._memory_bytes,
            added_bytes=self._added_bytes,
            loss=self._loss / label_tokens if label_tokens else None,
        )

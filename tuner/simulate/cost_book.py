"""All that is known about costs: measurements shared by key, and a fit for what was not measured.

A shape that was measured costs the median over the processes that measured it. One that was not
costs the fit of its key. A key with fewer than LEAST_SHAPES measured shapes borrows: the fit that
was given for it, else that of the nearest key that has enough, scaled by the median ratio of its
own measurements to that fit (steps by steps, compiles by compiles), with an error that says how
far the two are apart. Where nothing was measured at all the default stands in.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tuner.batching.bucket_time import RunCost
from tuner.batching.grouping import Shape
from tuner.simulate.cost import CostModel, default_cost_model, fit_cost_model
from tuner.simulate.measurement import (
    CostKey,
    ProcessMeasurement,
    ShapeMeasurement,
    UpdateMeasurement,
)
from tuner.simulate.memory import MemoryCost, fit_memory, shows_further_share

LEAST_SHAPES = 3
"""Measured shapes from which on a key has a fit of its own: as many as a step has terms."""

MEASURED_ERROR = 0.03
"""Relative error, 95 %, of a median of steady steps between fresh processes of a quiet machine."""

MOST_PROCESS_ERROR = 0.25
"""A machine whose steps scatter more than half as much tells nothing by one process."""

SHAPES_A_PROCESS = 6
"""That one process measures, about."""

UNLIKE = {"device": 3.0, "graph_mode": 0.5, "precision": 0.4, "jit_level": 0.3, "rows": 0.15}
"""Relative error (95 %) of a scaled fit for each field in which two keys differ, before anything
was measured under the second; one measured shape takes it to BORROWED_ERROR. Orders of magnitude:
a dynamic graph takes 1.05 to 1.9 times a static one on CPU, packing adds a mask."""

SAME_DTYPE_ERROR = 0.12
"""The same for two precisions of one compute dtype: op groups are a small part of a step."""

LEARNED_ERROR = 0.25
"""The same where what the two differ in was measured on a shape of other keys."""

BORROWED_ERROR = 0.15
"""Relative error (95 %) of a fit that was scaled to one or two measured shapes, at most."""

LEAST_BORROWED_ERROR = 0.05
"""The same at least, of a fit that was given for the very key."""

DEFAULT_ERROR = 1.0
"""Relative error (95 %) of the default costs: another model on another machine."""

NO_UPDATE = UpdateMeasurement(first_call_s=0.0, update_s=0.0)


@dataclass(frozen=True, kw_only=True)
class KnownCosts:
    """What is known under one key.

    Attributes:
        key: The key.
        model: For shapes that were not measured.
        steps_s: (B, L) -> median steady seconds, measured.
        first_calls_s: (B, L) -> seconds of the first call beyond a step, measured: its compile, or
            under one dynamic graph the taking of its memory.
        update: Median of what was measured; zeros before.
        memory: None where it is not known.
        process_error: Relative error (95 %) of all steps of the key together: the machine may have
            been faster or slower while they were measured.
    """

    key: CostKey
    model: CostModel
    steps_s: Mapping[Shape, float]
    first_calls_s: Mapping[Shape, float]
    update: UpdateMeasurement
    memory: MemoryCost | None
    process_error: float = 0.0

    def step_s(self, shape: Shape) -> float:
        """Seconds of a steady step, measured if it was."""
        measured = self.steps_s.get(shape)
        return self.model.step.step_s(shape) if measured is None else measured

    def half_width_s(self, shape: Shape) -> float:
        """Half of the 95 % interval of a steady step, seconds."""
        if shape in self.steps_s:
            return MEASURED_ERROR * self.steps_s[shape]
        return self.model.step.half_width_s(shape)

    def shape_s(self, shape: Shape) -> float:
        """Seconds that having the shape costs once: its compile, or the first visit of a graph.

        A measured visit is noise in part, and may be below 0.
        """
        measured = self.first_calls_s.get(shape)
        return self.model.shape_s(shape) if measured is None else measured

    def compile_s(self, shapes: Collection[Shape]) -> float:
        """Seconds that a plan's shapes and the update take once."""
        once_s = self.model.compile_base_s if self.model.is_one_graph else 0.0
        # Measured visits of single shapes may be below 0.
        return once_s + max(0.0, sum(map(self.shape_s, shapes))) + self.update.compile_s

    def run_cost(self, epochs: int, world_size: int = 1) -> RunCost:
        """For solving boundaries: the fit alone, since its errors do not favour single shapes."""
        return RunCost(
            step_s=self.model.step.step_s,
            compile_s=self.model.shape_s,
            epochs=epochs,
            world_size=world_size,
        )


class CostBook:
    """Measurements by key, and what follows from them."""

    def __init__(
        self,
        processes: Iterable[ProcessMeasurement] = (),
        models: Mapping[CostKey, tuple[CostModel, MemoryCost | None]] | None = None,
    ) -> None:
        """Sort measurements by key.

        Args:
            processes: In any order; the same ones in another order give the same figures.
            models: Fits from elsewhere, for keys without measurements of their own.
        """
        self._processes: dict[CostKey, list[ProcessMeasurement]] = defaultdict(list)
        self._models = dict(models or {})
        self._known: dict[CostKey, KnownCosts] = {}
        for process in processes:
            self.add(process)

    def add(self, process: ProcessMeasurement) -> None:
        """Take one more into account."""
        self._processes[process.key].append(process)
        # Other keys may have borrowed from this one.
        self._known.clear()

    def plus(self, *processes: ProcessMeasurement) -> CostBook:
        """A book that knows more; this one stays as it is."""
        everything = [item for items in self._processes.values() for item in items]
        return CostBook([*everything, *processes], self._models)

    @property
    def keys(self) -> tuple[CostKey, ...]:
        """Keys under which something was measured or given, in the order of their text."""
        measured = {key for key, items in self._processes.items() if any(i.shapes for i in items)}
        return tuple(sorted(measured | set(self._models), key=str))

    def processes(self, key: CostKey) -> tuple[ProcessMeasurement, ...]:
        """What was measured under a key."""
        return tuple(self._processes.get(key, ()))

    def known(self, key: CostKey) -> KnownCosts:
        """What is known under a key; never nothing, see the module's text."""
        if key not in self._known:
            self._known[key] = self._learn(key)
        return self._known[key]

    def predict_without(self, key: CostKey, shape: Shape) -> tuple[float, float]:
        """What would be foretold of a shape that was measured, had it not been.

        Args:
            key: Of its measurements.
            shape: (B, L).

        Returns:
            Seconds of a steady step by a fit of everything else, and half of their 95 % interval.
        """
        others = [
            replace(process, shapes=tuple(item for item in process.shapes if item.shape != shape))
            if process.key == key
            else process
            for processes in self._processes.values()
            for process in processes
        ]
        step = CostBook(others, self._models).known(key).model.step
        return step.step_s(shape), step.half_width_s(shape)

    def _learn(self, key: CostKey) -> KnownCosts:
        processes = self._processes.get(key, [])
        shapes = [item for process in processes for item in process.shapes]
        steps_s = self._steps_s(key)
        compiled = [item for item in shapes if item.has_compiled]
        visited = [item for item in shapes if not item.has_compiled]
        is_one_graph = key.graph_mode == "dynamic"
        compile_s = median_of(compiled, lambda item: item.compile_s)
        visit_s = median_of(visited, lambda item: item.compile_s) if is_one_graph else None
        if len(steps_s) >= LEAST_SHAPES:
            source = f"{len(steps_s)} measured shapes"
            model = fit_cost_model(steps_s, compile_s, source, visit_s)
        else:
            model = self._borrow(key, steps_s, compile_s)
        given_memory = self._models[key][1] if key in self._models else None
        return KnownCosts(
            key=key,
            model=model,
            steps_s=steps_s,
            first_calls_s=compile_s if visit_s is None else visit_s,
            update=self._update(key),
            memory=self._memory(key) or given_memory,
            process_error=self._process_error(len(steps_s)),
        )

    def _memory(self, key: CostKey) -> MemoryCost | None:
        processes = self._processes.get(key, [])
        is_one_graph = key.graph_mode == "dynamic"
        share = 1.0 if is_one_graph or shows_further_share(processes) else self._further_share(key)
        return fit_memory(processes, is_one_graph=is_one_graph, assumed_share=share)

    def _further_share(self, key: CostKey) -> float:
        """That of the nearest key with processes that ran several static graphs; else 1."""
        found = [
            (key_distance(key, other), str(other), other)
            for other, processes in self._processes.items()
            if (other.graph_mode, other.device) == ("static", key.device)
            and shows_further_share(processes)
        ]
        if not found:
            return 1.0
        memory = fit_memory(self._processes[min(found)[2]], is_one_graph=False)
        assert memory is not None
        return memory.further_share

    def _process_error(self, num_shapes: int) -> float:
        """Twice the scatter of steps of one shape, less by the root of the number of processes.

        Steps are timed in turn, over the seconds that a process takes, so their scatter is of the
        machine. It is as large over minutes, between processes, at least: measured on a shared
        host, steps of one shape in one process scatter by 6 %, their medians between processes
        by 10 %. For the number of processes stands that of measured shapes, since which process
        measures a shape depends on the order of trials.
        """
        error = min(2.0 * self._scatter(), MOST_PROCESS_ERROR) if num_shapes else 0.0
        return error / math.sqrt(max(1.0, num_shapes / SHAPES_A_PROCESS))

    def _scatter(self) -> float:
        """Relative standard deviation of steady steps about the mean of their shape, all keys."""
        squares, degrees = [], 0
        for process in itertools.chain.from_iterable(self._processes.values()):
            for shape in process.shapes:
                steady_s = np.array(shape.steady_s)
                squares.extend(np.square(steady_s / steady_s.mean() - 1.0).tolist())
                degrees += len(steady_s) - 1
        # Summed exactly, so in any order.
        return math.sqrt(math.fsum(squares) / degrees) if degrees else 0.0

    def _borrow(
        self, key: CostKey, steps_s: Mapping[Shape, float], compile_s: Mapping[Shape, float]
    ) -> CostModel:
        """The nearest fit, scaled to the few shapes that were measured under this key."""
        if key in self._models:
            model, error = self._models[key][0], 0.0
        else:
            model, error = self._nearest(key)
        factor = 1.0
        if steps_s:
            error = min(BORROWED_ERROR, max(error, LEAST_BORROWED_ERROR))
            factor = statistics.median(
                seconds / model.step.step_s(shape) for shape, seconds in steps_s.items()
            )
        model = replace(
            model,
            step=model.step.scaled(factor, error),
            compile_error=float(np.hypot(model.compile_error, error)),
            is_one_graph=key.graph_mode == "dynamic",
            source=f"{model.source}, scaled" if error else model.source,
        )
        return _with_compiles(model, compile_s)

    def _nearest(self, key: CostKey) -> tuple[CostModel, float]:
        found = [
            (key_distance(key, other), str(other), other)
            for other in {*self._processes, *self._models}
            if other != key and self._has_own_fit(other)
        ]
        if not found:
            return default_cost_model(), DEFAULT_ERROR
        distance, _, nearest = min(found)
        model = self.known(nearest).model
        factor = self._learned_factor(key, nearest)
        if factor is None:
            return model, distance
        return replace(model, step=model.step.scaled(factor, 0.0)), min(LEARNED_ERROR, distance)

    def _learned_factor(self, key: CostKey, nearest: CostKey) -> float | None:
        """What the fields in which two keys differ have cost elsewhere; None if nowhere measured.

        Packed rows in fp16 against packed rows in fp32, say, tell what fp16 does to single rows.
        """
        differing = {
            name: getattr(nearest, name)
            for name in UNLIKE
            if getattr(key, name) != getattr(nearest, name)
        }
        ratios = []
        for other in sorted(self._processes, key=str):
            twin = replace(other, **differing)
            if other == key or twin == other or not _agree(other, key, differing):
                continue
            twins = self._steps_s(twin)
            ratios += [
                seconds / twins[shape]
                for shape, seconds in self._steps_s(other).items()
                if shape in twins
            ]
        return statistics.median(ratios) if ratios else None

    def _steps_s(self, key: CostKey) -> dict[Shape, float]:
        shapes = [item for process in self._processes.get(key, ()) for item in process.shapes]
        return median_of(shapes, lambda item: item.step_s)

    def _has_own_fit(self, key: CostKey) -> bool:
        measured = {
            item.shape for process in self._processes.get(key, ()) for item in process.shapes
        }
        return len(measured) >= LEAST_SHAPES or key in self._models

    def _update(self, key: CostKey) -> UpdateMeasurement:
        """The median under the key, else over all: one graph of it serves all shapes."""
        own = [item.update for item in self._processes.get(key, ()) if item.update]
        every = [
            item.update for items in self._processes.values() for item in items if item.update
        ]
        updates = own or every
        if not updates:
            return NO_UPDATE
        return UpdateMeasurement(
            first_call_s=statistics.median(item.first_call_s for item in updates),
            update_s=statistics.median(item.update_s for item in updates),
        )


def _with_compiles(model: CostModel, compile_s: Mapping[Shape, float]) -> CostModel:
    """Scaled to the compiles that were measured; as it is if there are none."""
    ratios = [
        seconds / model.compile_s(shape)
        for shape, seconds in compile_s.items()
        if model.compile_s(shape) > 0.0
    ]
    if not ratios:
        return model
    factor = statistics.median(ratios)
    return replace(
        model,
        compile_base_s=factor * model.compile_base_s,
        compile_per_step_s=factor * model.compile_per_step_s,
    )


def _agree(one: CostKey, other: CostKey, names: Iterable[str]) -> bool:
    """Whether two keys have these fields in common; of precisions the compute dtype."""
    return all(
        getattr(one, name).split("+")[0] == getattr(other, name).split("+")[0] for name in names
    )


def key_distance(one: CostKey, other: CostKey) -> float:
    """Relative error (95 %) of taking one key's fit for the other's; 0 for the same key."""
    unlike = [name for name in UNLIKE if getattr(one, name) != getattr(other, name)]
    errors = [UNLIKE[name] for name in unlike if name != "precision"]
    if "precision" in unlike:
        same_dtype = one.precision.split("+")[0] == other.precision.split("+")[0]
        errors.append(SAME_DTYPE_ERROR if same_dtype else UNLIKE["precision"])
    return float(np.sqrt(sum(error**2 for error in errors)))


def median_of(
    shapes: Iterable[ShapeMeasurement], figure: Callable[[ShapeMeasurement], float]
) -> dict[Shape, float]:
    """(B, L) -> median of a figure over all measurements of the shape, shapes in rising order."""
    found: dict[Shape, list[float]] = defaultdict(list)
    for item in shapes:
        found[item.shape].append(figure(item))
    return {shape: statistics.median(found[shape]) for shape in sorted(found)}

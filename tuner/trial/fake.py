"""A runner without a device: seconds from a hidden cost, failures on demand.

Shipped for tests and for trying a study where MindSpore is not to be had. Everything it answers is
made up and says so in `memory_kind`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tuner.batching.grouping import Shape
from tuner.config.schema import TrainConfig
from tuner.simulate.measurement import CostKey, ShapeMeasurement, UpdateMeasurement
from tuner.trial.fake_deviation import FakeDeviations
from tuner.trial.folder import TrialFolder
from tuner.trial.record import Installation, Status, TrialResult, TrialSpec
from tuner.trial.runner import OnMeasured, go_on


@dataclass(frozen=True, kw_only=True)
class HiddenCost:
    """What the fake device costs.

    Attributes:
        compile_s: Seconds of each static graph, or of the one dynamic graph.
        overhead_s: Seconds a step.
        token_s: Seconds a padded token.
        attention_s: Seconds a padded token and token attended to.
        dynamic_factor: A step of a dynamic graph takes this many times a static one.
        low_factor: A step below fp32 takes this many times one in fp32.
        packed_factor: A step of packed rows takes this many times one of single rows.
        row_s: Seconds a row of a batch: a term that the fitted cost does not have.
        process_bytes: Memory before the first shape.
        token_bytes: Bytes a padded token, of every static shape, of the largest dynamic one.
    """

    compile_s: float = 5.0
    overhead_s: float = 0.02
    token_s: float = 1.3e-4
    attention_s: float = 2.8e-7
    dynamic_factor: float = 1.9
    low_factor: float = 1.6
    packed_factor: float = 1.05
    row_s: float = 0.0
    process_bytes: int = 500_000_000
    token_bytes: int = 50_000

    def step_s(self, shape: Shape, key: CostKey) -> float:
        """Seconds of one steady step at (B, L)."""
        size, length = shape
        tokens = size * length
        seconds = self.overhead_s + self.token_s * tokens + self.attention_s * tokens * length
        seconds += self.row_s * size
        if key.graph_mode == "dynamic":
            seconds *= self.dynamic_factor
        if key.precision != "fp32":
            seconds *= self.low_factor
        return seconds * (self.packed_factor if key.rows == "packed" else 1.0)


class FakeRunner(FakeDeviations):
    """Answers at once, in the manner of ProcessRunner."""

    def __init__(
        self,
        cost: HiddenCost,
        *,
        noise: float = 0.0,
        fails: Callable[[TrainConfig], tuple[Status, str] | None] = lambda config: None,
        salt: tuple[int, ...] = (),
        noise_per_run: bool = False,
    ) -> None:
        """Set up the hidden device.

        Args:
            cost: Its costs.
            noise: Standard deviation of the relative error of every timing, >= 0. It follows from
                the shape and the graph, not from the order of trials.
            fails: Status and reason of a config that fails; None for one that does not.
            salt: Of the noise: the same device on another day.
            noise_per_run: The noise follows from the number of the process too: the same shape
                takes another time in every one of them.
        """
        self._cost = cost
        self._noise = noise
        self._fails = fails
        self._salt = salt
        self._noise_per_run = noise_per_run
        self._lock = threading.Lock()
        self.specs: list[TrialSpec] = []

    def probe(self, device: str) -> Installation:
        """A device called CPU."""
        return Installation(device="CPU", versions={"mindspore": "fake"})

    def stop(self) -> None:
        """Nothing runs on after `run` has returned."""

    def run(
        self, spec: TrialSpec, folder: TrialFolder, on_measured: OnMeasured = go_on
    ) -> TrialResult:
        """Cost every shape that is asked for; nothing is written."""
        with self._lock:
            self.specs.append(spec)
            number = len(self.specs) if self._noise_per_run else 0
        failure = self._fails(spec.config)
        if failure is not None:
            return TrialResult(status=failure[0], reason=failure[1], wall_s=1.0)
        measured: tuple[ShapeMeasurement, ...] = ()
        memory_bytes = self._cost.process_bytes
        for shape in spec.shapes:
            rng = self._rng(shape, spec.config, number)
            item = self._measure(shape, spec, memory_bytes, rng, is_first=not measured)
            memory_bytes = item.memory_bytes
            if memory_bytes > spec.memory_limit_bytes:
                return self._failed("oom", "over the made-up memory", measured)
            measured = (*measured, item)
            if on_measured(measured):
                return self._failed("pruned", "it cannot become the best", measured)
        return TrialResult(
            status="ok",
            shapes=measured,
            update=UpdateMeasurement(first_call_s=1.0, update_s=0.01),
            base_bytes=self._cost.process_bytes,
            peak_bytes=memory_bytes,
            memory_kind="made up",
            wall_s=1.0,
        )

    @property
    def configs(self) -> list[TrainConfig]:
        """The configs of all trials that were run, in order."""
        return [spec.config for spec in self.specs]

    @staticmethod
    def _failed(
        status: Status, reason: str, measured: tuple[ShapeMeasurement, ...]
    ) -> TrialResult:
        return TrialResult(status=status, reason=reason, shapes=measured, wall_s=1.0)

    def _rng(self, shape: Shape, config: TrainConfig, number: int) -> np.random.Generator:
        """Of the noise of a shape in a process; number 0 where that is the same in all."""
        key = str(CostKey.of(config, "CPU")).encode()
        return np.random.default_rng([*shape, *key, *self._salt, *([number] if number else [])])

    def _measure(
        self,
        shape: Shape,
        spec: TrialSpec,
        bytes_before: int,
        rng: np.random.Generator,
        *,
        is_first: bool,
    ) -> ShapeMeasurement:
        key = CostKey.of(spec.config, "CPU")
        compiles = is_first or key.graph_mode == "static"
        # One error for the process and the shape, a smaller one for every step.
        level = 1.0 + self._noise * rng.standard_normal()
        step_s = self._cost.step_s(shape, key) * max(0.1, level)
        steps = 1.0 + self._noise / 3 * rng.standard_normal(spec.timed_steps)
        added = self._cost.token_bytes * shape[0] * shape[1] if compiles else 0
        return ShapeMeasurement(
            batch_size=shape[0],
            padded_length=shape[1],
            first_call_s=step_s + (self._cost.compile_s if compiles else 0.0),
            steady_s=tuple((step_s * np.maximum(0.1, steps)).tolist()),
            has_compiled=compiles,
            memory_bytes=bytes_before + added,
            added_bytes=added,
            loss=None,
        )

"""A runner without a device: seconds from a hidden cost, failures on demand.

Shipped for tests and for trying a study where MindSpore is not to be had. Everything it answers is
made up and says so in `memory_kind`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tuner.batching.grouping import Shape
from tuner.batching.plan import plan_batches
from tuner.config.schema import TrainConfig
from tuner.data.lengths import Lengths
from tuner.simulate.estimate import ShapeMeasurement, UpdateMeasurement
from tuner.trial.folder import TrialFolder
from tuner.trial.record import Installation, Status, TrialResult, TrialSpec


@dataclass(frozen=True, kw_only=True)
class HiddenCost:
    """What the fake device costs.

    Attributes:
        compile_s: Seconds of each static graph, or of the one dynamic graph.
        overhead_s: Seconds a step.
        token_s: Seconds a padded token.
        attention_s: Seconds a padded token and token attended to.
        dynamic_factor: A step of a dynamic graph takes this many times a static one.
    """

    compile_s: float = 5.0
    overhead_s: float = 0.02
    token_s: float = 1.3e-4
    attention_s: float = 2.8e-7
    dynamic_factor: float = 1.9

    def step_s(self, shape: Shape, mode: str) -> float:
        """Seconds of one steady step at (B, L)."""
        size, length = shape
        tokens = size * length
        static_s = self.overhead_s + self.token_s * tokens + self.attention_s * tokens * length
        return static_s * (self.dynamic_factor if mode == "dynamic" else 1.0)


class FakeRunner:
    """Answers at once, in the manner of ProcessRunner."""

    def __init__(
        self,
        cost: HiddenCost,
        *,
        noise: float = 0.0,
        fails: Callable[[TrainConfig], tuple[Status, str] | None] = lambda config: None,
    ) -> None:
        """Set up the hidden device.

        Args:
            cost: Its costs.
            noise: Standard deviation of the relative error of every timing, >= 0. It follows from
                the config and the shape, not from the order of trials.
            fails: Status and reason of a config that fails; None for one that does not.
        """
        self._cost = cost
        self._noise = noise
        self._fails = fails
        self.configs: list[TrainConfig] = []

    def probe(self, device: str) -> Installation:
        """A device called CPU."""
        return Installation(device="CPU", versions={"mindspore": "fake"})

    def run(self, spec: TrialSpec, folder: TrialFolder) -> TrialResult:
        """Cost every shape of the plan; nothing is written."""
        self.configs.append(spec.config)
        failure = self._fails(spec.config)
        if failure is not None:
            return TrialResult(status=failure[0], reason=failure[1], wall_s=1.0)
        lengths = Lengths(tokens=np.load(spec.lengths_file), fingerprint="fake")
        plan = plan_batches(lengths, spec.config)
        mode = spec.config.graph.mode
        measured = tuple(
            self._measure(shape, mode, compiles=mode == "static" or index == 0)
            for index, shape in enumerate(plan.shapes)
        )
        return TrialResult(
            status="ok",
            shapes=measured,
            update=UpdateMeasurement(first_call_s=1.0, update_s=0.01),
            peak_bytes=10**9,
            memory_kind="made up",
            wall_s=1.0,
        )

    def _measure(self, shape: Shape, mode: str, *, compiles: bool) -> ShapeMeasurement:
        rng = np.random.default_rng([*shape, len(mode)])
        step_s = self._cost.step_s(shape, mode) * (1.0 + self._noise * rng.standard_normal())
        return ShapeMeasurement(
            batch_size=shape[0],
            padded_length=shape[1],
            first_call_s=step_s + (self._cost.compile_s if compiles else 0.0),
            step_s=step_s,
            step_spread_s=0.0,
            num_timed_steps=1,
            memory_bytes=10**9,
            loss=None,
        )

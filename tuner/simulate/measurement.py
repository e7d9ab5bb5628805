"""What a process measured: shapes, the update, memory. Values only."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from tuner.batching.grouping import Shape
from tuner.config.schema import PrecisionConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class ShapeMeasurement:
    """What one shape cost in a process.

    Attributes:
        batch_size: B.
        padded_length: L in tokens.
        first_call_s: Seconds of the first call: compile, memory, and one step.
        steady_s: Seconds of each steady step. One at least.
        settling_s: Seconds of the calls between the first and the steady ones.
        has_compiled: The first call compiled a graph; False where one graph serves all shapes.
        memory_bytes: Memory of the process after this shape.
        added_bytes: What the shape added to it, >= 0.
        loss: Summed loss of the first call divided by its labels; None without labels.
    """

    batch_size: int
    padded_length: int
    first_call_s: float
    steady_s: tuple[float, ...]
    has_compiled: bool
    memory_bytes: int
    added_bytes: int
    loss: float | None
    settling_s: tuple[float, ...] = ()

    @property
    def shape(self) -> Shape:
        """(B, L)."""
        return self.batch_size, self.padded_length

    @property
    def step_s(self) -> float:
        """Median of the steady steps, seconds."""
        return statistics.median(self.steady_s)

    @property
    def step_spread_s(self) -> float:
        """Largest minus smallest of the steady steps, seconds."""
        return max(self.steady_s) - min(self.steady_s)

    @property
    def compile_s(self) -> float:
        """What the calls before the steady ones took beyond steady steps, seconds.

        Nearly all of it is the compile in the first call, >= 0. Of a shape that compiled nothing
        it is little more than noise, and below 0 as often as the noise is: cut off at 0 the sum
        over many shapes would be too high.
        """
        calls_s = (self.first_call_s, *self.settling_s)
        beyond_s = sum(calls_s) - len(calls_s) * self.step_s
        return max(0.0, beyond_s) if self.has_compiled else beyond_s


@dataclass(frozen=True, kw_only=True)
class UpdateMeasurement:
    """What an optimizer update cost in a trial: seconds of the first call and of a steady one."""

    first_call_s: float
    update_s: float

    @property
    def compile_s(self) -> float:
        """What the first call took beyond a steady update, seconds, >= 0."""
        return max(0.0, self.first_call_s - self.update_s)


@dataclass(frozen=True, kw_only=True)
class CostKey:
    """What costs depend on besides the shape; measurements under one key are shared.

    Attributes:
        device: `CPU` or `Ascend`.
        graph_mode: `static` or `dynamic`.
        jit_level: `O0` to `O2`.
        precision: `fp32`, or the compute dtype with the op groups that stay in fp32, as
            `fp16+softmax+loss`.
        rows: `single`, or `packed` where the step also takes segments and positions.
    """

    device: str
    graph_mode: str
    jit_level: str
    precision: str
    rows: str

    @classmethod
    def of(cls, config: TrainConfig, device: str) -> CostKey:
        """The key of a config's steps on a device."""
        return cls(
            device=device,
            graph_mode=config.graph.mode,
            jit_level=config.graph.jit_level,
            precision=describe_precision(config.precision),
            rows="packed" if config.batching.strategy == "packed" else "single",
        )

    def __str__(self) -> str:
        return " ".join((self.device, self.graph_mode, self.jit_level, self.precision, self.rows))


@dataclass(frozen=True, kw_only=True)
class ProcessMeasurement:
    """All that one process measured.

    Attributes:
        key: What it ran.
        shapes: In the order of their first calls.
        update: None if it did not get that far.
        base_bytes: Memory before the first shape; 0 if it is not known.
        peak_bytes: Largest memory of the process; 0 if it is not known.
    """

    key: CostKey
    shapes: tuple[ShapeMeasurement, ...]
    update: UpdateMeasurement | None
    base_bytes: int
    peak_bytes: int


def describe_precision(precision: PrecisionConfig) -> str:
    """A precision in one word: `fp32`, `fp16`, `fp16+softmax+loss`."""
    return "+".join((precision.compute_dtype, *precision.fp32_ops))

"""Made-up measurements of processes, and the plain formulas that they follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tuner.batching.grouping import Shape
from tuner.simulate.measurement import (
    CostKey,
    ProcessMeasurement,
    ShapeMeasurement,
    UpdateMeasurement,
)
from tuner.simulate.stats import PlanStats

STATIC = CostKey(
    device="CPU", graph_mode="static", jit_level="O0", precision="fp32", rows="single"
)
DYNAMIC = CostKey(
    device="CPU", graph_mode="dynamic", jit_level="O0", precision="fp32", rows="single"
)
UPDATE = UpdateMeasurement(first_call_s=3.5, update_s=0.5)
NO_UPDATE = UpdateMeasurement(first_call_s=0.0, update_s=0.0)


def seconds_of(shape: Shape, known: tuple[float, float, float]) -> float:
    """Overhead, tokens and attention, added up."""
    size, length = shape
    return known[0] + known[1] * size * length + known[2] * size * length * length


def measure(
    shape: Shape,
    step_s: float,
    compile_s: float = 5.0,
    *,
    has_compiled: bool = True,
    added_bytes: int = 0,
) -> ShapeMeasurement:
    """One shape whose three steady steps have step_s for their median."""
    return ShapeMeasurement(
        batch_size=shape[0],
        padded_length=shape[1],
        first_call_s=step_s + compile_s,
        steady_s=(1.25 * step_s, step_s, 0.75 * step_s),
        has_compiled=has_compiled,
        memory_bytes=1_000 + added_bytes,
        added_bytes=added_bytes,
        loss=1.5,
    )


def process_of(
    key: CostKey,
    shapes: Sequence[ShapeMeasurement],
    *,
    update: UpdateMeasurement | None = UPDATE,
    base_bytes: int = 0,
    peak_bytes: int = 0,
) -> ProcessMeasurement:
    """A process that measured these shapes."""
    return ProcessMeasurement(
        key=key,
        shapes=tuple(shapes),
        update=update,
        base_bytes=base_bytes,
        peak_bytes=peak_bytes,
    )


def stats_of(
    shape_counts: Mapping[Shape, int], *, real_tokens: int = 1000, num_updates: int = 4
) -> PlanStats:
    """A plan that meets these shapes."""
    return PlanStats(
        num_steps=sum(shape_counts.values()),
        num_updates=num_updates,
        real_tokens=real_tokens,
        padded_tokens=sum(size * length * count for (size, length), count in shape_counts.items()),
        shape_counts=shape_counts,
        real_tokens_of_shape=dict.fromkeys(shape_counts, real_tokens // len(shape_counts)),
        num_filler_rows=0,
        length_autocorrelation=0.0,
    )

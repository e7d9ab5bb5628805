"""Memory of a plan, fitted to what shapes added to the memory of processes.

Static graphs keep buffers of their own: every shape of a plan adds g + p * B * L + q * B * L^2
bytes, and none gives them back. One dynamic graph takes the buffers of its largest shape. Around
that stand the fixed bytes of a process: program, weights, moments, the update.
Measured on a 2-core CPU with MindSpore 2.10: six static shapes of 2,048 to 8,192 tokens took the
resident set from 0.9 to 10.7 GB, one dynamic graph to 7.8 GB, and none came back. On Ascend the
figure is the device pool; whether graphs there share it was never measured, so the sum is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from tuner.batching.grouping import Shape
from tuner.simulate.measurement import ProcessMeasurement

LEAST_SHARE = 0.05
"""Additions below this share of the largest are noise of the allocator and weigh no more."""

LEAST_ERROR = 0.10
"""Relative error of the added bytes that is assumed at least."""


@dataclass(frozen=True, kw_only=True)
class MemoryCost:
    """A fitted memory.

    Attributes:
        fixed_bytes: Of a process without a shape, its update included.
        graph_bytes: g, bytes of a shape.
        token_bytes: p, bytes a padded token.
        attention_bytes: q, bytes a padded token and token attended to.
        is_one_graph: One graph takes the largest shape's bytes alone.
        error: Relative error of the added bytes, as a 95 % half width.
    """

    fixed_bytes: float
    graph_bytes: float
    token_bytes: float
    attention_bytes: float
    is_one_graph: bool
    error: float

    def added_bytes(self, shape: Shape) -> float:
        """Estimated bytes that (B, L) adds as the first or as a further static shape."""
        size, length = shape
        tokens = size * length
        return (
            self.graph_bytes + self.token_bytes * tokens + self.attention_bytes * tokens * length
        )

    def shapes_bytes(self, shapes: Collection[Shape]) -> float:
        """Estimated bytes that the shapes of a plan add together."""
        added = [self.added_bytes(shape) for shape in shapes]
        return max(added) if self.is_one_graph else sum(added)

    def peak_bytes(self, shapes: Collection[Shape]) -> float:
        """Estimated peak of a process that runs these shapes, at least one."""
        return self.fixed_bytes + self.shapes_bytes(shapes)

    def least_peak_bytes(self, shapes: Collection[Shape]) -> float:
        """Lower end of the 95 % interval of the peak."""
        return self.fixed_bytes + max(0.0, 1.0 - self.error) * self.shapes_bytes(shapes)


def fit_memory(
    processes: Sequence[ProcessMeasurement], *, is_one_graph: bool
) -> MemoryCost | None:
    """Fit; None where no process knows its memory.

    Args:
        processes: Of one key.
        is_one_graph: Only the first shape of a process counts then: later ones, being smaller,
            find room in its buffers.
    """
    known = [item for item in processes if item.base_bytes and item.peak_bytes and item.shapes]
    if not known:
        return None
    # Sorted: sums of floats depend on their order, figures may not depend on that of processes.
    rows = sorted(_additions(known, is_one_graph))
    terms = np.array([(1.0, size * length, size * length**2) for (size, length), _ in rows])
    added = np.array([float(count) for _, count in rows])
    weights = 1.0 / np.maximum(added, max(1.0, LEAST_SHARE * added.max()))
    if len({shape for shape, _ in rows}) < terms.shape[1]:
        # A few shapes do not part the terms: in proportion to the tokens.
        terms[:, [0, 2]] = 0.0
    coefficients, _ = nnls(terms * weights[:, None], added * weights)
    residuals = (terms @ coefficients - added) * weights
    graph_bytes, token_bytes, attention_bytes = coefficients.tolist()
    return MemoryCost(
        fixed_bytes=max(_fixed_bytes(item) for item in known),
        graph_bytes=graph_bytes,
        token_bytes=token_bytes,
        attention_bytes=attention_bytes,
        is_one_graph=is_one_graph,
        error=max(LEAST_ERROR, 2.0 * float(np.sqrt(np.mean(residuals**2)))),
    )


def _additions(
    processes: Iterable[ProcessMeasurement], is_one_graph: bool
) -> Iterable[tuple[Shape, int]]:
    for process in processes:
        for item in process.shapes[:1] if is_one_graph else process.shapes:
            yield item.shape, item.added_bytes


def _fixed_bytes(process: ProcessMeasurement) -> float:
    """The peak without what the shapes added: it holds the update's buffers too."""
    added = sum(item.added_bytes for item in process.shapes)
    return max(float(process.base_bytes), float(process.peak_bytes - added))

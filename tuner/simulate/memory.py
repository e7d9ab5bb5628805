"""Memory of a plan, fitted to what shapes added to the memory of processes.

The first shape of a process, its largest, takes g + p * B * L + q * B * L^2 bytes, and none gives
them back. A further static graph takes a share of the same: all of it where graphs keep buffers
of their own, little where they find room in those of the first. One dynamic graph takes the
buffers of its largest shape. Around that stand the fixed bytes of a process: program, weights,
moments, the update.

Measured on a 2-core CPU with MindSpore 2.10: with the kernels that it derives six static shapes of
2,048 to 8,192 tokens took the resident set from 0.9 to 10.7 GB, one dynamic graph to 7.8 GB; with
the decoder's own kernels eight static shapes of 16,384 tokens take 2.4 GB, the largest alone 2.2.
On Ascend the figure is the device pool; whether graphs there share it was never measured, so until
a process has run several the sum is assumed.
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

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.0)
"""Of the bytes of a first graph that a further one may take."""

ALIKE = 0.05**2
"""Mean square of residuals by which a smaller share must be better than a larger one."""

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
        further_share: Of these bytes that every static shape but the largest takes, 0..1.
    """

    fixed_bytes: float
    graph_bytes: float
    token_bytes: float
    attention_bytes: float
    is_one_graph: bool
    error: float
    further_share: float = 1.0

    def added_bytes(self, shape: Shape) -> float:
        """Estimated bytes that (B, L) adds as the first shape of a process."""
        size, length = shape
        tokens = size * length
        return (
            self.graph_bytes + self.token_bytes * tokens + self.attention_bytes * tokens * length
        )

    def shapes_bytes(self, shapes: Collection[Shape]) -> float:
        """Estimated bytes that the shapes of a plan add together."""
        added = [self.added_bytes(shape) for shape in shapes]
        if self.is_one_graph:
            return max(added)
        return max(added) + self.further_share * (sum(added) - max(added))

    def peak_bytes(self, shapes: Collection[Shape]) -> float:
        """Estimated peak of a process that runs these shapes, at least one."""
        return self.fixed_bytes + self.shapes_bytes(shapes)

    def least_peak_bytes(self, shapes: Collection[Shape]) -> float:
        """Lower end of the 95 % interval of the peak."""
        return self.fixed_bytes + max(0.0, 1.0 - self.error) * self.shapes_bytes(shapes)


def fit_memory(
    processes: Sequence[ProcessMeasurement], *, is_one_graph: bool, assumed_share: float = 1.0
) -> MemoryCost | None:
    """Fit; None where no process knows its memory.

    Args:
        processes: Of one key.
        is_one_graph: Only the first shape of a process counts then: later ones, being smaller,
            find room in its buffers.
        assumed_share: `further_share` where no process has run several static shapes.
    """
    known = [item for item in processes if item.base_bytes and item.peak_bytes and item.shapes]
    if not known:
        return None
    # Sorted: sums of floats depend on their order, figures may not depend on that of processes.
    rows = sorted(_additions(known, is_one_graph))
    has_further = any(is_further for _, _, is_further in rows)
    fits = [(_fit_rows(rows, share), share) for share in (SHARES if has_further else (1.0,))]
    least = min(square for (_, square), _ in fits)
    (coefficients, square), share = next(fit for fit in fits if fit[0][1] <= least + ALIKE)
    graph_bytes, token_bytes, attention_bytes = coefficients
    return MemoryCost(
        fixed_bytes=max(_fixed_bytes(item) for item in known),
        graph_bytes=graph_bytes,
        token_bytes=token_bytes,
        attention_bytes=attention_bytes,
        is_one_graph=is_one_graph,
        error=max(LEAST_ERROR, 2.0 * float(np.sqrt(square))),
        further_share=share if has_further else assumed_share,
    )


def shows_further_share(processes: Iterable[ProcessMeasurement]) -> bool:
    """Whether any process has run several shapes and knows its memory."""
    return any(item.base_bytes and item.peak_bytes and len(item.shapes) > 1 for item in processes)


def _fit_rows(
    rows: Sequence[tuple[Shape, int, bool]], share: float
) -> tuple[tuple[float, float, float], float]:
    """g, p, q if further shapes take a share, and the mean square of the weighted residuals."""
    terms = np.array([(1.0, size * length, size * length**2) for (size, length), _, _ in rows])
    terms *= np.array([share if is_further else 1.0 for _, _, is_further in rows])[:, None]
    added = np.array([float(count) for _, count, _ in rows])
    weights = 1.0 / np.maximum(added, max(1.0, LEAST_SHARE * added.max()))
    seen = {shape for shape, _, is_further in rows if share or not is_further}
    if len(seen) < terms.shape[1]:
        # A few shapes do not part the terms: in proportion to the tokens.
        terms[:, [0, 2]] = 0.0
    found, _ = nnls(terms * weights[:, None], added * weights)
    residuals = (terms @ found - added) * weights
    return (float(found[0]), float(found[1]), float(found[2])), float(np.mean(residuals**2))


def _additions(
    processes: Iterable[ProcessMeasurement], is_one_graph: bool
) -> Iterable[tuple[Shape, int, bool]]:
    """(B, L), what it added, and whether others were there before."""
    for process in processes:
        for place, item in enumerate(process.shapes[:1] if is_one_graph else process.shapes):
            yield item.shape, item.added_bytes, place > 0


def _fixed_bytes(process: ProcessMeasurement) -> float:
    """The peak without what the shapes added: it holds the update's buffers too."""
    added = sum(item.added_bytes for item in process.shapes)
    return max(float(process.base_bytes), float(process.peak_bytes - added))

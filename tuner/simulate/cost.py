"""Seconds of a shape that was not measured, fitted to the shapes that were.

step_s = a + b * B * L + c * B * L^2: overhead, the token-wise layers, attention. Coefficients are
non-negative; the fit minimises the relative error, so that short steps count as much as long ones.
On a 2-core CPU with MindSpore 2.10 a decoder of 2 layers fits within 8 % (static) and 10 %
(dynamic) over shapes from 32 x 64 to 8 x 1024.

Compiling a shape, its first memory included, takes compile_s = d + e * step_s: a fixed part and
one that grows with the shape. On the same machine and shapes static graphs fit within 15 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from tuner.batching.grouping import Shape


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """A fitted step cost.

    Attributes:
        overhead_s: a, seconds a step.
        token_s: b, seconds a padded token.
        attention_s: c, seconds a padded token and token attended to.
        max_relative_error: Largest |fitted / measured - 1| over the fitted shapes.
    """

    overhead_s: float
    token_s: float
    attention_s: float
    max_relative_error: float

    def step_s(self, shape: Shape) -> float:
        """Estimated seconds of one step at (B, L)."""
        size, length = shape
        tokens = size * length
        return self.overhead_s + self.token_s * tokens + self.attention_s * tokens * length


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of static graphs, fitted.

    Attributes:
        step: Of a steady step.
        compile_base_s: d, seconds.
        compile_per_step_s: e, compile seconds for each second of a step.
        source: Where the figures come from, for people.
    """

    step: StepCost
    compile_base_s: float
    compile_per_step_s: float
    source: str

    def compile_s(self, shape: Shape) -> float:
        """Estimated seconds of compiling (B, L)."""
        return self.compile_base_s + self.compile_per_step_s * self.step.step_s(shape)


DEFAULT_MEASURED: Mapping[Shape, tuple[float, float]] = {
    (32, 64): (0.300, 5.0),
    (16, 128): (0.383, 4.917),
    (8, 256): (0.416, 5.584),
    (4, 512): (0.574, 6.426),
    (2, 1024): (0.855, 9.045),
    (8, 1024): (3.413, 22.787),
}
"""(B, L) -> seconds of a steady step and of the compile: static graphs of a decoder of 2 layers,
width 128, vocabulary 1000, AdamW, measured on a 2-core x86 CPU with MindSpore 2.10.0."""

DEFAULT_SOURCE = "a small decoder measured on a 2-core CPU"


def default_cost_model() -> CostModel:
    """What is assumed where nothing was measured."""
    return fit_cost_model(
        {shape: step_s for shape, (step_s, _) in DEFAULT_MEASURED.items()},
        {shape: compile_s for shape, (_, compile_s) in DEFAULT_MEASURED.items()},
        DEFAULT_SOURCE,
    )


def fit_cost_model(
    step_s: Mapping[Shape, float], compile_s: Mapping[Shape, float], source: str
) -> CostModel:
    """Fit steps and compiles of static graphs.

    Args:
        step_s: (B, L) -> steady seconds, > 0; at least one shape.
        compile_s: The same shapes -> compile seconds, >= 0.
        source: Where they come from, for people.
    """
    step = fit_step_cost(step_s)
    steps = np.array([step.step_s(shape) for shape in compile_s])
    seconds = np.array(list(compile_s.values()))
    terms = np.stack([np.ones_like(steps), steps], axis=1)
    # Relative errors, as for steps; a compile of 0 s (from a cache) must not divide.
    weights = 1.0 / np.maximum(seconds, 1e-3)
    (base_s, per_step_s), _ = nnls(terms * weights[:, None], seconds * weights)
    return CostModel(
        step=step,
        compile_base_s=float(base_s),
        compile_per_step_s=float(per_step_s),
        source=source,
    )


def fit_step_cost(measured: Mapping[Shape, float]) -> StepCost:
    """Fit the cost to measured steady step seconds.

    Args:
        measured: (B, L) -> seconds, > 0; at least one shape. With fewer than three the fit is
            exact where the shapes allow it; of a single shape it is proportional to the tokens.
    """
    terms = _terms(list(measured))
    seconds = np.array(list(measured.values()))
    if len(measured) == 1:
        coefficients = np.array([0.0, seconds[0] / terms[0, 1], 0.0])
    else:
        coefficients, _ = nnls(terms / seconds[:, None], np.ones(len(seconds)))
    error = np.abs(terms @ coefficients / seconds - 1.0).max()
    return StepCost(
        overhead_s=float(coefficients[0]),
        token_s=float(coefficients[1]),
        attention_s=float(coefficients[2]),
        max_relative_error=float(error),
    )


def _terms(shapes: list[Shape]) -> NDArray[np.float64]:
    sizes = np.array([size for size, _ in shapes], dtype=np.float64)
    lengths = np.array([length for _, length in shapes], dtype=np.float64)
    tokens = sizes * lengths
    return np.stack([np.ones_like(tokens), tokens, tokens * lengths], axis=1)

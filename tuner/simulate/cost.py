"""Seconds of a shape that was not measured, fitted to the shapes that were.

step_s = a + b * B * L + c * B * L^2: overhead, the token-wise layers, attention. Coefficients are
non-negative; the fit minimises the relative error, so that short steps count as much as long ones.
On a 2-core CPU with MindSpore 2.10 a decoder of 2 layers fits within 8 % (static) and 10 %
(dynamic) over shapes from 32 x 64 to 8 x 1024.

The first call of a shape takes d + e * step_s more than a steady one if it compiles, and
e * step_s if it only takes memory: a fixed part and one that grows with the shape. On the same
machine and shapes static graphs fit within 15 %. One dynamic graph compiles in its first call
alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tuner.batching.grouping import Shape
from tuner.simulate.relative_fit import PRIOR_ERROR, RelativeFit, fit_relative

LEAST_COMPILE_S = 1e-3
"""A compile of 0 s (from a cache) must not divide."""


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """A fitted step cost.

    Attributes:
        overhead_s: a, seconds a step.
        token_s: b, seconds a padded token.
        attention_s: c, seconds a padded token and token attended to.
        max_relative_error: Largest |fitted / measured - 1| over the fitted shapes.
        fit: Where the interval of a prediction comes from; None: figures without one.
        scaled_error: Relative error, as a 95 % half width, that comes on top because the fit was
            scaled from another graph mode, level or precision, or was given without measurements;
            0 otherwise.
    """

    overhead_s: float
    token_s: float
    attention_s: float
    max_relative_error: float
    fit: RelativeFit | None = None
    scaled_error: float = 0.0

    def step_s(self, shape: Shape) -> float:
        """Estimated seconds of one step at (B, L)."""
        size, length = shape
        tokens = size * length
        return self.overhead_s + self.token_s * tokens + self.attention_s * tokens * length

    def half_width_s(self, shape: Shape) -> float:
        """Half of the 95 % interval of a steady step at (B, L), seconds."""
        own_s = 0.0
        if self.fit is not None:
            size, length = shape
            own_s = self.fit.half_width((1.0, size * length, size * length * length))
        return float(np.hypot(own_s, self.scaled_error * self.step_s(shape)))

    @property
    def relative_error(self) -> float:
        """Scatter of single shapes about the fit, one standard deviation; 0 without a fit."""
        return self.fit.relative_error if self.fit else 0.0

    def scaled(self, factor: float, error: float) -> StepCost:
        """The same costs times a factor; `error` (relative, 95 %) comes on top of theirs."""
        fit = self.fit
        if fit is not None:
            fit = replace(
                fit,
                coefficients=tuple(factor * value for value in fit.coefficients),
                covariance=tuple(
                    tuple(factor**2 * value for value in row) for row in fit.covariance
                ),
            )
        return replace(
            self,
            overhead_s=factor * self.overhead_s,
            token_s=factor * self.token_s,
            attention_s=factor * self.attention_s,
            fit=fit,
            scaled_error=float(np.hypot(self.scaled_error, error)),
        )


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of a run's graphs, fitted.

    Attributes:
        step: Of a steady step.
        compile_base_s: d, seconds of a compile.
        compile_per_step_s: e, seconds of a first call for each second of a step.
        compile_error: Relative error of a compile, as a 95 % half width.
        is_one_graph: One dynamic graph serves all shapes: d is paid once.
        source: Where the figures come from, for people.
    """

    step: StepCost
    compile_base_s: float
    compile_per_step_s: float
    compile_error: float = 0.0
    is_one_graph: bool = False
    source: str

    def compile_s(self, shape: Shape) -> float:
        """Estimated seconds that compiling (B, L) takes beyond a steady step."""
        return self.compile_base_s + self.visit_s(shape)

    def visit_s(self, shape: Shape) -> float:
        """Estimated seconds beyond a steady step of a first call that compiles nothing."""
        return self.compile_per_step_s * self.step.step_s(shape)

    def shape_s(self, shape: Shape) -> float:
        """What having one more shape in a plan costs: its compile, or only its memory."""
        return self.visit_s(shape) if self.is_one_graph else self.compile_s(shape)

    def plan_compile_s(self, shapes: Collection[Shape]) -> float:
        """Estimated seconds that the first calls of a plan's shapes take beyond steady steps."""
        once_s = self.compile_base_s if self.is_one_graph else 0.0
        return once_s + sum(map(self.shape_s, shapes))


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
    step_s: Mapping[Shape, float],
    compile_s: Mapping[Shape, float],
    source: str,
    visit_s: Mapping[Shape, float] | None = None,
) -> CostModel:
    """Fit steps and first calls.

    Args:
        step_s: (B, L) -> steady seconds, > 0; at least one shape.
        compile_s: (B, L) -> seconds beyond a steady step of first calls that compiled, >= 0; may
            be empty.
        source: Where they come from, for people.
        visit_s: The same of first calls that compiled nothing, below 0 where noise is larger; None
            where every shape compiles.
    """
    step = fit_step_cost(step_s)
    base_s, per_step_s, error = (
        _fit_compiles(step, compile_s)
        if visit_s is None
        else _fit_one_compile(step, compile_s, visit_s)
    )
    return CostModel(
        step=step,
        compile_base_s=base_s,
        compile_per_step_s=per_step_s,
        compile_error=error,
        is_one_graph=visit_s is not None,
        source=source,
    )


def _fit_compiles(step: StepCost, compile_s: Mapping[Shape, float]) -> tuple[float, float, float]:
    """d, e and the error of graphs that each shape has one of."""
    if not compile_s:
        return 0.0, 0.0, 0.0
    terms = np.array([(1.0, step.step_s(shape)) for shape in compile_s])
    seconds = np.array(list(compile_s.values()))
    fit = fit_relative(terms, np.maximum(seconds, LEAST_COMPILE_S))
    base_s, per_step_s = fit.coefficients
    return base_s, per_step_s, 2.0 * fit.relative_error


def _fit_one_compile(
    step: StepCost, compile_s: Mapping[Shape, float], visit_s: Mapping[Shape, float]
) -> tuple[float, float, float]:
    """d, e and the error of e, of one graph.

    A visit is a small difference of calls that scatter: relative errors of single ones mean
    nothing, the ratio of their sums does.
    """
    steps_s = np.array([step.step_s(shape) for shape in visit_s])
    visits_s = np.array(list(visit_s.values()))
    per_step_s, error = 0.0, PRIOR_ERROR
    if visits_s.sum() > 0.0:
        per_step_s = float(visits_s.sum() / steps_s.sum())
        scatter_s = float(np.sqrt(((visits_s - per_step_s * steps_s) ** 2).sum()))
        error = float(np.hypot(PRIOR_ERROR, scatter_s / visits_s.sum()))
    bases_s = [seconds - per_step_s * step.step_s(shape) for shape, seconds in compile_s.items()]
    return max(0.0, float(np.mean(bases_s))) if bases_s else 0.0, per_step_s, 2.0 * error


def fit_step_cost(measured: Mapping[Shape, float]) -> StepCost:
    """Fit the cost to measured steady step seconds.

    Args:
        measured: (B, L) -> seconds, > 0; at least one shape. With fewer than three the fit is
            exact where the shapes allow it; of a single shape it is proportional to the tokens.
    """
    terms = _terms(list(measured))
    if len(measured) == 1:
        # One shape cannot part overhead, tokens and attention.
        terms[:, [0, 2]] = 0.0
    fit = fit_relative(terms, np.array(list(measured.values())))
    overhead_s, token_s, attention_s = fit.coefficients
    return StepCost(
        overhead_s=overhead_s,
        token_s=token_s,
        attention_s=attention_s,
        max_relative_error=fit.max_relative_error,
        fit=fit,
    )


def _terms(shapes: list[Shape]) -> NDArray[np.float64]:
    sizes = np.array([size for size, _ in shapes], dtype=np.float64)
    lengths = np.array([length for _, length in shapes], dtype=np.float64)
    tokens = sizes * lengths
    return np.stack([np.ones_like(tokens), tokens, tokens * lengths], axis=1)

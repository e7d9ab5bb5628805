"""Non-negative least squares on relative error, with an interval for what it predicts.

The fit minimises sum of (x_i . c / y_i - 1)^2 over c >= 0, so that small values count as much as
large ones (Lawson and Hanson, Solving Least Squares Problems, 1974; SciPy's `nnls`).

The scatter s of the relative errors is that of the residuals, held by a prior: with n values and
p coefficients above 0,
    s^2 = (PRIOR_DEGREES * PRIOR_ERROR^2 + sum of squared residuals) / (PRIOR_DEGREES + n - p),
so that few points that happen to fit do not claim to know everything. A new value at x is then
x . c with variance x' C x + (s * x . c)^2, C = (A' A / s^2 + P)^-1 with A = x_i / y_i;
intervals take Student's t with PRIOR_DEGREES + n - p degrees of freedom. (Gelman et al., Bayesian
Data Analysis, 3rd edition, section 14.2: the scaled inverse chi-squared prior of a regression's
variance; section 14.8: a normal prior of its coefficients.)

P is a weak prior: what a term adds to the values at hand is unknown by PRIOR_SHARE of them. It
matters where the values cannot tell terms apart. Shapes of one token budget have nearly the same
B * L, so the least squares may put all of the time into the overhead and none into the tokens; a
covariance over the terms in use alone would then call every other budget hopeless. Terms held at 0
by the bound are as uncertain as the values leave them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.stats import t as student_t

PRIOR_DEGREES = 4.0
PRIOR_ERROR = 0.06
"""Relative error that steps have about the fit: of six shapes measured on a 2-core CPU, static and
dynamic, root mean square 4 to 6 % (simulate/cost.py)."""

CONFIDENCE = 0.95

PRIOR_SHARE = 0.5
"""Standard deviation of a term's share of a value before anything is measured: none to all."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RelativeFit:
    """A fitted sum of non-negative terms; P terms.

    Attributes:
        coefficients: P numbers, >= 0.
        covariance: P x P, of the coefficients; rows of terms that are 0 in all values are 0.
        relative_error: s, scatter of single values about the fit, as a share of the value.
        degrees: Degrees of freedom of the intervals.
        max_relative_error: Largest |fitted / value - 1| over the fitted values.
    """

    coefficients: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    relative_error: float
    degrees: float
    max_relative_error: float

    def value(self, terms: Sequence[float]) -> float:
        """The sum at x, P terms."""
        return float(np.dot(self.coefficients, terms))

    def half_width(self, terms: Sequence[float]) -> float:
        """Half of the 95 % interval of a new value at x, in the value's unit."""
        x = np.asarray(terms)
        scatter = self.relative_error * self.value(terms)
        variance = x @ np.asarray(self.covariance) @ x + scatter**2
        return _half_widths_of(self.degrees) * math.sqrt(variance)


def fit_relative(terms: FloatArray, values: FloatArray) -> RelativeFit:
    """Fit.

    Args:
        terms: float64 [n, P], >= 0; n >= 1.
        values: float64 [n], > 0.
    """
    scaled = terms / values[:, None]
    # Columns of unit length: 1 and B * L^2 are 10^8 apart, their squares past float64.
    lengths = np.sqrt((scaled**2).sum(axis=0))
    lengths[lengths == 0.0] = 1.0
    unit = scaled / lengths
    shares, _ = nnls(unit, np.ones(len(values)))
    coefficients = shares / lengths
    residuals = unit @ shares - 1.0
    used = coefficients > 0
    degrees = PRIOR_DEGREES + max(0, len(values) - int(used.sum()))
    square = (PRIOR_DEGREES * PRIOR_ERROR**2 + float(residuals @ residuals)) / degrees
    covariance = _covariance(unit, square) / np.outer(lengths, lengths)
    return RelativeFit(
        coefficients=tuple(coefficients.tolist()),
        covariance=tuple(tuple(row) for row in covariance.tolist()),
        relative_error=float(np.sqrt(square)),
        degrees=degrees,
        max_relative_error=float(np.abs(residuals).max()),
    )


def _covariance(unit: FloatArray, square: float) -> FloatArray:
    """Of the coefficients of columns of unit length; a term of 0 everywhere is known to be 0."""
    num_values, num_terms = unit.shape
    # A term that makes up all of every value has the coefficient sqrt(n) in these columns.
    precision = unit.T @ unit / square + np.eye(num_terms) / (PRIOR_SHARE**2 * num_values)
    met = unit.any(axis=0)
    return np.linalg.inv(precision) * np.outer(met, met)


@functools.lru_cache(maxsize=256)
def _half_widths_of(degrees: float) -> float:
    """Standard deviations of half an interval; SciPy takes 0.2 ms for one."""
    return float(student_t.ppf(0.5 + CONFIDENCE / 2, degrees))

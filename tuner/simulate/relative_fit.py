"""Non-negative least squares on relative error, with an interval for what it predicts.

The fit minimises sum of (x_i . c / y_i - 1)^2 over c >= 0, so that small values count as much as
large ones (Lawson and Hanson, Solving Least Squares Problems, 1974; SciPy's `nnls`).

The scatter s of the relative errors is that of the residuals, held by a prior: with n values and
p coefficients above 0,
    s^2 = (PRIOR_DEGREES * PRIOR_ERROR^2 + sum of squared residuals) / (PRIOR_DEGREES + n - p),
so that few points that happen to fit do not claim to know everything. A new value at x is then
x . c with variance x' C x + (s * x . c)^2, C = s^2 (A' A)^-1 over the columns in use with
A = x_i / y_i;
intervals take Student's t with PRIOR_DEGREES + n - p degrees of freedom. Coefficients held at 0 by
the bound count as known. (Gelman et al., Bayesian Data Analysis, 3rd edition, section 14.2: the
scaled inverse chi-squared prior of a regression's variance.)
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

LEAST_SINGULAR = 1e-12
"""Share of the largest singular value below which columns count as proportional to each other."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RelativeFit:
    """A fitted sum of non-negative terms; P terms.

    Attributes:
        coefficients: P numbers, >= 0.
        covariance: P x P, of the coefficients; rows of those held at 0 are 0.
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
    covariance = np.zeros((terms.shape[1], terms.shape[1]))
    # The pseudo-inverse: columns may be proportional to each other on the values at hand.
    inverse = np.linalg.pinv(unit[:, used], rcond=LEAST_SINGULAR) / lengths[used, None]
    covariance[np.ix_(used, used)] = square * inverse @ inverse.T
    return RelativeFit(
        coefficients=tuple(coefficients.tolist()),
        covariance=tuple(tuple(row) for row in covariance.tolist()),
        relative_error=float(np.sqrt(square)),
        degrees=degrees,
        max_relative_error=float(np.abs(residuals).max()),
    )


@functools.lru_cache(maxsize=256)
def _half_widths_of(degrees: float) -> float:
    """Standard deviations of half an interval; SciPy takes 0.2 ms for one."""
    return float(student_t.ppf(0.5 + CONFIDENCE / 2, degrees))

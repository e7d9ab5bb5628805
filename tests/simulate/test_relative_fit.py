"""The fit on relative error: what it finds, and whether its intervals hold what they promise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tuner.simulate.relative_fit import (
    PRIOR_DEGREES,
    PRIOR_ERROR,
    PRIOR_SHARE,
    RelativeFit,
    fit_relative,
)

SIZES = (1, 2, 4, 8, 16, 32)
LENGTHS = (32, 64, 128, 256, 512, 1024)
TRUTH = np.array([0.02, 1.3e-4, 2.8e-7])


def terms_of(shapes):
    return np.array([(1.0, size * length, size * length**2) for size, length in shapes])


def some_shapes(rng, count):
    every = list(itertools.product(SIZES, LENGTHS))
    return [every[i] for i in rng.choice(len(every), count, replace=False)]


@pytest.mark.parametrize(
    "known", [(0.02, 1.3e-4, 2.8e-7), (0.0, 1e-4, 0.0), (0.3, 0.0, 1e-6), (1e-3, 1e-6, 1e-11)]
)
def test_known_coefficients_come_back(known):
    terms = terms_of(itertools.product(SIZES, LENGTHS))
    fit = fit_relative(terms, terms @ known)
    assert fit.coefficients == pytest.approx(known, rel=1e-6, abs=1e-14)
    assert fit.max_relative_error < 1e-9
    assert fit.value((1.0, 77.0, 7700.0)) == pytest.approx(
        known[0] + 77 * known[1] + 7700 * known[2], rel=1e-6
    )


def test_weighted_least_squares_where_no_coefficient_is_held_at_0():
    """The textbook's: weights 1 / y, covariance (X' W X / s^2 + prior)^-1."""
    rng = np.random.default_rng(1)
    terms = terms_of(some_shapes(rng, 10))
    values = terms @ TRUTH * (1 + 0.03 * rng.standard_normal(10))
    weights = np.diag(1 / values**2)
    # One unit for all columns: the textbook's inverse has no digits left otherwise.
    units = np.diag(1 / np.array([1.0, 1e3, 1e6]))
    normal = units @ terms.T @ weights @ terms @ units
    expected = units @ np.linalg.solve(normal, units @ terms.T @ weights @ values)
    assert min(expected) > 0
    residuals = terms @ expected / values - 1
    degrees = PRIOR_DEGREES + 10 - 3
    square = (PRIOR_DEGREES * PRIOR_ERROR**2 + sum(residuals**2)) / degrees
    fit = fit_relative(terms, values)
    assert fit.coefficients == pytest.approx(expected, rel=1e-6)
    assert fit.relative_error == pytest.approx(np.sqrt(square))
    assert fit.degrees == degrees
    assert fit.max_relative_error == pytest.approx(max(abs(residuals)))
    normal += np.diag(np.diag(normal)) * square / (PRIOR_SHARE**2 * 10)
    covariance = square * units @ np.linalg.inv(normal) @ units
    np.testing.assert_allclose(fit.covariance, covariance, rtol=1e-6)


def test_interval_by_hand():
    """Four equal values of 2: s^2 = 4 * 0.06^2 / (4 + 3); A' A = 4 / 2^2 = 1.

    The prior's standard deviation of the coefficient is 0.5 of 2, that is 1, so
    C = 1 / (1 / s^2 + 1). A new value at x = 1: variance C + (2 s)^2; t of 7 degrees at 0.975 is
    2.3646.
    """
    fit = fit_relative(np.ones((4, 1)), np.full(4, 2.0))
    square = 4 * 0.06**2 / 7
    covariance = 1 / (1 / square + 1)
    assert fit.covariance[0][0] == pytest.approx(covariance)
    half_width = 2.3646 * (covariance + 4 * square) ** 0.5
    assert fit.half_width((1.0,)) == pytest.approx(half_width, rel=1e-4)


def test_a_coefficient_held_at_0_is_as_uncertain_as_the_values_leave_it():
    terms = terms_of([(1, 64), (8, 64), (4, 256), (1, 1024), (2, 512)])
    # Falls with the length where no sum of the terms can: the overhead alone is left.
    falling = fit_relative(terms, 1 / terms[:, 1])
    assert falling.coefficients[1:] == (0.0, 0.0)
    assert np.count_nonzero(falling.covariance) == 9
    assert falling.degrees == PRIOR_DEGREES + 5 - 1


def test_shapes_of_one_budget_leave_other_budgets_open():
    """With B * L = 4096 throughout, overhead and tokens are one column."""
    lengths = np.array([96, 128, 160, 192, 224, 288, 512])
    sizes = 4096 // lengths
    terms = terms_of(zip(sizes, lengths, strict=True))
    inside = {budget: 0 for budget in (1024, 2048, 4096, 8192)}
    for seed in range(200):
        noise = 1 + 0.03 * np.random.default_rng(seed).standard_normal(len(terms))
        fit = fit_relative(terms, terms @ TRUTH * noise)
        for budget in inside:
            row = terms_of([(budget // 128, 128)])[0]
            inside[budget] += abs(fit.value(row) - row @ TRUTH) <= fit.half_width(row)
    assert min(inside.values()) >= 0.95 * 200
    # And the budget that was measured is known well.
    row = terms_of([(32, 128)])[0]
    assert fit.half_width(row) < 0.15 * fit.value(row)


def test_long_rows_keep_the_uncertainty_of_the_overhead():
    """Terms 10^10 apart: the textbook's inverse in exact rational arithmetic."""
    from fractions import Fraction

    shapes = [(1, 64), (64, 512), (8, 4096), (8, 32768), (2, 8192)]
    terms = terms_of(shapes)
    values = terms @ [5.0, 1e-4, 1e-9]
    fit = fit_relative(terms, values)
    scaled = [
        [Fraction(t) / Fraction(y) for t in row] for row, y in zip(terms, values, strict=True)
    ]
    normal = [[sum(row[i] * row[j] for row in scaled) for j in range(3)] for i in range(3)]
    square = Fraction(fit.relative_error) ** 2
    prior = square / (Fraction(PRIOR_SHARE) ** 2 * len(shapes))
    for term in range(3):
        normal[term][term] *= 1 + prior
    (a, b, c), (_, e, f), (_, _, i) = normal
    determinant = a * (e * i - f * f) - b * (b * i - f * c) + c * (b * f - e * c)
    diagonal = [(e * i - f * f), (a * i - c * c), (a * e - b * b)]
    expected = [float(square * minor / determinant) for minor in diagonal]
    assert np.diag(fit.covariance) == pytest.approx(expected, rel=1e-5)


def test_proportional_columns_share_what_they_explain():
    """All shapes of one length: tokens and attention are not to be told apart."""
    terms = terms_of([(size, 128) for size in SIZES])
    fit = fit_relative(terms, terms @ TRUTH)
    for size in (3, 64):
        row = terms_of([(size, 128)])[0]
        assert fit.value(row) == pytest.approx(row @ TRUTH)
        assert 0.0 < fit.half_width(row) < 0.5 * fit.value(row)


def test_terms_that_are_all_0_explain_nothing():
    fit = fit_relative(np.zeros((3, 2)), np.array([1.0, 2.0, 3.0]))
    assert fit.coefficients == (0.0, 0.0)
    assert fit.covariance == ((0.0, 0.0), (0.0, 0.0))
    assert fit.max_relative_error == 1.0
    assert fit.value((5.0, 7.0)) == fit.half_width((5.0, 7.0)) == 0.0


def test_the_unit_of_the_values_does_not_matter():
    rng = np.random.default_rng(5)
    terms = terms_of(some_shapes(rng, 6))
    values = terms @ TRUTH * (1 + 0.05 * rng.standard_normal(6))
    seconds, nanoseconds = fit_relative(terms, values), fit_relative(terms, values * 1e9)
    row = terms_of([(3, 300)])[0]
    assert nanoseconds.value(row) == pytest.approx(1e9 * seconds.value(row))
    assert nanoseconds.half_width(row) == pytest.approx(1e9 * seconds.half_width(row))
    assert nanoseconds.relative_error == pytest.approx(seconds.relative_error)


def coverage(rng, num_values: int, noise: float, num_fits: int) -> tuple[list[bool], list[float]]:
    """Whether new values at other shapes lie in their intervals, and relative half widths."""
    inside, widths = [], []
    for _ in range(num_fits):
        shapes = some_shapes(rng, num_values + 5)
        terms = terms_of(shapes)
        values = terms @ TRUTH * (1 + noise * rng.standard_normal(len(shapes)))
        fit: RelativeFit = fit_relative(terms[:num_values], values[:num_values])
        for row, value in zip(terms[num_values:], values[num_values:], strict=True):
            inside.append(abs(value - fit.value(row)) <= fit.half_width(row))
            widths.append(fit.half_width(row) / fit.value(row))
    return inside, widths


def test_intervals_hold_new_values_as_often_as_they_say():
    rng = np.random.default_rng(11)
    inside, widths = [], []
    for num_values, noise in itertools.product(range(3, 13), (0.03, 0.05, 0.07, 0.1)):
        held, relative = coverage(rng, num_values, noise, num_fits=20)
        inside += held
        assert np.mean(held) > 0.8, (num_values, noise)
        if num_values >= 6:
            widths += relative
    assert len(inside) == 10 * 4 * 20 * 5
    assert np.mean(inside) >= 0.93
    # Of perfect knowledge at a noise of 6 % it would be 0.12.
    assert np.median(widths) < 0.25
    assert np.quantile(widths, 0.95) < 0.6

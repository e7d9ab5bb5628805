"""The fitted step cost: known coefficients come back, and the stated error is the true one."""

from __future__ import annotations

import numpy as np
import pytest
from cost_case import seconds_of
from hypothesis import given
from hypothesis import strategies as st

from tuner.simulate.cost import (
    DEFAULT_MEASURED,
    LEAST_COMPILE_S,
    CostModel,
    StepCost,
    default_cost_model,
    fit_cost_model,
    fit_step_cost,
)
from tuner.simulate.relative_fit import PRIOR_ERROR

SHAPES = [(32, 64), (16, 128), (8, 256), (4, 512), (2, 1024), (8, 1024), (1, 64)]

shapes = st.tuples(st.integers(1, 64), st.integers(8, 2048))
seconds = st.floats(1e-5, 10.0)


def coefficients_of(fit):
    return fit.overhead_s, fit.token_s, fit.attention_s


@pytest.mark.parametrize(
    "known",
    [
        (5e-3, 1e-6, 1e-9),
        (1e-2, 2e-6, 0.0),
        (0.0, 1e-6, 1e-9),
        (5e-3, 0.0, 1e-9),
        (0.0, 3e-5, 0.0),
        (0.2, 1e-6, 1e-10),
        (0.2, 0.0, 0.0),
    ],
)
def test_known_coefficients_come_back(known):
    fit = fit_step_cost({shape: seconds_of(shape, known) for shape in SHAPES})
    # A coefficient of 0 may come back as one that does not matter to any step.
    assert coefficients_of(fit) == pytest.approx(known, rel=1e-6, abs=1e-15)
    assert fit.max_relative_error < 1e-9


@given(st.floats(1e-4, 1.0), st.floats(1e-7, 1e-4), st.floats(1e-10, 1e-7))
def test_exact_measurements_predict_other_shapes_exactly(overhead_s, token_s, attention_s):
    known = overhead_s, token_s, attention_s
    fit = fit_step_cost({shape: seconds_of(shape, known) for shape in SHAPES})
    for shape in [(64, 64), (3, 700), (1, 4096)]:
        assert fit.step_s(shape) == pytest.approx(seconds_of(shape, known), rel=1e-6)


@given(st.dictionaries(shapes, seconds, min_size=1, max_size=8))
def test_no_measurement_makes_a_coefficient_negative(measured):
    fit = fit_step_cost(measured)
    assert min(coefficients_of(fit)) >= 0.0
    assert sum(coefficients_of(fit)) > 0.0
    assert fit.step_s((1, 1)) >= 0.0


@given(st.dictionaries(shapes, seconds, min_size=1, max_size=8))
def test_stated_error_is_the_true_one(measured):
    fit = fit_step_cost(measured)
    errors = [
        abs(seconds_of(shape, coefficients_of(fit)) / step_s - 1.0)
        for shape, step_s in measured.items()
    ]
    assert fit.max_relative_error == pytest.approx(max(errors), rel=1e-9, abs=1e-12)


@given(shapes, seconds)
def test_single_shape_is_exact_and_in_proportion_to_the_tokens(shape, step_s):
    fit = fit_step_cost({shape: step_s})
    size, length = shape
    assert fit.step_s(shape) == pytest.approx(step_s)
    assert fit.step_s((2 * size, length)) == pytest.approx(2 * step_s)
    assert fit.step_s((size, 3 * length)) == pytest.approx(3 * step_s)
    assert fit.max_relative_error < 1e-9


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 3.0, 4.0])
def test_two_shapes_are_exact_where_the_terms_allow_it(factor):
    """Twice the length at the same B: from the same time (overhead) to four times (attention)."""
    fit = fit_step_cost({(8, 64): 0.1, (8, 128): 0.1 * factor})
    assert fit.step_s((8, 64)) == pytest.approx(0.1)
    assert fit.step_s((8, 128)) == pytest.approx(0.1 * factor)
    assert fit.max_relative_error < 1e-9


def test_two_shapes_that_no_terms_explain_say_their_error():
    """The longer is measured faster. A constant c has (c/0.2 - 1)^2 + (c/0.1 - 1)^2 least at 0.12,

    where the errors are 0.12/0.2 - 1 = -0.4 and 0.12/0.1 - 1 = 0.2.
    """
    fit = fit_step_cost({(8, 64): 0.2, (8, 128): 0.1})
    assert coefficients_of(fit) == pytest.approx((0.12, 0.0, 0.0))
    assert fit.max_relative_error == pytest.approx(0.4)


def test_noise_is_weighed_by_its_share_and_not_by_its_seconds():
    """A short step that is 5 % off may not be given up for a long one."""
    known = 1e-3, 1e-6, 1e-9
    measured = {shape: seconds_of(shape, known) for shape in SHAPES}
    noise = np.random.default_rng(0).uniform(0.95, 1.05, len(SHAPES))
    noisy = {shape: measured[shape] * share for shape, share in zip(SHAPES, noise, strict=True)}
    fit = fit_step_cost(noisy)
    for shape in SHAPES:
        assert fit.step_s(shape) == pytest.approx(measured[shape], rel=0.1)


def test_known_compile_costs_come_back():
    step_s = {shape: seconds_of(shape, (5e-3, 1e-6, 1e-9)) for shape in SHAPES}
    compile_s = {shape: 4.0 + 2.5 * seconds for shape, seconds in step_s.items()}
    model = fit_cost_model(step_s, compile_s, "a test")
    assert model.compile_base_s == pytest.approx(4.0)
    assert model.compile_per_step_s == pytest.approx(2.5)
    other = (7, 900)
    assert model.compile_s(other) == pytest.approx(
        4.0 + 2.5 * seconds_of(other, (5e-3, 1e-6, 1e-9)), rel=1e-6
    )
    assert model.source == "a test"


def test_compiles_that_took_no_time_cost_a_millisecond_at_most():
    model = fit_cost_model({(8, 64): 0.1, (4, 128): 0.2}, {(8, 64): 0.0, (4, 128): 0.0}, "cache")
    for shape in [(8, 64), (4, 128), (16, 256)]:
        assert 0.0 <= model.compile_s(shape) <= LEAST_COMPILE_S * (1 + 1e-9)


def test_nothing_compiled_costs_nothing():
    model = fit_cost_model({(8, 64): 0.1}, {}, "a test")
    assert (model.compile_base_s, model.compile_per_step_s, model.compile_error) == (0, 0, 0)
    assert model.plan_compile_s([(8, 64), (4, 64)]) == 0.0


def test_one_graph_pays_its_compile_once_and_the_memory_of_every_shape():
    """Compile 30 + 1.5 steps in one first call, 1.5 steps in every other."""
    known = 0.1, 1e-4, 1e-7
    step_s = {shape: seconds_of(shape, known) for shape in SHAPES}
    first, *others = SHAPES
    model = fit_cost_model(
        step_s,
        {first: 30.0 + 1.5 * step_s[first]},
        "a test",
        {shape: 1.5 * step_s[shape] for shape in others},
    )
    assert model.is_one_graph
    assert model.compile_base_s == pytest.approx(30.0)
    for shape in [*SHAPES, (3, 333)]:
        visit_s = 1.5 * seconds_of(shape, known)
        assert model.visit_s(shape) == model.shape_s(shape) == pytest.approx(visit_s)
        assert model.compile_s(shape) == pytest.approx(30.0 + visit_s)
    plan = [(3, 333), (8, 64)]
    assert model.plan_compile_s(plan) == pytest.approx(
        30.0 + sum(1.5 * seconds_of(shape, known) for shape in plan)
    )


def test_visits_that_scatter_cost_their_mean_within_its_error():
    """60 visits of a tenth of a step, with noise of a fifth of a step: many of them below 0."""
    rng = np.random.default_rng(7)
    step_s = {(8, 8 * k): 0.2 + 5e-3 * k for k in range(1, 62)}
    (first, compiled_s), *others = step_s.items()
    found, hits = [], 0
    for _ in range(200):
        shares = 0.1 + 0.2 * rng.standard_normal(60)
        assert shares.min() < 0.0
        visit_s = {
            shape: share * seconds for (shape, seconds), share in zip(others, shares, strict=True)
        }
        model = fit_cost_model(step_s, {first: 6.0 + 0.1 * compiled_s}, "a test", visit_s)
        found.append(model.compile_per_step_s)
        hits += abs(found[-1] - 0.1) <= model.compile_error * found[-1]
        assert model.compile_base_s == pytest.approx(6.0, abs=0.05)
    assert np.mean(found) == pytest.approx(0.1, rel=0.03)
    # Twice the error of a mean: 95 %.
    assert 0.9 <= hits / 200 <= 0.99


def test_visits_that_cost_nothing_do_not_make_the_compile_dearer():
    step_s = {(8, 8): 0.2, (8, 16): 0.3, (8, 24): 0.4}
    model = fit_cost_model(step_s, {(8, 8): 6.0}, "a test", {(8, 16): -0.3, (8, 24): 0.2})
    assert (model.compile_per_step_s, model.compile_base_s) == (0.0, 6.0)
    assert model.compile_error == 2 * PRIOR_ERROR


def test_one_graph_that_met_a_single_shape_is_one_graph():
    assert fit_cost_model({(8, 64): 0.1}, {(8, 64): 9.0}, "a test", {}).is_one_graph
    assert not fit_cost_model({(8, 64): 0.1}, {(8, 64): 9.0}, "a test").is_one_graph


def test_static_graphs_pay_every_compile():
    model = CostModel(
        step=StepCost(overhead_s=0.5, token_s=0.0, attention_s=0.0, max_relative_error=0.0),
        compile_base_s=4.0,
        compile_per_step_s=2.0,
        source="a test",
    )
    assert model.shape_s((8, 64)) == model.compile_s((8, 64)) == 5.0
    assert model.visit_s((8, 64)) == 1.0
    assert model.plan_compile_s([(8, 64), (4, 64), (2, 64)]) == 15.0
    assert model.plan_compile_s([]) == 0.0


def noisy_fit():
    noise = np.random.default_rng(2).uniform(0.93, 1.07, len(SHAPES))
    known = 1e-2, 1e-5, 1e-8
    return fit_step_cost(
        {shape: seconds_of(shape, known) * n for shape, n in zip(SHAPES, noise, strict=True)}
    )


def test_scaled_costs_are_the_same_times_the_factor():
    fit = noisy_fit()
    scaled = fit.scaled(1.9, 0.0)
    for shape in [(8, 64), (3, 700), (1, 4096)]:
        assert scaled.step_s(shape) == pytest.approx(1.9 * fit.step_s(shape))
        assert scaled.half_width_s(shape) == pytest.approx(1.9 * fit.half_width_s(shape))
    assert scaled.relative_error == fit.relative_error > 0.0
    assert scaled.max_relative_error == fit.max_relative_error


def test_the_error_of_scaling_adds_to_that_of_the_fit_as_squares():
    fit = noisy_fit()
    scaled = fit.scaled(2.0, 0.3)
    for shape in [(8, 64), (3, 700)]:
        own_s = 2 * fit.half_width_s(shape)
        expected = (own_s**2 + (0.3 * 2 * fit.step_s(shape)) ** 2) ** 0.5
        assert scaled.half_width_s(shape) == pytest.approx(expected)
    # 0.3 and 0.4 make 0.5.
    assert scaled.scaled(1.0, 0.4).scaled_error == pytest.approx(0.5)


def test_costs_without_a_fit_have_no_interval_but_that_of_scaling():
    plain = StepCost(overhead_s=1.0, token_s=0.0, attention_s=0.0, max_relative_error=0.0)
    assert plain.half_width_s((8, 64)) == plain.relative_error == 0.0
    assert plain.scaled(3.0, 0.1).half_width_s((8, 64)) == pytest.approx(0.3)


def test_the_default_is_within_its_stated_errors_of_what_was_measured():
    model = default_cost_model()
    for shape, (step_s, compile_s) in DEFAULT_MEASURED.items():
        assert model.step.step_s(shape) == pytest.approx(step_s, rel=0.085)
        assert model.compile_s(shape) == pytest.approx(compile_s, rel=0.15)

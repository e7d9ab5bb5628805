"""Which shapes a trial measures, against a slow reading of the rule."""

from __future__ import annotations

import pytest
from cost_case import DYNAMIC, NO_UPDATE, STATIC
from hypothesis import given
from hypothesis import strategies as st

from tuner.simulate.cost import CostModel, StepCost
from tuner.simulate.cost_book import KnownCosts
from tuner.simulate.to_measure import KNOWN_WELL, choose_shapes, far_shapes, largest_first

shapes = st.tuples(st.integers(1, 20), st.integers(1, 100))
plans = st.dictionaries(shapes, st.integers(0, 9), min_size=1, max_size=12).filter(
    lambda counts: any(counts.values())
)


def costs_of(measured=(), *, error=0.1, compile_s=0.0, compile_error=0.0, is_one_graph=False):
    """A step takes B * L milliseconds, measured or not; one that was not to `error`."""
    return KnownCosts(
        key=DYNAMIC if is_one_graph else STATIC,
        model=CostModel(
            step=StepCost(
                overhead_s=0.0,
                token_s=1e-3,
                attention_s=0.0,
                max_relative_error=0.0,
                scaled_error=error,
            ),
            compile_base_s=compile_s,
            compile_per_step_s=0.5,
            compile_error=compile_error,
            is_one_graph=is_one_graph,
            source="a test",
        ),
        steps_s={shape: shape[0] * shape[1] / 1000 for shape in measured},
        first_calls_s=dict.fromkeys(measured, 2.0),
        update=NO_UPDATE,
        memory=None,
    )


def choose_slowly(counts, epochs, measured, max_shapes, error, compile_s, compile_error):
    """The docstring of choose_shapes, word for word, of static graphs as costs_of has them."""

    def step_s(shape):
        return shape[0] * shape[1] / 1000

    def first_s(shape):
        return 2.0 if shape in measured else compile_s + 0.5 * step_s(shape)

    def uncertain_s(shape):
        return epochs * counts[shape] * error * step_s(shape) + compile_error * first_s(shape)

    def size(shape):
        return shape[0] * shape[1], shape[1]

    met = [shape for shape in counts if counts[shape]]
    run_s = sum(first_s(shape) + epochs * counts[shape] * step_s(shape) for shape in met)
    chosen = set()
    if all(size(max(met, key=size)) > size(shape) for shape in measured):
        chosen.add(max(met, key=size))
    least = min(met, key=size)
    is_far = all(2 * size(least)[0] < size(shape)[0] for shape in {*measured, *chosen})
    if is_far and len(chosen) + 1 < max_shapes:
        chosen.add(least)
    while len(chosen) < max_shapes:
        rest = [shape for shape in met if shape not in measured and shape not in chosen]
        if sum(map(uncertain_s, rest)) <= KNOWN_WELL * run_s or not rest:
            break
        most = max(map(uncertain_s, rest))
        chosen.add(min(shape for shape in rest if uncertain_s(shape) == most))
    return tuple(sorted(chosen, key=size, reverse=True))


def test_nothing_known_takes_all_largest_first():
    met = {(8, 16): 5, (2, 256): 1, (4, 64): 3}
    assert choose_shapes(met, 1, costs_of(), 9) == ((2, 256), (4, 64), (8, 16))


def test_of_equally_many_tokens_the_longer_rows_come_first():
    met = {(8, 32): 1, (2, 128): 1, (4, 64): 1}
    assert choose_shapes(met, 1, costs_of(), 9) == ((2, 128), (4, 64), (8, 32))


def test_shapes_that_the_epoch_does_not_meet_are_left_out():
    assert choose_shapes({(1, 8): 0, (1, 16): 2, (9, 99): 0}, 1, costs_of(), 9) == ((1, 16),)


def test_the_largest_and_those_that_carry_the_run():
    # Uncertain seconds, in steps of (1, 1): 100, 90, 800, 70, 600, 50.
    met = {(1, 100): 1, (1, 90): 1, (1, 80): 10, (1, 70): 1, (1, 60): 10, (1, 50): 1}
    assert choose_shapes(met, 1, costs_of(), 3) == ((1, 100), (1, 80), (1, 60))
    assert choose_shapes(met, 1, costs_of(), 2) == ((1, 100), (1, 80))
    assert choose_shapes(met, 1, costs_of(), 1) == ((1, 100),)


def test_stops_when_the_rest_is_known_well():
    """50 + 900 + 40 + 10 = 1000 tokens: without compiles 2 % of the run are 20 tokens.

    What is left open after (1, 100): 100 tokens, of which 20 % are 20, 40 % 40 and 45 % 45; after
    (1, 50), too: 50, of which 40 % are 20 and 45 % are 22.5.
    """
    met = {(1, 100): 9, (1, 40): 1, (1, 50): 1, (1, 10): 1}

    def costs(error):
        # (1, 5) was measured: no shape is far below all that are known.
        known = costs_of([(1, 5)], error=error)
        model = CostModel(**{**vars(known.model), "compile_per_step_s": 0.0})
        return KnownCosts(**{**vars(known), "model": model})

    assert choose_shapes(met, 7, costs(0.2), 9) == ((1, 100),)
    assert choose_shapes(met, 7, costs(0.45), 9) == ((1, 100), (1, 50), (1, 40))
    assert choose_shapes(met, 7, costs(0.4), 9) == ((1, 100), (1, 50))


def test_nothing_is_measured_more_closely_than_the_machine_is_steady():
    """Of 200 tokens (1, 100) is known; 20 % of the other 100 are open, 10 % of the run."""
    met = {(1, 100): 1, (1, 99): 1}
    costs = costs_of([(1, 100)], error=0.2)
    model = CostModel(**{**vars(costs.model), "compile_per_step_s": 0.0})
    found = {
        error: choose_shapes(
            met,
            # Compiles of 2 s and none, so that steps are nearly all of the run.
            1000,
            KnownCosts(**{**vars(costs), "model": model, "process_error": error}),
            9,
        )
        for error in (0.0, 0.09, 0.11)
    }
    assert found == {0.0: ((1, 99),), 0.09: ((1, 99),), 0.11: ()}


def test_the_largest_is_measured_though_the_run_is_known_well():
    met = {(1, 100): 1, (1, 50): 9}
    assert choose_shapes(met, 1, costs_of(error=1e-6), 9) == ((1, 100),)
    assert choose_shapes(met, 1, costs_of([(1, 90)], error=1e-6), 9) == ((1, 100),)
    assert choose_shapes(met, 1, costs_of([(2, 50)], error=1e-6), 9) == ((1, 100),)
    assert choose_shapes(met, 1, costs_of([(1, 100), (1, 101)], error=1e-6), 9) == ()


def test_a_smallest_far_below_all_that_is_known_is_measured_too():
    met = {(1, 100): 1, (1, 49): 1}
    assert choose_shapes(met, 1, costs_of(error=1e-6), 9) == ((1, 100), (1, 49))
    assert choose_shapes(met, 1, costs_of(error=1e-6), 2) == ((1, 100),)
    assert choose_shapes(met, 1, costs_of([(1, 100)], error=1e-6), 9) == ((1, 49),)
    assert choose_shapes(met, 1, costs_of([(1, 200)], error=1e-6), 9) == ((1, 49),)
    # At most twice its tokens, or fewer than it: the fit need not go beyond what is known.
    assert choose_shapes(met, 1, costs_of([(2, 49), (1, 200)], error=1e-6), 9) == ()
    assert choose_shapes(met, 1, costs_of([(1, 8), (1, 200)], error=1e-6), 9) == ()


def test_a_compile_that_is_not_known_is_uncertain_too():
    """Few steps, known exactly; compiles of 10 s to half."""
    met = {(1, 100): 1, (1, 50): 1, (1, 10): 1}
    costs = costs_of([(1, 100)], error=0.0, compile_s=10.0, compile_error=0.5)
    assert choose_shapes(met, 1, costs, 9) == ((1, 50), (1, 10))


def test_one_graph_knows_the_compile_after_any_shape():
    """What another shape costs once is half a step: nothing beside 1000 steps."""
    met = {(1, 100): 1000, (1, 50): 1}
    costs = costs_of([(1, 100)], compile_s=10.0, compile_error=0.5, is_one_graph=True)
    assert choose_shapes(met, 1, costs, 9) == ()


@given(
    plans,
    st.integers(1, 3),
    st.lists(shapes, max_size=4),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.03, 0.3]),
    st.sampled_from([0.0, 3.0]),
    st.sampled_from([0.0, 0.2]),
)
def test_what_is_chosen_is_what_the_rule_says(
    counts, epochs, others, max_shapes, error, compile_s, compile_error
):
    measured = {*others, *list(counts)[::3]}
    costs = costs_of(measured, error=error, compile_s=compile_s, compile_error=compile_error)
    chosen = choose_shapes(counts, epochs, costs, max_shapes)
    assert chosen == choose_slowly(
        counts, epochs, measured, max_shapes, error, compile_s, compile_error
    )
    assert not set(chosen) & measured
    assert len(set(chosen)) == len(chosen) <= max_shapes


@pytest.mark.parametrize("max_shapes", [2, 6])
def test_a_heavy_shape_is_never_left_out_for_a_light_one(max_shapes):
    met = {(1, length): 1 for length in range(1, 50)} | {(1, 25): 1000}
    assert (1, 25) in choose_shapes(met, 1, costs_of(), max_shapes)


def test_of_many_tokens_the_longer_rows_come_first():
    assert largest_first([(8, 16), (2, 256), (4, 64), (1, 512)]) == (
        (1, 512),
        (2, 256),
        (4, 64),
        (8, 16),
    )


class TestFarShapes:
    def test_a_line_of_eight_rows_tells_nothing_of_many_short_ones(self):
        line = [(8, length) for length in (160, 256, 512)]
        assert far_shapes([(85, 48), (30, 136)], line) == ((85, 48), (30, 136))

    def test_up_to_one_and_a_half_times_the_length_and_the_tokens_it_does(self):
        """By hand, beside 40 x 100: 4,000 tokens, so 2,667 to 6,000; lengths 67 to 150."""
        known = [(40, 100)]
        near = [(40, 150), (40, 67), (60, 100), (27, 150), (27, 100)]
        far = [(40, 151), (40, 66), (61, 100), (26, 100)]
        assert far_shapes(near, known) == ()
        assert [far_shapes([shape], known) for shape in far] == [(shape,) for shape in far]

    def test_the_chosen_ones_are_far_from_each_other(self):
        assert far_shapes([(40, 100), (41, 100), (80, 50)], []) == ((40, 100), (80, 50))

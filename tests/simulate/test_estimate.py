"""Seconds of a run, calculated by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from cost_case import (
    DYNAMIC,
    NO_UPDATE,
    STATIC,
    UPDATE,
    measure,
    process_of,
    seconds_of,
    stats_of,
)
from hypothesis import given
from hypothesis import strategies as st

from tuner.simulate.cost import CostModel, StepCost
from tuner.simulate.cost_book import CostBook, KnownCosts
from tuner.simulate.estimate import Estimate, estimate_from_model, estimate_run, zero_padding_run_s
from tuner.simulate.memory import MemoryCost


def known_of(*shapes, key=STATIC, update=UPDATE):
    return CostBook([process_of(key, shapes, update=update)]).known(key)


# Every step takes B * L milliseconds, known to 10 %; a compile 5 s, a visit one step, to 30 %.
PER_TOKEN = StepCost(
    overhead_s=0.0, token_s=1e-3, attention_s=0.0, max_relative_error=0.07, scaled_error=0.1
)
MEMORY = MemoryCost(
    fixed_bytes=1000.0,
    graph_bytes=10.0,
    token_bytes=2.0,
    attention_bytes=0.0,
    is_one_graph=False,
    error=0.1,
)


def costs_of(steps_s, first_calls_s, *, is_one_graph=False, memory=MEMORY):
    return KnownCosts(
        key=DYNAMIC if is_one_graph else STATIC,
        model=CostModel(
            step=PER_TOKEN,
            compile_base_s=5.0,
            compile_per_step_s=1.0,
            compile_error=0.3,
            is_one_graph=is_one_graph,
            source="a test",
        ),
        steps_s=steps_s,
        first_calls_s=first_calls_s,
        update=UPDATE,
        memory=memory,
    )


def test_run_of_measured_shapes_is_their_plain_sum():
    """Compile 10 + 6 + 3 (update); 5 * 2.0 + 3 * 1.0 + 4 updates * 0.5 = 15 seconds of steps.

    Interval: 3 % of 10 s and of 3 s of steps, and 25 % of 13 s together, as squares: the three
    steps of each shape scatter by 25 %, twice of which is more than the most.
    """
    estimate = estimate_run(
        stats_of({(4, 128): 5, (8, 64): 3}),
        1,
        known_of(measure((4, 128), 2.0, 10.0), measure((8, 64), 1.0, 6.0)),
    )
    assert estimate.estimated_compile_s == pytest.approx(19.0)
    assert estimate.estimated_run_s == pytest.approx(34.0)
    assert estimate.estimated_run_error_s == pytest.approx(math.hypot(0.3, 0.09, 3.25))
    assert estimate.estimated_real_tokens_per_s == pytest.approx(1000 / 34)
    assert estimate.estimated_steady_real_tokens_per_s == pytest.approx(1000 / 15)
    assert estimate.measured_time_fraction == 1.0
    assert estimate.estimated_peak_bytes is None


def test_epochs_multiply_the_running_part_alone():
    """Three epochs: 19 seconds of compiling as before, 3 * 15 of running, 3 * 1000 tokens."""
    estimate = estimate_run(
        stats_of({(4, 128): 5, (8, 64): 3}),
        3,
        known_of(measure((4, 128), 2.0, 10.0), measure((8, 64), 1.0, 6.0)),
    )
    assert estimate.estimated_compile_s == pytest.approx(19.0)
    assert estimate.estimated_run_s == pytest.approx(64.0)
    assert estimate.estimated_run_error_s == pytest.approx(3 * math.hypot(0.3, 0.09, 3.25))
    assert estimate.estimated_real_tokens_per_s == pytest.approx(3000 / 64)
    assert estimate.estimated_steady_real_tokens_per_s == pytest.approx(3000 / 45)


def test_unmeasured_shape_costs_the_fit():
    """step_s = 1 + B * L / 512 + 0 in the measured three; (2, 512) then takes 3 seconds.

    A compile takes 2 + 3 steps: 8, 11 and 17 measured, 11 the fourth; the update 3: 50.
    Steps: 2 * 2.0 + 1 * 3.0 + 1 * 5.0 + 4 * 3.0 = 24, of which 12 measured; updates 4 * 0.5.
    """
    estimate = estimate_run(
        stats_of({(8, 64): 2, (8, 128): 1, (8, 256): 1, (2, 512): 4}),
        1,
        known_of(
            measure((8, 64), 2.0, 8.0),
            measure((8, 128), 3.0, 11.0),
            measure((8, 256), 5.0, 17.0),
        ),
    )
    assert estimate.estimated_compile_s == pytest.approx(50.0)
    assert estimate.estimated_run_s == pytest.approx(50.0 + 24.0 + 2.0)
    assert estimate.measured_time_fraction == pytest.approx(0.5)
    assert estimate.max_fit_error < 1e-9


def test_interval_by_hand():
    """(8, 64) and (8, 128) measured at 0.5 and 1 s, (4, 100) and (2, 100) fitted at 0.4 and 0.2.

    Of two epochs: measured 3 % of 20 * 0.5 = 10 and of 5 * 1.0, as squares; fitted 10 % of
    5 * 0.4 = 2 and of 10 * 0.2 = 2, added up. Compiles of (4, 100) and (2, 100), 5.4 and 5.2 s,
    to 30 %; those of the others are known.
    """
    costs = costs_of({(8, 64): 0.5, (8, 128): 1.0}, {(8, 64): 4.0, (8, 128): 6.0})
    estimate = estimate_run(
        stats_of({(8, 64): 20, (8, 128): 5, (4, 100): 5, (2, 100): 10}), 2, costs
    )
    steps_error_s = 2 * math.sqrt(0.3**2 + 0.15**2 + (0.2 + 0.2) ** 2)
    error_s = math.hypot(steps_error_s, 0.3 * (5.4 + 5.2))
    compile_s = 4.0 + 6.0 + 5.4 + 5.2 + 3.0
    assert estimate.estimated_compile_s == pytest.approx(compile_s)
    assert estimate.estimated_run_s == pytest.approx(compile_s + 2 * (10 + 5 + 2 + 2 + 4 * 0.5))
    assert estimate.estimated_run_error_s == pytest.approx(error_s)
    assert estimate.low_run_s == pytest.approx(estimate.estimated_run_s - error_s)
    assert estimate.high_run_s == pytest.approx(estimate.estimated_run_s + error_s)
    assert estimate.measured_time_fraction == pytest.approx(15 / 19)
    assert estimate.max_fit_error == 0.07


def test_all_steps_err_together_as_the_machine_did():
    """As above, and 10 % of the 19 s of steps of each epoch."""
    costs = costs_of({(8, 64): 0.5, (8, 128): 1.0}, {(8, 64): 4.0, (8, 128): 6.0})
    stats = stats_of({(8, 64): 20, (8, 128): 5, (4, 100): 5, (2, 100): 10})
    quiet = estimate_run(stats, 2, costs)
    noisy = estimate_run(stats, 2, dataclasses.replace(costs, process_error=0.1))
    assert noisy.estimated_run_s == quiet.estimated_run_s
    assert noisy.estimated_run_error_s == pytest.approx(
        math.hypot(quiet.estimated_run_error_s, 2 * 0.1 * 19.0)
    )


def test_interval_ends_at_nothing():
    wide = Estimate.of_run(compile_s=1.0, running_s=2.0, real_tokens=6, max_fit_error=0.0)
    assert (wide.low_run_s, wide.high_run_s, wide.estimated_peak_bytes) == (3.0, 3.0, None)
    costs = costs_of({}, {})
    open_end = estimate_run(stats_of({(8, 64): 1}, num_updates=0), 1, costs)
    assert 0.0 < open_end.low_run_s < open_end.estimated_run_s
    vague = Estimate(**{**vars(wide), "estimated_run_error_s": 7.0})
    assert (vague.low_run_s, vague.high_run_s) == (0.0, 10.0)


def test_one_graph_compiles_once_and_visits_the_rest():
    """Base 5; visits of 2 s and 0.7 s measured, of one step (0.4 s) fitted; the update 3."""
    costs = costs_of({(8, 64): 0.5}, {(8, 64): 2.0, (8, 128): 0.7}, is_one_graph=True, memory=None)
    estimate = estimate_run(stats_of({(8, 64): 2, (8, 128): 2, (4, 100): 1}), 1, costs)
    assert estimate.estimated_compile_s == pytest.approx(5.0 + 2.0 + 0.7 + 0.4 + 3.0)
    assert estimate.estimated_run_s == pytest.approx(11.1 + 2 * 0.5 + 2 * 1.024 + 0.4 + 2.0)
    fitted_error_s = 0.1 * (2 * 1.024 + 0.4)
    assert estimate.estimated_run_error_s == pytest.approx(
        math.hypot(math.hypot(0.03, fitted_error_s), 0.3 * 0.4)
    )


def test_measured_dynamic_graph_by_hand():
    """First calls of 30 s, then of one step each: three measured, three estimated, one compile."""
    known = (0.5, 1e-3, 0.0)
    lengths = (64, 128, 256, 320, 384, 448)
    items = [
        measure((8, 256), seconds_of((8, 256), known), 30.0 + seconds_of((8, 256), known)),
        *(
            measure((8, length), *[seconds_of((8, length), known)] * 2, has_compiled=False)
            for length in (128, 64)
        ),
    ]
    estimate = estimate_run(
        stats_of({(8, length): 1 for length in lengths}), 1, known_of(*items, key=DYNAMIC)
    )
    visits_s = sum(seconds_of((8, length), known) for length in lengths)
    assert estimate.estimated_compile_s == pytest.approx(30 + visits_s + 3)


def test_memory_is_that_of_all_planned_shapes():
    """1000 + (10 + 2 * 512) + (10 + 2 * 1024), also of a shape that this epoch does not meet."""
    estimate = estimate_run(stats_of({(8, 64): 3, (8, 128): 0}), 1, costs_of({}, {}))
    assert estimate.estimated_peak_bytes == 1000 + 1034 + 2058


def test_measured_shape_is_taken_as_it_is_even_where_the_fit_differs():
    """No terms explain a longer step that is faster: the sum is still that of the measurements."""
    shapes = [(8, 64), (8, 128), (8, 256)]
    items = [
        measure(shape, step_s, 0.0) for shape, step_s in zip(shapes, (0.3, 0.2, 0.1), strict=True)
    ]
    estimate = estimate_run(
        stats_of(dict.fromkeys(shapes, 1), num_updates=0), 1, known_of(*items, update=NO_UPDATE)
    )
    assert estimate.estimated_run_s == pytest.approx(0.6)
    assert estimate.max_fit_error > 0.1


def test_shape_that_this_epoch_does_not_meet_is_compiled_and_not_run():
    estimate = estimate_run(
        stats_of({(8, 64): 2, (8, 128): 0}, num_updates=0),
        1,
        known_of(measure((8, 64), 1.0, 5.0), measure((8, 128), 100.0, 7.0), update=NO_UPDATE),
    )
    assert estimate.estimated_compile_s == pytest.approx(12.0)
    assert estimate.estimated_run_s == pytest.approx(14.0)


def test_estimate_from_a_model_leaves_out_what_the_epoch_does_not_meet():
    """Two shapes, 5 + 0.512 and 5 + 0.4 s of compile; 3 epochs of 2 * 0.512 + 0.4 s."""
    stats = stats_of({(8, 64): 2, (4, 100): 1, (9, 999): 0})
    estimate = estimate_from_model(stats, costs_of({}, {}).model, 3)
    assert estimate.estimated_compile_s == pytest.approx(10.912)
    assert estimate.estimated_run_s == pytest.approx(10.912 + 3 * 1.424)
    assert estimate.estimated_real_tokens_per_s == pytest.approx(3000 / (10.912 + 3 * 1.424))
    assert (estimate.estimated_run_error_s, estimate.measured_time_fraction) == (0.0, 0.0)


@given(
    st.dictionaries(
        st.tuples(st.integers(1, 32), st.integers(8, 1024)),
        st.tuples(st.integers(0, 50), st.floats(1e-4, 5.0), st.floats(0.0, 60.0)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 5),
)
def test_all_measured_equals_a_plain_sum(cases, epochs):
    counts = {shape: count for shape, (count, _, _) in cases.items()}
    counts[max(counts)] += 1
    items = [measure(shape, step_s, compile_s) for shape, (_, step_s, compile_s) in cases.items()]
    estimate = estimate_run(stats_of(counts), epochs, known_of(*items))
    compile_s = sum(item.compile_s for item in items) + 3.0
    steps_s = sum(counts[item.shape] * item.step_s for item in items)
    squares = sum((0.03 * epochs * counts[item.shape] * item.step_s) ** 2 for item in items)
    squares += (0.25 * epochs * steps_s) ** 2
    assert estimate.estimated_compile_s == pytest.approx(compile_s)
    assert estimate.estimated_run_s == pytest.approx(compile_s + epochs * (steps_s + 4 * 0.5))
    assert estimate.estimated_run_error_s == pytest.approx(math.sqrt(squares))
    assert estimate.measured_time_fraction == pytest.approx(1.0)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60), st.integers(1, 4))
def test_zero_padding_is_every_row_at_its_own_length(tokens, epochs):
    cost = StepCost(overhead_s=0.05, token_s=1e-4, attention_s=3e-8, max_relative_error=0.0)
    total_s = 0.0
    for _ in range(epochs):
        for length in tokens:
            rows = 4096 / length
            # A batch of that many rows, of which one is this one's share.
            total_s += (0.05 + 1e-4 * rows * length + 3e-8 * rows * length**2) / rows
    found = zero_padding_run_s(np.array(tokens, np.int32), 4096, epochs, cost)
    assert found == pytest.approx(total_s)

"""Seconds of a run, calculated by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import make_config

from tuner.simulate.estimate import ShapeMeasurement, UpdateMeasurement, estimate_run
from tuner.simulate.stats import PlanStats

UPDATE = UpdateMeasurement(first_call_s=3.5, update_s=0.5)
NO_UPDATE = UpdateMeasurement(first_call_s=0.0, update_s=0.0)
STATIC = make_config({"graph.mode": "static"})
DYNAMIC = make_config({"graph.mode": "dynamic"})


SIX_SHAPES = {(8, length): 1 for length in (64, 128, 256, 320, 384, 448)}


def stats_of(shape_counts, *, real_tokens=1000, num_updates=4):
    return PlanStats(
        num_steps=sum(shape_counts.values()),
        num_updates=num_updates,
        real_tokens=real_tokens,
        padded_tokens=sum(size * length * count for (size, length), count in shape_counts.items()),
        shape_counts=shape_counts,
        real_tokens_of_shape=dict.fromkeys(shape_counts, real_tokens // len(shape_counts)),
        num_filler_rows=0,
        length_autocorrelation=0.0,
    )


def measured(size, length, step_s, compile_s):
    return ShapeMeasurement(
        batch_size=size,
        padded_length=length,
        first_call_s=step_s + compile_s,
        step_s=step_s,
        step_spread_s=0.0,
        num_timed_steps=5,
        memory_bytes=1,
        loss=1.0,
    )


def test_run_of_measured_shapes_is_their_plain_sum():
    """Compile 10 + 6 + 3 (update); 5 * 2.0 + 3 * 1.0 + 4 updates * 0.5 = 15 seconds of steps."""
    estimate = estimate_run(
        stats_of({(4, 128): 5, (8, 64): 3}),
        STATIC,
        [measured(4, 128, 2.0, 10.0), measured(8, 64, 1.0, 6.0)],
        UPDATE,
    )
    assert estimate.estimated_compile_s == pytest.approx(19.0)
    assert estimate.estimated_run_s == pytest.approx(34.0)
    assert estimate.estimated_real_tokens_per_s == pytest.approx(1000 / 34)
    assert estimate.estimated_steady_real_tokens_per_s == pytest.approx(1000 / 15)
    assert estimate.measured_time_fraction == 1.0
    assert estimate.max_fit_error < 1e-9


def test_epochs_multiply_the_running_part_alone():
    """Three epochs: 19 seconds of compiling as before, 3 * 15 of running, 3 * 1000 tokens."""
    estimate = estimate_run(
        stats_of({(4, 128): 5, (8, 64): 3}),
        make_config({"train.epochs": 3}),
        [measured(4, 128, 2.0, 10.0), measured(8, 64, 1.0, 6.0)],
        UPDATE,
    )
    assert estimate.estimated_compile_s == pytest.approx(19.0)
    assert estimate.estimated_run_s == pytest.approx(64.0)
    assert estimate.estimated_real_tokens_per_s == pytest.approx(3000 / 64)
    assert estimate.estimated_steady_real_tokens_per_s == pytest.approx(3000 / 45)


def test_unmeasured_shape_costs_the_fit_and_the_median_compile():
    """step_s = 1 + B * L / 512 + 0 in the measured three; (2, 512) then takes 3 seconds.

    Compile: 10 + 6 + 2 measured, the fourth shape the median 6, the update 3: 27.
    Steps: 2 * 2.0 + 1 * 3.0 + 1 * 5.0 + 4 * 3.0 = 24, of which 12 measured; updates 4 * 0.5.
    """
    estimate = estimate_run(
        stats_of({(8, 64): 2, (8, 128): 1, (8, 256): 1, (2, 512): 4}),
        STATIC,
        [
            measured(8, 64, 2.0, 10.0),
            measured(8, 128, 3.0, 6.0),
            measured(8, 256, 5.0, 2.0),
        ],
        UPDATE,
    )
    assert estimate.estimated_compile_s == pytest.approx(27.0)
    assert estimate.estimated_run_s == pytest.approx(27.0 + 24.0 + 2.0)
    assert estimate.measured_time_fraction == pytest.approx(0.5)
    assert estimate.max_fit_error < 1e-9


def test_measured_shape_is_taken_as_it_is_even_where_the_fit_differs():
    """No terms explain a longer step that is faster: the sum is still that of the measurements."""
    estimate = estimate_run(
        stats_of({(8, 64): 1, (8, 128): 1}, num_updates=0),
        STATIC,
        [measured(8, 64, 0.2, 0.0), measured(8, 128, 0.1, 0.0)],
        NO_UPDATE,
    )
    assert estimate.estimated_run_s == pytest.approx(0.3)
    assert estimate.max_fit_error > 0.1


def three_calls():
    """Compiles of 30, 1 and 3 seconds."""
    return [
        measured(8, length, 2.0, compile_s)
        for length, compile_s in ((256, 30.0), (128, 1.0), (64, 3.0))
    ]


def test_one_dynamic_graph_compiles_once():
    """First call 30, later shapes 1 and 3; three more of 2 (their median); the update 3: 43."""
    estimate = estimate_run(
        stats_of(SIX_SHAPES),
        DYNAMIC,
        three_calls(),
        UPDATE,
    )
    assert estimate.estimated_compile_s == pytest.approx(30 + 1 + 3 + 3 * 2 + 3)


def test_one_dynamic_graph_of_which_one_shape_was_measured_compiles_once():
    estimate = estimate_run(stats_of(SIX_SHAPES), DYNAMIC, [measured(8, 256, 2.0, 30.0)], UPDATE)
    assert estimate.estimated_compile_s == pytest.approx(30 + 3)


def test_static_graphs_count_the_first_compile_like_the_others():
    """The same calls as static graphs: the median of 30, 1 and 3 is 3."""
    estimate = estimate_run(
        stats_of(SIX_SHAPES),
        STATIC,
        three_calls(),
        UPDATE,
    )
    assert estimate.estimated_compile_s == pytest.approx(30 + 1 + 3 + 3 * 3 + 3)


def test_shape_that_this_epoch_does_not_meet_is_compiled_and_not_run():
    estimate = estimate_run(
        stats_of({(8, 64): 2, (8, 128): 0}, num_updates=0),
        STATIC,
        [measured(8, 64, 1.0, 5.0), measured(8, 128, 100.0, 7.0)],
        NO_UPDATE,
    )
    assert estimate.estimated_compile_s == pytest.approx(12.0)
    assert estimate.estimated_run_s == pytest.approx(14.0)


def test_first_call_faster_than_a_steady_step_costs_no_compile():
    assert measured(8, 64, 2.0, -0.5).compile_s == 0.0
    assert measured(8, 64, 2.0, 0.5).compile_s == pytest.approx(0.5)
    assert UpdateMeasurement(first_call_s=0.1, update_s=0.2).compile_s == 0.0


@given(
    st.dictionaries(
        st.tuples(st.integers(1, 32), st.integers(8, 1024)),
        st.tuples(st.integers(0, 50), st.floats(1e-4, 5.0), st.floats(0.0, 60.0)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 5),
    st.sampled_from(["static", "dynamic"]),
)
def test_all_measured_equals_a_plain_sum(cases, epochs, mode):
    counts = {shape: count for shape, (count, _, _) in cases.items()}
    counts[max(counts)] += 1
    items = [
        measured(*shape, step_s, compile_s) for shape, (_, step_s, compile_s) in cases.items()
    ]
    estimate = estimate_run(
        stats_of(counts),
        make_config({"train.epochs": epochs, "graph.mode": mode}),
        items,
        UPDATE,
    )
    compile_s = sum(item.compile_s for item in items) + 3.0
    steps_s = sum(counts[item.shape] * item.step_s for item in items)
    assert estimate.estimated_compile_s == pytest.approx(compile_s)
    assert estimate.estimated_run_s == pytest.approx(compile_s + epochs * (steps_s + 4 * 0.5))
    assert estimate.measured_time_fraction == pytest.approx(1.0)

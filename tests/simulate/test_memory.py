"""Memory of plans: what is summed, what is found again, what is said where little is known."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from cost_case import DYNAMIC, STATIC, measure, process_of

from tuner.simulate.memory import LEAST_ERROR, MemoryCost, fit_memory

GB = 10**9
BASE = 900_000_000
SHAPES = [(8, 1024), (32, 64), (16, 128), (8, 256), (4, 512), (2, 1024)]


def cost_of(*, is_one_graph: bool, error: float = 0.1) -> MemoryCost:
    return MemoryCost(
        fixed_bytes=1000.0,
        graph_bytes=10.0,
        token_bytes=2.0,
        attention_bytes=0.5,
        is_one_graph=is_one_graph,
        error=error,
    )


def added_by(shape, graph=2e7, token=5e4, attention=40.0):
    size, length = shape
    return round(graph + token * size * length + attention * size * length**2)


def process(shapes, key=STATIC, base=BASE, more=0, added=added_by):
    items = [measure(shape, 0.1, added_bytes=added(shape)) for shape in shapes]
    peak = base + sum(item.added_bytes for item in items) + more
    return process_of(key, items, base_bytes=base, peak_bytes=peak)


def test_static_shapes_add_up_and_one_graph_takes_its_largest():
    """(2, 4) adds 10 + 2 * 8 + 0.5 * 32 = 42, (3, 2) adds 10 + 2 * 6 + 0.5 * 12 = 28."""
    static, dynamic = cost_of(is_one_graph=False), cost_of(is_one_graph=True)
    assert static.added_bytes((2, 4)) == dynamic.added_bytes((2, 4)) == 42.0
    assert static.shapes_bytes([(2, 4), (3, 2)]) == 70.0
    assert dynamic.shapes_bytes([(3, 2), (2, 4)]) == 42.0
    assert static.peak_bytes([(2, 4), (3, 2)]) == 1070.0
    assert dynamic.peak_bytes([(2, 4), (3, 2)]) == 1042.0


def test_further_static_shapes_take_a_share():
    """As above: the largest adds 42, a quarter of 28 and of 28 comes to it."""
    cost = dataclasses.replace(cost_of(is_one_graph=False), further_share=0.25)
    assert cost.shapes_bytes([(3, 2), (2, 4), (3, 2)]) == 42.0 + 14.0
    assert cost.peak_bytes([(2, 4)]) == 1042.0


@pytest.mark.parametrize("share", [1.0, 0.3, 0.02, 0.0])
def test_the_share_of_further_graphs_is_found(share):
    """Two processes, each of which runs its largest shape first."""
    processes = []
    for shapes in (SHAPES, [(4, 1024), (4, 512), (16, 128)]):
        items = [
            measure(shape, 0.1, added_bytes=round(added_by(shape) * (share if place else 1.0)))
            for place, shape in enumerate(shapes)
        ]
        peak = BASE + sum(item.added_bytes for item in items)
        processes.append(process_of(STATIC, items, base_bytes=BASE, peak_bytes=peak))
    found = fit_memory(processes, is_one_graph=False)
    assert found is not None
    # Shares of a hundredth or two cannot be told from none.
    assert found.further_share == pytest.approx(share, abs=0.02)
    for one in processes:
        shapes = [item.shape for item in one.shapes]
        assert found.peak_bytes(shapes) == pytest.approx(one.peak_bytes, rel=0.05)


def test_a_share_that_was_never_seen_is_assumed():
    for share in (1.0, 0.2):
        found = fit_memory([process(SHAPES[:1])], is_one_graph=False, assumed_share=share)
        assert found is not None and found.further_share == share
    seen = fit_memory([process(SHAPES)], is_one_graph=False, assumed_share=0.2)
    assert seen is not None and seen.further_share == 1.0


def test_lower_end_takes_the_error_off_what_shapes_add_alone():
    cost = cost_of(is_one_graph=False, error=0.25)
    assert cost.least_peak_bytes([(2, 4), (3, 2)]) == 1000.0 + 0.75 * 70.0
    assert cost_of(is_one_graph=False, error=3.0).least_peak_bytes([(2, 4)]) == 1000.0


def test_known_coefficients_come_back():
    found = fit_memory([process(SHAPES)], is_one_graph=False)
    assert found is not None
    for shape in [*SHAPES, (3, 700)]:
        assert found.added_bytes(shape) == pytest.approx(added_by(shape), rel=1e-5)
    assert (found.graph_bytes, found.token_bytes) == (
        pytest.approx(2e7, rel=1e-4),
        pytest.approx(5e4, rel=1e-4),
    )
    assert found.fixed_bytes == BASE
    assert found.error == LEAST_ERROR


def test_the_update_s_buffers_are_fixed_bytes():
    """Of several processes the largest: 0.9 GB and what the peak has beyond base and shapes."""
    processes = [process(SHAPES[:2], more=70_000_000), process(SHAPES[2:], more=30_000_000)]
    found = fit_memory(processes, is_one_graph=False)
    assert found is not None
    assert found.fixed_bytes == BASE + 70_000_000


def test_a_peak_below_the_sum_leaves_the_base():
    found = fit_memory([process(SHAPES, more=-(10**8))], is_one_graph=False)
    assert found is not None
    assert found.fixed_bytes == BASE


@pytest.mark.parametrize("times", [1, 5])
def test_few_shapes_are_in_proportion_to_the_tokens(times):
    """However often they were measured: 1000 and 3000 tokens, 50 kB a token."""
    shapes = [(4, 250), (30, 100)]
    processes = [process(shapes, added=lambda s: 50_000 * s[0] * s[1])] * times
    found = fit_memory(processes, is_one_graph=False)
    assert found is not None
    assert (found.graph_bytes, found.attention_bytes) == (0.0, 0.0)
    assert found.token_bytes == pytest.approx(50_000)
    assert found.added_bytes((1, 4000)) == pytest.approx(2e8)


def test_of_one_graph_the_first_shape_of_each_process_counts():
    """Later ones found room: they added nothing, which says nothing about them."""
    largest = [(8, 1024), (16, 512), (64, 64), (2, 2048)]

    def first_only(shape):
        return added_by(shape) if shape in largest else 0

    processes = [process([shape, (1, 32)], DYNAMIC, added=first_only) for shape in largest]
    found = fit_memory(processes, is_one_graph=True)
    assert found is not None
    assert found.is_one_graph
    for shape in largest:
        assert found.added_bytes(shape) == pytest.approx(added_by(shape), rel=1e-5)


@pytest.mark.parametrize(
    "processes",
    [
        [],
        [process([])],
        [process_of(STATIC, [measure((8, 64), 0.1, added_bytes=5)], peak_bytes=GB)],
        [process_of(STATIC, [measure((8, 64), 0.1, added_bytes=5)], base_bytes=GB)],
    ],
    ids=["none", "no shape", "no base", "no peak"],
)
def test_where_nothing_is_known_nothing_is_said(processes):
    assert fit_memory(processes, is_one_graph=False) is None


def test_processes_that_do_not_know_their_memory_are_left_out():
    unknown = process_of(STATIC, [measure((1, 8), 0.1, added_bytes=GB)])
    processes = [process(SHAPES)]
    assert fit_memory([unknown, *processes], is_one_graph=False) == fit_memory(
        processes, is_one_graph=False
    )


def test_shapes_that_added_nothing_cost_nothing():
    found = fit_memory([process(SHAPES, added=lambda shape: 0)], is_one_graph=False)
    assert found is not None
    assert found.peak_bytes(SHAPES) == pytest.approx(BASE)


def test_the_order_of_processes_changes_no_figure():
    rng = np.random.default_rng(4)
    processes = [
        process([shape], added=lambda s: round(added_by(s) * rng.uniform(0.7, 1.3)))
        for shape in SHAPES[:4]
    ]
    first, *others = (
        fit_memory(order, is_one_graph=False) for order in itertools.permutations(processes)
    )
    assert all(other == first for other in others)


def test_the_error_is_twice_the_scatter():
    """Added bytes 30 % above and below the tokens' share: the error of single shapes is told."""
    up = {(8, 100): 1.3, (4, 100): 0.7}
    processes = [
        process([shape], added=lambda s: round(1e6 * up[s] * s[0] * s[1])) for shape in up
    ]
    found = fit_memory(processes, is_one_graph=False)
    assert found is not None
    # p minimises (p / 1.3 - 1)^2 + (p / 0.7 - 1)^2.
    p = (1 / 1.3 + 1 / 0.7) / (1 / 1.3**2 + 1 / 0.7**2)
    scatter = (((p / 1.3 - 1) ** 2 + (p / 0.7 - 1) ** 2) / 2) ** 0.5
    assert found.token_bytes == pytest.approx(1e6 * p)
    assert found.error == pytest.approx(2 * scatter)
    assert found.least_peak_bytes([(8, 100)]) < BASE + 1e6 * p * 800 * (1 - scatter)

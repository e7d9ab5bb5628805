"""What is known under a key: measured, fitted, borrowed, given, or assumed."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import replace

import pytest
from cost_case import DYNAMIC, NO_UPDATE, STATIC, UPDATE, measure, process_of, seconds_of

from tuner.simulate.cost import CostModel, StepCost, default_cost_model
from tuner.simulate.cost_book import (
    BORROWED_ERROR,
    DEFAULT_ERROR,
    LEARNED_ERROR,
    LEAST_BORROWED_ERROR,
    LEAST_SHAPES,
    MEASURED_ERROR,
    CostBook,
    key_distance,
    median_of,
)
from tuner.simulate.measurement import UpdateMeasurement
from tuner.simulate.memory import MemoryCost

KNOWN = (0.02, 1e-4, 3e-7)
SHAPES = [(8, 1024), (32, 64), (16, 128), (4, 512)]
OTHER = (3, 700)
O1 = dataclasses.replace(STATIC, jit_level="O1")
FP16 = dataclasses.replace(STATIC, precision="fp16")
FP16_LOSS = dataclasses.replace(STATIC, precision="fp16+loss")
PACKED = dataclasses.replace(STATIC, rows="packed")
ASCEND = dataclasses.replace(STATIC, device="Ascend")


def measured(key, shapes=SHAPES, factor=1.0, **fields):
    """Steps of a factor times the known seconds, compiles of 4 s and two steps."""
    items = []
    for shape in shapes:
        step_s = factor * seconds_of(shape, KNOWN)
        items.append(measure(shape, step_s, 4.0 + 2 * step_s))
    return process_of(key, items, **fields)


def given(step_s=1.0, error=0.2):
    """A model as a file gives it: every step takes as long, a compile 10 s."""
    return CostModel(
        step=StepCost(
            overhead_s=step_s,
            token_s=0.0,
            attention_s=0.0,
            max_relative_error=0.0,
            scaled_error=error,
        ),
        compile_base_s=10.0,
        compile_per_step_s=0.0,
        compile_error=0.3,
        source="a file",
    )


class TestMeasured:
    def test_a_shape_costs_its_median_over_the_processes(self):
        steps = [0.2, 0.9, 0.3]
        book = CostBook(
            process_of(STATIC, [measure((8, 64), step_s, 10 * step_s)]) for step_s in steps
        )
        known = book.known(STATIC)
        assert known.steps_s == {(8, 64): 0.3}
        assert known.step_s((8, 64)) == 0.3
        assert known.half_width_s((8, 64)) == pytest.approx(MEASURED_ERROR * 0.3)
        assert known.shape_s((8, 64)) == pytest.approx(3.0)
        assert known.compile_s([(8, 64)]) == pytest.approx(3.0 + 3.0)

    def test_the_machine_errs_by_twice_the_scatter_of_single_steps(self):
        """By hand: steps of 0.9, 1.0, 1.1 and of 1.8, 2.0, 2.2 s scatter by 10 % each.

        Of one shape as of six; twelve are taken for two processes.
        """
        items = [
            dataclasses.replace(measure((8, 64 + k), s), steady_s=(0.9 * s, s, 1.1 * s))
            for k, s in enumerate([1.0, 2.0] * 6)
        ]
        errors = {
            count: CostBook([process_of(STATIC, items[:count])]).known(STATIC).process_error
            for count in (1, 6, 12)
        }
        assert errors == pytest.approx({1: 0.2, 6: 0.2, 12: 0.2 / 2**0.5})
        # Other keys are measured on the same machine; one without measurements is borrowed.
        book = CostBook([process_of(STATIC, items), process_of(DYNAMIC, items[:1])])
        assert book.known(DYNAMIC).process_error == pytest.approx(0.2)
        assert book.known(FP16).process_error == 0.0
        assert CostBook([measured(STATIC)]).known(STATIC).process_error == 0.25

    def test_other_shapes_cost_the_fit_of_the_key(self):
        known = CostBook([measured(STATIC), measured(DYNAMIC, factor=9)]).known(STATIC)
        expected = seconds_of(OTHER, KNOWN)
        assert known.step_s(OTHER) == pytest.approx(expected)
        assert known.shape_s(OTHER) == pytest.approx(4.0 + 2 * expected)
        assert known.half_width_s(OTHER) == known.model.step.half_width_s(OTHER) > 0.0
        assert known.model.source == "4 measured shapes"
        assert known.model.step.scaled_error == 0.0

    def test_shapes_of_several_processes_are_fitted_together(self):
        processes = [measured(STATIC, [shape]) for shape in SHAPES]
        assert CostBook(processes).known(STATIC).step_s(OTHER) == pytest.approx(
            seconds_of(OTHER, KNOWN)
        )

    def test_one_graph_pays_its_compile_once(self):
        """A first call of 30 s and one step, later ones of one step; the update's 3 s."""
        items = [
            measure(
                shape,
                seconds_of(shape, KNOWN),
                seconds_of(shape, KNOWN) + (30.0 if shape == SHAPES[0] else 0.0),
                has_compiled=shape == SHAPES[0],
            )
            for shape in SHAPES
        ]
        known = CostBook([process_of(DYNAMIC, items)]).known(DYNAMIC)
        assert SHAPES[0] not in known.first_calls_s
        plan = [SHAPES[0], SHAPES[1], OTHER]
        expected = 30.0 + sum(seconds_of(shape, KNOWN) for shape in plan) + 3.0
        assert known.compile_s(plan) == pytest.approx(expected)

    def test_visits_that_are_cheaper_than_steps_do_not_pay_for_a_compile(self):
        """A compile of 30 s, visits of -0.1 and 0.02 s, the update's 3 s."""
        items = [
            measure(shape, 1.0 + number, beyond_s, has_compiled=number == 0)
            for number, (shape, beyond_s) in enumerate(
                zip(SHAPES, (30.0, -0.1, 0.02, 0.08), strict=False)
            )
        ]
        known = CostBook([process_of(DYNAMIC, items)]).known(DYNAMIC)
        assert known.model.compile_per_step_s == 0.0
        assert known.compile_s(SHAPES[:3]) == pytest.approx(30.0 + 3.0)
        assert known.compile_s([SHAPES[0], *SHAPES[2:4]]) == pytest.approx(30.1 + 3.0)

    def test_the_run_cost_is_the_fit_alone(self):
        book = CostBook([measured(STATIC), measured(STATIC, SHAPES[:1], factor=1.5)])
        known = book.known(STATIC)
        cost = known.run_cost(epochs=3, world_size=2)
        assert (cost.epochs, cost.world_size) == (3, 2)
        assert cost.step_s(SHAPES[0]) == known.model.step.step_s(SHAPES[0])
        assert cost.step_s(SHAPES[0]) != known.step_s(SHAPES[0])
        assert cost.compile_s(SHAPES[0]) == known.model.shape_s(SHAPES[0])

    def test_one_more_process_counts_at_once(self):
        book = CostBook([measured(STATIC)])
        before = book.known(DYNAMIC).step_s(OTHER)
        book.add(measured(STATIC, factor=5))
        assert book.known(STATIC).step_s(SHAPES[0]) == pytest.approx(
            3 * seconds_of(SHAPES[0], KNOWN)
        )
        # Also for those who borrow.
        assert book.known(DYNAMIC).step_s(OTHER) == pytest.approx(3 * before)

    def test_memory_is_that_of_the_key(self):
        items = [measure((10, 100), 0.1, added_bytes=1_000_000)]
        process = process_of(STATIC, items, base_bytes=500, peak_bytes=1_000_600)
        book = CostBook([process])
        memory = book.known(STATIC).memory
        assert memory is not None
        assert memory.peak_bytes([(10, 100), (5, 100)]) == pytest.approx(1_500_600)
        assert book.known(DYNAMIC).memory is None

    def test_medians_by_shape_rise(self):
        items = [measure((8, 64), 3.0), measure((2, 8), 1.0), measure((8, 64), 5.0)]
        found = median_of(items, lambda item: item.step_s)
        assert list(found.items()) == [((2, 8), 1.0), ((8, 64), 4.0)]

    def test_processes_are_told_by_key(self):
        one, other = measured(STATIC), measured(DYNAMIC, SHAPES[:1])
        book = CostBook([one, other])
        assert book.processes(STATIC) == (one,)
        assert book.processes(ASCEND) == ()
        empty = process_of(PACKED, [])
        assert CostBook([one, other, empty], {ASCEND: (given(), None)}).keys == (
            ASCEND,
            DYNAMIC,
            STATIC,
        )


def test_the_order_of_processes_changes_no_figure():
    processes = [
        measured(STATIC, SHAPES[:2], factor=1.03, base_bytes=900, peak_bytes=1000),
        measured(STATIC, SHAPES[1:], factor=0.97, base_bytes=905, peak_bytes=1003),
        measured(DYNAMIC, SHAPES[2:3], factor=1.9, update=None),
        measured(O1, SHAPES, factor=0.7, update=UpdateMeasurement(first_call_s=9, update_s=8)),
    ]
    known = [
        [CostBook(order).known(key) for key in (STATIC, DYNAMIC, O1, PACKED, ASCEND)]
        for order in itertools.permutations(processes)
    ]
    assert all(item == known[0] for item in known)


class TestUpdate:
    def test_the_median_of_each_figure(self):
        updates = [
            UpdateMeasurement(first_call_s=first, update_s=steady)
            for first, steady in ((9.0, 0.1), (2.0, 0.5), (3.0, 0.2))
        ]
        book = CostBook(measured(STATIC, update=item) for item in updates)
        assert book.known(STATIC).update == UpdateMeasurement(first_call_s=3.0, update_s=0.2)

    def test_is_shared_by_keys_that_have_none(self):
        other = UpdateMeasurement(first_call_s=5.5, update_s=1.5)
        book = CostBook(
            [measured(STATIC), measured(O1, update=other), measured(DYNAMIC, update=None)]
        )
        assert book.known(STATIC).update == UPDATE
        assert book.known(DYNAMIC).update == UpdateMeasurement(first_call_s=4.5, update_s=1.0)

    def test_is_nothing_before_one_was_measured(self):
        assert CostBook([measured(STATIC, update=None)]).known(STATIC).update == NO_UPDATE


class TestBorrowed:
    def test_the_default_stands_in_where_nothing_is_known(self):
        known = CostBook().known(STATIC)
        step = default_cost_model().step
        assert known.step_s(OTHER) == step.step_s(OTHER)
        assert known.half_width_s(OTHER) == pytest.approx(
            math.hypot(step.half_width_s(OTHER), DEFAULT_ERROR * step.step_s(OTHER))
        )
        assert known.memory is None
        assert known.compile_s([OTHER]) == default_cost_model().compile_s(OTHER)
        assert CostBook().known(DYNAMIC).model.is_one_graph

    @pytest.mark.parametrize("num_shapes", [1, 2])
    def test_few_shapes_scale_the_default_by_the_median_ratio(self, num_shapes):
        shapes = SHAPES[:num_shapes]
        known = CostBook([measured(STATIC, shapes)]).known(STATIC)
        step = default_cost_model().step
        ratios = [seconds_of(shape, KNOWN) / step.step_s(shape) for shape in shapes]
        factor = sum(ratios) / num_shapes
        assert known.step_s(OTHER) == pytest.approx(factor * step.step_s(OTHER))
        assert known.model.step.scaled_error == BORROWED_ERROR
        # What was measured is taken as it is.
        for shape in shapes:
            assert known.step_s(shape) == seconds_of(shape, KNOWN)

    def test_a_key_of_its_own_starts_at_the_least_shapes(self):
        few = CostBook([measured(STATIC, SHAPES[: LEAST_SHAPES - 1])]).known(STATIC)
        enough = CostBook([measured(STATIC, SHAPES[:LEAST_SHAPES])]).known(STATIC)
        assert few.model.source.endswith(", scaled")
        assert enough.model.source == f"{LEAST_SHAPES} measured shapes"

    @pytest.mark.parametrize(
        ("key", "nearest", "error"),
        [
            (PACKED, STATIC, 0.15),
            (FP16_LOSS, FP16, 0.12),
            (dataclasses.replace(FP16, rows="packed"), FP16, 0.15),
            (dataclasses.replace(DYNAMIC, jit_level="O1"), O1, 0.5),
            (DYNAMIC, STATIC, 0.5),
            (dataclasses.replace(FP16_LOSS, rows="packed"), FP16, (0.12**2 + 0.15**2) ** 0.5),
        ],
    )
    def test_the_nearest_key_lends_its_fit(self, key, nearest, error):
        factors = {STATIC: 1.0, O1: 0.7, FP16: 1.6}
        book = CostBook([measured(lender, factor=factors[lender]) for lender in factors])
        known = book.known(key)
        assert known.step_s(OTHER) == pytest.approx(factors[nearest] * seconds_of(OTHER, KNOWN))
        assert known.model.step.scaled_error == pytest.approx(error)
        assert known.model.compile_error == pytest.approx(
            math.hypot(book.known(nearest).model.compile_error, error)
        )

    def test_a_key_that_borrows_does_not_lend(self):
        book = CostBook([measured(ASCEND, factor=0.1), measured(PACKED, SHAPES[:2], factor=7)])
        assert book.known(STATIC).step_s(OTHER) == pytest.approx(0.1 * seconds_of(OTHER, KNOWN))

    def test_of_two_equally_near_keys_the_first_by_name(self):
        # Both differ from the static key by the level alone.
        o2 = dataclasses.replace(STATIC, jit_level="O2")
        for order in itertools.permutations([measured(O1), measured(o2, factor=3)]):
            assert CostBook(order).known(STATIC).step_s(OTHER) == pytest.approx(
                seconds_of(OTHER, KNOWN)
            )

    def test_a_measured_shape_says_how_much_slower_the_key_is(self):
        """1.9 times at one shape: 1.9 times at all."""
        book = CostBook([measured(STATIC), measured(DYNAMIC, SHAPES[:1], factor=1.9)])
        known = book.known(DYNAMIC)
        assert known.step_s(OTHER) == pytest.approx(1.9 * seconds_of(OTHER, KNOWN))
        assert known.model.step.scaled_error == BORROWED_ERROR
        near = CostBook([measured(FP16), measured(FP16_LOSS, SHAPES[:1], factor=1.1)])
        assert near.known(FP16_LOSS).model.step.scaled_error == pytest.approx(0.12)

    def test_measured_compiles_scale_borrowed_ones(self):
        """Three times as long in one shape: in others too."""
        items = [measure(SHAPES[0], 0.5, 3 * (4.0 + 2 * 0.5))]
        known = CostBook([measured(STATIC), process_of(O1, items)]).known(O1)
        scale = 0.5 / seconds_of(SHAPES[0], KNOWN)
        expected = 3 * (4.0 + 2 * scale * seconds_of(OTHER, KNOWN))
        assert known.shape_s(OTHER) == pytest.approx(expected)
        assert known.shape_s(SHAPES[0]) == pytest.approx(15.0)

    def test_what_further_graphs_take_is_that_of_the_nearest_key_that_ran_several(self):
        """Largest shapes of 1 GB; a further one took 0.1 GB in fp32, and 0.5 GB in packed rows."""
        large, small = (8, 512), (16, 256)

        def ran(key, *added_bytes):
            items = [
                measure(shape, 0.1, added_bytes=added)
                for shape, added in zip((large, small), added_bytes, strict=False)
            ]
            return process_of(key, items, base_bytes=10**9, peak_bytes=10**9 + sum(added_bytes))

        fp16_packed = replace(FP16, rows="packed")
        processes = [
            ran(STATIC, 10**9, 10**8),
            ran(replace(STATIC, rows="packed"), 10**9, 5 * 10**8),
            ran(FP16, 10**9),
            ran(DYNAMIC, 10**9, 0),
        ]
        book = CostBook(processes)
        assert book.known(STATIC).memory.further_share == 0.1
        assert book.known(FP16).memory.further_share == 0.1
        assert book.known(DYNAMIC).memory.further_share == 1.0
        assert book.known(FP16).memory.peak_bytes([large, small]) == pytest.approx(2.1e9)
        packed = CostBook([*processes, ran(fp16_packed, 10**9)]).known(fp16_packed)
        assert packed.memory.further_share == 0.5
        alone = CostBook([ran(FP16, 10**9), ran(DYNAMIC, 10**9, 0)]).known(FP16)
        assert alone.memory.further_share == 1.0

    def test_one_shape_under_one_graph_costs_the_compile_it_took(self):
        items = [measure((8, 64), 0.5, 42.0)]
        known = CostBook([process_of(DYNAMIC, items)]).known(DYNAMIC)
        assert known.compile_s([(8, 64)]) == pytest.approx(42.0 + 3.0)


class TestGiven:
    MEMORY = MemoryCost(
        fixed_bytes=1.0,
        graph_bytes=2.0,
        token_bytes=3.0,
        attention_bytes=4.0,
        is_one_graph=False,
        error=0.2,
    )

    def test_are_used_with_their_own_error(self):
        known = CostBook(models={STATIC: (given(), self.MEMORY)}).known(STATIC)
        assert known.step_s(OTHER) == 1.0
        assert known.half_width_s(OTHER) == pytest.approx(0.2)
        assert (known.shape_s(OTHER), known.model.compile_error) == (10.0, 0.3)
        assert known.memory == self.MEMORY
        assert known.model.source == "a file"

    def test_are_scaled_to_few_measured_shapes(self):
        book = CostBook([measured(STATIC, SHAPES[:2])], {STATIC: (given(), self.MEMORY)})
        known = book.known(STATIC)
        ratios = [seconds_of(shape, KNOWN) for shape in SHAPES[:2]]
        assert known.step_s(OTHER) == pytest.approx(sum(ratios) / 2)
        assert known.model.step.scaled_error == pytest.approx(
            math.hypot(0.2, LEAST_BORROWED_ERROR)
        )

    def test_are_left_when_enough_shapes_were_measured(self):
        book = CostBook([measured(STATIC)], {STATIC: (given(), self.MEMORY)})
        known = book.known(STATIC)
        assert known.step_s(OTHER) == pytest.approx(seconds_of(OTHER, KNOWN))
        assert known.model.source == "4 measured shapes"
        # Memory was not measured here.
        assert known.memory == self.MEMORY

    def test_lend_to_others(self):
        known = CostBook(models={STATIC: (given(error=0.2), self.MEMORY)}).known(PACKED)
        assert known.step_s(OTHER) == 1.0
        assert known.half_width_s(OTHER) == pytest.approx((0.2**2 + 0.15**2) ** 0.5)
        assert known.memory is None

    def test_come_before_a_nearer_measured_key(self):
        book = CostBook([measured(STATIC)], {PACKED: (given(), None)})
        assert book.known(PACKED).step_s(OTHER) == 1.0


def test_distance_of_keys():
    assert key_distance(STATIC, STATIC) == 0.0
    assert key_distance(STATIC, DYNAMIC) == key_distance(DYNAMIC, STATIC) == 0.5
    assert key_distance(FP16, FP16_LOSS) == 0.12
    assert key_distance(STATIC, FP16_LOSS) == 0.4
    assert key_distance(ASCEND, dataclasses.replace(O1, rows="packed")) == pytest.approx(
        (3.0**2 + 0.3**2 + 0.15**2) ** 0.5
    )


class TestPredictWithout:
    """A shape foretold as if it had not been measured."""

    BOOK = CostBook(
        [
            measured(STATIC, [*SHAPES, OTHER]),
            # A second process that measured it must be left out too.
            process_of(STATIC, [measure(OTHER, 99.0)]),
            measured(DYNAMIC, [OTHER], factor=2.0),
        ]
    )

    def test_is_the_fit_of_all_other_shapes(self):
        others = CostBook([measured(STATIC), measured(DYNAMIC, [OTHER], factor=2.0)])
        model = others.known(STATIC).model
        assert self.BOOK.predict_without(STATIC, OTHER) == pytest.approx(
            (model.step.step_s(OTHER), model.step.half_width_s(OTHER))
        )
        assert self.BOOK.predict_without(STATIC, OTHER)[0] == pytest.approx(
            seconds_of(OTHER, KNOWN), rel=1e-6
        )

    def test_leaves_the_book_as_it_is(self):
        before = self.BOOK.known(STATIC)
        self.BOOK.predict_without(STATIC, OTHER)
        assert self.BOOK.known(STATIC) == before
        assert before.steps_s[OTHER] == pytest.approx((seconds_of(OTHER, KNOWN) + 99.0) / 2)

    def test_borrows_where_too_few_are_left(self):
        seconds, half_width = self.BOOK.predict_without(DYNAMIC, OTHER)
        # Nothing else was measured under this key: the static fit, without a factor.
        assert seconds == pytest.approx(self.BOOK.known(STATIC).model.step.step_s(OTHER))
        assert half_width > 0.5 * seconds


def test_what_a_precision_costs_is_learned_from_other_rows():
    """fp16 takes 2.2 times as long on a shape of packed rows; single rows never ran in it."""
    packed_fp16 = dataclasses.replace(PACKED, precision="fp16+norms")
    book = CostBook(
        [
            measured(STATIC),
            measured(PACKED, shapes=SHAPES[:1], factor=1.05),
            measured(packed_fp16, shapes=SHAPES[:1], factor=1.05 * 2.2),
        ]
    )
    known = book.known(FP16)
    expected = 2.2 * seconds_of(OTHER, KNOWN)
    assert known.step_s(OTHER) == pytest.approx(expected, rel=1e-6)
    # Less is known than where it was measured, more than where nothing was.
    assert known.half_width_s(OTHER) >= LEARNED_ERROR * expected
    assert known.half_width_s(OTHER) < key_distance(FP16, STATIC) * expected


def test_what_a_level_costs_is_learned_from_another_precision():
    """O1 takes 0.7 times as long in fp32, fp16 1.6 times at O0: together 1.12 times."""
    fp16_o1 = dataclasses.replace(FP16, jit_level="O1")
    book = CostBook([measured(STATIC), measured(O1, factor=0.7), measured(FP16, factor=1.6)])
    known = book.known(fp16_o1)
    assert known.step_s(OTHER) == pytest.approx(0.7 * 1.6 * seconds_of(OTHER, KNOWN), rel=1e-6)
    assert known.model.step.scaled_error == pytest.approx(LEARNED_ERROR)


def test_without_a_shape_in_common_nothing_is_learned():
    packed_fp16 = dataclasses.replace(PACKED, precision="fp16")
    book = CostBook(
        [
            measured(STATIC),
            measured(PACKED, shapes=SHAPES[:1]),
            measured(packed_fp16, shapes=SHAPES[1:2], factor=2.2),
        ]
    )
    assert book.known(FP16).step_s(OTHER) == pytest.approx(seconds_of(OTHER, KNOWN), rel=1e-6)

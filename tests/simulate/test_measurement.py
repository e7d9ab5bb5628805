"""What was measured, as the rest of the product reads it."""

from __future__ import annotations

import dataclasses

import pytest
from cost_case import DYNAMIC, STATIC, measure
from strategies import make_config

from tuner.simulate.measurement import CostKey, UpdateMeasurement, describe_precision


def test_a_step_is_the_median_of_the_steady_ones():
    item = dataclasses.replace(measure((8, 64), 1.0), steady_s=(0.5, 3.0, 1.0, 2.0))
    assert item.step_s == 1.5
    assert item.step_spread_s == 2.5
    assert item.shape == (8, 64)
    single = dataclasses.replace(item, steady_s=(0.25,))
    assert (single.step_s, single.step_spread_s) == (0.25, 0.0)


def test_first_call_faster_than_a_steady_step_costs_no_compile():
    assert measure((8, 64), 2.0, -0.5).compile_s == 0.0
    assert measure((8, 64), 2.0, 0.5).compile_s == pytest.approx(0.5)
    assert UpdateMeasurement(first_call_s=0.1, update_s=0.2).compile_s == 0.0
    assert UpdateMeasurement(first_call_s=3.5, update_s=0.5).compile_s == 3.0


def test_visits_of_one_graph_are_right_in_sum():
    """Where nothing is compiled noise makes first calls faster as often as slower."""
    visits = [measure((8, 64), 2.0, beyond_s, has_compiled=False) for beyond_s in (-0.5, 0.75)]
    assert [item.compile_s for item in visits] == pytest.approx([-0.5, 0.75])


def test_calls_that_are_not_steady_yet_cost_what_they_take_beyond_steady_steps():
    """First call 5 s, then 0.75 and 0.7 s, steady 0.5 s: 4.5 + 0.25 + 0.2."""
    item = dataclasses.replace(measure((8, 64), 0.5, 4.5), settling_s=(0.75, 0.7))
    assert item.compile_s == pytest.approx(4.95)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, STATIC),
        ({"graph.mode": "dynamic"}, DYNAMIC),
        ({"graph.jit_level": "O1"}, dataclasses.replace(STATIC, jit_level="O1")),
        ({"batching.strategy": "packed"}, dataclasses.replace(STATIC, rows="packed")),
        ({"batching.strategy": "bucketed"}, STATIC),
        ({"train.epochs": 7, "batching.align": 16}, STATIC),
        (
            {"precision.compute_dtype": "fp16", "precision.fp32_ops": ["softmax", "loss"]},
            dataclasses.replace(STATIC, precision="fp16+softmax+loss"),
        ),
    ],
)
def test_a_key_is_what_a_step_depends_on_besides_its_shape(changes, key):
    assert CostKey.of(make_config(changes), "CPU") == key


def test_a_key_reads_as_its_fields():
    assert str(STATIC) == "CPU static O0 fp32 single"
    assert str(dataclasses.replace(DYNAMIC, rows="packed")) == "CPU dynamic O0 fp32 packed"


def test_a_precision_without_fp32_groups_is_its_dtype():
    assert describe_precision(make_config().precision) == "fp32"
    config = make_config({"precision.compute_dtype": "bf16", "precision.fp32_ops": []})
    assert describe_precision(config.precision) == "bf16"

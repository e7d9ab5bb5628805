"""A trial's files: what was written is read back, anything else is said to be unreadable."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import configs

from tuner.simulate.measurement import ShapeMeasurement, UpdateMeasurement
from tuner.trial.record import (
    Installation,
    Refusal,
    Status,
    TrialResult,
    TrialSpec,
    UnreadableRecordError,
    is_sound,
    parse_json,
    to_json,
)

seconds = st.floats(0.0, 1e6)
counts = st.integers(0, 2**45)
measurements = st.builds(
    ShapeMeasurement,
    batch_size=st.integers(1, 9999),
    padded_length=st.integers(1, 99999),
    first_call_s=seconds,
    steady_s=st.lists(seconds, min_size=1, max_size=5).map(tuple),
    has_compiled=st.booleans(),
    memory_bytes=counts,
    added_bytes=counts,
    loss=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)
results = st.builds(
    TrialResult,
    status=st.sampled_from(get_args(Status)),
    reason=st.text(),
    shapes=st.lists(measurements, max_size=3).map(tuple),
    update=st.none() | st.builds(UpdateMeasurement, first_call_s=seconds, update_s=seconds),
    base_bytes=counts,
    peak_bytes=counts,
    memory_kind=st.text(),
    wall_s=seconds,
)
specs = st.builds(
    TrialSpec,
    config=configs(),
    lengths_file=st.text(),
    shapes=st.lists(st.tuples(st.integers(1, 999), st.integers(1, 9999)), min_size=1).map(tuple),
    timed_steps=st.integers(1, 99),
    time_limit_s=st.floats(0.001, 1e6),
    memory_limit_bytes=st.integers(1, 2**45),
    device_id=st.integers(0, 7),
    timed_s=st.floats(0.0, 1e6),
)
installations = st.builds(
    Installation, device=st.text(), versions=st.dictionaries(st.text(), st.text(), max_size=3)
)
refusals = st.builds(Refusal, problem=st.text(), fix=st.text())


@given(st.one_of(measurements, results, specs, installations, refusals))
def test_what_was_written_is_read_back(record):
    text = to_json(record)
    assert "\n" not in text
    assert parse_json(type(record), text) == record


MEASUREMENT: dict[str, Any] = {
    "batch_size": 4, "padded_length": 32, "first_call_s": 3.0, "steady_s": [0.5, 0.75],
    "has_compiled": True, "memory_bytes": 10, "added_bytes": 3, "loss": None,
}  # fmt: skip


@pytest.mark.parametrize("end", range(0, len(json.dumps(MEASUREMENT)), 7))
def test_a_line_cut_off_anywhere_is_unreadable(end):
    text = json.dumps(MEASUREMENT)
    assert parse_json(ShapeMeasurement, text).shape == (4, 32)
    with pytest.raises(UnreadableRecordError):
        parse_json(ShapeMeasurement, text[:end])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"batch_size": "four"}, "batch_size"),
        ({"batch_size": 1.5}, "batch_size"),
        ({"steady_s": None}, "steady_s"),
        ({"steady_s": [0.5, "x"]}, "steady_s.1"),
        ({"has_compiled": 3}, "has_compiled"),
        ({"memory_bytes": []}, "memory_bytes"),
    ],
)
def test_the_field_that_is_wrong_is_named(change, field):
    with pytest.raises(UnreadableRecordError, match=f"^{field}: "):
        parse_json(ShapeMeasurement, json.dumps({**MEASUREMENT, **change}))


@pytest.mark.parametrize("missing", sorted(MEASUREMENT))
def test_the_field_that_is_missing_is_named(missing):
    rest = {name: value for name, value in MEASUREMENT.items() if name != missing}
    with pytest.raises(UnreadableRecordError, match=f"^{missing}: "):
        parse_json(ShapeMeasurement, json.dumps(rest))


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "3", '"ok"', '{"status": "fine"}', "\0"])
def test_text_that_is_no_result(text):
    with pytest.raises(UnreadableRecordError):
        parse_json(TrialResult, text)


SHAPE = parse_json(ShapeMeasurement, json.dumps(MEASUREMENT))
OK = TrialResult(
    status="ok", shapes=(SHAPE,), update=UpdateMeasurement(first_call_s=1.0, update_s=0.5)
)
UNTRUE = [math.nan, math.inf, -math.inf, -0.5, 0.0]


class TestSound:
    def test_a_whole_result_is(self):
        assert is_sound(OK)

    @pytest.mark.parametrize("seconds", UNTRUE)
    @pytest.mark.parametrize("status", ["ok", "oom"])
    def test_no_second_may_be_untrue(self, seconds, status):
        for shape in (
            dataclasses.replace(SHAPE, first_call_s=seconds),
            dataclasses.replace(SHAPE, steady_s=(0.5, seconds)),
        ):
            assert not is_sound(dataclasses.replace(OK, status=status, shapes=(SHAPE, shape)))
        for name in ("first_call_s", "update_s"):
            update = dataclasses.replace(OK.update, **{name: seconds})
            assert not is_sound(dataclasses.replace(OK, status=status, update=update))

    @pytest.mark.parametrize(
        "change",
        [{"steady_s": ()}, {"batch_size": 0}, {"padded_length": -1}, {"added_bytes": -1}],
        ids=str,
    )
    def test_a_shape_has_rows_tokens_and_steps(self, change):
        shape = dataclasses.replace(SHAPE, **change)
        assert not is_sound(dataclasses.replace(OK, shapes=(shape,)))

    def test_ok_needs_shapes_and_the_update(self):
        assert not is_sound(dataclasses.replace(OK, update=None))
        assert not is_sound(dataclasses.replace(OK, shapes=()))

    @pytest.mark.parametrize("status", sorted(set(get_args(Status)) - {"ok"}))
    def test_a_failure_needs_neither(self, status):
        assert is_sound(TrialResult(status=status, reason="because of this"))

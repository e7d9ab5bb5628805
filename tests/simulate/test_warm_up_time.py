"""Time limits of HCCL against the documented ranges, calculated by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.errors import BadInputError
from tuner.simulate.warm_up_time import choose_timeouts, describe_timeouts


@pytest.mark.parametrize(
    ("compile_s", "connect_s", "execute_s", "is_enough"),
    [
        (0.0, 600, 1836, True),  # the defaults: 27 * 68
        (200.0, 600, 1836, True),
        (200.1, 601, 1836, True),  # 600.3 s
        (612.0, 1836, 1836, True),
        (612.5, 1838, 1904, True),  # 1,837.5 s; 28 * 68
        (1000.0, 3000, 3060, True),  # 45 * 68
        (2400.0, 7200, 7208, True),  # 106 * 68
        (2401.0, 7200, 7208, False),  # 7,203 s are over what a connection may take
        (10_000.0, 7200, 17340, False),
    ],
)
def test_three_times_the_warm_up_within_what_hccl_takes(
    compile_s, connect_s, execute_s, is_enough
):
    limits = choose_timeouts(compile_s)
    assert (limits.connect_s, limits.execute_s) == (connect_s, execute_s)
    assert limits.is_enough is is_enough
    assert limits.wait_s == pytest.approx(3 * compile_s)
    assert limits.variables == {
        "HCCL_CONNECT_TIMEOUT": str(connect_s),
        "HCCL_EXEC_TIMEOUT": str(execute_s),
    }


@given(st.floats(0.0, 1e6), st.floats(1.0, 10.0))
def test_never_nothing_never_less_than_the_default_and_whole_units(compile_s, factor):
    limits = choose_timeouts(compile_s, factor)
    assert 600 <= limits.connect_s <= 7200
    assert 1800 <= limits.execute_s <= 17340
    # Atlas training products round down to a multiple of 68, so nothing may be lost by that.
    assert limits.execute_s // 68 * 68 == limits.execute_s
    assert limits.is_enough == (compile_s * factor <= limits.connect_s)
    if limits.is_enough:
        assert limits.execute_s >= compile_s * factor


def test_a_longer_warm_up_has_no_shorter_limits():
    limits = [choose_timeouts(float(compile_s)) for compile_s in range(0, 20_000, 50)]
    for name in ("connect_s", "execute_s"):
        values = [getattr(item, name) for item in limits]
        assert values == sorted(values) and values[0] < values[-1]


def test_words_hold_the_lines_to_set():
    told = describe_timeouts(choose_timeouts(1000.0))
    assert "HCCL_CONNECT_TIMEOUT=3000 HCCL_EXEC_TIMEOUT=3060" in told and "3,000 s" in told
    assert "fewer shapes" not in told
    short = describe_timeouts(choose_timeouts(4000.0))
    assert "no more than 7,200 s" in short and "12,000 s" in short and "fewer shapes" in short


@pytest.mark.parametrize("compile_s", [-1.0, math.nan, math.inf])
def test_what_is_no_number_of_seconds_is_refused(compile_s):
    with pytest.raises(BadInputError, match="must be a number >= 0"):
        choose_timeouts(compile_s)


@pytest.mark.parametrize("factor", [0.99, 0.0, math.nan, math.inf])
def test_a_factor_that_shortens_is_refused(factor):
    with pytest.raises(BadInputError, match="must be at least 1"):
        choose_timeouts(100.0, factor)

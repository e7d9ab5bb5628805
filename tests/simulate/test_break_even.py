"""When a longer compile is earned back, calculated by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.simulate.break_even import BreakEven, find_break_even
from tuner.simulate.estimate import Estimate


def estimate(compile_s, steady_real_tokens_per_s):
    return Estimate(
        estimated_run_s=100.0,
        estimated_run_error_s=2.0,
        estimated_compile_s=compile_s,
        estimated_real_tokens_per_s=1.0,
        estimated_steady_real_tokens_per_s=steady_real_tokens_per_s,
        measured_time_fraction=1.0,
        max_fit_error=0.0,
        estimated_peak_bytes=None,
    )


def test_static_graph_against_dynamic_graph():
    """Compile 5.3 s and 0.300 s a step against none and 0.598 s, 32 x 64 tokens each.

    5.3 / (0.598 - 0.300) = 17.79 steps; 17.785 * 2048 = 36424.2 tokens.
    """
    static, dynamic = estimate(5.3, 2048 / 0.300), estimate(0.0, 2048 / 0.598)
    assert find_break_even(static, dynamic, 2048) == BreakEven(real_tokens=36425, steps=18)
    assert find_break_even(dynamic, static, 2048) == BreakEven(real_tokens=0, steps=0)
    # The dynamic graph has a compile of its own, 5.8 s: the static one is never behind.
    assert find_break_even(static, estimate(5.8, 2048 / 0.598), 2048) == BreakEven(
        real_tokens=0, steps=0
    )


@pytest.mark.parametrize(
    ("candidate", "baseline", "expected"),
    [
        # 10 s more, 1/100 - 1/200 = 0.005 s a token gained: 2000 tokens, 4 steps of 500.
        ((30.0, 200.0), (20.0, 100.0), BreakEven(real_tokens=2000, steps=4)),
        # 10.001 s more: 2000.2 tokens, in the fifth step.
        ((30.001, 200.0), (20.0, 100.0), BreakEven(real_tokens=2001, steps=5)),
        ((30.0, 100.0), (20.0, 100.0), None),
        ((30.0, 99.0), (20.0, 100.0), None),
        ((20.0, 100.0), (20.0, 100.0), None),
        ((20.0, 99.0), (20.0, 100.0), None),
        ((20.0, 101.0), (20.0, 100.0), BreakEven(real_tokens=0, steps=0)),
        ((19.0, 50.0), (20.0, 100.0), BreakEven(real_tokens=0, steps=0)),
    ],
)
def test_hand_calculated(candidate, baseline, expected):
    assert find_break_even(estimate(*candidate), estimate(*baseline), 500) == expected


@given(
    st.floats(0, 1000), st.floats(0, 1000), st.floats(1, 1e6), st.floats(1, 1e6),
    st.floats(1, 1e5),
)  # fmt: skip
def test_the_candidate_is_behind_one_token_before_and_not_at_the_break_even(
    compile_s, other_compile_s, rate, other_rate, tokens_per_step
):
    found = find_break_even(
        estimate(compile_s, rate), estimate(other_compile_s, other_rate), tokens_per_step
    )

    def lead_s(tokens):
        return other_compile_s + tokens / other_rate - compile_s - tokens / rate

    if found is None:
        assert compile_s >= other_compile_s
        assert rate <= other_rate * (1 + 1e-9)
        return
    assert found.steps * tokens_per_step >= found.real_tokens * (1 - 1e-9) - 1
    rounding_s = 1e-9 * (compile_s + other_compile_s + found.real_tokens / min(rate, other_rate))
    assert lead_s(found.real_tokens) >= -rounding_s
    if found.real_tokens:
        assert lead_s(found.real_tokens - 1) <= rounding_s

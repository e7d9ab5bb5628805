"""Rules for boundaries: hand calculations, and what each of them must hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import align_rules, align_slowly, first_boundary, lengths, skewed_tokens

from tuner.batching.boundary_rules import BOUNDARY_RULES

SQUARES = [1, 4, 9, 16, 25, 36, 49, 64, 81, 100]


@pytest.mark.parametrize(
    ("name", "tokens", "align", "num_buckets", "expected"),
    [
        # 10 rows: the 5th and the last; the 3.3rd, so the 4th, the 6.7th and the last.
        ("quantile", SQUARES, 1, 2, (25, 100)),
        ("quantile", SQUARES, 1, 3, (16, 49, 100)),
        ("quantile", SQUARES, 8, 3, (16, 56, 104)),
        ("quantile", [7, 7, 7, 7, 7, 7, 7, 9], 1, 4, (7, 9)),
        # 385 tokens, running 1 5 14 30 55 91 140 204 285 385: half, 192.5, is reached at 64;
        # 128.3 at 49 and 256.7 at 81.
        ("equal_tokens", SQUARES, 1, 2, (64, 100)),
        ("equal_tokens", SQUARES, 1, 3, (49, 81, 100)),
        ("equal_tokens", SQUARES, 8, 3, (56, 88, 104)),
        # From 1 to 100: factors of 10; from 4 to 64 in four: factors of 2.
        ("exponential", SQUARES, 1, 2, (10, 100)),
        ("exponential", SQUARES, 8, 2, (16, 104)),
        ("exponential", [4, 64], 1, 4, (8, 16, 32, 64)),
        ("exponential", [3, 1000], 1, 3, (21, 145, 1000)),
        ("exponential", [5, 5], 1, 4, (5,)),
        ("uniform", SQUARES, 1, 4, (25, 50, 75, 100)),
        ("uniform", SQUARES, 1, 3, (34, 67, 100)),
        ("uniform", SQUARES, 64, 4, (64, 128)),
        # (36, 100) pads 6 rows to 36 and 4 to 100: 616; (25, 100) 625; (49, 100) 643.
        ("least_padding", SQUARES, 1, 2, (36, 100)),
        ("least_padding", [3, 8, 9, 16, 60], 8, 2, (16, 64)),
    ],
)
def test_hand_calculated_boundaries(name, tokens, align, num_buckets, expected):
    assert BOUNDARY_RULES[name](np.array(tokens), align, num_buckets) == expected


@pytest.mark.parametrize("name", BOUNDARY_RULES)
@given(
    tokens=lengths(max_rows=60, min_tokens=1), align=align_rules(), num_buckets=st.integers(1, 12)
)
def test_every_rule_covers_all_rows_with_aligned_boundaries(name, tokens, align, num_buckets):
    found = BOUNDARY_RULES[name](np.array(tokens, dtype=np.int32), align, num_buckets)
    assert 1 <= len(found) <= num_buckets
    assert list(found) == sorted(set(found))
    assert all(type(boundary) is int for boundary in found)
    assert all(align_slowly(boundary, align) == boundary for boundary in found)
    assert found[-1] == align_slowly(max(tokens), align)


@given(
    tokens=lengths(max_rows=60, min_tokens=1), align=align_rules(), num_buckets=st.integers(1, 12)
)
def test_no_rule_pads_less_than_least_padding(tokens, align, num_buckets):
    padded = {
        name: sum(
            first_boundary(length, rule(np.array(tokens), align, num_buckets)) for length in tokens
        )
        for name, rule in BOUNDARY_RULES.items()
    }
    assert padded["least_padding"] == min(padded.values())


@pytest.mark.parametrize("name", BOUNDARY_RULES)
@given(tokens=lengths(max_rows=60, min_tokens=1), num_buckets=st.integers(1, 12))
def test_counted_lengths_give_the_boundaries_of_the_rows(name, tokens, num_buckets):
    distinct = list(dict.fromkeys(tokens))
    counts = np.array([tokens.count(length) for length in distinct])
    rule = BOUNDARY_RULES[name]
    by_counts = rule(np.array(distinct), 8, num_buckets, counts)
    assert by_counts == rule(np.array(tokens), 8, num_buckets)


def test_quantiles_hold_equal_rows_and_equal_tokens_equal_tokens():
    tokens = np.array(skewed_tokens(20_000, longest=10**6))
    by_rows = np.searchsorted(BOUNDARY_RULES["quantile"](tokens, 1, 8), tokens)
    assert np.bincount(by_rows) / len(tokens) == pytest.approx([1 / 8] * 8, abs=0.005)
    by_tokens = np.searchsorted(BOUNDARY_RULES["equal_tokens"](tokens, 1, 8), tokens)
    shares = np.bincount(by_tokens, weights=tokens) / tokens.sum()
    assert shares == pytest.approx([1 / 8] * 8, abs=0.005)

"""Memory limits as users write them."""

from __future__ import annotations

import psutil
import pytest

from tuner.errors import BadInputError
from tuner.trial.limits import machine_memory_bytes, parse_memory_limit


@pytest.mark.parametrize(
    ("text", "limit_bytes"),
    [
        ("12GB", 12_000_000_000),
        ("500MB", 500_000_000),
        ("0.5GB", 500_000_000),
        ("1.5 gb", 1_500_000_000),
        (" 7mb ", 7_000_000),
    ],
)
def test_an_amount(text, limit_bytes):
    assert parse_memory_limit(text) == limit_bytes


@pytest.mark.parametrize(("text", "share"), [("90%", 0.9), ("100%", 1.0), ("12.5 %", 0.125)])
def test_a_share_of_the_machine(text, share):
    assert parse_memory_limit(text) == pytest.approx(share * machine_memory_bytes(), abs=1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12",
        "GB",
        "-1GB",
        "0GB",
        "0%",
        "0.0MB",
        "101%",
        "1e3MB",
        "1TB",
        "12GB!",
        "9 0%",
        "nan%",
    ],
)
def test_anything_else_is_refused_with_the_value_and_a_way_out(text):
    with pytest.raises(BadInputError) as caught:
        parse_memory_limit(text)
    assert caught.value.problem.endswith(f"(got {text!r})")
    assert "90%" in caught.value.fix


def test_the_machine_has_memory_and_not_more_than_it_has():
    assert 0 < machine_memory_bytes() <= psutil.virtual_memory().total

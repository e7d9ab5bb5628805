from __future__ import annotations

import pytest

from tuner.diagnose.finding import Finding, finding_of_error, worst_of
from tuner.errors import BadInputError


@pytest.mark.parametrize(
    ("severities", "worst"),
    [
        ([], "ok"),
        (["ok", "note"], "note"),
        (["warning", "ok", "note"], "warning"),
        (["ok", "error", "warning"], "error"),
    ],
)
def test_the_worst_finding_decides(severities, worst):
    findings = [Finding(name="x", severity=severity, what="x") for severity in severities]
    assert worst_of(findings) == worst


def test_an_error_of_the_input_is_a_finding_with_its_way_out():
    error = BadInputError("no such file: x.yaml", fix="check the path")
    assert finding_of_error(error, name="x", why="y") == Finding(
        name="x", severity="error", what="no such file: x.yaml", why="y", fix="check the path"
    )
    at = finding_of_error(error, name="x", why="y", place="data.path")
    assert at.what == "data.path: no such file: x.yaml"

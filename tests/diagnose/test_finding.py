from __future__ import annotations

import pytest

from tuner.diagnose.finding import Finding, worst_of


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

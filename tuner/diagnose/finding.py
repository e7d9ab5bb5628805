"""The value that every diagnosis is made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tuner.errors import BadInputError

Severity = Literal["ok", "note", "warning", "error"]
"""ok: as it should be; note: worth knowing; warning: runs, but slower or at a risk; error: will
not run."""

SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warning", "error")
"""From the least to the most severe."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: Stable, for machines: lower case with hyphens, for example `numpy-2`.
        severity: How bad it is.
        what: What was found, in one line, with the values.
        why: Why it matters; may be empty if all is well.
        fix: What to do about it; empty if there is nothing to do.
    """

    name: str
    severity: Severity
    what: str
    why: str = ""
    fix: str = ""


def finding_of_error(error: BadInputError, *, name: str, why: str, place: str = "") -> Finding:
    """What is wrong with the input, as a finding: it will not run.

    Args:
        error: Gives what and fix.
        name: Of the finding.
        why: Of the finding.
        place: Stands before the problem; empty: the problem names its place itself.
    """
    what = f"{place}: {error.problem}" if place else error.problem
    return Finding(name=name, severity="error", what=what, why=why, fix=error.fix)


def worst_of(findings: Iterable[Finding]) -> Severity:
    """The highest severity; ok of none."""
    return max((finding.severity for finding in findings), key=SEVERITIES.index, default="ok")

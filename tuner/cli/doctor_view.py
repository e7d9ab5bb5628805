"""What `varseq-doctor` prints, for people and for machines."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Mapping, Sequence

from tabulate import tabulate

from tuner.diagnose.fallback import ProfileReport
from tuner.diagnose.finding import SEVERITIES, Finding, worst_of

MARKS = {"ok": "ok  ", "note": "note", "warning": "WARN", "error": "FAIL"}
WIDTH = 100
MOST_OPS = 15
"""Op types that are printed; JSON has all."""


def format_section(title: str, findings: Sequence[Finding], *, has_title: bool = True) -> str:
    """A title, and a line or a few for each finding.

    Args:
        title: Of the section.
        findings: Of it.
        has_title: False for the later lines of a section that is told bit by bit.
    """
    lines = [title] if has_title else []
    for finding in findings:
        lines += _wrapped(f"  {MARKS[finding.severity]}  ", finding.what)
        if finding.severity == "ok":
            continue
        if finding.why:
            lines += _wrapped("        why: ", finding.why)
        if finding.fix:
            lines += _wrapped("        do:  ", finding.fix)
    return "\n".join(lines)


def format_end(findings: Sequence[Finding]) -> str:
    """One line: how many of each severity."""
    worst = worst_of(findings)
    if worst == "ok":
        return "all is well"
    counts = [
        f"{number} {severity}{'s' if number > 1 else ''}"
        for severity in reversed(SEVERITIES[1:])
        if (number := sum(finding.severity == severity for finding in findings))
    ]
    return ", ".join(counts)


def to_json_text(sections: Mapping[str, Sequence[Finding]]) -> str:
    """The same for machines: sections, their findings, and the worst severity."""
    plain = {
        title: [dataclasses.asdict(finding) for finding in findings]
        for title, findings in sections.items()
    }
    worst = worst_of([finding for findings in sections.values() for finding in findings])
    return json.dumps({"worst": worst, "sections": plain}, indent=1, ensure_ascii=False)


def format_profile(report: ProfileReport) -> str:
    """Sources, the longest ops, findings, and a line that counts these."""
    parts = []
    if report.sources:
        rows = [
            (op.op_type, op.core, op.count, f"{op.total_s:.4f}", f"{100 * op.share:.1f} %")
            for op in report.ops[:MOST_OPS]
        ]
        parts.append("\n".join(f"read {source}" for source in report.sources))
        parts.append(tabulate(rows, headers=["op", "core", "calls", "seconds", "share"]))
    parts += [format_section("findings", report.findings), format_end(report.findings)]
    return "\n\n".join(parts)


def profile_to_json(report: ProfileReport) -> str:
    """The same for machines, with all op types."""
    plain = {
        "worst": worst_of(report.findings),
        "sources": [str(source) for source in report.sources],
        "total_s": report.total_s,
        "ops": [dataclasses.asdict(op) for op in report.ops],
        "findings": [dataclasses.asdict(finding) for finding in report.findings],
    }
    return json.dumps(plain, indent=1, ensure_ascii=False)


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [start]

"""Which ops fell back to a slow core, by the tables of a profile.

Under dynamic shapes an op that the device has no kernel for runs on AI_CPU, a few small ARM cores
of the NPU: without an error, and slower by orders of magnitude. A profile of a few steps shows it;
what is looked for stands in `profile_rules.py`. Rules for Ascend rest on documented tables and
were not run on a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.diagnose.finding import Finding
from tuner.diagnose.profile_rules import (
    find_on_ascend,
    find_on_cpu,
    find_on_host,
    largest_first,
    seconds_of,
)
from tuner.diagnose.profile_tables import (
    ASCEND_KINDS,
    CPU_KINDS,
    TableKind,
    TableRows,
    find_tables,
)
from tuner.diagnose.profile_totals import KernelTotals


@dataclass(frozen=True, kw_only=True)
class OpTime:
    """Time of one op type on one core.

    Attributes:
        op_type: As the profiler names it.
        core: AI_CPU, AI_CORE, AI_VECTOR_CORE, MIX_AIC, MIX_AIV, N/A, or what else the profiler
            says; CPU in a profile of a CPU.
        count: Calls.
        total_s: Seconds of all calls.
        share: Of the seconds of all ops, 0 to 1.
    """

    op_type: str
    core: str
    count: int
    total_s: float
    share: float


@dataclass(frozen=True, kw_only=True)
class ProfileReport:
    """What a profile says.

    Attributes:
        sources: Tables that the figures are from; empty if none could be read.
        total_s: Seconds of all ops, of all ranks together; ops that ran side by side count twice.
        ops: The longest first.
        findings: The most severe first.
    """

    sources: tuple[Path, ...]
    total_s: float
    ops: tuple[OpTime, ...]
    findings: tuple[Finding, ...]


def read_profile(folder: Path) -> ProfileReport:
    """Read the tables of a profile, or of several, anywhere below a folder.

    Of each profile one kind of table is read: kernel_details, else op_summary of msprof, else
    op_statistic, which has no shapes; on CPU cpu_op_type_info, else cpu_op_detail_info. Tables of
    Ascend come before those of the CPU, which then tell what ran on the host.

    Args:
        folder: For example the one given to `StepProfiler`.

    Returns:
        A report in any case; what could not be read is a finding.
    """
    device, host = _Read(), _Read()
    profiles = find_tables(folder)
    for tables in profiles:
        device.read_best(tables, ASCEND_KINDS)
        host.read_best(tables, CPU_KINDS)
    findings = [*device.findings, *host.findings, *_several(device, host)]
    if device.sources:
        findings += find_on_ascend(device.totals)
        findings += find_on_host(host.totals)
        return _report(device, findings)
    if host.sources:
        findings += find_on_cpu(host.totals)
        return _report(host, findings)
    findings.append(_nothing_read(folder, is_found=bool(profiles)))
    return _report(device, findings)


class _Read:
    """Tables of one device as they are read."""

    def __init__(self) -> None:
        self.totals = KernelTotals()
        self.sources: list[Path] = []
        self.num_profiles = 0
        self.findings: list[Finding] = []

    def read_best(self, tables: Mapping[str, Sequence[Path]], kinds: Sequence[TableKind]) -> None:
        """Read the first kind that has any rows."""
        for kind in kinds:
            before = len(self.sources)
            for path in tables.get(kind.name, ()):
                table = TableRows(path, kind)
                self.totals.add(table)
                self.findings += table.findings()
                if table.num_rows > table.bad_numbers:
                    self.sources.append(path)
            if len(self.sources) > before:
                self.num_profiles += 1
                return


def _report(read: _Read, findings: list[Finding]) -> ProfileReport:
    sums = read.totals.sums
    total_s = seconds_of(sums)
    counts: dict[tuple[str, str], tuple[int, float]] = {}
    for key, found in sums.items():
        count, us = counts.get((key.op_type, key.core), (0, 0.0))
        counts[key.op_type, key.core] = count + found.count, us + found.total_us
    ops = [
        OpTime(
            op_type=op_type,
            core=core,
            count=count,
            total_s=us * 1e-6,
            share=us * 1e-6 / total_s if total_s else 0.0,
        )
        for (op_type, core), (count, us) in counts.items()
    ]
    return ProfileReport(
        sources=tuple(read.sources),
        total_s=total_s,
        ops=tuple(sorted(ops, key=lambda op: (-op.total_s, op.op_type, op.core))),
        findings=largest_first(findings),
    )


def _several(device: _Read, host: _Read) -> list[Finding]:
    read = device if device.sources else host
    if read.num_profiles < 2:
        return []
    return [
        Finding(
            name="several-profiles",
            severity="note",
            what=f"{read.num_profiles} profiles are read as one",
            why="figures are sums over ranks, and over runs if the folder holds several",
            fix="to look at one of them, give its *_ascend_ms folder",
        )
    ]


def _nothing_read(folder: Path, *, is_found: bool) -> Finding:
    tables = "no table of the profile could be read" if is_found else "no profile"
    return Finding(
        name="no-profile",
        severity="error",
        what=f"{tables} below {folder}" if folder.is_dir() else f"no such folder: {folder}",
        why="kernel_details.csv or op_statistic.csv is needed, of a CPU cpu_op_type_info_*.csv",
        fix="profile a few steps, or analyse what was collected: "
        "mindspore.profiler.profiler.analyse(FOLDER)",
    )

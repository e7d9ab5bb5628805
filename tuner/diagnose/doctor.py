"""Everything that is looked at, in the order in which it is told."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tuner.config.schema import TrainConfig
from tuner.diagnose.cann import check_cann, read_cann
from tuner.diagnose.capability import (
    CapabilityResult,
    describe_capability,
    try_capabilities,
)
from tuner.diagnose.config_check import check_config
from tuner.diagnose.finding import Finding, Severity, finding_of_error, worst_of
from tuner.diagnose.host import check_host, read_host
from tuner.diagnose.variables import check_variables
from tuner.diagnose.versions import (
    InstalledPackages,
    check_versions,
    mindspore_version,
    read_installed,
)
from tuner.errors import BadInputError
from tuner.trial.record import Installation
from tuner.trial.runner import TrialRunner

OnSection = Callable[[str, Sequence[Finding]], None]
"""Told each section's title and findings as soon as they are there."""


@dataclass(kw_only=True)
class Examination:
    """All sections so far.

    Attributes:
        on_section: Told each.
        sections: Title -> findings.
    """

    on_section: OnSection
    sections: dict[str, list[Finding]] = field(default_factory=dict)

    def add(self, title: str, look: Callable[[], Iterable[Finding]]) -> None:
        """Look at one thing; whatever goes wrong in looking becomes a finding."""
        findings: list[Finding] = []
        try:
            findings.extend(look())
        except Exception as error:
            findings.append(_could_not_look(title, error))
        self.sections.setdefault(title, []).extend(findings)
        if findings:
            self.on_section(title, findings)

    @property
    def findings(self) -> list[Finding]:
        """Of all sections."""
        return [finding for found in self.sections.values() for finding in found]

    @property
    def worst(self) -> Severity:
        """The highest severity."""
        return worst_of(self.findings)


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What is to be looked at.

    Attributes:
        folder: Where results would go, and where the small steps write.
        device: As a config has it.
        config: To check; None: the machine alone.
        runs_steps: Whether small steps are run.
    """

    folder: Path
    device: str = "auto"
    config: TrainConfig | None = None
    runs_steps: bool = True


def examine(
    wishes: Wishes,
    runner: TrialRunner,
    step_folder: Path,
    on_section: OnSection,
    environment: Mapping[str, str] = os.environ,
) -> Examination:
    """Look at the machine, and at a config if there is one.

    Args:
        wishes: What is to be looked at.
        runner: Runs `capability_worker`.
        step_folder: For what the small steps write.
        on_section: Told each section as soon as it is there.
        environment: Of the process.
    """
    found = Examination(on_section=on_section)
    installed = _installed()
    host = read_host(wishes.folder)
    mindspore = mindspore_version(installed)
    has_npu = host.num_npus > 0
    found.add("versions", lambda: check_versions(installed))
    cann = read_cann(environment)
    found.add("CANN and driver", lambda: check_cann(cann, mindspore, has_npu=has_npu))
    found.add("environment variables", lambda: check_variables(environment))
    found.add("machine", lambda: check_host(host))
    installation = _start_mindspore(found, installed, runner, wishes.device)
    tried: list[CapabilityResult] = []
    if installation is not None and wishes.runs_steps:
        tried = _run_steps(found, runner, step_folder, wishes.device)
    config = wishes.config
    if config is not None:
        device = installation.device if installation else None
        versions = installation.versions if installation else {}
        found.add("config", lambda: check_config(config, host, device, versions, tuple(tried)))
    return found


def examine_shapes(
    found: Examination, config: TrainConfig, on_table: Callable[[str], None]
) -> None:
    """Run a config's model op by op, in this process; nothing where MindSpore is not installed.

    Args:
        found: Gets the findings as the section `shapes`.
        config: As it was loaded.
        on_table: Told what every Cell takes and gives, before the findings.
    """
    if mindspore_version(_installed()) is None:
        return

    def look() -> Sequence[Finding]:
        from tuner.diagnose.shape_trace import trace_config

        try:
            report = trace_config(config)
        except BadInputError as error:
            why = "the model cannot be run at its planned shapes"
            return [finding_of_error(error, name="shapes-not-traced", why=why)]
        on_table(report.table())
        return report.findings

    found.add("shapes", look)


def _installed() -> InstalledPackages:
    return read_installed((sys.version_info[0], sys.version_info[1], sys.version_info[2]))


def _start_mindspore(
    found: Examination, installed: InstalledPackages, runner: TrialRunner, device: str
) -> Installation | None:
    """What MindSpore says of itself when it starts; None if it does not."""
    if mindspore_version(installed) is None:
        return None
    started: list[Installation] = []

    def look() -> list[Finding]:
        try:
            started.append(runner.probe(device))
        except BadInputError as error:
            why = "nothing can be measured or trained"
            return [finding_of_error(error, name="mindspore-does-not-start", why=why)]
        version = started[0].versions.get("mindspore", "unknown")
        model = f" ({started[0].device_model})" if started[0].device_model else ""
        text = f"MindSpore {version} starts and takes {started[0].device}{model}"
        return [Finding(name="mindspore-starts", severity="ok", what=text)]

    found.add("MindSpore", look)
    return started[0] if started else None


def _run_steps(
    found: Examination, runner: TrialRunner, folder: Path, device: str
) -> list[CapabilityResult]:
    """A small step of each kind."""
    tried: list[CapabilityResult] = []

    def tell(result: CapabilityResult) -> None:
        tried.append(result)
        found.add("small steps", lambda: [describe_capability(result)])

    def look() -> list[Finding]:
        try_capabilities(runner, folder, device, tell)
        return []

    found.add("small steps", look)
    return tried


def _could_not_look(title: str, error: Exception) -> Finding:
    first_line = next(iter(str(error).splitlines()), "")
    return Finding(
        name="not-looked-at",
        severity="warning",
        what=f"{title}: {type(error).__name__}: {first_line[:300]}",
        why="this part could not be looked at",
        fix="mend what it says, or pass it over",
    )

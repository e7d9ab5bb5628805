"""CANN, the software below MindSpore on Ascend, and the driver below that.

From the documentation, not run: no Ascend machine was at hand. The files and their lines are those
that MindSpore's own check reads (`run_check/_check_version.py` of 2.10: `compiler/version.info`
below ASCEND_HOME_PATH, line `Version=`), and those of the toolkit's installer (`version.cfg`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.diagnose.finding import Finding
from tuner.diagnose.versions import leading_numbers

HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
"""Set by the toolkit's set_env.sh."""
USUAL_HOME = Path("/usr/local/Ascend/ascend-toolkit/latest")
DRIVER_FILE = Path("/usr/local/Ascend/driver/version.info")
MOST_BYTES = 1 << 20
"""Of a version file that is read; they have a few hundred."""

PAIRS: Mapping[tuple[int, int], tuple[str, ...]] = {
    (2, 7): ("8.2", "8.3", "8.5"),
    (2, 10): ("8.2", "8.3", "8.5", "9.0", "9.1"),
}
"""MindSpore -> leading numbers of the CANN that go with it. 2.7: install pages of 2.7.0 (8.2.RC1),
2.7.1 (8.3.RC1) and 2.7.2 (8.5.0); 2.10: the list in its own check. For others none was found."""


@dataclass(frozen=True, kw_only=True)
class Cann:
    """What there is of CANN.

    Attributes:
        home: Folder that it was looked for in; None: no variable is set and the usual one is not
            there.
        version: As its file says; None if no file could be read or none says one.
        problem: Why there is no version; empty if there is one, or no CANN at all.
        driver: Version of the driver; None if it has no readable file.
    """

    home: Path | None
    version: str | None
    problem: str = ""
    driver: str | None = None


def read_cann(
    environment: Mapping[str, str],
    usual_home: Path = USUAL_HOME,
    driver_file: Path = DRIVER_FILE,
) -> Cann:
    """Look for CANN and its driver; whatever the files hold, it comes back.

    Args:
        environment: Of the process.
        usual_home: Where the installer puts it.
        driver_file: Where the driver's installer says its version.
    """
    given = [Path(environment[name]) for name in HOME_VARIABLES if environment.get(name)]
    driver, _ = _version_in(driver_file)
    home = given[0] if given else (usual_home if _is_there(usual_home) else None)
    if home is None:
        return Cann(home=None, version=None, driver=driver)
    version, problem = _version_below(home)
    return Cann(home=home, version=version, problem=problem, driver=driver)


def check_cann(cann: Cann, mindspore: str | None, *, has_npu: bool) -> list[Finding]:
    """Whether CANN is whole and goes with MindSpore.

    Args:
        cann: What was read.
        mindspore: Version of MindSpore; None: not installed.
        has_npu: Whether the machine has devices of Ascend's.
    """
    if cann.home is None:
        return [_no_cann(has_npu)]
    if cann.version is None:
        return [_unreadable(cann)]
    return [_check_pair(cann.version, mindspore), *_check_driver(cann, has_npu)]


def _no_cann(has_npu: bool) -> Finding:
    if not has_npu:
        return Finding(
            name="cann-absent", severity="ok", what="no CANN and no NPU: a machine for CPU runs"
        )
    return Finding(
        name="cann-missing",
        severity="error",
        what="the machine has an NPU, but neither ASCEND_HOME_PATH is set nor is there "
        f"{USUAL_HOME}",
        why="MindSpore finds no Ascend device without CANN",
        fix="install the CANN toolkit, or source its set_env.sh in this shell",
    )


def _unreadable(cann: Cann) -> Finding:
    return Finding(
        name="cann-unreadable",
        severity="warning",
        what=f"CANN in {cann.home}: {cann.problem}",
        why="whether it goes with MindSpore cannot be said",
        fix="check ASCEND_HOME_PATH and the installation, or install the toolkit again",
    )


def _check_pair(version: str, mindspore: str | None) -> Finding:
    leading = leading_numbers(mindspore or "")
    known = PAIRS.get(leading) if leading else None
    if mindspore is None or known is None:
        other = f"MindSpore {mindspore}" if mindspore else "no MindSpore"
        return Finding(
            name="cann-pairing-unknown",
            severity="note",
            what=f"CANN {version} with {other}: no pairing table is known for it",
            why="another CANN than a release was built for shows in missing or failing operators",
            fix="compare with the installation page of your MindSpore release",
        )
    numbers = leading_numbers(version)
    if numbers is not None and f"{numbers[0]}.{numbers[1]}" in known:
        return Finding(name="cann", severity="ok", what=f"CANN {version} with {mindspore}")
    return Finding(
        name="cann-mismatch",
        severity="error",
        what=f"CANN {version}, but MindSpore {mindspore} goes with {', '.join(known)}",
        why="MindSpore only warns; operators are then missing or fail in the middle of a run",
        fix=f"install CANN {known[-1]} (or {', '.join(known[:-1])}), or the MindSpore that goes "
        "with this one",
    )


def _check_driver(cann: Cann, has_npu: bool) -> list[Finding]:
    if cann.driver is not None:
        return [Finding(name="driver", severity="ok", what=f"Ascend driver {cann.driver}")]
    if not has_npu:
        return []
    return [
        Finding(
            name="driver-unknown",
            severity="note",
            what=f"the driver's version cannot be read from {DRIVER_FILE}",
            why="CANN needs a driver of its own age or newer",
            fix="look at it with npu-smi info",
        )
    ]


def _version_below(home: Path) -> tuple[str | None, str]:
    """Version of the first file that says one, else why there is none."""
    if not _is_there(home):
        return None, "there is no such folder"
    problems = []
    for file in _version_files(home):
        version, problem = _version_in(file)
        if version is not None:
            return version, ""
        problems.append(problem)
    return None, next((problem for problem in problems if problem), "it has no version file")


def _version_files(home: Path) -> Sequence[Path]:
    infos: list[Path] = []
    with contextlib.suppress(OSError):
        infos = sorted(home.glob("*-linux/ascend_toolkit_install.info"))
    return [home / "compiler" / "version.info", home / "version.cfg", *infos]


def _version_in(file: Path) -> tuple[str | None, str]:
    """A version and no problem, or none and why; no problem either if there is no such file."""
    try:
        with file.open("rb") as stream:
            text = stream.read(MOST_BYTES).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"{file.name} cannot be read ({error.strerror})"
    # `Version=8.2.RC1`, `version=8.2.RC1`, or `toolkit_running_version=[7.7.0.1:8.2.RC1]`.
    plain = re.search(r"^\s*version\s*=\s*(\S+)", text, re.IGNORECASE | re.MULTILINE)
    running = re.search(r"_running_version\s*=\s*\[[^\]:]*:([^\]]+)\]", text)
    found = plain or running
    if found is None or leading_numbers(found.group(1)) is None:
        return None, f"{file.name} says no version"
    return found.group(1).strip(), ""


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False

"""Python, MindSpore and NumPy: versions that fit together, read without importing any of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from tuner.diagnose.finding import Finding

OLDEST_MINDSPORE = (2, 7)
NEWEST_MINDSPORE = (2, 10)
"""Releases that the package's requirements allow; both ends included."""

OLDEST_PYTHON = (3, 10)
NEWEST_PYTHON = (3, 12)
"""For which MindSpore of those releases has wheels; both ends included."""

MINDSPORE_PACKAGES = ("mindspore", "mindspore-ascend")
"""Names under which wheels of MindSpore were published."""

OTHER_PACKAGES = ("numpy", "optuna", "varseq-tuner")


@dataclass(frozen=True, kw_only=True)
class InstalledPackages:
    """What is installed, by the packages' own records.

    Attributes:
        python: Three numbers.
        versions: Name of a package -> its version; a package that is not there has no entry.
    """

    python: tuple[int, int, int]
    versions: Mapping[str, str]


def read_installed(python: tuple[int, int, int]) -> InstalledPackages:
    """Ask the records of installed packages; imports none of them.

    Args:
        python: As `sys.version_info` begins.
    """
    versions = {}
    for name in (*MINDSPORE_PACKAGES, *OTHER_PACKAGES):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return InstalledPackages(python=python, versions=versions)


def mindspore_version(installed: InstalledPackages) -> str | None:
    """Of the first package of MindSpore that is there; None without one."""
    found = [installed.versions.get(name) for name in MINDSPORE_PACKAGES]
    return next((version for version in found if version is not None), None)


def check_versions(installed: InstalledPackages) -> list[Finding]:
    """Whether these versions work together."""
    return [_check_python(installed.python), _check_mindspore(installed), _check_numpy(installed)]


def leading_numbers(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version, `2.7.0rc1` -> (2, 7); None of other text."""
    match = re.match(r"\s*v?(\d+)\.(\d+)", version)
    return (int(match.group(1)), int(match.group(2))) if match else None


def _check_python(python: tuple[int, int, int]) -> Finding:
    text = ".".join(map(str, python))
    if OLDEST_PYTHON <= python[:2] <= NEWEST_PYTHON:
        return Finding(name="python", severity="ok", what=f"Python {text}")
    return Finding(
        name="python-unsupported",
        severity="error",
        what=f"Python {text}; {_span(OLDEST_PYTHON, NEWEST_PYTHON)} are supported",
        why="MindSpore has no wheels for others",
        fix="make an environment with Python 3.11 and install there",
    )


def _check_mindspore(installed: InstalledPackages) -> Finding:
    version = mindspore_version(installed)
    if version is None:
        return Finding(
            name="mindspore-missing",
            severity="error",
            what="MindSpore is not installed in this environment",
            why="nothing can be measured or trained without it",
            fix="pip install mindspore (CPU), or the package of your CANN version on Ascend",
        )
    numbers = leading_numbers(version)
    if numbers is not None and OLDEST_MINDSPORE <= numbers <= NEWEST_MINDSPORE:
        return Finding(name="mindspore", severity="ok", what=f"MindSpore {version}")
    return Finding(
        name="mindspore-unsupported",
        severity="warning",
        what=f"MindSpore {version}; {_span(OLDEST_MINDSPORE, NEWEST_MINDSPORE)} are supported",
        why="graph modes, jit levels and private names change between releases",
        fix='pip install "mindspore>=2.7,<2.11"',
    )


def _check_numpy(installed: InstalledPackages) -> Finding:
    version = installed.versions.get("numpy")
    if version is None:
        return Finding(
            name="numpy-missing",
            severity="error",
            what="NumPy is not installed in this environment",
            why="MindSpore and varseq-tuner need it",
            fix='pip install "numpy>=1.25,<2"',
        )
    numbers = leading_numbers(version)
    if numbers is not None and numbers[0] >= 2:
        return Finding(
            name="numpy-2",
            severity="error",
            what=f"NumPy {version}, but MindSpore's wheels are compiled against 1.25",
            why="calls fail in odd places (SystemError in pyboost_reshape), and of two ranks one "
            "fails while the other hangs",
            fix='pip install "numpy>=1.25,<2"',
        )
    if numbers is not None and numbers < (1, 25):
        return Finding(
            name="numpy-old",
            severity="warning",
            what=f"NumPy {version}, older than the 1.25 that MindSpore asks for",
            why="MindSpore's wheels are compiled against 1.25",
            fix='pip install "numpy>=1.25,<2"',
        )
    return Finding(name="numpy", severity="ok", what=f"NumPy {version}")


def _span(first: tuple[int, int], last: tuple[int, int]) -> str:
    return f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"

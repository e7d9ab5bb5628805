from __future__ import annotations

import sys
from importlib import metadata

import pytest

from tuner.diagnose.versions import (
    InstalledPackages,
    check_versions,
    leading_numbers,
    mindspore_version,
    read_installed,
)


def installed(python=(3, 11, 7), **versions):
    whole = {"mindspore": "2.10.0", "numpy": "1.26.4", **versions}
    present = {name: version for name, version in whole.items() if version is not None}
    return InstalledPackages(python=python, versions=present)


def by_name(findings):
    return {finding.name: finding for finding in findings}


def test_what_fits_together_is_well():
    assert {finding.severity for finding in check_versions(installed())} == {"ok"}


@pytest.mark.parametrize(
    ("packages", "name", "severity"),
    [
        (installed(numpy="2.4.6"), "numpy-2", "error"),
        (installed(numpy="2.0.0rc1"), "numpy-2", "error"),
        (installed(numpy="1.24.4"), "numpy-old", "warning"),
        (installed(numpy=None), "numpy-missing", "error"),
        (installed(mindspore=None), "mindspore-missing", "error"),
        (installed(mindspore="2.6.0"), "mindspore-unsupported", "warning"),
        (installed(mindspore="2.11.0"), "mindspore-unsupported", "warning"),
        (installed(mindspore="nightly"), "mindspore-unsupported", "warning"),
        (installed(python=(3, 9, 18)), "python-unsupported", "error"),
        (installed(python=(3, 13, 0)), "python-unsupported", "error"),
    ],
)
def test_each_trap_is_named_with_a_way_out(packages, name, severity):
    found = by_name(check_versions(packages))
    assert found[name].severity == severity
    assert found[name].why and found[name].fix


def test_numpy_2_is_told_with_its_version_and_the_command():
    finding = by_name(check_versions(installed(numpy="2.4.6")))["numpy-2"]
    assert "2.4.6" in finding.what and 'pip install "numpy>=1.25,<2"' in finding.fix


@pytest.mark.parametrize("version", ["2.7.0", "2.7.0rc1", "2.9.1", "2.10.0"])
def test_supported_releases_are_both_ends_and_between(version):
    assert by_name(check_versions(installed(mindspore=version)))["mindspore"].severity == "ok"


def test_the_package_for_ascend_counts_too():
    packages = installed(mindspore=None, **{"mindspore-ascend": "2.7.1"})
    assert mindspore_version(packages) == "2.7.1"


def test_installed_packages_are_those_of_this_environment():
    found = read_installed((sys.version_info[0], sys.version_info[1], sys.version_info[2]))
    assert found.versions["numpy"] == metadata.version("numpy")
    assert found.python == sys.version_info[:3]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.10.0", (2, 10)), ("v8.5.0", (8, 5)), ("8.2.RC1", (8, 2)), ("x", None), ("", None)],
)
def test_leading_numbers(text, numbers):
    assert leading_numbers(text) == numbers

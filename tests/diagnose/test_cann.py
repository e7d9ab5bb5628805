"""Version files of CANN here are synthetic, made from the documented lines: no NPU was at hand."""

from __future__ import annotations

import os

import pytest

from tuner.diagnose.cann import Cann, check_cann, read_cann


def read(tmp_path, environment=None, driver=None):
    driver_file = tmp_path / "driver.info"
    if driver is not None:
        driver_file.write_text(driver)
    return read_cann(environment or {}, tmp_path / "usual", driver_file)


def write(home, name, text):
    file = home / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode() if isinstance(text, str) else text)


@pytest.mark.parametrize(
    ("name", "text", "version"),
    [
        ("compiler/version.info", "Version=8.3.RC1\nother=1\n", "8.3.RC1"),
        ("compiler/version.info", "# head\nversion = 8.5.0\n", "8.5.0"),
        ("version.cfg", "toolkit_running_version=[7.7.0.1.231:8.2.RC1]\n", "8.2.RC1"),
        ("x86_64-linux/ascend_toolkit_install.info", "version=8.2.RC1\npath=/x\n", "8.2.RC1"),
    ],
)
def test_every_documented_file_tells_the_version(tmp_path, name, text, version):
    write(tmp_path / "usual", name, text)
    assert read(tmp_path) == Cann(home=tmp_path / "usual", version=version)


def test_the_variable_comes_before_the_usual_place(tmp_path):
    write(tmp_path / "usual", "compiler/version.info", "Version=8.2.RC1\n")
    write(tmp_path / "mine", "compiler/version.info", "Version=9.0.0\n")
    environment = {"ASCEND_HOME_PATH": str(tmp_path / "mine")}
    assert read(tmp_path, environment).version == "9.0.0"


@pytest.mark.parametrize("text", ["", "no version here", b"\xff\xfe\x00Version", "Version=\n"])
def test_a_broken_file_is_a_finding(tmp_path, text):
    write(tmp_path / "usual", "compiler/version.info", text)
    cann = read(tmp_path)
    assert cann.version is None
    (finding,) = check_cann(cann, "2.10.0", has_npu=False)
    assert (finding.name, finding.severity) == ("cann-unreadable", "warning")
    assert "version.info says no version" in finding.what


def test_a_folder_in_place_of_the_file_and_a_missing_home_are_findings(tmp_path):
    (tmp_path / "usual" / "compiler" / "version.info").mkdir(parents=True)
    assert "cannot be read" in read(tmp_path).problem
    gone = read(tmp_path, {"ASCEND_HOME_PATH": str(tmp_path / "gone")})
    (finding,) = check_cann(gone, "2.10.0", has_npu=True)
    assert finding.name == "cann-unreadable" and "no such folder" in finding.what


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_folder_is_a_finding(tmp_path):
    write(tmp_path / "usual", "compiler/version.info", "Version=8.2.RC1\n")
    (tmp_path / "usual" / "compiler").chmod(0)
    try:
        assert "cannot be read" in read(tmp_path).problem
    finally:
        (tmp_path / "usual" / "compiler").chmod(0o755)


@pytest.mark.parametrize(
    ("cann", "mindspore", "name", "severity"),
    [
        ("8.2.RC1", "2.7.0", "cann", "ok"),
        ("8.5.0", "2.7.2", "cann", "ok"),
        ("9.1.0", "2.10.0", "cann", "ok"),
        ("8.0.0", "2.10.0", "cann-mismatch", "error"),
        ("9.0.0", "2.7.0", "cann-mismatch", "error"),
        ("8.5.0", "2.8.0", "cann-pairing-unknown", "note"),
        ("8.5.0", None, "cann-pairing-unknown", "note"),
    ],
)
def test_cann_and_mindspore_are_compared(tmp_path, cann, mindspore, name, severity):
    there = Cann(home=tmp_path, version=cann, driver="24.1.0")
    finding = check_cann(there, mindspore, has_npu=True)[0]
    assert (finding.name, finding.severity) == (name, severity)
    assert cann in finding.what


def test_a_wrong_cann_is_told_with_what_goes_with_it(tmp_path):
    finding = check_cann(Cann(home=tmp_path, version="8.0.0"), "2.7.0", has_npu=True)[0]
    assert "8.2, 8.3, 8.5" in finding.what and "install CANN 8.5" in finding.fix


def test_no_cann_is_well_without_an_npu_and_an_error_with_one(tmp_path):
    nothing = read(tmp_path)
    assert check_cann(nothing, "2.10.0", has_npu=False)[0].severity == "ok"
    assert check_cann(nothing, "2.10.0", has_npu=True)[0].name == "cann-missing"


def test_the_driver_is_told(tmp_path):
    write(tmp_path / "usual", "compiler/version.info", "Version=8.2.RC1\n")
    findings = check_cann(read(tmp_path, driver="Version=24.1.rc2\n"), "2.7.0", has_npu=True)
    assert findings[1].what == "Ascend driver 24.1.rc2"
    without = check_cann(read(tmp_path / "other"), "2.7.0", has_npu=True)
    assert without[0].name == "cann-missing"

from __future__ import annotations

import dataclasses

import pytest
from machine_case import Runner, host
from strategies import make_config

from tuner.diagnose import doctor
from tuner.diagnose.capability import CAPABILITIES
from tuner.diagnose.doctor import Examination, Wishes, examine, examine_shapes
from tuner.diagnose.finding import Finding
from tuner.diagnose.versions import InstalledPackages


@pytest.fixture
def well_machine(monkeypatch):
    packages = InstalledPackages(
        python=(3, 11, 7), versions={"mindspore": "2.10.0", "numpy": "1.26.4"}
    )
    monkeypatch.setattr(doctor, "read_installed", lambda python: packages)
    monkeypatch.setattr(doctor, "read_host", lambda folder: host(num_npus=0))
    return packages


def look(tmp_path, runner=None, environment=None, **wishes):
    told = []
    found = examine(
        Wishes(folder=tmp_path, **wishes),
        runner or Runner(),
        tmp_path,
        lambda title, findings: told.append((title, list(findings))),
        environment or {},
    )
    assert [finding for _, findings in told for finding in findings] == found.findings
    return found


def test_sections_come_in_order_and_whole(well_machine, tmp_path):
    found = look(tmp_path)
    assert list(found.sections) == [
        "versions", "CANN and driver", "environment variables", "machine", "MindSpore",
        "small steps",
    ]  # fmt: skip
    assert len(found.sections["small steps"]) == len(CAPABILITIES)
    assert found.worst == "note"


def test_without_mindspore_nothing_of_it_is_started(well_machine, tmp_path, monkeypatch):
    without = dataclasses.replace(well_machine, versions={"numpy": "1.26.4"})
    monkeypatch.setattr(doctor, "read_installed", lambda python: without)
    runner = Runner(refusal="it must not be asked")
    found = look(tmp_path, runner)
    assert "MindSpore" not in found.sections and runner.specs == []
    assert "mindspore-missing" in {finding.name for finding in found.findings}
    assert found.worst == "error"


def test_a_mindspore_that_does_not_start_is_told_with_its_words(well_machine, tmp_path):
    found = look(tmp_path, Runner(refusal="libgomp.so.1: cannot open shared object file"))
    (finding,) = found.sections["MindSpore"]
    assert finding.severity == "error" and "libgomp" in finding.what
    assert "small steps" not in found.sections


def test_small_steps_are_left_out_on_demand(well_machine, tmp_path):
    runner = Runner()
    assert "small steps" not in look(tmp_path, runner, runs_steps=False).sections
    assert runner.specs == []


def test_a_look_that_fails_is_a_finding_and_the_others_go_on(well_machine, tmp_path, monkeypatch):
    def broken(environment):
        raise UnicodeError("odd bytes")

    monkeypatch.setattr(doctor, "check_variables", broken)
    found = look(tmp_path)
    (finding,) = found.sections["environment variables"]
    assert (finding.name, finding.severity) == ("not-looked-at", "warning")
    assert "UnicodeError: odd bytes" in finding.what
    assert "small steps" in found.sections


def test_a_runner_that_cannot_write_is_a_finding(well_machine, tmp_path):
    class FullDisk(Runner):
        def run(self, spec, folder, on_measured=lambda shapes: False):
            raise OSError(28, "No space left on device")

    (finding,) = look(tmp_path, FullDisk()).sections["small steps"]
    assert "No space left" in finding.what


def test_findings_before_a_failure_are_kept():
    def look_at_two():
        yield Finding(name="first", severity="ok", what="x")
        raise ValueError("second")

    found = Examination(on_section=lambda title, findings: None)
    found.add("two", look_at_two)
    assert [finding.name for finding in found.findings] == ["first", "not-looked-at"]


def shapes_of(config):
    tables = []
    found = Examination(on_section=lambda title, findings: None)
    examine_shapes(found, config, tables.append)
    assert tables == []
    return found.sections


def test_a_model_that_cannot_be_traced_is_a_finding(well_machine, tmp_path):
    config = make_config({"data.path": str(tmp_path / "none.mindrecord")})
    (finding,) = shapes_of(config)["shapes"]
    assert (finding.name, finding.severity) == ("shapes-not-traced", "error")
    assert "none.mindrecord" in finding.what and finding.fix == "check the path"


def test_without_mindspore_no_model_is_traced(well_machine, monkeypatch):
    without = dataclasses.replace(well_machine, versions={"numpy": "1.26.4"})
    monkeypatch.setattr(doctor, "read_installed", lambda python: without)
    assert shapes_of(make_config()) == {}

from __future__ import annotations

import dataclasses

import pytest
from machine_case import host
from strategies import make_config
from tune_case import make_row, write_data

from tuner.config.schema import PredictionRecord, ProvenanceConfig
from tuner.data.record_files import open_mindrecord
from tuner.diagnose.capability import CAPABILITIES, CapabilityResult
from tuner.diagnose.config_check import check_config
from tuner.trial.record import TrialResult

VERSIONS = {"mindspore": "2.10.0", "numpy": "1.26.4"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.mindrecord"
    write_data(path, [make_row([1, 2, 3]), make_row([4, 5])])
    return path


def tuned_config(data, tmp_path, fingerprint=None, peak_bytes=10**9, device="CPU"):
    provenance = ProvenanceConfig(
        data_fingerprint=fingerprint or open_mindrecord(data).fingerprint,
        num_samples=2, device=device, versions=VERSIONS, study="x", trial=0, shapes=((2, 8),),
        prediction=PredictionRecord(
            estimated_run_s=1.0, estimated_real_tokens_per_s=1.0,
            estimated_steady_real_tokens_per_s=1.0, estimated_compile_s=1.0,
            effective_token_fraction=0.9, peak_bytes=peak_bytes,
        ),
    )  # fmt: skip
    changes = {"data.path": str(data), "train.out": str(tmp_path / "out")}
    return make_config(changes).model_copy(update={"provenance": provenance})


def found(config, device="CPU", versions=VERSIONS, tried=(), **machine):
    findings = check_config(config, host(**machine), device, versions, tried)
    return {finding.name: finding for finding in findings}


def test_a_config_where_it_was_tuned_is_well(data, tmp_path):
    findings = found(tuned_config(data, tmp_path))
    assert {finding.severity for finding in findings.values()} == {"ok"}


def test_other_data_is_told_with_both_fingerprints(data, tmp_path):
    finding = found(tuned_config(data, tmp_path, fingerprint="f" * 64))["config-other-data"]
    assert finding.severity == "error"
    assert "f" * 12 in finding.what and open_mindrecord(data).fingerprint[:12] in finding.what


def test_missing_data_columns_and_source_are_told(data, tmp_path):
    config = make_config({"data.path": str(tmp_path / "gone.mindrecord")})
    assert found(config)["config-data"].severity == "error"
    other = make_config({"data.path": str(data), "data.input_column": "ids"})
    assert "ids" in found(other)["config-data"].what
    source = make_config({"data.path": str(data), "model.source": str(tmp_path / "none")})
    assert found(source)["config-source"].severity == "error"


@pytest.mark.parametrize(
    ("changes", "name", "severity"),
    [
        ({"precision.compute_dtype": "bf16"}, "config-refused", "error"),
        ({"graph.jit_level": "O2"}, "config-refused", "error"),
        ({"graph.attention": "flash"}, "config-refused", "error"),
    ],
)
def test_what_this_device_does_not_take_is_told(data, changes, name, severity):
    assert found(make_config({"data.path": str(data), **changes}))[name].severity == severity


def test_another_device_and_other_versions_are_told(data, tmp_path):
    config = tuned_config(data, tmp_path, device="Ascend")
    findings = found(config, versions={**VERSIONS, "mindspore": "2.7.0"})
    assert findings["config-other-device"].severity == "warning"
    assert "mindspore 2.10.0, here 2.7.0" in findings["config-other-versions"].what


def test_a_machine_that_is_too_small_is_told(data, tmp_path):
    config = tuned_config(data, tmp_path, peak_bytes=20 * 10**9)
    finding = found(config, free_memory_bytes=8 * 10**9)["config-memory"]
    assert finding.severity == "warning" and "20.0 GB" in finding.what and "8.0 GB" in finding.what


def test_a_device_that_is_not_there_is_an_error(data, tmp_path):
    assert found(tuned_config(data, tmp_path), device=None)["config-device"].severity == "error"


def test_a_kind_of_step_that_does_not_work_here_is_told(data, tmp_path):
    broken = TrialResult(status="crashed", reason="killed by SIGSEGV")
    tried = tuple(CapabilityResult(capability=kind, result=broken) for kind in CAPABILITIES)
    dynamic = make_config({"data.path": str(data), "graph.mode": "dynamic"})
    assert "dynamic graph" in found(dynamic, tried=tried)["config-broken-kind"].what
    assert (
        "static graph"
        in found(tuned_config(data, tmp_path), tried=tried)["config-broken-kind"].what
    )


def test_a_folder_that_cannot_be_written_is_told(data, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tuner.diagnose.config_check.read_host",
        lambda folder: dataclasses.replace(host(), folder=folder, can_write=False),
    )
    assert found(tuned_config(data, tmp_path))["disk-read-only"].severity == "error"

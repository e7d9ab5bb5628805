from __future__ import annotations

import pytest
from machine_case import Runner

from tuner.diagnose.capability import (
    CAPABILITIES,
    WORKER_COMMAND,
    Capability,
    describe_capability,
    try_capabilities,
)
from tuner.trial.runner import ProcessRunner


def tried_with(fails, tmp_path):
    results = []
    try_capabilities(Runner(fails), tmp_path, "cpu", results.append)
    return results


def test_every_kind_is_tried_once_and_told_at_once(tmp_path):
    runner, told = Runner(), []
    results = try_capabilities(runner, tmp_path, "cpu", told.append)
    assert told == results
    assert [item.capability for item in results] == list(CAPABILITIES)
    configs = [spec.config for spec in runner.specs]
    assert {config.device for config in configs} == {"cpu"}
    assert {config.graph.mode for config in configs} == {"static", "dynamic"}
    assert {config.graph.jit_level for config in configs} == {"O0", "O1", "O2"}
    assert {config.precision.compute_dtype for config in configs} == {"fp32", "fp16", "bf16"}


def test_what_works_is_told_with_time_and_memory(tmp_path):
    findings = [describe_capability(item) for item in tried_with(lambda config: None, tmp_path)]
    assert {finding.severity for finding in findings} == {"ok"}
    # The hidden cost: 0.02 + 1.3e-4 * 64 + 2.8e-7 * 64 * 32 seconds, and 5 of compile.
    assert findings[0].what.startswith(
        "static graph, O0, fp32: works, first call 5.0 s, step 28.9"
    )
    assert "MB (made up)" in findings[0].what


@pytest.mark.parametrize(
    ("failure", "severities"),
    [
        (("refused", "needs Ascend"), {"note"}),
        (("crashed", "killed by SIGSEGV"), {"error", "warning"}),
        (("timeout", "over the time limit of 40 s"), {"error", "warning"}),
    ],
)
def test_what_does_not_work_is_told_with_its_reason(tmp_path, failure, severities):
    findings = [describe_capability(item) for item in tried_with(lambda config: failure, tmp_path)]
    assert {finding.severity for finding in findings} == severities
    assert all(failure[1] in finding.what + finding.why for finding in findings)


def test_only_what_everything_needs_is_an_error(tmp_path):
    def fails(config):
        return ("crashed", "x") if config.graph.mode == "dynamic" else None

    found = {item.name: item for item in map(describe_capability, tried_with(fails, tmp_path))}
    assert found["works-dynamic-graph-o0-fp32"].severity == "warning"
    assert found["works-static-graph-o0-fp32"].severity == "ok"


@pytest.mark.mindspore
def test_real_steps_run_here(tmp_path):
    kinds = (
        CAPABILITIES[0],
        Capability(name="bf16", changes={"precision.compute_dtype": "bf16"}),
        Capability(name="O2", changes={"graph.jit_level": "O2"}),
    )
    static, bf16, level = try_capabilities(
        ProcessRunner(WORKER_COMMAND), tmp_path, "cpu", lambda result: None, kinds
    )
    assert static.works and static.result.shapes[0].step_s > 0
    assert static.result.memory_kind == "resident set of the process"
    assert (bf16.result.status, level.result.status) == ("refused", "refused")
    assert "bf16 needs Ascend" in bf16.result.reason and "O2 needs Ascend" in level.result.reason

from __future__ import annotations

import pytest

from tuner.diagnose.variables import CHECKS, check_variables


def test_nothing_set_is_well():
    assert [finding.severity for finding in check_variables({"PATH": "/bin"})] == ["ok"]


@pytest.mark.parametrize(
    ("name", "value", "finding", "severity"),
    [
        ("MS_COMPILER_CACHE_ENABLE", "1", "compiler-cache", "note"),
        ("MS_AUTO_DYNAMIC_SHAPE_ENABLE", "1", "auto-dynamic-shape", "warning"),
        ("MS_ALLOC_CONF", "enable_vmm:false", "vmm-off", "warning"),
        ("MS_ALLOC_CONF", "expandable_segments:True", "alloc-conf-unknown", "warning"),
        ("MS_ALLOC_CONF", "enable_vmm", "alloc-conf-unknown", "warning"),
        ("HCCL_CONNECT_TIMEOUT", "120", "hccl-connect-timeout", "warning"),
        ("HCCL_EXEC_TIMEOUT", "0", "hccl-exec-timeout", "warning"),
        ("HCCL_EXEC_TIMEOUT", "half an hour", "hccl-exec-timeout", "warning"),
        ("MS_ASCEND_CHECK_OVERFLOW_MODE", "SATURATION_MODE", "saturation-mode", "note"),
        ("MS_SIMULATION_LEVEL", "0", "simulation-level", "error"),
        ("ASCEND_LAUNCH_BLOCKING", "1", "launch-blocking", "warning"),
        ("RANK_TABLE_FILE", "/x/table.json", "rank-table", "note"),
        ("ASCEND_RT_VISIBLE_DEVICES", "0,1", "visible-devices", "note"),
        ("GLOG_v", "1", "verbose-log", "warning"),
    ],
)
def test_what_matters_is_told_with_its_value(name, value, finding, severity):
    (found,) = check_variables({name: value})
    assert (found.name, found.severity) == (finding, severity)
    assert value.split(":")[0] in found.what and found.why


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MS_COMPILER_CACHE_ENABLE", "0"),
        ("MS_AUTO_DYNAMIC_SHAPE_ENABLE", "0"),
        ("MS_ALLOC_CONF", "enable_vmm:true,vmm_align_size:2"),
        ("HCCL_CONNECT_TIMEOUT", "600"),
        ("HCCL_EXEC_TIMEOUT", "7200"),
        ("GLOG_v", "2"),
        ("ASCEND_LAUNCH_BLOCKING", "0"),
        ("MS_SIMULATION_LEVEL", ""),
    ],
)
def test_harmless_values_are_passed_over(name, value):
    assert name in CHECKS
    assert [finding.name for finding in check_variables({name: value})] == ["variables"]


def test_no_limit_is_the_default_limit():
    """CANN's default is 27 times 68 s; issue 54 of Ascend/pytorch: 0 changes nothing."""
    (found,) = check_variables({"HCCL_EXEC_TIMEOUT": "0"})
    assert f"{27 * 68:,} s" in found.what
    assert check_variables({"HCCL_EXEC_TIMEOUT": "0 "})[0].what == found.what

from __future__ import annotations

import os
import shutil

import psutil
import pytest
from machine_case import SPACIOUS, host

from tuner.diagnose.host import check_host, read_host


def test_a_large_machine_is_well():
    assert {finding.severity for finding in check_host(SPACIOUS)} == {"ok"}


@pytest.mark.parametrize(
    ("changes", "name", "severity"),
    [
        ({"free_memory_bytes": 2 * 10**9}, "memory-low", "warning"),
        ({"free_disk_bytes": 10**9}, "disk-low", "warning"),
        ({"free_disk_bytes": None}, "disk-unknown", "note"),
        ({"can_write": False}, "disk-read-only", "error"),
        ({"num_npus": 0}, "no-npu", "note"),
    ],
)
def test_what_is_short_is_told(changes, name, severity):
    found = {finding.name: finding for finding in check_host(host(**changes))}
    assert found[name].severity == severity and found[name].why


def test_the_system_is_asked(tmp_path):
    found = read_host(tmp_path / "not" / "there", tmp_path)
    assert found.num_cores == len(os.sched_getaffinity(0))
    assert 0 < found.free_memory_bytes <= found.memory_bytes <= psutil.virtual_memory().total
    free = shutil.disk_usage(tmp_path).free
    assert found.free_disk_bytes == pytest.approx(free, abs=2 * 10**9)
    assert found.can_write and found.num_npus == 0


def test_devices_are_counted_by_their_numbers(tmp_path):
    for name in ("davinci0", "davinci1", "davinci_manager", "null"):
        (tmp_path / name).touch()
    assert read_host(tmp_path, tmp_path).num_npus == 2
    assert read_host(tmp_path, tmp_path / "gone").num_npus == 0


def test_a_file_in_the_way_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    assert read_host(tmp_path / "file" / "below").can_write

"""The machine itself: cores, memory, disk, devices."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from tuner.diagnose.finding import Finding
from tuner.trial.limits import machine_memory_bytes

LEAST_MEMORY_BYTES = 4 * 10**9
"""Below it a decoder of two layers with some static graphs does not fit."""
LEAST_DISK_BYTES = 5 * 10**9
"""Trials, checkpoints and kept graphs of a small study."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """What the system says of the machine.

    Attributes:
        num_cores: That this process may use, >= 1.
        memory_bytes: Physical, or the limit of the container where that is less.
        free_memory_bytes: That new programs can have.
        folder: Where results would go.
        free_disk_bytes: On the disk of that folder; None: it cannot be asked.
        can_write: Whether files can be made there.
        num_npus: Devices of Ascend's that the system shows.
    """

    num_cores: int
    memory_bytes: int
    free_memory_bytes: int
    folder: Path
    free_disk_bytes: int | None
    can_write: bool
    num_npus: int


def read_host(folder: Path, device_folder: Path = Path("/dev")) -> Host:
    """Ask the system.

    Args:
        folder: Where results would go; it need not be there yet.
        device_folder: Where the system shows devices.
    """
    total = machine_memory_bytes()
    there = _nearest(folder)
    return Host(
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=total,
        free_memory_bytes=min(total, int(psutil.virtual_memory().available)),
        folder=folder,
        free_disk_bytes=_free_bytes(there),
        can_write=os.access(there, os.W_OK | os.X_OK),
        num_npus=_count_npus(device_folder),
    )


def check_host(host: Host) -> list[Finding]:
    """Whether there is room to work."""
    return [_check_memory(host), _check_disk(host), _describe_devices(host)]


def _check_memory(host: Host) -> Finding:
    text = (
        f"{host.num_cores} cores, {host.free_memory_bytes / 1e9:.1f} of "
        f"{host.memory_bytes / 1e9:.1f} GB of memory free"
    )
    if host.free_memory_bytes >= LEAST_MEMORY_BYTES:
        return Finding(name="memory", severity="ok", what=text)
    return Finding(
        name="memory-low",
        severity="warning",
        what=text,
        why="every static graph keeps memory of its own, and a process that runs out is killed",
        fix="end other programs, or give varseq-tune a --memory-limit and fewer buckets",
    )


def _check_disk(host: Host) -> Finding:
    if not host.can_write:
        return Finding(
            name="disk-read-only",
            severity="error",
            what=f"nothing can be written to {host.folder}",
            why="results, checkpoints and trials go there",
            fix="choose another folder with --out, or mend its permissions",
        )
    if host.free_disk_bytes is None:
        return Finding(
            name="disk-unknown",
            severity="note",
            what=f"the free space of {host.folder} cannot be asked",
            why="a full disk ends a run",
        )
    text = f"{host.free_disk_bytes / 1e9:.1f} GB free for {host.folder}"
    if host.free_disk_bytes >= LEAST_DISK_BYTES:
        return Finding(name="disk", severity="ok", what=text)
    return Finding(
        name="disk-low",
        severity="warning",
        what=text,
        why="a full disk ends a run; checkpoints hold three times the weights",
        fix="make room, or choose another folder with --out",
    )


def _describe_devices(host: Host) -> Finding:
    if host.num_npus:
        return Finding(name="npus", severity="ok", what=f"{host.num_npus} Ascend devices in /dev")
    return Finding(
        name="no-npu",
        severity="note",
        what="no Ascend device in /dev",
        why="everything runs on CPU here; timings and winners do not carry over to an NPU",
        fix="tune on the machine that trains",
    )


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above that is there."""
    for place in (folder.absolute(), *folder.absolute().parents):
        try:
            if place.is_dir():
                return place
        except OSError:
            continue
    return Path("/")


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _count_npus(device_folder: Path) -> int:
    try:
        names = os.listdir(device_folder)
    except OSError:
        return 0
    return sum(name.startswith("davinci") and name[len("davinci") :].isdigit() for name in names)

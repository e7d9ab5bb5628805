"""How much of the machine other programs take while a trial is timed."""

from __future__ import annotations

import contextlib
import os
import time

import psutil

IDLE = ("idle", "iowait", "steal", "guest", "guest_nice")
"""Fields of the machine's CPU times that are no work of a program here."""


class OtherWork:
    """Counts the CPU seconds of the whole machine less those of a process and of this one."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._machine_s = _busy_s()
        self._own_s = _own_s()
        self._child_s = 0.0

    def look(self, pid: int) -> None:
        """Note what a process has used so far; call it while it lives, the last time counts."""
        self._child_s = max(self._child_s, _process_s(pid))

    def cores(self) -> float:
        """Cores that others took on average since the start, >= 0."""
        passed_s = max(1e-3, time.monotonic() - self._started)
        used_s = self._child_s + _own_s() - self._own_s
        return max(0.0, (_busy_s() - self._machine_s - used_s) / passed_s)


def _busy_s() -> float:
    times = psutil.cpu_times()._asdict()
    return float(sum(value for name, value in times.items() if name not in IDLE))


def _own_s() -> float:
    """Of this process without its children: the watched one counts by itself."""
    times = os.times()
    return times.user + times.system


def _process_s(pid: int) -> float:
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)
    return 0.0

"""How much of the machine other programs take while a trial is timed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable

import psutil

IDLE = ("idle", "iowait", "steal", "guest", "guest_nice")
"""Fields of the machine's CPU times that are no work of a program here."""


class OtherWork:
    """Counts the CPU seconds of the whole machine less those of this process and its trials."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._machine_s = _busy_s()
        self._own_s = _own_s()
        self._first_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}

    def look(self, pids: Iterable[int]) -> None:
        """Note what trials have used so far; call it while they live, the last time counts.

        Args:
            pids: Of all trials of this process that live; what one has used before it is seen for
                the first time is not of this time.
        """
        for pid in pids:
            used_s = _process_s(pid)
            self._first_s.setdefault(pid, used_s)
            self._last_s[pid] = max(self._last_s.get(pid, used_s), used_s)

    def cores(self) -> float:
        """Cores that others took on average since the start, >= 0."""
        passed_s = max(1e-3, time.monotonic() - self._started)
        trials_s = sum(self._last_s.values()) - sum(self._first_s.values())
        used_s = trials_s + _own_s() - self._own_s
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

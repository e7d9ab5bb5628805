"""Whether the process that owns a trial is still there, on this machine or on another.

- On the same machine the process is looked up by its id and its start, so that another one with
  the same id is not taken for it. Containers share a host name but not their process ids: the
  boot and the process namespace are part of what "the same machine" means.
- On another machine only the owner's beat can tell: it is dead once the beat is older than
  `GRACE_S`. Clocks must agree to within half of that. An owner that was only suspended finds its
  trial taken over when it tells it, and loses that one measurement.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

BEAT_INTERVAL_S = 10.0
"""A beat is written this often at most."""

GRACE_S = 120.0
"""Age of a beat in seconds from which a process of another machine is taken for dead."""

# Counted from the third field of /proc/PID/stat, which follows the name in brackets.
STATE_FIELD = 0
START_FIELD = 19


def this_process() -> dict[str, Any]:
    """Machine, process id and start of this process, and the time in UTC seconds; plain JSON."""
    pid = os.getpid()
    return {"host": _machine(), "pid": pid, "start": _start_of(pid), "since": time.time()}


def is_this_process(owner: Mapping[str, Any]) -> bool:
    """Whether an owner is the process that asks."""
    here = this_process()
    return all(owner.get(key) == here[key] for key in ("host", "pid", "start"))


def is_alive(owner: Mapping[str, Any], beat_s: float | None) -> bool:
    """Whether the owner of a trial is still there.

    Args:
        owner: As `this_process` gave it in the process that took the trial.
        beat_s: UTC seconds of its last sign of life; None before the first.
    """
    if owner["host"] != _machine():
        return time.time() - (beat_s or owner["since"]) <= GRACE_S
    return _exists(owner["pid"]) and _start_of(owner["pid"]) in (owner["start"], "")


def _machine() -> str:
    return "/".join([platform.node(), _boot(), _process_namespace()])


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _process_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # Another user's.
        return True
    return True


def _start_of(pid: int) -> str:
    """When a process started; empty if that is hidden, `gone` if it is no more."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        # A killed process stays in the table until its parent has asked for its end.
        return "gone" if fields[STATE_FIELD] in "ZX" else fields[START_FIELD]
    except OSError:
        pass
    try:
        return str(round(psutil.Process(pid).create_time()))
    except psutil.Error:
        return ""

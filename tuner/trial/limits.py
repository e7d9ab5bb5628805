"""How much memory a trial may take."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

from tuner.errors import BadInputError

CGROUP_LIMIT_FILES = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
UNITS = {"MB": 10**6, "GB": 10**9}


def machine_memory_bytes() -> int:
    """Memory that this process may use: the machine's, or its container's if that is less."""
    total = int(psutil.virtual_memory().total)
    for file in CGROUP_LIMIT_FILES:
        try:
            total = min(total, int(file.read_text()))
        except (OSError, ValueError):
            # No such file, or the word "max": no limit from there.
            continue
    return total


def parse_memory_limit(text: str) -> int:
    """Turn `12GB`, `500MB` or `90%` (of the machine) into bytes.

    Raises:
        BadInputError: none of these, or not above 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|MB|%)", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) <= 0 or (match[2] == "%" and float(match[1]) > 100):
        raise BadInputError(
            f"--memory-limit must be an amount such as 12GB, 500MB or 90% (got {text!r})",
            fix="leave it out for 90% of this machine",
        )
    if match[2] == "%":
        return int(float(match[1]) / 100 * machine_memory_bytes())
    return int(float(match[1]) * UNITS[match[2].upper()])

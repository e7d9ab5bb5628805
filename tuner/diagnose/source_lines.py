"""The line of a model's source at which a forward breaks.

Op by op MindSpore only queues what it is told: shapes are inferred later, and an error is raised
wherever a value is waited for, a few lines or a few Cells on. No setting changes that for the
inference of shapes (2.10, CPU: neither `ms.runtime.launch_blocking` nor the context's
`pynative_synchronize`). So Python's own tracing waits for the device at every line of code that
is not a library's, which is slow and exact.
"""

from __future__ import annotations

import functools
import linecache
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import mindspore as ms
import numpy as np

LIBRARIES = tuple(
    Path(place).parent for place in (ms.__file__, np.__file__, __file__) if place is not None
)
STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])


class LineWatch:
    """Knows the line at which an exception came up."""

    def __init__(self, wait: Callable[[], None]) -> None:
        """Watch nothing yet.

        Args:
            wait: Returns when all that was queued is done, and raises what went wrong with it.
        """
        self._wait = wait
        self._now: tuple[str, int] | None = None
        self._error: object = None
        self._broke_at: tuple[str, int] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread; another tool's tracing, as a debugger's, rests meanwhile."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def line_of(self, error: BaseException) -> tuple[str, str]:
        """Name of the file with the number of the line, and its text; empty if not known."""
        place = self._broke_at if error is self._error else self._now
        if place is None:
            return "", ""
        name, number = place
        return f"{Path(name).name}:{number}", linecache.getline(name, number).strip()

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return None if _is_of_library(frame.f_code.co_filename) else self._follow

    def _follow(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "exception":
            self._keep(argument[1])
            return self._follow
        try:
            self._wait()
        except Exception as error:
            self._keep(error)
            raise
        if event == "line":
            self._now = (frame.f_code.co_filename, frame.f_lineno)
        elif event == "return":
            # What the line that called does next belongs to that line.
            self._now = _line_in_source(frame.f_back)
        return self._follow

    def _keep(self, error: object) -> None:
        if error is not self._error:
            self._error, self._broke_at = error, self._now


def _line_in_source(frame: FrameType | None) -> tuple[str, int] | None:
    while frame is not None and _is_of_library(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


@functools.cache
def _is_of_library(name: str) -> bool:
    path = Path(name)
    if name.startswith("<") or any(map(path.is_relative_to, LIBRARIES)):
        return True
    # Packages of the user may be installed there too.
    return path.is_relative_to(STANDARD_LIBRARY) and "site-packages" not in path.parts

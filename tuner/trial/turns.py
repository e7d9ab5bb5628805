"""Processes that step in turn: while one times its steps the others wait.

A machine that others share is faster and slower for seconds or minutes on end. Processes that are
timed one after the other meet different speeds; those that take turns of a few seconds meet the
same. The turn is an exclusive lock on a file: a process that dies gives it up, whatever happened.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

LET_OTHERS_S = 0.02
"""Before one asks again: the kernel wakes those that wait, the longest waiting first."""


class Turns:
    """One process's turns, or, without a file, a single one that never ends."""

    def __init__(self, file: Path | None, turn_s: float = 1.0) -> None:
        """Open the file; it is made where it is not there.

        Args:
            file: Whose lock is the turn; None: nobody else takes turns.
            turn_s: Seconds of a turn, at least; it ends with the step that runs then.
        """
        self.file = file
        self._file = None if file is None else os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        self._turn_s = turn_s
        self._taken = 0.0

    @property
    def are_shared(self) -> bool:
        """Whether others take turns too."""
        return self._file is not None

    def take(self) -> None:
        """Wait for a turn."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._taken = time.monotonic()

    def pass_on(self) -> None:
        """If this turn is over let others have theirs, and wait for the next."""
        if self._file is None or time.monotonic() - self._taken < self._turn_s:
            return
        self.give_up()
        time.sleep(LET_OTHERS_S)
        self.take()

    def give_up(self) -> None:
        """End the turn."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """End the turn for good."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

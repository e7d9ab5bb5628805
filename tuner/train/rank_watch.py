"""The signs of life of one rank, and its look at the others; a thread of its own.

Whoever finds that a rank is lost says so and ends its own process on the spot: it may be inside a
collective that never returns, which no exception reaches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import psutil

from tuner.errors import BadInputError
from tuner.train.msrun import MSRUN_MODULE
from tuner.train.rank_files import RankFolder, RankStatus
from tuner.train.rank_judge import FAILURE, STALL_S, Lost, RankJudge, Waiting
from tuner.train.world import World

BEAT_S = 1.0
EXIT_LOST = 3
"""Exit code of a rank that ended because another did."""

RANKS_PER_LOOK_S = 32
"""Ranks whose files a rank reads in a second: with more of them it looks less often."""

FIRST_FAILS_S = 3.0
"""Seconds in which the first rank will fail too, if it fails of the same."""

TELL_EVERY_S = 10.0
"""Seconds between two lines about who is waited for."""

LAUNCHER_VARIABLE = "VARSEQ_TUNER_LAUNCHER"
"""Process id of the varseq-train that started msrun on this machine."""


class RankWatch:
    """One rank among others. Enter it before anything is opened, and say `end` at the end."""

    def __init__(self, folder: RankFolder, world: World) -> None:
        """Prepare; nothing is written yet.

        Args:
            folder: That all ranks share.
            world: This rank.
        """
        self.folder = folder
        self.world = world
        self._status = RankStatus(rank=world.rank, host=socket.gethostname(), pid=os.getpid())
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._judge = RankJudge()
        self._has_met = False
        self._waiting_since: float | None = None
        self._longest_wait_s = 0.0
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def __enter__(self) -> RankWatch:
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.set()
        self._thread.join()

    @property
    def has_stepped(self) -> bool:
        """Whether a step was made or gone on from, so that there is something to save."""
        return self._status.steps > 0

    def at(self, place: str, step: int = 0, detail: str = "") -> None:
        """Say what is being done.

        Args:
            place: As of `RankStatus`.
            step: Steps done.
            detail: More, for people.
        """
        with self._lock:
            marks = self._status.marks + 1
            self._status = dataclasses.replace(
                self._status, place=place, steps=step, detail=detail, marks=marks
            )

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A block in which this rank waits for the others."""
        with self._lock:
            status = self._status
            self._status = dataclasses.replace(
                status, meetings=status.meetings + 1, marks=status.marks + 1
            )
            self._waiting_since = time.monotonic()
        try:
            yield
        except RuntimeError:
            # A collective fails when a rank is gone: meanwhile the thread finds out which one and
            # ends this process.
            self._closing.wait(STALL_S + 5 * BEAT_S)
            raise
        with self._lock:
            assert self._waiting_since is not None
            waited_s = time.monotonic() - self._waiting_since
            self._longest_wait_s = max(self._longest_wait_s, waited_s)
            self._waiting_since = None

    def met(self) -> None:
        """All ranks are there: from now on their files are of this run, and are looked at."""
        self._has_met = True

    def wait_for_others(
        self, notice: Callable[[str], None], stop_requested: Callable[[], bool]
    ) -> bool:
        """Say that this rank is ready, and wait until all are, however long that takes.

        Args:
            notice: Told now and then who is waited for.
            stop_requested: Asked all the time.

        Returns:
            False if a stop was requested.

        Raises:
            BadInputError: the files of a rank are not there.
        """
        self.at("ready")
        self._beat()
        told_at = time.monotonic()
        while late := [
            status for status in self._others() if status.place in ("start", "warm-up", FAILURE)
        ]:
            if stop_requested():
                return False
            if time.monotonic() - told_at > TELL_EVERY_S:
                told_at = time.monotonic()
                notice(f"waiting for the warm-up of {_listed(late)}")
            time.sleep(0.1)
        return True

    def fail(self, error: Exception) -> bool:
        """Tell the others that this rank fails, before it spends seconds on finding out why.

        Args:
            error: That ends it.

        Returns:
            Whether it is to find out: where ranks fail of the same, the first alone is.
        """
        self.at(FAILURE, self._status.steps, in_a_line(error))
        self._beat()
        ends_at = time.monotonic() + FIRST_FAILS_S
        while not self.world.is_first and time.monotonic() < ends_at:
            first = self.folder.read(0)
            if first is not None and (first.place == FAILURE or first.exit_code is not None):
                return False
            time.sleep(0.1)
        return True

    def wait_for_first(self, limit_s: float = math.inf) -> None:
        """Let the first rank end before this one; it has files to finish and lines to print.

        Args:
            limit_s: Seconds after which it is not waited for any longer, unless it is finding
                out why it fails.
        """
        ends_at = time.monotonic() + limit_s
        while not self.world.is_first:
            first = self.folder.read(0)
            if first is not None and first.exit_code is not None:
                return
            is_failing = first is not None and first.place == FAILURE
            if time.monotonic() >= ends_at and not is_failing:
                return
            time.sleep(0.1)

    def end(self, exit_code: int, message: str = "") -> None:
        """Tell the others that this rank ends, and how."""
        self.at("end", self._status.steps)
        with self._lock:
            self._status = dataclasses.replace(self._status, exit_code=exit_code, message=message)
        self._beat()

    def _others(self) -> list[RankStatus]:
        found = []
        for rank in range(self.world.size):
            status = self.folder.read(rank)
            if status is None:
                raise BadInputError(
                    f"rank {self.world.rank} finds no file of rank {rank} in {self.folder.path}",
                    fix="give all machines the same train.out, in a folder that they share",
                )
            if rank != self.world.rank:
                found.append(status)
        return found

    def _run(self) -> None:
        looks_at = 0.0
        while not self._closing.wait(BEAT_S):
            self._beat()
            if not has_launcher():
                _end_msrun()
                self._give_up("the varseq-train that started this rank is gone")
            if not self._has_met or time.monotonic() < looks_at:
                continue
            lost = self._look()
            looks_at = time.monotonic() + self.world.size / RANKS_PER_LOOK_S - BEAT_S
            if lost is not None:
                self._give_up(str(lost))

    def _beat(self) -> None:
        with self._lock:
            self._status = dataclasses.replace(self._status, beat=self._status.beat + 1)
            # A full disk or a share that is gone for a moment: the others will judge.
            with contextlib.suppress(OSError):
                self.folder.write(self._status)

    def _look(self) -> Lost | None:
        with self._lock:
            since, meeting = self._waiting_since, self._status.meetings
            has_ended = self._status.exit_code is not None
        if has_ended:
            return None
        waiting = None
        if since is not None:
            waiting = Waiting(
                rank=self.world.rank,
                meeting=meeting,
                since_s=since,
                longest_s=self._longest_wait_s,
            )
        others = {
            rank: self.folder.read(rank)
            for rank in range(self.world.size)
            if rank != self.world.rank
        }
        return self._judge.look(time.monotonic(), others, waiting)

    def _give_up(self, why: str) -> NoReturn:
        line = f"{why}; this rank ({self.world.rank}) ends too, go on with --resume"
        print(line, file=sys.stderr, flush=True)
        self.end(EXIT_LOST, why)
        os._exit(EXIT_LOST)


def in_a_line(error: Exception) -> str:
    """An error for people, in at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def has_launcher() -> bool:
    """Whether the varseq-train that started this process is still there, if one did."""
    number = os.environ.get(LAUNCHER_VARIABLE)
    return number is None or psutil.pid_exists(int(number))


def _end_msrun() -> None:
    """End msrun, this process's parent, and with it the scheduler, which shares its group.

    The scheduler cannot look after itself: it is in a call that keeps Python's lock.
    """
    with contextlib.suppress(psutil.Error, OSError):
        parent = psutil.Process(os.getppid())
        if MSRUN_MODULE in parent.cmdline():
            os.killpg(os.getpgid(parent.pid), signal.SIGKILL)


def _listed(statuses: list[RankStatus]) -> str:
    names = [
        f"rank {status.rank}" + (f" ({status.detail})" if status.detail else "")
        for status in statuses[:3]
    ]
    more = f" and {len(statuses) - 3} more" if len(statuses) > 3 else ""
    return ", ".join(names) + more

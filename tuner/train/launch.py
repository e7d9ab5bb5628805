"""Starting the ranks of a run with MindSpore's own launcher, and ending them together.

msrun starts a scheduler and the ranks of this machine, each in a session of its own, and ends all
of them a second after one ended badly. What it does not do is done here: signals go on to the
ranks, which save and end; what the first rank prints is shown; the rank that was lost is named
with its last step and the end of its log; and whatever is left of the processes is ended, so that
no port stays taken. On several machines the same command runs on each, with its --node-rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from tuner.errors import BadInputError
from tuner.train.msrun import LaunchPlan, free_port, msrun_command, msrun_environment, python_name
from tuner.train.rank_files import SCHEDULER_LOG, RankFolder, RankStatus, last_lines
from tuner.train.rank_judge import Lost, RankJudge
from tuner.train.rank_watch import EXIT_LOST, LAUNCHER_VARIABLE

POLL_S = 0.2
END_S = 10.0
"""Seconds that the others and msrun get once a rank has ended badly, or all have ended."""

DIED = "died"

SET_CHILD_SUBREAPER = 36
"""Of prctl(2): orphans below become children of this process."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def launch(
    plan: LaunchPlan,
    folder: RankFolder,
    arguments: Sequence[str],
    *,
    show: Callable[[str], None],
) -> int:
    """Run varseq-train on every rank of this machine until all have ended.

    Args:
        plan: The ranks.
        folder: Their files.
        arguments: Of varseq-train.
        show: Given what the first rank of this machine prints, and lines about the end.

    Returns:
        The exit code of the command.

    Raises:
        BadInputError: the folder cannot be written.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        for rank in plan.local_ranks:
            folder.remove(rank)
    except OSError as error:
        raise BadInputError(
            f"cannot write {folder.path}: {error.strerror or error}",
            fix="choose a train.out that can be written",
        ) from None
    _adopt_orphans()
    environment = msrun_environment(os.environ)
    program = [python_name(), "-m", "tuner.cli.train", *arguments]
    command = msrun_command(plan, plan.port or free_port(), folder.path, program)
    with _signals() as received, folder.msrun_log_of(plan.node_rank).open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environment, LAUNCHER_VARIABLE: str(os.getpid())},
            # Ctrl-C reaches this process alone: msrun would kill the ranks.
            start_new_session=True,
        )
        followed = _Launched(process, plan, folder, show)
        try:
            followed.follow(received)
        finally:
            followed.end_all()
        return followed.tell_end(received)


def _adopt_orphans() -> None:
    """Let ranks that msrun leaves behind become ours, so that they can be waited for (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Stop signals as they come, in a list."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Launched:
    """msrun and what it has started."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        plan: LaunchPlan,
        folder: RankFolder,
        show: Callable[[str], None],
    ) -> None:
        self._process = process
        self._plan = plan
        self._folder = folder
        self._show = show
        self._family: dict[int, psutil.Process] = {}
        self._judge = RankJudge()
        self._lost: Lost | None = None
        self._shown = 0

    def follow(self, received: Sequence[int]) -> None:
        """Return when all ranks have ended, or one badly and the others had time to."""
        num_passed_on = 0
        ends_at: float | None = None
        while self._process.poll() is None:
            self._look_at_family()
            self._show_log()
            if not all(map(self._pass_on, received[num_passed_on:])):
                # Nothing to save yet.
                return
            num_passed_on = len(received)
            if ends_at is None and self._is_ending():
                ends_at = time.monotonic() + END_S
            if ends_at is not None and (
                time.monotonic() > ends_at or not any(map(self._is_running, self._known()))
            ):
                break
            time.sleep(POLL_S)

    def end_all(self) -> None:
        """End what is left of msrun, its scheduler and its ranks."""
        self._look_at_family()
        for child in self._family.values():
            with contextlib.suppress(psutil.Error):
                # psutil knows by its start whether a process of this number is still the same.
                child.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        psutil.wait_procs(list(self._family.values()), timeout=END_S)
        self._show_log()

    def tell_end(self, received: Sequence[int]) -> int:
        """Say why it ended, where the first rank has not said so; the exit code."""
        known = self._known()
        bad = [status for status in known if status.exit_code]
        faults = [status for status in bad if status.exit_code != EXIT_LOST]
        has_all = all(status.exit_code is not None for status in known)
        if self._lost is None and has_all and len(known) == self._plan.workers:
            return self._tell_fault(faults or bad, received) if bad else 0
        if faults:
            return self._tell_fault(faults, received)
        if received:
            return 128 + received[0]
        self._tell_lost()
        return EXIT_LOST

    def _tell_fault(self, bad: Sequence[RankStatus], received: Sequence[int]) -> int:
        first = min(bad, key=lambda status: status.rank)
        code = first.exit_code or EXIT_LOST
        if first.rank != self._plan.local_ranks[0]:
            message = first.message or f"exit code {code}"
            self._show(f"varseq-train: rank {first.rank}: {message}\n")
            # The lines before its last one may say more, as of shapes that do not fit.
            self._show_tail(self._folder.log_of(first.rank), without=message)
        return 128 + received[0] if received and code > 128 else code

    def _tell_lost(self) -> None:
        reason, rank = self._why()
        self._show(f"varseq-train: error: {reason}; all ranks were ended, go on with --resume\n")
        logs = [self._folder.path / SCHEDULER_LOG, self._msrun_log]
        for log in logs if rank is None else [self._folder.log_of(rank)]:
            self._show_tail(log)

    def _show_tail(self, log: Path, without: str | None = None) -> None:
        lines = [line for line in last_lines(log) if without is None or without not in line]
        self._show("".join(f"  {log.name}: {line}\n" for line in lines))

    def _why(self) -> tuple[str, int | None]:
        """What went wrong, and the rank whose log may say more."""
        if self._lost is not None and self._lost.reason != DIED:
            return str(self._lost), self._lost.status.rank
        dead = self._first_dead()
        for status in self._known():
            lost_rank = self._lost.status.rank if self._lost else None
            if status.exit_code == EXIT_LOST and status.rank != lost_rank:
                return status.message, lost_rank
            if dead is not None and status.pid == dead[0]:
                code = dead[1]
                how = f"died of signal {-code}" if code < 0 else f"ended with exit code {code}"
                return str(Lost(status=status, reason=how)), status.rank
        if self._lost is not None:
            return str(self._lost), self._lost.status.rank
        return "msrun ended before its ranks had met", None

    def _first_dead(self) -> tuple[int, int] | None:
        """Process id and exit code of the rank for which msrun has ended the others."""
        text = "\n".join(last_lines(self._msrun_log))
        found = re.search(r"process (\d+) exit with exception. Error code: (-?\d+)", text)
        return None if found is None else (int(found[1]), int(found[2]))

    def _is_ending(self) -> bool:
        """Whether a rank is lost, or has ended badly, or all have ended."""
        known = self._known()
        dead = [status for status in known if not self._is_running(status)]
        for status in dead:
            if status.exit_code is None and self._lost is None:
                self._lost = Lost(status=status, reason=DIED)
                self._tell_machines(status)
        judged = self._judge.look(time.monotonic(), self._statuses())
        if judged is not None and self._lost is None and judged.status.exit_code is None:
            self._lost = judged
        return (
            self._lost is not None
            or any(status.exit_code for status in known)
            or len(dead) == self._plan.workers
            or self._first_dead() is not None
        )

    def _tell_machines(self, dead: RankStatus) -> None:
        """Other machines see the files of a rank only; it cannot write them any more."""
        if self._plan.nodes > 1:
            with contextlib.suppress(OSError):
                self._folder.write(dataclasses.replace(dead, exit_code=EXIT_LOST, message=DIED))

    @property
    def _msrun_log(self) -> Path:
        return self._folder.msrun_log_of(self._plan.node_rank)

    def _statuses(self) -> dict[int, RankStatus | None]:
        return {rank: self._folder.read(rank) for rank in self._plan.local_ranks}

    def _known(self) -> list[RankStatus]:
        return [status for status in self._statuses().values() if status is not None]

    def _is_running(self, status: RankStatus) -> bool:
        try:
            return psutil.Process(status.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def _look_at_family(self) -> None:
        """Looking walks the machine's processes, so it is left when all ranks are known."""
        ranks = {status.pid for status in self._known()}
        if len(ranks) == self._plan.workers and ranks <= self._family.keys():
            return
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                self._family.setdefault(child.pid, child)

    def _pass_on(self, number: int) -> bool:
        """Give a signal of the user to the ranks; False while they are not ready for one."""
        known = self._known()
        if len(known) < self._plan.workers or any(item.place == "start" for item in known):
            return False
        for status in known:
            child = self._family.get(status.pid)
            with contextlib.suppress(psutil.Error):
                if child is not None:
                    child.send_signal(number)
        return True

    def _show_log(self) -> None:
        """What the first rank of this machine has printed since."""
        with contextlib.suppress(OSError):
            with self._folder.log_of(self._plan.local_ranks[0]).open("rb") as log:
                log.seek(self._shown)
                content = log.read()
            self._shown += len(content)
            if content:
                self._show(content.decode("utf-8", errors="replace"))

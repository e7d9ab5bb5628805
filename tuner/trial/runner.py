"""Running a trial in a process of its own, with a time and a memory limit.

However the process ends, the answer is a TrialResult: the file it wrote if there is one, else what
we did to it (timeout, oom), else the signal or text it died with. What was measured before a
failure is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import psutil

from tuner.errors import OUT_OF_MEMORY_TEXT, BadInputError
from tuner.simulate.measurement import ShapeMeasurement
from tuner.trial.deviation import DeviationResult, DeviationSpec, read_deviation_result
from tuner.trial.folder import TrialFolder
from tuner.trial.other_work import OtherWork
from tuner.trial.past import read_measured
from tuner.trial.record import (
    Installation,
    Refusal,
    Status,
    TrialResult,
    TrialSpec,
    UnreadableRecordError,
    is_sound,
    parse_json,
    to_json,
)

WORKER_COMMAND = (sys.executable, "-m", "tuner.trial.worker")
DEVIATION_COMMAND = (sys.executable, "-m", "tuner.trial.deviation_worker")
# Tells the worker whose child it is: when it first looks, the tuner may be gone already.
PARENT_VARIABLE = "VARSEQ_TUNER_PID"
# Looking at memory walks the machine's processes (3 ms for 70 of them): often enough to stop
# growth in time, seldom enough not to disturb the timings. The end of a trial is seen sooner.
POLL_S = 0.2
PROBE_LIMIT_S = 120.0


OnMeasured = Callable[[tuple[ShapeMeasurement, ...]], bool]
"""Told all shapes measured so far whenever there is one more; True stops the trial as pruned."""


def go_on(shapes: tuple[ShapeMeasurement, ...]) -> bool:
    """An OnMeasured that never stops."""
    return False


class TrialRunner(Protocol):
    """Runs one trial; never raises for what a trial does."""

    def run(
        self, spec: TrialSpec, folder: TrialFolder, on_measured: OnMeasured = go_on
    ) -> TrialResult:
        """Measure; files go to the folder, which may hold those of an interrupted attempt.

        Args:
            spec: What to measure.
            folder: The trial's own.
            on_measured: Called while the trial runs, from the thread that called `run`.
        """

    def run_deviation(self, spec: DeviationSpec, folder: TrialFolder) -> DeviationResult:
        """A deviation run, as `run`: its failures are values."""

    def stop(self) -> None:
        """End what runs, from another thread, and let nothing start any more."""

    def probe(self, device: str) -> Installation:
        """What trials will run on, given the config's `device`."""


class ProcessRunner:
    """The real one: a fresh Python process for each trial."""

    def __init__(
        self,
        command: Sequence[str] = WORKER_COMMAND,
        deviation_command: Sequence[str] = DEVIATION_COMMAND,
    ) -> None:
        """Choose the processes.

        Args:
            command: Program and arguments; the trial's folder is added as the last one.
            deviation_command: The same for deviation runs.
        """
        self._command = tuple(command)
        self._deviation_command = tuple(deviation_command)
        self._stopped = threading.Event()
        self._alive: set[int] = set()

    def run(
        self, spec: TrialSpec, folder: TrialFolder, on_measured: OnMeasured = go_on
    ) -> TrialResult:
        """Run the worker until it ends, breaks a limit or is told to stop."""
        shutil.rmtree(folder.path, ignore_errors=True)
        folder.path.mkdir(parents=True)
        folder.spec.write_text(to_json(spec), encoding="utf-8")
        started = time.monotonic()
        progress = _Progress(folder, on_measured)
        watched = _watch(
            [*self._command, str(folder.path)], folder, spec, self._must_end(progress), self._alive
        )
        return _classify(watched, folder, spec, time.monotonic() - started)

    def run_deviation(self, spec: DeviationSpec, folder: TrialFolder) -> DeviationResult:
        """Compare precisions in a process until it ends, breaks a limit or is told to stop."""
        shutil.rmtree(folder.path, ignore_errors=True)
        folder.path.mkdir(parents=True)
        folder.spec.write_text(to_json(spec), encoding="utf-8")
        started = time.monotonic()
        command = [*self._deviation_command, str(folder.path)]
        watched = _watch(command, folder, spec, self._stopped.is_set, self._alive)
        death = _cause_of_death(watched, folder, spec)
        return read_deviation_result(folder, spec, death, time.monotonic() - started)

    def stop(self) -> None:
        """End running workers within a poll; later ones end as soon as they have started."""
        self._stopped.set()

    def _must_end(self, progress: _Progress) -> Callable[[], bool]:
        return lambda: self._stopped.is_set() or progress.says_stop()

    def probe(self, device: str) -> Installation:
        """Import MindSpore in a process and ask what it is.

        Raises:
            BadInputError: it cannot be imported, or has no such device.
        """
        try:
            done = subprocess.run(
                [*self._command, "--probe", device],
                capture_output=True,
                text=True,
                timeout=PROBE_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BadInputError(
                f"MindSpore did not start within {PROBE_LIMIT_S:.0f} s",
                fix="check the installation with: python -c 'import mindspore'",
            ) from None
        lines = done.stdout.strip().splitlines()
        answer = lines[-1] if lines else ""
        try:
            return parse_json(Installation, answer)
        except UnreadableRecordError:
            pass
        try:
            refusal = parse_json(Refusal, answer)
        except UnreadableRecordError:
            raise BadInputError(
                f"MindSpore does not start here: {_last_line(done.stderr)}",
                fix="check the installation with: python -c 'import mindspore'",
            ) from None
        raise BadInputError(refusal.problem, fix=refusal.fix)


class Limits(Protocol):
    """What ends a process that does not end by itself."""

    @property
    def time_limit_s(self) -> float:
        """Wall seconds of the process."""

    @property
    def memory_limit_bytes(self) -> int:
        """Resident set of the process and its children."""


class _Progress:
    """What a running trial has measured so far."""

    def __init__(self, folder: TrialFolder, on_measured: OnMeasured) -> None:
        self._folder = folder
        self._on_measured = on_measured
        self._size = 0
        self._num_shapes = 0

    def says_stop(self) -> bool:
        """Tell the caller what is new; whether it wants the trial to end."""
        try:
            size = self._folder.measured.stat().st_size
        except OSError:
            return False
        if size == self._size:
            return False
        self._size = size
        shapes = read_measured(self._folder)
        if len(shapes) == self._num_shapes:
            # A line that is still being written.
            return False
        self._num_shapes = len(shapes)
        return self._on_measured(shapes)


class _Watched:
    """How a process ended and what was seen of it."""

    def __init__(self, return_code: int, peak_bytes: int, broken_limit: Status | None) -> None:
        self.return_code = return_code
        self.peak_bytes = peak_bytes
        self.broken_limit = broken_limit
        self.other_cores = 0.0


def _watch(
    command: Sequence[str],
    folder: TrialFolder,
    spec: Limits,
    must_end: Callable[[], bool],
    alive: set[int],
) -> _Watched:
    """Run to its end; `alive` holds the processes of all trials of this runner meanwhile."""
    with folder.stdout.open("wb") as stdout, folder.stderr.open("wb") as stderr:
        # Its own session: Ctrl-C reaches the tuner alone, which then ends the whole group.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,
        )
        alive.add(process.pid)
        try:
            others = OtherWork()
            # It has used nothing when it starts.
            others.look((process.pid,))
            watched = _poll(process, spec, must_end, others, alive)
            watched.other_cores = others.cores()
            return watched
        finally:
            _end_group(process)
            alive.discard(process.pid)


def _poll(
    process: subprocess.Popen[bytes],
    spec: Limits,
    must_end: Callable[[], bool],
    others: OtherWork,
    alive: set[int],
) -> _Watched:
    deadline = time.monotonic() + spec.time_limit_s
    peak_bytes = 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Of many trials each is looked at the less often, and all together as often as one.
            return _Watched(process.wait(timeout=POLL_S * len(alive)), peak_bytes, None)
        others.look(tuple(alive))
        memory_bytes = _tree_memory_bytes(process.pid)
        peak_bytes = max(peak_bytes, memory_bytes)
        if memory_bytes > spec.memory_limit_bytes:
            return _Watched(-signal.SIGKILL, peak_bytes, "oom")
        if time.monotonic() > deadline:
            return _Watched(-signal.SIGKILL, peak_bytes, "timeout")
        if must_end():
            return _Watched(-signal.SIGKILL, peak_bytes, "pruned")


def _tree_memory_bytes(pid: int) -> int:
    """Resident bytes of a process and its children; 0 once it is gone."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0
    total = 0
    for member in family:
        with contextlib.suppress(psutil.Error):
            total += member.memory_info().rss
    return total


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _classify(
    watched: _Watched, folder: TrialFolder, spec: TrialSpec, wall_s: float
) -> TrialResult:
    result = _read_result(folder)
    if result is None:
        status, reason = _cause_of_death(watched, folder, spec)
        result = TrialResult(status=status, reason=reason)
    result = dataclasses.replace(result, wall_s=wall_s, other_cores=watched.other_cores)
    return result if result.status == "ok" else _with_measured(result, watched, folder)


def _read_result(folder: TrialFolder) -> TrialResult | None:
    """The answer that the trial wrote; None if there is none or it holds no result."""
    try:
        result = parse_json(TrialResult, folder.result.read_text(encoding="utf-8"))
    except (OSError, UnreadableRecordError, UnicodeDecodeError):
        return None
    return result if is_sound(result) else None


def _with_measured(result: TrialResult, watched: _Watched, folder: TrialFolder) -> TrialResult:
    """A failure with what was measured before it."""
    shapes = read_measured(folder)
    count = f"{len(shapes)} measured shape{'s' if len(shapes) > 1 else ''}"
    return dataclasses.replace(
        result,
        reason=f"{result.reason}, after {count}" if shapes else result.reason,
        shapes=shapes,
        peak_bytes=watched.peak_bytes,
        memory_kind="resident set of the process",
    )


def _cause_of_death(watched: _Watched, folder: TrialFolder, spec: Limits) -> tuple[Status, str]:
    if watched.broken_limit == "pruned":
        return "pruned", "it cannot become the best"
    if watched.broken_limit == "timeout":
        return "timeout", f"over the time limit of {spec.time_limit_s:g} s"
    if watched.broken_limit == "oom":
        limit_gb = spec.memory_limit_bytes / 1e9
        return "oom", f"{watched.peak_bytes / 1e9:.2f} GB, over the limit of {limit_gb:.2f} GB"
    text = folder.stderr.read_text(encoding="utf-8", errors="replace")[-20_000:]
    about_memory = [line for line in text.splitlines() if re.search(OUT_OF_MEMORY_TEXT, line)]
    if about_memory:
        return "oom", _last_line(about_memory[-1])
    if watched.return_code < 0:
        return "crashed", f"killed by {_signal_name(-watched.return_code)}"
    if watched.return_code > 0:
        return "crashed", f"exit code {watched.return_code}: {_last_line(text)}"
    if folder.result.exists():
        return "crashed", "it wrote an unreadable result"
    return "crashed", "it ended without a result"


def _signal_name(number: int) -> str:
    if number == signal.SIGKILL:
        return "SIGKILL (by the system, often for memory)"
    try:
        return signal.Signals(number).name
    except ValueError:
        # Real-time signals have no names.
        return f"signal {number}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"

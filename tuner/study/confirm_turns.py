"""A round of a confirmation: the candidates' processes live side by side and step in turn.

A machine that others share is faster and slower for seconds or minutes on end. One after the
other, candidates of a round meet different speeds, and a lead of a few percent is lost in it: over
three rounds of a minute each the run seconds of one plan scattered by 10 to 20 %. So each process
starts and visits its shapes while the others wait, and then all take turns of a few seconds, the
longer the more one has to step.

Where memory does not hold all processes, and on an NPU, of which each process reserves most of the
memory, the runs of a round follow each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tuner.simulate.measurement import ShapeMeasurement
from tuner.study.confirm_round import (
    InTurn,
    Round,
    Task,
    measure_whole,
    met_shapes,
    steady_seconds,
)
from tuner.study.outcome import Outcome
from tuner.study.proposal import ConfirmationRun
from tuner.study.setup import StudySetup
from tuner.trial.runner import TrialRunner
from tuner.trial.turns import Turns

BEAT_S = 1.0
"""Between two signs of life."""

LOOK_S = 0.1
"""Between two looks whether a process has visited its shapes."""

LONGEST_TURN_S = 3.0
"""Of the one that has the most to step: some ten steps; the machine hardly changes meanwhile."""

LEAST_TURN_S = 0.5
"""A step or two: what a process finds cold at the start of a turn is then little of it."""

MEMORY_SHARE = 0.8
"""Of the limit that all processes together may be expected to take."""


@dataclass(frozen=True, kw_only=True)
class TaskWatch:
    """Who is told about tasks.

    Attributes:
        on_start: Before the process of a run starts.
        on_end: What a run measured, as soon as its process has ended.
        beat: Told once a second at least of every run that has not ended.
        on_turns: Once all have visited their shapes: how many step in turn now, and for how many
            seconds, about.
    """

    on_start: Callable[[ConfirmationRun], None]
    on_end: Callable[[ConfirmationRun, Round], None]
    beat: Callable[[ConfirmationRun], object]
    on_turns: Callable[[int, float], None]


def may_step_in_turn(setup: StudySetup, outcomes: Collection[Outcome]) -> bool:
    """Whether the processes of these may live side by side.

    Args:
        setup: Device and limits.
        outcomes: Of planned configs.
    """
    together = sum(outcome.expected_peak_bytes for outcome in outcomes)
    fits = together <= MEMORY_SHARE * setup.memory_limit_bytes
    return setup.installation.device == "CPU" and fits


def measure_together(
    setup: StudySetup,
    runner: TrialRunner,
    tasks: Mapping[ConfirmationRun, Task],
    watch: TaskWatch,
) -> None:
    """Measure every task in a process of its own; if they are several they step in turn.

    Args:
        setup: Limits.
        runner: Runs them, in threads, so that signs of life go on meanwhile.
        tasks: What each run measures; at least one.
        watch: Told what happens, from this thread.
    """
    # Not in the study's folder, which may be on a network where files have no locks.
    with TemporaryDirectory(prefix="varseq-turns-") as folder:
        file = Path(folder) / "turns" if len(tasks) > 1 else None
        # Nobody steps before all have visited their shapes.
        gate = Turns(file)
        gate.take()
        try:
            _measure_all(setup, runner, tasks, watch, gate)
        finally:
            gate.close()


def _measure_all(
    setup: StudySetup,
    runner: TrialRunner,
    tasks: Mapping[ConfirmationRun, Task],
    watch: TaskWatch,
    gate: Turns,
) -> None:
    turns = _turns_of(tasks, setup.timed_s, gate.file)
    with ThreadPoolExecutor(len(tasks)) as pool:
        living: dict[ConfirmationRun, Future[Round] | None] = dict.fromkeys(tasks)
        try:
            for run, task in tasks.items():
                watch.on_start(run)
                visited = _Visited(len(met_shapes(task.outcome)))
                future = pool.submit(
                    measure_whole, setup, runner, task, turns.get(run), visited.look
                )
                living[run] = future
                while not (visited.event.wait(LOOK_S) or future.done()):
                    _tell(living, watch)
                _tell(living, watch)
            if turns and living:
                watch.on_turns(
                    len(living),
                    sum(steady_seconds(tasks[run].outcome, setup.timed_s) for run in living),
                )
            gate.give_up()
            while living:
                futures = [future for future in living.values() if future]
                wait(futures, timeout=BEAT_S, return_when=FIRST_COMPLETED)
                _tell(living, watch)
        except BaseException:
            # The pool waits for its threads: without this, for all measurements.
            runner.stop()
            gate.give_up()
            raise


def _turns_of(
    tasks: Mapping[ConfirmationRun, Task], timed_s: float, file: Path | None
) -> dict[ConfirmationRun, InTurn]:
    """Turns in proportion to what each has to step, so that all are through at about one time."""
    if file is None:
        return {}
    steady_s = {run: steady_seconds(task.outcome, timed_s) for run, task in tasks.items()}
    longest_s = max(steady_s.values())
    return {
        run: InTurn(
            file=file,
            num_processes=len(tasks),
            turn_s=max(LEAST_TURN_S, LONGEST_TURN_S * seconds / longest_s),
        )
        for run, seconds in steady_s.items()
    }


def _tell(living: dict[ConfirmationRun, Future[Round] | None], watch: TaskWatch) -> None:
    """Tell who lives or will; what has ended is told and taken out."""
    for run, future in list(living.items()):
        watch.beat(run)
        if future is not None and future.done():
            watch.on_end(run, future.result())
            del living[run]


class _Visited:
    """Whether a process has visited all of its shapes."""

    def __init__(self, num_shapes: int) -> None:
        self._num_shapes = num_shapes
        self.event = threading.Event()

    def look(self, shapes: tuple[ShapeMeasurement, ...]) -> bool:
        """Told what is measured; never ends the process."""
        if len(shapes) >= self._num_shapes:
            self.event.set()
        return False

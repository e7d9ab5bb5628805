"""The search: units of work side by side, until the wanted number of trials is told.

What is known about costs is shared by all trials: a trial measures the shapes of its plan that
carry the run and are least known, so that later trials cost little or nothing. Trials run on as
many devices as there are, each in a process of its own watched by a thread; several tuners may
work on one study, whose storage says who does what.
"""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from tuner.simulate.measurement import ShapeMeasurement
from tuner.study.baselines import OVERRIDES
from tuner.study.confirm import expected_seconds, is_late
from tuner.study.fill import FILLED, measure_filled
from tuner.study.knowledge import FINDINGS, Knowledge
from tuner.study.optuna_study import OptunaStudy
from tuner.study.outcome import Outcome, outcome_to_plain
from tuner.study.precision import SENSITIVITY, describe_findings, run_sensitivity
from tuner.study.propose import Proposer
from tuner.study.result import StudyResult
from tuner.study.sensitivity import PrecisionFindings, findings_to_plain
from tuner.study.setup import StudySetup
from tuner.study.unit import Unit, is_hopeless, measure_smaller, measure_unit, partial_estimate
from tuner.study.watch import StudyWatch
from tuner.trial.record import TrialResult
from tuner.trial.runner import TrialRunner

WAIT_S = 1.0
"""Between two signs of life, and between two looks for what others have told."""
RECOVERY_S = 30.0
"""Between two looks for trials of dead tuners."""
BUSY_CORES = 0.3
"""Cores that others may take on average before their work is worth a word."""

Answer = Outcome | PrecisionFindings


class Search:
    """One tuner's part in the search of a study."""

    def __init__(
        self, setup: StudySetup, runner: TrialRunner, watch: StudyWatch, study: OptunaStudy
    ) -> None:
        """Join a study.

        Args:
            setup: What it is about.
            runner: Runs trials, from several threads.
            watch: Told what happens.
            study: Of this setup.
        """
        self._setup = setup
        self._runner = runner
        self._watch = watch
        self._study = study
        self._knowledge = Knowledge(setup)
        self._last_recovery = 0.0
        self._has_warned = False

    def run(self) -> StudyResult:
        """Search, or go on searching.

        Returns:
            All outcomes, those of earlier starts and of other tuners included.
        """
        self._look()
        self._watch.on_result(self._knowledge.result())
        proposer = Proposer(self._setup, self._study, self._knowledge, self._watch.on_notice)
        running: dict[Future[Answer], Unit] = {}
        devices = list(range(self._setup.jobs))
        with ThreadPoolExecutor(self._setup.jobs) as pool:
            try:
                while True:
                    while devices and (unit := self._next(proposer)) is not None:
                        unit = dataclasses.replace(unit, device_id=devices.pop())
                        running[pool.submit(self._measure, unit)] = unit
                    if not running and not self._must_wait():
                        break
                    devices += self._collect(running)
            except BaseException:
                # The pool waits for its threads: without this, for whole trials.
                self._runner.stop()
                raise
        self._look()
        return self._knowledge.result()

    def _next(self, proposer: Proposer) -> Unit | None:
        """The next unit that needs a process; what needs none is told on the way."""
        while not self._is_late():
            self._look()
            unit = proposer.next()
            if unit is None:
                return None
            self._watch.on_trial(unit.number, unit.config)
            if unit.needs_process or _is_pass(unit):
                return unit
            self._tell(unit, unit.outcome or unit.finish(TrialResult(status="ok")))
        return None

    def _is_late(self) -> bool:
        """Whether the time that the confirmation leaves is up."""
        if self._setup.deadline_s is None:
            return False
        rounds, timed_s = self._setup.confirm_rounds, self._setup.timed_s
        needed_s = expected_seconds(self._knowledge.outcomes(), rounds, timed_s)
        return is_late(self._setup, needed_s)

    def _collect(self, running: dict[Future[Answer], Unit]) -> list[int]:
        """Tell what has ended, give signs of life for the rest; the devices that are free."""
        done, _ = wait(running, timeout=WAIT_S, return_when=FIRST_COMPLETED)
        free = []
        for future in done:
            unit = running.pop(future)
            free.append(unit.device_id)
            self._tell(unit, future.result())
        for unit in running.values():
            self._study.beat(unit.number)
        return free

    def _must_wait(self) -> bool:
        """Other tuners are still busy: with their trials the study is whole."""
        if self._is_late():
            return False
        if self._recover():
            return True
        if not self._study.running():
            return False
        time.sleep(WAIT_S)
        self._look()
        return True

    def _measure(self, unit: Unit) -> Answer:
        """In a thread of the pool."""
        if _is_pass(unit):
            dtype = (unit.baseline or "").removeprefix(SENSITIVITY)
            return run_sensitivity(self._setup, self._runner, dtype, unit.number, unit.device_id)
        book, best = self._knowledge.book, self._knowledge.best_speed()
        if unit.baseline == FILLED:
            return measure_filled(self._setup, self._runner, unit, book)

        def on_measured(measured: tuple[ShapeMeasurement, ...]) -> bool:
            estimate = partial_estimate(unit, measured, book)
            self._study.report(unit.number, len(measured), estimate.estimated_real_tokens_per_s)
            # With all of its shapes measured there is nothing left to save.
            is_whole = len(measured) == len(unit.shapes)
            return unit.baseline is None and not is_whole and is_hopeless(estimate, best)

        outcome = measure_unit(self._setup, self._runner, unit, on_measured)
        if unit.baseline in OVERRIDES:
            return measure_smaller(self._setup, self._runner, unit, outcome, book)
        return outcome

    def _tell(self, unit: Unit, answer: Answer) -> None:
        if isinstance(answer, PrecisionFindings):
            self._knowledge.keep_findings(answer)
            self._study.tell_pruned(unit.number, {FINDINGS: findings_to_plain(answer)})
            self._watch.on_notice(describe_findings(answer))
            return
        self._warn_if_busy(unit, answer)
        self._knowledge.keep(unit.number, answer)
        outcome = self._knowledge.outcome(unit.number)
        plain = outcome_to_plain(outcome)
        if outcome.real_tokens_per_s is not None:
            violation = outcome.precision.violation if outcome.precision else 0.0
            self._study.tell_measured(unit.number, outcome.real_tokens_per_s, plain, violation)
        elif outcome.status == "pruned":
            self._study.tell_pruned(unit.number, plain)
        else:
            self._study.tell_failed(unit.number, plain)
        self._watch.on_result(self._knowledge.result())

    def _warn_if_busy(self, unit: Unit, outcome: Outcome) -> None:
        if self._has_warned or outcome.other_cores < BUSY_CORES or self._setup.jobs > 1:
            return
        self._has_warned = True
        self._watch.on_notice(
            f"other programs took {outcome.other_cores:.1f} cores while trial {unit.number} was "
            "timed: its steps may be too slow. Let the machine be quiet while this runs"
        )

    def _look(self) -> None:
        """Learn what other tuners have told, and take up what dead ones have left."""
        if time.monotonic() - self._last_recovery > RECOVERY_S:
            self._recover()
        for told in self._study.told():
            self._knowledge.read(told)

    def _recover(self) -> bool:
        """Take up what dead tuners have left; whether there was any."""
        self._last_recovery = time.monotonic()
        numbers = self._study.recover()
        for number in numbers:
            self._watch.on_notice(f"trial {number} was interrupted and is run again")
        return bool(numbers)


def _is_pass(unit: Unit) -> bool:
    """Whether a unit looks for sensitive op groups, and measures no run."""
    return unit.baseline is not None and unit.baseline.startswith(SENSITIVITY)

"""A round whose processes step in turn: who waits for whom, and when there are no turns."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from search_case import COST, HUNDRED_ROWS, journal_of, search
from study_case import make_setup, make_space

from tuner.study.confirm import choose_candidates, run_confirmation
from tuner.study.confirm_turns import may_step_in_turn
from tuner.study.optuna_board import ConfirmationBoard
from tuner.study.unit import TIMED_STEPS
from tuner.trial.fake import FakeRunner
from tuner.trial.runner import go_on
from tuner.trial.turns import Turns

SPACE = make_space(strategy=["bucketed", "fixed"], num_buckets={"low": 2, "high": 3})
ROUNDS = 2
TURNS_OF_EACH = 3


class SteppingRunner(FakeRunner):
    """Visits at once, then takes some turns, in the manner of a worker; notes what happens."""

    def __init__(self, *, fails=lambda config: None):
        super().__init__(COST, fails=fails)
        self.events: list[tuple[str, str]] = []
        self.most_at_once = 0
        self._running = 0

    def run(self, spec, folder, on_measured=go_on):
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            self.events.append(("visits", folder.path.name))
            result = super().run(spec, folder, on_measured)
            if result.status == "ok" and spec.turns_file:
                self._step(spec, folder.path.name)
            self.events.append(("ends", folder.path.name))
            return result
        finally:
            self._running -= 1

    def _step(self, spec, name):
        turns = Turns(Path(spec.turns_file), turn_s=0.0)
        turns.take()
        for number in range(TURNS_OF_EACH):
            if number:
                turns.pass_on()
            self.events.append(("steps", name))
            time.sleep(0.005)
        turns.close()


@pytest.fixture
def setup(tmp_path):
    return make_setup(
        tmp_path,
        HUNDRED_ROWS,
        SPACE,
        base={"train.epochs": 300},
        trials=4,
        confirm_rounds=ROUNDS,
        memory_limit_bytes=10**12,
    )


@pytest.fixture
def candidates(setup):
    return choose_candidates(search(setup, FakeRunner(COST)).outcomes)


def board_of(setup):
    return ConfirmationBoard(journal_of(setup.folder.path), "confirmed")


def confirm(setup, runner, candidates, on_notice=lambda _: None):
    return run_confirmation(setup, runner, board_of(setup), candidates, on_notice)


def test_nobody_steps_before_all_have_visited_and_then_they_take_turns(setup, candidates):
    runner = SteppingRunner()
    found = confirm(setup, runner, candidates)
    assert found.is_complete and found.verdict is not None
    num = len(candidates)
    assert num >= 4 and runner.most_at_once == num
    per_round = len(runner.events) // ROUNDS
    assert per_round == num * (2 + TURNS_OF_EACH)
    for start in range(0, len(runner.events), per_round):
        events = runner.events[start : start + per_round]
        assert [kind for kind, _ in events[:num]] == ["visits"] * num
        steps = [name for kind, name in events if kind == "steps"]
        assert set(Counter(steps).values()) == {TURNS_OF_EACH}
        # The first turns are everybody's first: nobody comes again before.
        changes = sum(one != other for one, other in itertools.pairwise(steps))
        assert changes > num


def test_it_is_told_how_long_all_step_once_they_wait_for_each_other(setup, candidates):
    """30 s of steady steps each, which is more than four steps of each of their shapes."""
    notices = []
    confirm(
        dataclasses.replace(setup, confirm_s=30.0), SteppingRunner(), candidates, notices.append
    )
    num = len(candidates)
    told = f"all {num} step in turn now, for about {num / 2:.1f} minutes"
    assert [place for place, notice in enumerate(notices) if notice == told] == [
        round_number * (num + 1) + num for round_number in range(ROUNDS)
    ]
    assert len(notices) == ROUNDS * (num + 1)


def test_the_time_limit_is_of_all_whose_turns_one_waits_for(setup, candidates):
    runner = SteppingRunner()
    confirm(setup, runner, candidates)
    # A file of each round, which is gone with it.
    files = {spec.turns_file for spec in runner.specs}
    assert len(files) == ROUNDS and not any(Path(file).parent.exists() for file in files)
    for spec in runner.specs:
        assert spec.time_limit_s == setup.time_limit_s * len(candidates)


def test_turns_are_the_longer_the_more_there_is_to_step(setup, candidates):
    """By hand: of four steady steps of each shape, and of 3 s at least."""
    runner = SteppingRunner()
    confirm(dataclasses.replace(setup, confirm_s=3.0), runner, candidates)
    wanted_s = {}
    for item in candidates.values():
        config, counts = item.outcome.config, item.outcome.figures.shape_counts
        steps_s = item.outcome.estimate.estimated_run_s - item.outcome.estimate.estimated_compile_s
        mean_s = steps_s / config.train.epochs / sum(counts.values())
        wanted_s[config] = max(3.0, TIMED_STEPS * sum(map(bool, counts.values())) * mean_s)
    longest_s = max(wanted_s.values())
    for spec in runner.specs:
        assert spec.turn_s == pytest.approx(max(0.5, 3.0 * wanted_s[spec.config] / longest_s))


def test_a_failure_holds_nobody_up(setup, candidates):
    runner = SteppingRunner(
        fails=lambda config: ("crashed", "broken") if config.batching.strategy == "fixed" else None
    )
    found = confirm(setup, runner, candidates)
    assert found.is_complete and found.winner is not None
    assert {item.status for item in found.rounds} == {"ok", "crashed"}
    assert [kind for kind, _ in runner.events].count("steps") == TURNS_OF_EACH * sum(
        item.status == "ok" for item in found.rounds
    )


@pytest.mark.parametrize("change", ["memory", "device"])
def test_runs_follow_each_other_where_they_do_not_fit_side_by_side(setup, candidates, change):
    outcomes = [item.outcome for item in candidates.values()]
    assert may_step_in_turn(setup, outcomes)
    if change == "memory":
        together = sum(outcome.expected_peak_bytes for outcome in outcomes)
        fits = dataclasses.replace(setup, memory_limit_bytes=round(1.26 * together))
        assert may_step_in_turn(fits, outcomes)
        setup = dataclasses.replace(setup, memory_limit_bytes=round(1.24 * together))
    else:
        installation = dataclasses.replace(setup.installation, device="Ascend")
        setup = dataclasses.replace(setup, installation=installation)
    assert not may_step_in_turn(setup, outcomes)
    runner = SteppingRunner()
    found = confirm(setup, runner, candidates)
    assert found.is_complete and runner.most_at_once == 1
    assert {spec.turns_file for spec in runner.specs} == {None}
    assert {spec.time_limit_s for spec in runner.specs} == {setup.time_limit_s}


def test_no_round_begins_that_the_time_does_not_hold(setup, candidates):
    """A round is reckoned to take some 20 s of compiles alone."""
    short = dataclasses.replace(setup, deadline_s=time.monotonic() + 5.0)
    runner = SteppingRunner()
    assert confirm(short, runner, candidates).rounds == () and runner.specs == []
    long = dataclasses.replace(setup, deadline_s=time.monotonic() + 5000.0)
    assert confirm(long, runner, candidates).is_complete


def test_an_interrupt_ends_all_and_keeps_what_has_ended(setup, candidates):
    class Interrupted(SteppingRunner):
        def __init__(self):
            super().__init__()
            self.stopped = threading.Event()

        def stop(self):
            self.stopped.set()

        def run(self, spec, folder, on_measured=go_on):
            if len(self.specs) == 2:
                raise KeyboardInterrupt
            if self.specs:
                # The second visits, and waits for a turn that never comes.
                with self._lock:
                    self.specs.append(spec)
                on_measured((None,) * len(spec.shapes))
                self.stopped.wait(30)
            return FakeRunner.run(self, spec, folder, on_measured)

    runner = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        confirm(setup, runner, candidates)
    assert runner.stopped.is_set()
    results = board_of(setup).results()
    assert [item.candidate for item in results] == list(candidates)[:1]

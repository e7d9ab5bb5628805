"""A whole study: search, confirmation, and the same command once more."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter

import pytest
from search_case import COST, HUNDRED_ROWS, NUM_BASELINES, journal_of, measured_under
from study_case import Seen, make_setup, make_space

from tuner.simulate.measurement import CostKey
from tuner.study.choose import choose_best
from tuner.study.run import run_study
from tuner.study.watch import StudyWatch
from tuner.trial.fake import FakeRunner

SPACE = make_space(
    strategy=["bucketed", "dynamic", "fixed"],
    num_buckets={"low": 1, "high": 6},
    longest_rows_per_batch=[2, 4],
    graph_mode=["static", "dynamic"],
)


@pytest.fixture
def setup(tmp_path):
    return make_setup(
        tmp_path,
        HUNDRED_ROWS,
        SPACE,
        base={"train.epochs": 300},
        trials=6,
        confirm_rounds=2,
        memory_limit_bytes=10**12,
        storage=journal_of(tmp_path),
    )


class InterruptedRunner(FakeRunner):
    """As by Ctrl-C in the n-th process, of the search or of the confirmation."""

    def __init__(self, *arguments, in_process, **more):
        super().__init__(*arguments, **more)
        self._in_process = in_process

    def run(self, spec, folder, on_measured=lambda shapes: False):
        if len(self.specs) + 1 == self._in_process:
            raise KeyboardInterrupt
        return super().run(spec, folder, on_measured)


def test_the_winner_of_the_confirmation_is_the_best(setup):
    seen = Seen()
    runner = FakeRunner(COST, noise=0.01, noise_per_run=True)
    result = run_study(setup, runner, seen.watch)
    confirmation = result.confirmation
    assert confirmation is not None and confirmation.is_complete
    assert result.best == confirmation.winner
    assert len(confirmation.rounds) == 2 * len(confirmation.candidates)
    assert len([line for line in seen.notices if line.startswith("confirming (")]) == len(
        confirmation.rounds
    )
    # Figures of the search stay those of the search.
    assert max(measured_under(result).values()) == 1


def test_the_winner_may_be_another_than_the_best_estimate(setup):
    """The one that the search holds for the best fails as soon as it is measured whole."""
    without = dataclasses.replace(setup, confirm_rounds=0)
    first = run_study(without, FakeRunner(COST), Seen().watch)
    best = first.best
    assert best is not None and first.confirmation is None
    runner = FakeRunner(
        COST,
        fails=lambda config: ("oom", "9 GB") if config == best.outcome.config else None,
    )
    result = run_study(setup, runner, Seen().watch)
    assert choose_best(result.outcomes) == best
    assert result.best is not None and result.best.number != best.number


def test_the_same_command_runs_nothing_again_and_gives_the_same(setup):
    first = run_study(setup, FakeRunner(COST, noise=0.01, noise_per_run=True), Seen().watch)
    runner, seen = FakeRunner(COST, noise=0.01, noise_per_run=True, salt=(1,)), Seen()
    again = run_study(setup, runner, seen.watch)
    assert runner.specs == [] and seen.notices == []
    assert again.outcomes == first.outcomes and again.confirmation == first.confirmation
    # More rounds: those that there are count.
    more = run_study(dataclasses.replace(setup, confirm_rounds=3), runner, seen.watch)
    assert more.confirmation is not None and first.confirmation is not None
    assert len(runner.specs) == len(first.confirmation.candidates)
    assert more.confirmation.rounds[: len(first.confirmation.rounds)] == first.confirmation.rounds


def test_more_trials_confirm_again_only_if_the_candidates_are_others(setup):
    first = run_study(setup, FakeRunner(COST), Seen().watch)
    runner = FakeRunner(COST)
    more = run_study(dataclasses.replace(setup, trials=10), runner, Seen().watch)
    assert more.confirmation is not None and first.confirmation is not None
    assert len(more.outcomes) == NUM_BASELINES + 10
    if list(more.confirmation.candidates) == list(first.confirmation.candidates):
        assert more.confirmation.rounds == first.confirmation.rounds
    else:
        assert len(more.confirmation.rounds) == 2 * len(more.confirmation.candidates)
    # Without any round to run, what was confirmed is still known.
    silent = run_study(
        dataclasses.replace(setup, trials=10, confirm_rounds=0), FakeRunner(COST), Seen().watch
    )
    assert silent.confirmation is not None
    assert silent.confirmation.rounds == more.confirmation.rounds


@pytest.mark.parametrize("in_process", [1, 3, 5, 9, 12, 15])
def test_an_interrupt_anywhere_and_the_same_command_goes_on(setup, threads, in_process):
    whole = run_study(
        dataclasses.replace(setup, storage=f"{setup.storage}.other"),
        FakeRunner(COST),
        Seen().watch,
    )
    first = InterruptedRunner(COST, in_process=in_process)
    with pytest.raises(KeyboardInterrupt):
        run_study(setup, first, Seen().watch)
    assert set(threading.enumerate()) <= threads
    second = FakeRunner(COST)
    result = run_study(setup, second, Seen().watch)
    assert len(result.outcomes) == NUM_BASELINES + 6
    assert max(measured_under(result).values()) == 1
    confirmation = result.confirmation
    assert confirmation is not None and confirmation.is_complete
    pairs = Counter((item.candidate, item.number) for item in confirmation.rounds)
    assert set(pairs.values()) == {1} and len(pairs) == 2 * len(confirmation.candidates)
    # No process was run twice: search and rounds of both starts make up the whole.
    measured = [item for item in result.outcomes if item.outcome.measured]
    assert len(first.specs) + len(second.specs) == len(measured) + len(pairs)
    assert result.best is not None and whole.best is not None
    assert result.best.outcome.config == whole.best.outcome.config


def test_results_are_told_all_along_with_what_was_confirmed(setup):
    told = []
    watch = StudyWatch(
        on_notice=lambda line: None,
        on_trial=lambda number, config: None,
        on_result=told.append,
    )
    result = run_study(setup, FakeRunner(COST), watch)
    assert [len(item.outcomes) for item in told[:-1]] == list(range(len(result.outcomes) + 1))
    assert {item.confirmation for item in told[:-1]} == {None}
    assert told[-1].confirmation == result.confirmation
    assert told[-1].best == result.best


def test_a_deadline_before_the_confirmation_leaves_the_best_estimate(setup):
    late = dataclasses.replace(setup, deadline_s=time.monotonic() - 1.0)
    run_study(dataclasses.replace(setup, confirm_rounds=0), FakeRunner(COST), Seen().watch)
    runner = FakeRunner(COST)
    result = run_study(late, runner, Seen().watch)
    assert runner.specs == []
    assert result.best == choose_best(result.outcomes) is not None
    assert result.confirmation is None or result.confirmation.rounds == ()


def test_if_nothing_runs_there_is_no_confirmation(setup):
    runner = FakeRunner(COST, fails=lambda config: ("crashed", "no device"))
    result = run_study(setup, runner, Seen().watch)
    assert result.confirmation is None and result.best is None
    assert len(result.outcomes) == NUM_BASELINES + 6


def test_what_the_rounds_measured_is_known_like_what_trials_measured(setup):
    """Of every key the processes of its trials and of its rounds; the table stays the trials'."""
    result = run_study(setup, FakeRunner(COST, noise=0.01, noise_per_run=True), Seen().watch)
    confirmation = result.confirmation
    assert confirmation is not None
    for key in result.book.keys:
        of_trials = [
            item.outcome
            for item in result.outcomes
            if item.outcome.measured and CostKey.of(item.outcome.config, "CPU") == key
        ]
        of_rounds = [
            item
            for item in confirmation.rounds
            if CostKey.of(confirmation.candidates[item.candidate].outcome.config, "CPU") == key
        ]
        assert len(result.book.processes(key)) == len(of_trials) + len(of_rounds)
    best = result.best
    assert best is not None and best.outcome.estimate is not None
    # Every shape of the winner was measured in each round: nothing of it is foretold.
    assert best.outcome.estimate.measured_time_fraction == pytest.approx(1.0)
    costs = result.book.known(CostKey.of(best.outcome.config, "CPU"))
    assert set(best.outcome.shapes) <= set(costs.steps_s)

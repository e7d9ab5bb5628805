"""Several devices at a time, the time limit of a study, and what stops it."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
from search_case import (
    COST,
    HUNDRED_ROWS,
    NUM_BASELINES,
    TEN_ROWS,
    keys,
    measured_under,
    proposals,
    search,
)
from strategies import skewed_tokens
from study_case import Seen, make_setup, make_space

from tuner.simulate.measurement import CostKey
from tuner.study.confirm import choose_candidates, expected_seconds
from tuner.trial.fake import FakeRunner

SPACE = make_space(
    strategy=["bucketed", "dynamic", "fixed", "packed"],
    num_buckets={"low": 1, "high": 6},
    align=[8, 32],
    longest_rows_per_batch=[2, 4],
    graph_mode=["static", "dynamic"],
)


class SlowRunner(FakeRunner):
    """Takes a moment for every process, and keeps who ran beside whom.

    A process waits so long for another one beside it until there has been one: on a busy machine
    it would have ended before the next is planned.
    """

    def __init__(self, cost, *, seconds=0.02, company_s=0.0, fails_in=0, error=None, **more):
        super().__init__(cost, **more)
        self._seconds = seconds
        self._company_s = company_s
        self._had_company = threading.Event()
        self._fails_in = fails_in
        self._error = error or RuntimeError("broken")
        self._busy = {}
        self._guard = threading.Lock()
        self._stopped = threading.Event()
        self.most_at_a_time = 0
        self.started_at = []
        self.clashes = []

    def run(self, spec, folder, on_measured=lambda shapes: False):
        key = str(CostKey.of(spec.config, "CPU"))
        own = {(key, shape) for shape in spec.shapes}
        with self._guard:
            self.started_at.append(time.monotonic())
            if spec.device_id in self._busy:
                self.clashes.append(f"two on device {spec.device_id}")
            for other in self._busy.values():
                self.clashes += sorted(own & other)
            self._busy[spec.device_id] = own
            self.most_at_a_time = max(self.most_at_a_time, len(self._busy))
            if self.most_at_a_time > 1:
                self._had_company.set()
            fails = len(self.started_at) == self._fails_in
        try:
            if fails:
                raise self._error
            self._had_company.wait(self._company_s)
            self._stopped.wait(self._seconds)
            return super().run(spec, folder, on_measured)
        finally:
            with self._guard:
                del self._busy[spec.device_id]

    def stop(self):
        self._stopped.set()

    @property
    def was_stopped(self):
        return self._stopped.is_set()


def make(tmp_path, **more):
    tokens = skewed_tokens(400, seed=5, longest=700)
    more = {"trials": 12, "jobs": 2, "memory_limit_bytes": 10**12, **more}
    return make_setup(tmp_path, tokens, SPACE, base={"train.epochs": 200}, **more)


def test_two_trials_at_a_time_on_two_devices_and_never_the_same_shape(tmp_path):
    runner, seen = SlowRunner(COST, company_s=10.0), Seen()
    result = search(make(tmp_path), runner, seen)
    assert runner.most_at_a_time == 2
    assert {spec.device_id for spec in runner.specs} == {0, 1}
    assert runner.clashes == []
    assert max(measured_under(result).values()) == 1
    assert len(proposals(result)) == 12 and len(result.outcomes) == 12 + NUM_BASELINES
    assert [item.number for item in result.outcomes] == sorted(
        item.number for item in result.outcomes
    )
    assert seen.counts[-1] == len(result.outcomes)


@pytest.mark.parametrize("seed", range(2))
def test_no_config_runs_beside_itself(tmp_path, seed):
    """Few boundaries and many numbers of buckets: three at a time soon propose the same."""
    space = make_space(
        strategy=["bucketed"],
        num_buckets={"low": 2, "high": 12},
        longest_rows_per_batch=[2, 4],
    )
    seen = Seen()
    setup = make_setup(
        tmp_path,
        HUNDRED_ROWS,
        space,
        base={"train.epochs": 200},
        trials=12,
        jobs=3,
        seed=seed,
        memory_limit_bytes=10**12,
    )
    result = search(setup, SlowRunner(COST), seen)
    assert len(set(keys(proposals(result)))) == len(proposals(result)) == 8
    # Said once, not at every look for something to do.
    total = len(result.outcomes)
    assert seen.notices == [f"the space holds no more than {total} different configs"]


def test_one_job_runs_one_at_a_time_on_the_first_device(tmp_path):
    runner = SlowRunner(COST, seconds=0.0)
    search(make(tmp_path, jobs=1, trials=5), runner)
    assert runner.most_at_a_time == 1
    assert {spec.device_id for spec in runner.specs} == {0}


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("fails_in", [1, 2, 6])
def test_an_error_in_a_trials_thread_ends_the_study_and_what_runs(
    tmp_path, threads, jobs, fails_in
):
    runner = SlowRunner(COST, seconds=0.0, fails_in=fails_in)
    # Without `stop` the other trial would take a minute.
    runner._seconds = 60.0 if jobs == 2 and fails_in == 2 else 0.0
    setup = make(tmp_path, jobs=jobs)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="broken"):
        search(setup, runner)
    assert runner.was_stopped and time.monotonic() - started < 30.0
    assert set(threading.enumerate()) <= threads


def test_an_interrupt_leaves_no_thread_and_the_same_command_goes_on(tmp_path, threads):
    first = SlowRunner(COST, seconds=60.0, fails_in=2, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        search(make(tmp_path), first)
    assert first.was_stopped and set(threading.enumerate()) <= threads
    again, seen = SlowRunner(COST), Seen()
    result = search(make(tmp_path), again, seen)
    assert len(proposals(result)) == 12 and len(result.outcomes) == 12 + NUM_BASELINES
    # Both that were running, the one that was interrupted and the one beside it.
    assert len([line for line in seen.notices if "was interrupted and is run again" in line]) == 2
    assert again.clashes == []


def test_nothing_starts_after_the_deadline(tmp_path):
    runner = SlowRunner(COST, seconds=0.3)
    deadline_s = time.monotonic() + 2.0
    result = search(make(tmp_path, trials=500, jobs=1, deadline_s=deadline_s), runner)
    assert 0 < len(result.outcomes) < 100
    # It is planned in between.
    assert max(runner.started_at) <= deadline_s + 1.0
    assert time.monotonic() < deadline_s + 3.0


def test_a_deadline_that_has_passed_starts_nothing_at_all(tmp_path):
    runner = SlowRunner(COST)
    result = search(make(tmp_path, deadline_s=time.monotonic() - 1.0), runner)
    assert runner.specs == [] and result.outcomes == () and result.best is None


def test_the_seconds_of_a_confirmation_by_hand(tmp_path):
    """One point; padding to the longest, ten quantiles and the point are one plan."""
    space = make_space()
    base = {"train.epochs": 3}
    result = search(make_setup(tmp_path, TEN_ROWS, space, base=base, trials=1), FakeRunner(COST))
    candidates = choose_candidates(result.outcomes)
    assert len(candidates) == 1 + NUM_BASELINES
    # Of each every shape compiles and is called five times, and then four times that are timed, or
    # more that make 5 s with all shapes.
    seconds = 0.0
    for item in candidates.values():
        figures = item.outcome.figures
        estimate = item.outcome.estimate
        num_steps = sum(figures.shape_counts.values())
        compile_s = estimate.estimated_compile_s
        step_s = (estimate.estimated_run_s - compile_s) / 3 / num_steps
        num_shapes = sum(count > 0 for count in figures.shape_counts.values())
        seconds += compile_s + 5 * num_shapes * step_s + max(5.0, 4 * num_shapes * step_s)
    # The first: 5 s and the update's 0.99 s; 3 steps of (4, 32) and 0.01 s of update an epoch.
    first = candidates["pad to the longest"].outcome.estimate
    assert first.estimated_compile_s == pytest.approx(5.99)
    assert expected_seconds(result.outcomes, 1, 5.0) == pytest.approx(seconds)
    assert expected_seconds(result.outcomes, 3, 5.0) == pytest.approx(3 * seconds)
    assert expected_seconds((), 3, 5.0) == 0.0


def test_time_for_the_confirmation_is_kept(tmp_path):
    """On the made-up device a confirmation takes minutes: the search ends that much earlier."""
    setup = make(tmp_path, trials=15, jobs=1, confirm_rounds=2)
    needed_s = expected_seconds(search(setup, FakeRunner(COST)).outcomes, 2, 0.0)
    assert needed_s > 60.0
    (tmp_path / "late").mkdir()
    late = dataclasses.replace(
        make(tmp_path / "late", trials=15, jobs=1, confirm_rounds=2),
        deadline_s=time.monotonic() + 0.5 * needed_s,
    )
    runner = FakeRunner(COST)
    started = time.monotonic()
    result = search(late, runner)
    # It ends by itself as soon as what is known makes the confirmation that long.
    assert len(proposals(result)) < 15
    assert time.monotonic() - started < 0.4 * needed_s
    (tmp_path / "none").mkdir()
    unconfirmed = dataclasses.replace(
        make(tmp_path / "none", trials=10, jobs=1),
        deadline_s=time.monotonic() + 0.5 * needed_s,
    )
    assert len(proposals(search(unconfirmed, FakeRunner(COST)))) == 10


def test_a_busy_machine_is_worth_one_line(tmp_path):
    class BusyRunner(FakeRunner):
        def run(self, spec, folder, on_measured=lambda shapes: False):
            result = super().run(spec, folder, on_measured)
            return dataclasses.replace(result, other_cores=0.8)

    seen = Seen()
    setup = make_setup(tmp_path, HUNDRED_ROWS, SPACE, trials=6)
    result = search(setup, BusyRunner(COST), seen)
    busy = [line for line in seen.notices if "other programs took" in line]
    assert busy == [
        "other programs took 0.8 cores while trial 0 was timed: its steps may be too slow. "
        "Let the machine be quiet while this runs"
    ]
    assert {item.outcome.other_cores for item in result.outcomes if item.outcome.measured} == {0.8}

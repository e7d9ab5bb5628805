"""A study that goes on: nothing finished runs again, nothing is lost, another study is refused."""

from __future__ import annotations

import re
import threading

import optuna
import pytest
from optuna.trial import TrialState
from search_case import (
    COST,
    HUNDRED_ROWS,
    NUM_BASELINES,
    SMALL,
    TEN_ROWS,
    InterruptedRunner,
    baselines,
    frozen_trials,
    keys,
    measured_under,
    proposals,
    search,
)
from study_case import Seen, make_setup, make_space

from tuner.errors import BadInputError
from tuner.study.baselines import baseline_names
from tuner.trial.fake import FakeRunner

TINY = make_space(
    strategy=["bucketed", "fixed"],
    num_buckets={"low": 1, "high": 3},
    graph_mode=["static", "dynamic"],
)
"""8 points."""


class TestRepeats:
    SPACE = make_space(
        strategy=["bucketed"],
        num_buckets={"low": 2, "high": 9},
        longest_rows_per_batch=[2, 4],
        graph_mode=["static", "dynamic"],
    )
    TOKENS = (*[8] * 900, *[16] * 400)
    """Two lengths: two buckets or nine, the boundaries are 8 and 16."""

    def test_the_same_resolved_config_is_measured_and_counted_once(self, tmp_path):
        # 2 budgets x 2 modes.
        runner, seen = FakeRunner(COST), Seen()
        setup = make_setup(tmp_path, self.TOKENS, self.SPACE, trials=30)
        result = search(setup, runner, seen)
        assert len(proposals(result)) == len(set(keys(proposals(result)))) == 4
        assert max(measured_under(result).values()) == 1
        total = 4 + NUM_BASELINES
        assert seen.notices == [f"the space holds no more than {total} different configs"]

    def test_a_repeat_is_told_the_same_value(self, tmp_path):
        space = make_space(strategy=["bucketed"], num_buckets={"low": 2, "high": 9})
        result = search(make_setup(tmp_path, self.TOKENS, space), FakeRunner(COST))
        (item,) = proposals(result)
        repeats = [
            trial
            for trial in frozen_trials(tmp_path)
            if trial.state == TrialState.COMPLETE and trial.number >= NUM_BASELINES
        ]
        assert len(repeats) >= 8
        assert {trial.value for trial in repeats} == {item.outcome.real_tokens_per_s}


class TestGoingOn:
    @pytest.mark.parametrize("in_process", range(1, 8))
    def test_no_finished_trial_runs_twice_and_the_interrupted_one_runs_again(
        self, tmp_path, threads, in_process
    ):
        setup = make_setup(tmp_path, HUNDRED_ROWS, SMALL, trials=10)
        first = InterruptedRunner(COST, in_process)
        with pytest.raises(KeyboardInterrupt):
            search(setup, first)
        assert first.was_stopped
        assert set(threading.enumerate()) <= threads
        told_before = [t for t in frozen_trials(tmp_path) if t.state.is_finished()]
        seen, again = Seen(), FakeRunner(COST)
        result = search(setup, again, seen)
        assert len(proposals(result)) == 10 and set(baselines(result)) == set(
            baseline_names(has_own_config=False)
        )
        assert len(set(keys(result.outcomes))) == 10 + NUM_BASELINES
        assert max(measured_under(result).values()) == 1
        assert not set(map(repr, first.configs)) & set(map(repr, again.configs))
        # It runs again, unless what is known by then leaves nothing of it to measure.
        assert first.interrupted in [item.outcome.config for item in result.outcomes]
        assert seen.counts[0] == len(told_before)
        assert re.fullmatch(r"trial \d+ was interrupted and is run again", seen.notices[0])
        assert len(seen.notices) == 1

    def test_a_tuner_killed_before_it_knew_the_point_loses_no_baseline(self, tmp_path):
        database = tmp_path / "study.db"
        setup = make_setup(tmp_path, TEN_ROWS, SMALL, trials=4, storage=str(database))
        with pytest.raises(KeyboardInterrupt):
            search(setup, InterruptedRunner(COST, 2))
        # As a kill between asking and suggesting leaves it.
        optuna.load_study(study_name="varseq-tune", storage=f"sqlite:///{database}").ask()
        result = search(setup, FakeRunner(COST))
        assert set(baselines(result)) == set(baseline_names(has_own_config=False))
        assert len(proposals(result)) == 4

    def test_the_outcomes_are_those_of_the_first_start(self, tmp_path):
        setup = make_setup(tmp_path, TEN_ROWS, SMALL, trials=6)
        first = search(setup, FakeRunner(COST, noise=0.1))
        runner = FakeRunner(COST)
        assert search(setup, runner).outcomes == first.outcomes
        assert runner.configs == []

    def test_more_trials_go_on_from_there(self, tmp_path):
        first = search(make_setup(tmp_path, TEN_ROWS, SMALL, trials=4), FakeRunner(COST))
        runner = FakeRunner(COST)
        more = search(make_setup(tmp_path, TEN_ROWS, SMALL, trials=7), runner)
        assert keys(more.outcomes)[: len(first.outcomes)] == keys(first.outcomes)
        assert len(proposals(more)) == 7 and len(runner.configs) <= 3

    def test_an_exhausted_space_stays_exhausted(self, tmp_path):
        setup = make_setup(tmp_path, TEN_ROWS, TINY, trials=500)
        first = search(setup, FakeRunner(COST))
        runner = FakeRunner(COST)
        assert search(setup, runner).outcomes == first.outcomes
        assert runner.configs == []


class TestAnotherStudy:
    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("data", {"fingerprint": "e" * 64}),
            ("search space", {"space": make_space(align=[16])}),
            ("base config", {"base": {"train.epochs": 2}}),
            ("base config", {"base": {"model.num_layers": 1}}),
            ("device", {"device": "Ascend"}),
            ("MindSpore version", {"versions": {"mindspore": "2.6.0"}}),
        ],
    )
    def test_is_refused_naming_both_fingerprints(self, tmp_path, name, change):
        search(make_setup(tmp_path, TEN_ROWS, SMALL, trials=2), FakeRunner(COST))
        before = frozen_trials(tmp_path)
        runner = FakeRunner(COST)
        with pytest.raises(BadInputError) as caught:
            search(make_setup(tmp_path, TEN_ROWS, trials=4, **{"space": SMALL, **change}), runner)
        problem = caught.value.problem
        assert f"another {name} " in problem
        values = re.search(r"\((.+), now (.+)\)", problem)
        assert values is not None and values[1] != values[2]
        assert "--new-study" in caught.value.fix
        assert runner.configs == []
        assert frozen_trials(tmp_path) == before

    def test_data_that_only_moved_is_the_same(self, tmp_path):
        search(make_setup(tmp_path, TEN_ROWS, SMALL, trials=2), FakeRunner(COST))
        moved = make_setup(
            tmp_path, TEN_ROWS, SMALL, trials=3, base={"data.path": "elsewhere.mindrecord"}
        )
        assert len(proposals(search(moved, FakeRunner(COST)))) == 3

    def test_a_refused_study_is_left_as_it_is(self, tmp_path):
        storage = str(tmp_path / "study.db")
        search(make_setup(tmp_path, TEN_ROWS, SMALL, trials=1, storage=storage), FakeRunner(COST))
        before = (tmp_path / "study.db").read_bytes()
        other = make_setup(tmp_path, TEN_ROWS, SMALL, storage=storage, fingerprint="e" * 64)
        with pytest.raises(BadInputError, match="another data"):
            search(other, FakeRunner(COST))
        assert (tmp_path / "study.db").read_bytes() == before

    @pytest.mark.parametrize("content", [b"not a database at all" * 100, b""])
    def test_a_file_that_is_not_a_study(self, tmp_path, content):
        database = tmp_path / "study.db"
        database.write_bytes(content)
        setup = make_setup(tmp_path, TEN_ROWS, SMALL, trials=1, storage=str(database))
        if not content:
            # SQLite takes an empty file for a new database.
            assert len(proposals(search(setup, FakeRunner(COST)))) == 1
            return
        with pytest.raises(BadInputError, match="cannot be opened as a study") as caught:
            search(setup, FakeRunner(COST))
        assert "\n" not in str(caught.value)
        assert database.read_bytes() == content

"""The study on a made-up device: what is found, what is told, how it goes on."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState
from strategies import skewed_tokens
from study_case import Seen, make_setup, make_space

from tuner.batching.plan import resolve_boundaries
from tuner.config.schema import TrainConfig
from tuner.errors import BadInputError
from tuner.study.choose import choose_best, pad_to_longest
from tuner.study.outcome import NumberedOutcome
from tuner.study.search import StudySetup, configure, run_search, try_config
from tuner.study.space import Choice, SearchSpace, fit_to_device, load_space
from tuner.trial.fake import FakeRunner, HiddenCost
from tuner.trial.folder import TrialFolder
from tuner.trial.record import Installation, TrialResult, TrialSpec

COST = HiddenCost(
    compile_s=5.0, overhead_s=0.02, token_s=1.3e-4, attention_s=2.8e-7, dynamic_factor=1.9
)
# 5 rows of 3 tokens, 4 of 10, 1 of 30: 85 tokens.
TEN_ROWS = [3] * 5 + [10] * 4 + [30]
SMALL = make_space(
    strategy=["bucketed", "dynamic", "fixed"],
    num_buckets={"low": 1, "high": 3},
    longest_rows_per_batch=[1, 2, 4],
    graph_mode=["static", "dynamic"],
)

# 8 points.
TINY = make_space(
    strategy=["bucketed", "fixed"],
    num_buckets={"low": 1, "high": 3},
    graph_mode=["static", "dynamic"],
)


def frozen_trials(folder: Path) -> list[FrozenTrial]:
    """The trials as Optuna itself reads them."""
    storage = f"sqlite:///{folder / 'study.db'}"
    return optuna.load_study(study_name="varseq-tune", storage=storage).trials


def keys(outcomes: tuple[NumberedOutcome, ...]) -> list[str]:
    return [item.outcome.config.model_dump_json() for item in outcomes]


def static_step_s(size: int, length: int) -> float:
    return 0.02 + 1.3e-4 * size * length + 2.8e-7 * size * length * length


class InterruptedRunner:
    """Is interrupted in its n-th trial, as by Ctrl-C."""

    def __init__(self, inner: FakeRunner, in_trial: int) -> None:
        self._inner = inner
        self._left = in_trial

    def run(self, spec: TrialSpec, folder: TrialFolder) -> TrialResult:
        self._left -= 1
        if self._left == 0:
            self._inner.configs.append(spec.config)
            raise KeyboardInterrupt
        return self._inner.run(spec, folder)

    def probe(self, device: str) -> Installation:
        return self._inner.probe(device)


class TestTheValue:
    """Real tokens of the run over its seconds, worked out by hand."""

    def value(self, folder: Path, **space: Any) -> tuple[float, NumberedOutcome]:
        setup = make_setup(
            folder, TEN_ROWS, make_space(**space), base={"train.epochs": 3}, trials=1
        )
        (item,) = run_search(setup, FakeRunner(COST), Seen().watch)
        (frozen,) = frozen_trials(folder)
        assert frozen.state == TrialState.COMPLETE
        assert item.outcome.real_tokens_per_s == frozen.value
        assert frozen.value is not None
        return frozen.value, item

    def test_of_fixed(self, tmp_path):
        # The longest is padded to 32; a budget of 4 x 32 takes 4 rows: 3 steps of (4, 32). An
        # update gathers 4 x 30 = 120 real tokens, more than the epoch has: 1 an epoch, of 0.01 s;
        # its first call takes 1 s.
        run_s = 5.0 + 0.99 + 3 * (3 * static_step_s(4, 32) + 0.01)
        value, item = self.value(tmp_path)
        assert value == pytest.approx(3 * 85 / run_s, rel=1e-12)
        assert item.outcome.shapes == ((4, 32),)
        assert item.outcome.effective_token_fraction == pytest.approx(85 / (3 * 4 * 32))

    def test_of_bucketed(self, tmp_path):
        # Two buckets pad least at 16 and 32: 9 x 16 + 32 = 176 tokens (8 and 32: 200). The budget
        # of 128 takes 8 rows of 16: two batches of 5; and the one row of 32.
        steps_s = 2 * static_step_s(5, 16) + static_step_s(1, 32)
        run_s = 2 * 5.0 + 0.99 + 3 * (steps_s + 0.01)
        value, item = self.value(tmp_path, strategy=["bucketed"])
        assert value == pytest.approx(3 * 85 / run_s, rel=1e-12)
        assert item.outcome.config.batching.boundaries == (16, 32)

    def test_of_one_dynamic_graph(self, tmp_path):
        # As bucketed, every step 1.9 times as long and only the first shape compiles.
        steps_s = 1.9 * (2 * static_step_s(5, 16) + static_step_s(1, 32))
        run_s = 5.0 + 0.99 + 3 * (steps_s + 0.01)
        value, _ = self.value(tmp_path, strategy=["bucketed"], graph_mode=["dynamic"])
        assert value == pytest.approx(3 * 85 / run_s, rel=1e-12)

    def test_of_more_updates(self, tmp_path):
        # 12 rows of 30, one a batch; an update gathers the 30 tokens of one step: 12 an epoch.
        setup = make_setup(
            tmp_path,
            [30] * 12,
            make_space(longest_rows_per_batch=[1]),
            base={"train.tokens_per_update": 30, "train.epochs": 2},
            trials=1,
        )
        (item,) = run_search(setup, FakeRunner(COST), Seen().watch)
        run_s = 5.0 + 0.99 + 2 * (12 * static_step_s(1, 32) + 12 * 0.01)
        assert item.outcome.real_tokens_per_s == pytest.approx(2 * 360 / run_s, rel=1e-12)

    def test_every_candidate_gathers_the_largest_budget_for_an_update(self, tmp_path):
        space = make_space(longest_rows_per_batch=[1, 2, 4])
        setup = make_setup(tmp_path, TEN_ROWS, space)
        outcomes = run_search(setup, FakeRunner(COST), Seen().watch)
        assert len(outcomes) == 3
        assert {item.outcome.config.train.tokens_per_update for item in outcomes} == {4 * 30}


class TestWhatIsFound:
    def test_first_come_pad_to_longest_and_the_simplest_of_each_strategy(self, tmp_path):
        setup = make_setup(tmp_path, TEN_ROWS, SMALL, trials=3)
        outcomes = run_search(setup, FakeRunner(COST), Seen().watch)
        tried = [
            (item.outcome.config.batching.strategy, item.outcome.config.graph.mode)
            for item in outcomes
        ]
        assert tried == [("fixed", "static"), ("bucketed", "static"), ("dynamic", "dynamic")]
        fixed = pad_to_longest(outcomes)
        assert fixed is not None and fixed.number == 0

    def test_a_small_space_is_exhausted_and_the_study_ends_by_itself(self, tmp_path):
        # align is part of the config: 2 x 3 x 2 different ones.
        space = make_space(
            align=[8, 16],
            longest_rows_per_batch=[1, 2, 4],
            graph_mode=["static", "dynamic"],
        )
        seen, runner = Seen(), FakeRunner(COST)
        outcomes = run_search(
            make_setup(tmp_path, TEN_ROWS, space, trials=500), runner, seen.watch
        )
        assert len(outcomes) == len(set(keys(outcomes))) == len(runner.configs) == 12
        assert seen.notices == ["the space holds no more than 12 different configs"]
        assert seen.counts == list(range(13))

    def test_the_same_result_whatever_the_order(self, tmp_path):
        found = []
        for seed in range(3):
            folder = tmp_path / str(seed)
            folder.mkdir()
            setup = make_setup(folder, TEN_ROWS, TINY, trials=500, seed=seed)
            outcomes = run_search(setup, FakeRunner(COST), Seen().watch)
            best = choose_best(outcomes)
            assert best is not None
            values = {
                key: item.outcome.real_tokens_per_s
                for key, item in zip(keys(outcomes), outcomes, strict=True)
            }
            found.append((best.outcome.real_tokens_per_s, values))
            assert best.outcome.real_tokens_per_s == max(values.values())
        assert found[0] == found[1] == found[2]

    def test_the_same_seed_gives_the_same_trials(self, tmp_path):
        runs = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            setup = make_setup(tmp_path / name, TEN_ROWS, SMALL, trials=8, seed=5)
            runs.append(keys(run_search(setup, FakeRunner(COST), Seen().watch)))
        assert runs[0] == runs[1]

    def test_of_equals_the_earliest_is_the_best(self, tmp_path):
        # Rows of one length: fixed and bucketed cost exactly the same.
        space = make_space(strategy=["bucketed", "fixed"])
        setup = make_setup(tmp_path, [16] * 8, space, trials=2)
        outcomes = run_search(setup, FakeRunner(COST), Seen().watch)
        assert outcomes[0].outcome.real_tokens_per_s == outcomes[1].outcome.real_tokens_per_s
        assert choose_best(outcomes) == outcomes[0]

    def test_30_trials_mostly_come_within_3_percent_of_the_whole_grid(self, tmp_path):
        # Of 16 seeds 12 did, the worst within 10 %; with one random state for all trials 13.
        space, _ = fit_to_device(load_space("default"), "CPU")
        tokens = skewed_tokens(400, seed=2)
        best_of_grid = max(grid_values(make_setup(tmp_path, tokens, space)))
        reached = []
        for seed in range(3):
            folder = tmp_path / str(seed)
            folder.mkdir()
            setup = make_setup(folder, tokens, space, trials=30, seed=seed)
            best = choose_best(run_search(setup, FakeRunner(COST), Seen().watch))
            assert best is not None
            reached.append((best.outcome.real_tokens_per_s or 0) / best_of_grid)
        assert sorted(reached)[1] > 0.97 and min(reached) > 0.9


def grid_values(setup: StudySetup) -> list[float]:
    """The value of every point of the space, one after the other."""
    np.save(setup.folder.lengths, setup.data.lengths.tokens)
    values: dict[str, float] = {}
    for choice in grid(setup.space):
        config = resolve_boundaries(setup.data.lengths, configure(setup, choice))
        key = config.model_dump_json()
        if key not in values:
            outcome = try_config(setup, config, FakeRunner(COST), 0)
            values[key] = outcome.real_tokens_per_s or 0.0
    return list(values.values())


def grid(space: SearchSpace) -> list[Choice]:
    return [
        Choice(
            strategy=strategy,
            num_buckets=buckets,
            align=align,
            longest_rows_per_batch=rows,
            graph_mode=mode,
            jit_level="O0",
        )
        for strategy in ("fixed", "dynamic", "bucketed")
        for buckets in (range(2, 17) if strategy == "bucketed" else [None])
        for align in space.align
        for rows in (2, 4, 8)
        for mode in ("static", "dynamic")
    ]


class TestFailures:
    @pytest.mark.parametrize("status", ["oom", "timeout", "crashed", "diverged", "refused"])
    def test_each_is_recorded_and_the_study_goes_on(self, tmp_path, status):
        runner = FakeRunner(
            COST,
            fails=lambda config: (
                (status, f"{status} for a reason")
                if config.batching.strategy == "bucketed"
                else None
            ),
        )
        setup = make_setup(tmp_path, TEN_ROWS, SMALL, trials=8)
        outcomes = run_search(setup, runner, Seen().watch)
        assert len(outcomes) == 8
        failed = [item for item in outcomes if item.outcome.estimate is None]
        assert failed and len(failed) < 8
        for item in failed:
            assert item.outcome.config.batching.strategy == "bucketed"
            assert (item.outcome.status, item.outcome.reason) == (status, f"{status} for a reason")
        best = choose_best(outcomes)
        assert best is not None and best.outcome.config.batching.strategy != "bucketed"

    def test_are_told_to_optuna_as_pruned_with_a_violated_constraint(self, tmp_path):
        runner = FakeRunner(
            COST,
            fails=lambda config: ("oom", "9 GB") if config.graph.mode == "static" else None,
        )
        run_search(make_setup(tmp_path, TEN_ROWS, SMALL, trials=8), runner, Seen().watch)
        told = [trial for trial in frozen_trials(tmp_path) if trial.state != TrialState.WAITING]
        for trial in told:
            failed = trial.params["graph_mode"] == "static"
            assert trial.state == (TrialState.PRUNED if failed else TrialState.COMPLETE)
            assert (max(trial.constraints.values()) > 0) is failed
        assert {trial.state for trial in told} == {TrialState.PRUNED, TrialState.COMPLETE}

    def test_mixed(self, tmp_path):
        statuses = iter(["oom", "timeout", "crashed", "diverged", "refused"] * 2)

        def fails(config: TrainConfig) -> Any:
            return None if config.batching.strategy == "fixed" else (next(statuses), "why")

        setup = make_setup(tmp_path, TEN_ROWS, SMALL, trials=11)
        outcomes = run_search(setup, FakeRunner(COST, fails=fails), Seen().watch)
        counts = Counter(item.outcome.status for item in outcomes)
        assert counts["ok"] >= 1
        assert set(counts) == {"ok", "oom", "timeout", "crashed", "diverged", "refused"}
        best = choose_best(outcomes)
        assert best is not None and best.outcome.config.batching.strategy == "fixed"

    def test_all_failing_leaves_no_best(self, tmp_path):
        runner = FakeRunner(COST, fails=lambda config: ("crashed", "broken"))
        setup = make_setup(tmp_path, TEN_ROWS, SMALL, trials=12)
        outcomes = run_search(setup, runner, Seen().watch)
        assert len(outcomes) == 12
        assert choose_best(outcomes) is None and pad_to_longest(outcomes) is None

    def test_too_many_static_shapes_are_refused_without_a_trial(self, tmp_path):
        # Random batches of two of these rows have many lengths.
        space = make_space(
            strategy=["dynamic"],
            longest_rows_per_batch=[2],
            graph_mode=["static", "dynamic"],
            max_static_shapes=3,
        )
        tokens = [8 * n for n in range(1, 41)]
        runner = FakeRunner(COST)
        outcomes = run_search(make_setup(tmp_path, tokens, space), runner, Seen().watch)
        by_mode = {item.outcome.config.graph.mode: item.outcome for item in outcomes}
        assert [config.graph.mode for config in runner.configs] == ["dynamic"]
        assert by_mode["static"].status == "refused"
        shapes = int(by_mode["static"].reason.split()[0])
        assert by_mode["static"].reason == (f"{shapes} static shapes, over max_static_shapes 3")
        assert shapes == by_mode["static"].num_shapes > 3
        assert by_mode["dynamic"].status == "ok"

    def test_a_plan_that_cannot_be_made_is_refused_once_per_config(self, tmp_path):
        # A row is longer than the limit: no plan at all. Three bucket counts, three configs.
        space = make_space(strategy=["bucketed"], num_buckets={"low": 2, "high": 4})
        setup = make_setup(
            tmp_path,
            TEN_ROWS,
            space,
            base={"data.max_length": 20, "data.overflow": "error"},
        )
        runner = FakeRunner(COST)
        outcomes = run_search(setup, runner, Seen().watch)
        assert [item.outcome.status for item in outcomes] == ["refused"] * 3
        assert all("30" in item.outcome.reason for item in outcomes)
        assert runner.configs == []


class TestRepeats:
    def test_the_same_resolved_config_is_measured_and_counted_once(self, tmp_path):
        # Two lengths: two buckets or nine, the boundaries are 8 and 16. 2 budgets x 2 modes.
        space = make_space(
            strategy=["bucketed"],
            num_buckets={"low": 2, "high": 9},
            longest_rows_per_batch=[2, 4],
            graph_mode=["static", "dynamic"],
        )
        runner, seen = FakeRunner(COST), Seen()
        setup = make_setup(tmp_path, [8] * 9 + [16] * 4, space, trials=30)
        outcomes = run_search(setup, runner, seen.watch)
        assert len(outcomes) == len(runner.configs) == len(set(keys(outcomes))) == 4
        assert seen.notices == ["the space holds no more than 4 different configs"]

    def test_a_repeat_is_told_the_same_value(self, tmp_path):
        space = make_space(strategy=["bucketed"], num_buckets={"low": 2, "high": 9})
        setup = make_setup(tmp_path, [8] * 9 + [16] * 4, space)
        (item,) = run_search(setup, FakeRunner(COST), Seen().watch)
        repeats = [
            trial for trial in frozen_trials(tmp_path) if trial.state == TrialState.COMPLETE
        ]
        assert len(repeats) >= 8
        assert {trial.value for trial in repeats} == {item.outcome.real_tokens_per_s}


class TestGoingOn:
    @pytest.mark.parametrize("in_trial", [1, 2, 4, 9])
    def test_no_finished_trial_runs_twice_and_the_interrupted_one_runs_again(
        self, tmp_path, in_trial
    ):
        runner = FakeRunner(COST)
        setup = make_setup(tmp_path, TEN_ROWS, SMALL, trials=10)
        with pytest.raises(KeyboardInterrupt):
            run_search(setup, InterruptedRunner(runner, in_trial), Seen().watch)
        finished, interrupted = runner.configs[:-1], runner.configs[-1]
        seen, again = Seen(), FakeRunner(COST)
        outcomes = run_search(setup, again, seen.watch)
        assert len(outcomes) == len(set(keys(outcomes))) == 10
        assert len(again.configs) == 10 - len(finished)
        assert not set(map(repr, finished)) & set(map(repr, again.configs))
        assert interrupted in again.configs
        assert [item.outcome.config for item in outcomes][: len(finished)] == finished
        assert seen.counts[0] == len(finished)
        (notice,) = seen.notices
        assert re.fullmatch(r"trial \d+ was interrupted and is run again", notice)

    def test_a_tuner_killed_before_it_knew_the_point_loses_no_baseline(self, tmp_path):
        setup = make_setup(tmp_path, TEN_ROWS, SMALL, trials=4)
        with pytest.raises(KeyboardInterrupt):
            run_search(setup, InterruptedRunner(FakeRunner(COST), 2), Seen().watch)
        # As a kill between asking and suggesting leaves it.
        storage = f"sqlite:///{tmp_path / 'study.db'}"
        optuna.load_study(study_name="varseq-tune", storage=storage).ask()
        outcomes = run_search(setup, FakeRunner(COST), Seen().watch)
        strategies = {item.outcome.config.batching.strategy for item in outcomes}
        assert strategies == {"fixed", "bucketed", "dynamic"}

    def test_the_outcomes_are_those_of_the_first_start(self, tmp_path):
        setup = make_setup(tmp_path, TEN_ROWS, SMALL, trials=6)
        first = run_search(setup, FakeRunner(COST, noise=0.1), Seen().watch)
        runner = FakeRunner(COST)
        assert run_search(setup, runner, Seen().watch) == first
        assert runner.configs == []

    def test_more_trials_go_on_from_there(self, tmp_path):
        first = run_search(
            make_setup(tmp_path, TEN_ROWS, SMALL, trials=4), FakeRunner(COST), Seen().watch
        )
        runner = FakeRunner(COST)
        more = run_search(make_setup(tmp_path, TEN_ROWS, SMALL, trials=7), runner, Seen().watch)
        assert more[:4] == first and len(more) == 7 and len(runner.configs) == 3

    def test_an_exhausted_space_stays_exhausted(self, tmp_path):
        setup = make_setup(tmp_path, TEN_ROWS, TINY, trials=500)
        first = run_search(setup, FakeRunner(COST), Seen().watch)
        runner = FakeRunner(COST)
        assert run_search(setup, runner, Seen().watch) == first
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
        ],
    )
    def test_is_refused_naming_both_fingerprints(self, tmp_path, name, change):
        run_search(make_setup(tmp_path, TEN_ROWS, SMALL, trials=2), FakeRunner(COST), Seen().watch)
        before = (tmp_path / "study.db").read_bytes()
        arguments = {"space": SMALL, **change}
        runner = FakeRunner(COST)
        with pytest.raises(BadInputError) as caught:
            run_search(make_setup(tmp_path, TEN_ROWS, trials=4, **arguments), runner, Seen().watch)
        problem = caught.value.problem
        assert f"another {name} " in problem
        values = re.search(r"\((.+), now (.+)\)", problem)
        assert values is not None and values[1] != values[2]
        assert "--new-study" in caught.value.fix
        assert runner.configs == []
        assert (tmp_path / "study.db").read_bytes() == before

    def test_data_that_only_moved_is_the_same(self, tmp_path):
        run_search(make_setup(tmp_path, TEN_ROWS, SMALL, trials=2), FakeRunner(COST), Seen().watch)
        moved = make_setup(
            tmp_path, TEN_ROWS, SMALL, trials=3, base={"data.path": "elsewhere.mindrecord"}
        )
        assert len(run_search(moved, FakeRunner(COST), Seen().watch)) == 3

    @pytest.mark.parametrize("content", [b"not a database at all" * 100, b""])
    def test_a_file_that_is_not_a_study(self, tmp_path, content):
        (tmp_path / "study.db").write_bytes(content)
        setup = make_setup(tmp_path, TEN_ROWS, SMALL, trials=1)
        if not content:
            # SQLite takes an empty file for a new database.
            assert len(run_search(setup, FakeRunner(COST), Seen().watch)) == 1
            return
        with pytest.raises(BadInputError, match="cannot be opened as a study") as caught:
            run_search(setup, FakeRunner(COST), Seen().watch)
        assert "\n" not in str(caught.value)
        assert (tmp_path / "study.db").read_bytes() == content

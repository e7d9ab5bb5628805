"""What goes wrong in trials: kept, told to Optuna so that it learns, never the end of a study."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import textwrap
from collections import Counter
from typing import Any

import pytest
from optuna.trial import TrialState
from search_case import (
    COST,
    HUNDRED_ROWS,
    NUM_BASELINES,
    SMALL,
    TEN_ROWS,
    baselines,
    frozen_trials,
    keys,
    proposals,
    search,
)
from study_case import Seen, make_setup, make_space

from tuner.config.schema import TrainConfig
from tuner.errors import BadInputError
from tuner.study.baselines import (
    PACKED,
    PAD_TO_LONGEST,
    RANDOM_BATCHES,
    TEN_QUANTILES,
    YOUR_CONFIG,
)
from tuner.study.choose import choose_best, is_feasible, pad_to_longest
from tuner.study.fill import FILLED
from tuner.trial.fake import FakeRunner
from tuner.trial.runner import ProcessRunner

FAILURES = ("timeout", "crashed", "diverged", "refused", "oom")


def fails_where(status: str, strategy: str) -> Any:
    """For FakeRunner: this strategy fails, for a reason."""
    return lambda config: (
        (status, f"{status} for a reason") if config.batching.strategy == strategy else None
    )


class TestEachKind:
    @pytest.mark.parametrize("status", FAILURES)
    def test_is_recorded_and_the_study_goes_on(self, tmp_path, status):
        runner = FakeRunner(COST, fails=fails_where(status, "bucketed"))
        result = search(make_setup(tmp_path, HUNDRED_ROWS, SMALL, trials=8), runner)
        assert len(proposals(result)) == 8
        failed = [
            item.outcome for item in result.outcomes if item.outcome.status not in ("ok", "pruned")
        ]
        assert baselines(result)[TEN_QUANTILES].outcome in failed and len(failed) > 1
        for outcome in failed:
            assert outcome.config.batching.strategy == "bucketed"
            assert outcome.estimate is None and outcome.real_tokens_per_s is None
            if outcome.baseline != FILLED:
                assert (outcome.status, outcome.reason) == (status, f"{status} for a reason")
        best = choose_best(result.outcomes)
        assert best is not None and best.outcome.config.batching.strategy != "bucketed"

    @pytest.mark.parametrize("status", FAILURES)
    def test_is_told_to_optuna_as_pruned_with_a_violated_constraint(self, tmp_path, status):
        runner = FakeRunner(
            COST,
            fails=lambda config: (status, "9 GB") if config.graph.mode == "static" else None,
        )
        # In a long run static graphs may win, and so are tried.
        long = {"train.epochs": 300}
        search(make_setup(tmp_path, HUNDRED_ROWS, SMALL, base=long, trials=12), runner)
        told = [t for t in frozen_trials(tmp_path) if t.params and t.state.is_finished()]
        violated = {"static": set(), "dynamic": set()}
        for trial in told:
            violation = max(trial.constraints.values())
            violated[trial.params["graph_mode"]].add((trial.state, violation > 0))
        assert (TrialState.PRUNED, True) in violated["static"]
        # What is too slow by what is known is not run, and so does not fail.
        assert violated["static"] <= {(TrialState.PRUNED, True), (TrialState.PRUNED, False)}
        assert (TrialState.COMPLETE, False) in violated["dynamic"]
        assert violated["dynamic"] <= {(TrialState.COMPLETE, False), (TrialState.PRUNED, False)}

    def test_mixed(self, tmp_path):
        statuses = itertools.cycle(FAILURES)

        def fails(config: TrainConfig) -> Any:
            return None if config.batching.strategy == "fixed" else (next(statuses), "why")

        setup = make_setup(tmp_path, HUNDRED_ROWS, SMALL, trials=11)
        result = search(setup, FakeRunner(COST, fails=fails))
        counts = Counter(item.outcome.status for item in result.outcomes)
        assert set(counts) - {"pruned"} == {"ok", *FAILURES}
        best = choose_best(result.outcomes)
        assert best is not None and best.outcome.config.batching.strategy == "fixed"

    def test_all_failing_leaves_no_best(self, tmp_path):
        runner = FakeRunner(COST, fails=lambda config: ("crashed", "broken"))
        result = search(make_setup(tmp_path, HUNDRED_ROWS, SMALL, trials=12), runner)
        assert len(proposals(result)) == 12
        assert choose_best(result.outcomes) is None and pad_to_longest(result.outcomes) is None
        assert result.best is None

    def test_a_baseline_that_fails_does_not_take_a_trial_from_the_others(self, tmp_path):
        runner = FakeRunner(COST, fails=fails_where("timeout", "packed"))
        result = search(make_setup(tmp_path, TEN_ROWS, SMALL, trials=3), runner)
        statuses = {name: item.outcome.status for name, item in baselines(result).items()}
        assert statuses == {
            PAD_TO_LONGEST: "ok",
            RANDOM_BATCHES: "ok",
            TEN_QUANTILES: "ok",
            PACKED: "timeout",
        }
        assert len(proposals(result)) == 3
        assert frozen_trials(tmp_path)[3].state == TrialState.PRUNED

    def test_a_failed_point_is_not_tried_again(self, tmp_path):
        runner = FakeRunner(COST, fails=fails_where("crashed", "bucketed"))
        space = make_space(strategy=["bucketed", "fixed"], num_buckets={"low": 1, "high": 3})
        result = search(make_setup(tmp_path, HUNDRED_ROWS, space, trials=50), runner)
        assert len(set(keys(result.outcomes))) == len(result.outcomes)
        assert len(runner.specs) <= len(result.outcomes)


class TestEndedEarly:
    def test_a_slow_trial_is_pruned_without_a_violation(self, tmp_path):
        base = {"train.epochs": 200}
        setup = make_setup(tmp_path, HUNDRED_ROWS, SMALL, trials=20, base=base)
        runner = FakeRunner(COST)
        result = search(setup, runner)
        pruned = [item for item in result.outcomes if item.outcome.status == "pruned"]
        assert pruned
        best = choose_best(result.outcomes)
        assert best is not None and best not in pruned
        for item in pruned:
            trial = frozen_trials(tmp_path)[item.number]
            assert trial.state == TrialState.PRUNED
            assert max(trial.constraints.values()) == 0.0
            # What it had come to is all that Optuna takes for its value.
            assert trial.value == list(trial.intermediate_values.values())[-1]
            assert trial.value < (best.outcome.real_tokens_per_s or 0.0)
            assert not is_feasible(item.outcome)
            if item.outcome.reason.startswith("not measured: at most "):
                # Too slow by what is known: no process at all.
                assert item.outcome.asked == () and item.outcome.wall_s == 0.0
                assert item.outcome.config not in runner.configs
                continue
            # What it had measured is known to all.
            assert item.outcome.reason == "it cannot become the best" and item.outcome.measured
            for measured in item.outcome.measured:
                known = result.book.known(item.outcome.process("CPU").key).steps_s
                assert known[measured.shape] == pytest.approx(measured.step_s)

    def test_a_baseline_is_measured_whole_however_slow(self, tmp_path):
        base = {"train.epochs": 200}
        setup = make_setup(tmp_path, HUNDRED_ROWS, SMALL, trials=1, base=base)
        result = search(setup, FakeRunner(COST))
        assert [item.outcome.status for item in baselines(result).values()] == ["ok"] * 4
        slow = baselines(result)[PACKED].outcome
        ahead = baselines(result)[TEN_QUANTILES].outcome
        assert slow.measured
        assert (slow.real_tokens_per_s or 0.0) < 0.8 * (ahead.real_tokens_per_s or 0.0)


class TestRefused:
    def test_too_many_static_shapes_are_refused_without_a_trial(self, tmp_path):
        # Random batches of two of these rows have many lengths.
        space = make_space(
            strategy=["dynamic"],
            longest_rows_per_batch=[2],
            graph_mode=["static", "dynamic"],
            max_static_shapes=3,
        )
        tokens = [8 * n for n in range(1, 41)]
        runner = FakeRunner(dataclasses.replace(COST, dynamic_factor=0.7))
        result = search(make_setup(tmp_path, tokens, space), runner)
        by_mode = {item.outcome.config.graph.mode: item.outcome for item in proposals(result)}
        assert not any(
            config.graph.mode == "static" and config.batching.strategy == "dynamic"
            for config in runner.configs
        )
        assert by_mode["static"].status == "refused"
        shapes = int(by_mode["static"].reason.split()[0])
        assert by_mode["static"].reason == f"{shapes} static shapes, over max_static_shapes 3"
        assert shapes == by_mode["static"].num_shapes > 3
        assert by_mode["dynamic"].status == "ok"

    def test_a_plan_that_cannot_be_made_is_refused_without_a_trial(self, tmp_path):
        # Your own token budget does not take the longest row.
        base = {"batching.tokens_per_batch": 24}
        setup = make_setup(
            tmp_path, TEN_ROWS, make_space(), base=base, trials=1, has_own_config=True
        )
        runner = FakeRunner(COST)
        result = search(setup, runner)
        own = baselines(result)[YOUR_CONFIG].outcome
        assert own.status == "refused" and own.figures is None and own.shapes == ()
        assert "batching.tokens_per_batch" in own.reason and "24" in own.reason
        assert own.config not in runner.configs
        assert frozen_trials(tmp_path)[NUM_BASELINES].state == TrialState.PRUNED

    def test_data_that_no_plan_takes_is_refused_before_anything_runs(self, tmp_path):
        base = {"data.max_length": 20, "data.overflow": "error"}
        runner = FakeRunner(COST)
        with pytest.raises(BadInputError, match="the longest has 30"):
            search(make_setup(tmp_path, TEN_ROWS, make_space(), base=base), runner)
        assert runner.configs == []


GARBAGE = """
    import json, pathlib, sys
    folder = pathlib.Path(sys.argv[1])
    spec = json.loads((folder / "spec.json").read_text())
    shapes, strategy = spec["shapes"], spec["config"]["batching"]["strategy"]
    result = {
        "status": "ok",
        "shapes": [
            {
                "batch_size": size, "padded_length": length, "first_call_s": 2.0,
                "steady_s": [1e-3 * size * length] * 4, "has_compiled": True,
                "memory_bytes": 1000, "added_bytes": 10, "loss": None,
            }
            for size, length in shapes
        ],
        "update": {"first_call_s": 1.0, "update_s": 0.5},
    }
    text = json.dumps(result)
    if strategy == "bucketed":
        text = text[:40]
    if strategy == "packed":
        text = text.replace("2.0", "-2.0")
    if strategy == "dynamic":
        sys.exit("no device")
    (folder / "result.json").write_text(text)
"""


def test_answers_that_are_none_are_crashes_and_the_study_goes_on(tmp_path):
    """Half a file, negative seconds, no file: from real processes."""
    runner = ProcessRunner([sys.executable, "-c", textwrap.dedent(GARBAGE)])
    seen = Seen()
    space = make_space(longest_rows_per_batch=[2])
    setup = make_setup(tmp_path, HUNDRED_ROWS, space, trials=1)
    result = search(setup, runner, seen)
    by_name = {name: item.outcome for name, item in baselines(result).items()}
    assert {name: (item.status, item.reason) for name, item in by_name.items()} == {
        PAD_TO_LONGEST: ("ok", ""),
        RANDOM_BATCHES: ("crashed", "exit code 1: no device"),
        TEN_QUANTILES: ("crashed", "it wrote an unreadable result"),
        PACKED: ("crashed", "it wrote an unreadable result"),
    }
    (item,) = proposals(result)
    assert item.outcome.status == "ok"
    # 100 rows, two of 512 tokens a batch: 50 steps of 1,024 ms. An update gathers two times the
    # longest row, 1,000 real tokens, of an epoch's 9,300.
    num_updates = by_name[PAD_TO_LONGEST].figures.num_updates
    assert 8 <= num_updates <= 10
    speed = 9_300 / (2.0 - 1.024 + 0.5 + 50 * 1.024 + num_updates * 0.5)
    assert by_name[PAD_TO_LONGEST].real_tokens_per_s == pytest.approx(speed)

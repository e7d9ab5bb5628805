"""The value of a trial by hand, and what a study measures on the made-up device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState
from search_case import (
    COST,
    NUM_BASELINES,
    SMALL,
    TEN_ROWS,
    baselines,
    figures,
    frozen_trials,
    keys,
    measured_under,
    proposals,
    search,
    step_s,
)
from strategies import skewed_tokens
from study_case import Seen, make_setup, make_space

from tuner.simulate.measurement import CostKey
from tuner.study.baselines import PAD_TO_LONGEST, RANDOM_BATCHES
from tuner.study.choose import choose_best
from tuner.study.outcome import NumberedOutcome
from tuner.trial.fake import FakeRunner, HiddenCost
from tuner.trial.record import TrialSpec

EPOCHS = 3000
"""So many that two buckets pay for their compiles whatever a step is thought to take."""


def key_of(spec: TrialSpec) -> str:
    return str(CostKey.of(spec.config, "CPU"))


class TestTheValue:
    """Real tokens of the run over its seconds, worked out by hand."""

    def value(
        self, folder: Path, epochs: int = EPOCHS, cost: HiddenCost = COST, **space: Any
    ) -> tuple[float, NumberedOutcome]:
        setup = make_setup(
            folder, TEN_ROWS, make_space(**space), base={"train.epochs": epochs}, trials=1
        )
        (item,) = proposals(search(setup, FakeRunner(cost)))
        frozen = frozen_trials(folder)[item.number]
        assert frozen.state == TrialState.COMPLETE
        assert item.outcome.real_tokens_per_s == frozen.value
        assert frozen.value is not None
        return frozen.value, item

    def test_of_fixed(self, tmp_path):
        # The longest is padded to 32; a budget of 4 x 32 takes 4 rows: 3 steps of (4, 32). An
        # update gathers 4 x 30 = 120 real tokens, more than the epoch has: 1 an epoch, of 0.01 s;
        # its first call takes 1 s.
        run_s = 5.0 + 0.99 + 3 * (3 * step_s(4, 32) + 0.01)
        value, item = self.value(tmp_path, epochs=3)
        assert value == pytest.approx(3 * 85 / run_s, rel=1e-12)
        assert item.outcome.shapes == ((4, 32),)
        assert item.outcome.effective_token_fraction == pytest.approx(85 / (3 * 4 * 32))

    def test_of_bucketed(self, tmp_path):
        # Two buckets take least at 16 and 32: 9 rows go from 4 to 8 in a batch (8 and 32: 5 from 4
        # to 16, 5 stay). The budget of 128 takes 8 rows of 16: two batches of 5; and one of 32.
        steps_s = 2 * step_s(5, 16) + step_s(1, 32)
        run_s = 2 * 5.0 + 0.99 + EPOCHS * (steps_s + 0.01)
        value, item = self.value(tmp_path, strategy=["bucketed"])
        assert value == pytest.approx(EPOCHS * 85 / run_s, rel=1e-12)
        assert item.outcome.config.batching.boundaries == (16, 32)

    def test_of_one_dynamic_graph(self, tmp_path):
        # As bucketed, every step 0.7 times as long and only the first shape compiles; so the nine
        # rows of up to 16 come in batches of five and four, without a filler.
        steps_s = 0.7 * (step_s(5, 16) + step_s(4, 16) + step_s(1, 32))
        run_s = 5.0 + 0.99 + EPOCHS * (steps_s + 0.01)
        cost = dataclasses.replace(COST, dynamic_factor=0.7)
        value, item = self.value(
            tmp_path, cost=cost, strategy=["bucketed"], graph_mode=["dynamic"]
        )
        assert item.outcome.config.batching.boundaries == (16, 32)
        # A first call that adds nothing counts for a millisecond.
        assert value == pytest.approx(EPOCHS * 85 / run_s, rel=1e-5)

    def test_of_more_updates(self, tmp_path):
        # 12 rows of 30, one a batch; an update gathers the 30 tokens of one step: 12 an epoch.
        setup = make_setup(
            tmp_path,
            [30] * 12,
            make_space(longest_rows_per_batch=[1]),
            base={"train.tokens_per_update": 30, "train.epochs": 2},
            trials=1,
        )
        (item,) = proposals(search(setup, FakeRunner(COST)))
        run_s = 5.0 + 0.99 + 2 * (12 * step_s(1, 32) + 12 * 0.01)
        assert item.outcome.real_tokens_per_s == pytest.approx(2 * 360 / run_s, rel=1e-12)

    def test_every_candidate_gathers_the_largest_budget_for_an_update(self, tmp_path):
        space = make_space(longest_rows_per_batch=[1, 2, 4])
        result = search(make_setup(tmp_path, TEN_ROWS, space), FakeRunner(COST))
        assert len(proposals(result)) == 3
        gathered = {item.outcome.config.train.tokens_per_update for item in result.outcomes}
        assert gathered == {4 * 30}


class TestWhatIsFound:
    def test_a_small_space_is_exhausted_and_the_study_ends_by_itself(self, tmp_path):
        # 30 tokens are padded to 32 or 40: 2 x 3 x 2 different plans.
        space = make_space(
            align=[8, 20],
            longest_rows_per_batch=[1, 2, 4],
            graph_mode=["static", "dynamic"],
        )
        seen, runner = Seen(), FakeRunner(COST)
        setup = make_setup(tmp_path, TEN_ROWS, space, trials=500)
        result = search(setup, runner, seen)
        assert len(proposals(result)) == len(set(keys(proposals(result)))) == 12
        total = 12 + NUM_BASELINES
        assert len(set(keys(result.outcomes))) == total
        assert seen.notices == [f"the space holds no more than {total} different configs"]
        assert seen.counts == list(range(total + 1))
        assert len(seen.started) == total

    def test_the_best_is_the_largest_value(self, tmp_path):
        result = search(make_setup(tmp_path, TEN_ROWS, SMALL, trials=12), FakeRunner(COST))
        best = choose_best(result.outcomes)
        assert best is not None and best == result.best
        values = [item.outcome.real_tokens_per_s or 0.0 for item in result.outcomes]
        assert best.outcome.real_tokens_per_s == max(values)

    def test_the_same_seed_gives_the_same_trials(self, tmp_path):
        runs = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            setup = make_setup(tmp_path / name, TEN_ROWS, SMALL, trials=8, seed=5)
            runs.append(figures(search(setup, FakeRunner(COST, noise=0.05))))
        assert runs[0] == runs[1]

    def test_of_equals_the_earliest_is_the_best(self, tmp_path):
        # Rows of one length: fixed and bucketed cost exactly the same as padding to the longest.
        space = make_space(strategy=["bucketed", "fixed"])
        result = search(make_setup(tmp_path, [16] * 8, space, trials=2), FakeRunner(COST))
        speeds = {item.outcome.real_tokens_per_s for item in proposals(result)}
        assert speeds == {baselines(result)[PAD_TO_LONGEST].outcome.real_tokens_per_s}
        assert choose_best(result.outcomes) == result.outcomes[0]


class TestSharedMeasurements:
    def test_no_shape_is_measured_twice_under_one_key(self, tmp_path):
        space = make_space(
            strategy=["bucketed", "dynamic", "fixed", "packed"],
            num_buckets={"low": 2, "high": 12},
            align=[8, 64],
            longest_rows_per_batch=[2, 4, 8],
            graph_mode=["static", "dynamic"],
        )
        tokens = skewed_tokens(600, seed=2, longest=512)
        runner = FakeRunner(COST, noise=0.03)
        base = {"train.epochs": 3}
        result = search(
            make_setup(tmp_path, tokens, space, base=base, trials=25, memory_limit_bytes=10**12),
            runner,
        )
        counts = measured_under(result)
        # What was told is what processes were asked for, but for those that were ended early.
        asked = {(key_of(spec), shape) for spec in runner.specs for shape in spec.shapes}
        assert set(counts) <= asked and sum(counts.values()) > 20
        assert max(counts.values()) == 1
        seen_keys = {key for key, _ in counts}
        # Packed rows and single ones, static graphs and a dynamic one: each for itself.
        assert len(seen_keys) >= 3
        by_key = {key: {shape for other, shape in counts if other == key} for key in seen_keys}
        assert any(
            by_key[one] & by_key[other] for one in by_key for other in by_key if one != other
        )

    def test_a_trial_with_nothing_new_to_measure_runs_no_process(self, tmp_path):
        # The point is the baseline's plan under another alignment: (4, 32) three times.
        seen, runner = Seen(), FakeRunner(COST)
        setup = make_setup(tmp_path, TEN_ROWS, make_space(), trials=1)
        result = search(setup, runner, seen)
        (item,) = proposals(result)
        assert item.outcome.asked == item.outcome.measured == ()
        assert item.outcome.wall_s == 0.0 and item.outcome.update is None
        assert item.outcome.estimate is not None
        assert item.outcome.estimate.measured_time_fraction == 1.0
        assert len(seen.started) == 1 + NUM_BASELINES > len(runner.specs)
        assert item.outcome.config not in runner.configs

    def test_a_measured_trial_tells_what_it_measured(self, tmp_path):
        runner = FakeRunner(COST)
        result = search(make_setup(tmp_path, TEN_ROWS, SMALL, trials=8), runner)
        told = [item.outcome for item in result.outcomes if item.outcome.measured]
        assert [outcome.asked for outcome in told] == [spec.shapes for spec in runner.specs]
        for outcome in told:
            measured = tuple(item.shape for item in outcome.measured)
            assert outcome.asked[: len(measured)] == measured != ()
            if outcome.status == "ok":
                assert measured == outcome.asked and outcome.update is not None
            else:
                # It was ended before its last shape; after that there is nothing to save.
                assert outcome.status == "pruned" and len(measured) < len(outcome.asked)

    def test_partial_values_are_kept_for_the_dashboard(self, tmp_path):
        result = search(make_setup(tmp_path, TEN_ROWS, SMALL, trials=6), FakeRunner(COST))
        for item in result.outcomes:
            reported = frozen_trials(tmp_path)[item.number].intermediate_values
            if item.outcome.measured:
                assert sorted(reported) == list(range(1, len(item.outcome.measured) + 1))
            elif item.outcome.status == "pruned":
                # What was known said enough.
                assert sorted(reported) == [0]
        fixed = baselines(result)[PAD_TO_LONGEST]
        # One shape is all of its plan; the update is not known yet at that moment.
        run_s = 5.0 + 3 * step_s(4, 32)
        reported = frozen_trials(tmp_path)[fixed.number].intermediate_values[1]
        assert reported == pytest.approx(85 / run_s)
        dynamic = baselines(result)[RANDOM_BATCHES]
        assert dynamic.outcome.measured[0].has_compiled

"""Confirmation on the made-up device: who is measured again, in which order, and who wins."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from search_case import COST, HUNDRED_ROWS, journal_of, search
from study_case import make_setup, make_space

from tuner.study.baselines import PACKED, PAD_TO_LONGEST, RANDOM_BATCHES, TEN_QUANTILES
from tuner.study.choose import choose_best, is_feasible, simplicity
from tuner.study.confirm import (
    NUM_BEST,
    choose_candidates,
    name_of,
    read_confirmation,
    run_confirmation,
)
from tuner.study.optuna_board import ConfirmationBoard
from tuner.study.outcome import NumberedOutcome
from tuner.study.unit import TIMED_STEPS
from tuner.trial.fake import FakeRunner

SPACE = make_space(
    strategy=["bucketed", "dynamic", "fixed"],
    num_buckets={"low": 1, "high": 6},
    longest_rows_per_batch=[2, 4],
    graph_mode=["static", "dynamic"],
)
IN_ORDER = [PAD_TO_LONGEST, RANDOM_BATCHES, TEN_QUANTILES, PACKED]


@pytest.fixture
def setup(tmp_path):
    return make_setup(
        tmp_path,
        HUNDRED_ROWS,
        SPACE,
        base={"train.epochs": 300},
        trials=10,
        confirm_rounds=3,
        confirm_s=7.0,
        memory_limit_bytes=10**12,
    )


@pytest.fixture
def outcomes(setup):
    return search(setup, FakeRunner(COST)).outcomes


def confirm(setup, outcomes, runner, notices=None):
    board = ConfirmationBoard(journal_of(setup.folder.path), "confirmed")
    candidates = choose_candidates(outcomes)
    said = [] if notices is None else notices
    return run_confirmation(setup, runner, board, candidates, said.append)


def with_run(item, low_s, high_s, number=None, **changes):
    """An outcome whose run takes so long, between its ends."""
    middle, half = (low_s + high_s) / 2, (high_s - low_s) / 2
    estimate = dataclasses.replace(
        item.outcome.estimate,
        estimated_run_s=middle,
        estimated_run_error_s=half,
        estimated_real_tokens_per_s=1e6 / middle,
    )
    outcome = dataclasses.replace(item.outcome, estimate=estimate, **changes)
    return NumberedOutcome(number=item.number if number is None else number, outcome=outcome)


class TestCandidates:
    def test_are_the_best_few_then_all_measured_baselines(self, outcomes):
        candidates = choose_candidates(outcomes)
        names = list(candidates)
        proposed = [name for name in names if name.startswith("trial ")]
        assert 1 <= len(proposed) <= NUM_BEST
        assert names == [*proposed, *IN_ORDER]
        best = choose_best([item for item in outcomes if item.outcome.baseline is None])
        assert candidates[names[0]] == best and names[0] == name_of(best)
        assert len({item.number for item in candidates.values()}) == len(candidates)

    def test_a_rival_may_win_by_noise_and_the_simplest_of_them_is_taken(self, outcomes):
        baseline = next(item for item in outcomes if item.outcome.baseline == TEN_QUANTILES)
        simple, middle, other = (
            with_run(baseline, 1.0, 1.0, 100 + count, baseline=None, shapes=((4, 8),) * count)
            for count in (2, 3, 4)
        )
        assert simplicity(simple.outcome) < simplicity(middle.outcome)
        near = [
            with_run(other, 95.0, 105.0),
            with_run(middle, 104.0, 112.0),
            with_run(simple, 104.9, 120.0),
        ]
        assert [item.number for item in choose_candidates(near).values()] == [
            other.number,
            simple.number,
        ]
        # Out of reach of the best: not confirmed.
        far = [near[0], near[1], with_run(simple, 105.1, 120.0)]
        assert [item.number for item in choose_candidates(far).values()] == [
            other.number,
            middle.number,
        ]

    def test_the_best_of_another_kind_is_taken_too_if_it_may_win(self, outcomes):
        """Its measurements are of another time, when the machine may have been slower."""
        named = {item.outcome.baseline: item for item in outcomes}
        static, dynamic = named[TEN_QUANTILES], named[RANDOM_BATCHES]
        best = with_run(static, 95.0, 105.0, 100, baseline=None, shapes=((4, 8),) * 3)
        simple = with_run(static, 103.0, 120.0, 101, baseline=None, shapes=((4, 8),) * 2)
        near = [with_run(dynamic, low, low + 12.0, 110 + low, baseline=None) for low in (103, 104)]
        far = with_run(dynamic, 106.0, 120.0, 120, baseline=None)
        chosen = choose_candidates([best, simple, *near, far])
        # One dynamic graph is the simplest of all: the same one twice is confirmed once.
        assert [item.number for item in chosen.values()] == [100, 213]
        chosen = choose_candidates([best, simple, far])
        assert [item.number for item in chosen.values()] == [100, 101]
        packed = with_run(named[PACKED], 103.0, 115.0, 130, baseline=None, shapes=((4, 8),) * 3)
        chosen = choose_candidates([best, simple, packed])
        assert [item.number for item in chosen.values()] == [100, 130, 101]

    def test_of_equally_simple_rivals_the_fastest_is_confirmed(self, outcomes):
        named = {item.outcome.baseline: item for item in outcomes}
        best = with_run(named[PACKED], 95.0, 105.0, 100, baseline=None, shapes=((4, 8),) * 3)
        slow, fast = (
            with_run(named[TEN_QUANTILES], low, 130.0, 100 + number, baseline=None,
                     shapes=((4, 8),) * 2)
            for number, low in ((1, 104.0), (2, 99.0))
        )  # fmt: skip
        assert [item.number for item in choose_candidates([best, slow, fast]).values()] == [
            100,
            102,
        ]

    def test_a_rival_of_the_same_kind_that_is_no_simpler_is_not_measured_again(self, outcomes):
        static = next(item for item in outcomes if item.outcome.baseline == TEN_QUANTILES)
        best, *others = (
            with_run(static, low, 105.0, 100 + count, baseline=None, shapes=((4, 8),) * count)
            for count, low in ((3, 95.0), (3, 96.0), (4, 96.0))
        )
        assert list(choose_candidates([best, *others])) == [name_of(best)]

    def test_a_proposal_that_is_a_baseline_is_measured_once(self, outcomes):
        baseline = next(item for item in outcomes if item.outcome.baseline == TEN_QUANTILES)
        same = with_run(baseline, 1.0, 1.0, number=99, baseline=None)
        candidates = choose_candidates([*outcomes, same])
        assert "trial 99" in candidates and TEN_QUANTILES not in candidates

    def test_what_failed_or_breaks_a_tolerance_is_no_candidate(self, outcomes):
        failed = [
            dataclasses.replace(
                item, outcome=dataclasses.replace(item.outcome, status="oom", estimate=None)
            )
            for item in outcomes
        ]
        assert choose_candidates(failed) == {}
        kept = [item for item in outcomes if item.outcome.baseline != PACKED]
        assert PACKED not in choose_candidates(kept)
        assert all(is_feasible(item.outcome) for item in choose_candidates(outcomes).values())


class TestRounds:
    def test_are_interleaved_each_beginning_with_another(self, setup, outcomes):
        notices = []
        runner = FakeRunner(COST, noise=0.01, noise_per_run=True)
        found = confirm(setup, outcomes, runner, notices)
        names = list(found.candidates)
        order = [item.candidate for item in found.rounds]
        per_round = [order[k * len(names) : (k + 1) * len(names)] for k in range(3)]
        for number, measured in enumerate(per_round):
            assert measured == names[number:] + names[:number]
        assert [item.number for item in found.rounds] == [
            number for number in (1, 2, 3) for _ in names
        ]
        assert found.is_complete and found.verdict is not None
        assert found.verdict.num_rounds == 3
        total = 3 * len(names)
        notices = [notice for notice in notices if notice.startswith("confirming ")]
        assert len(runner.specs) == len(notices) == total
        assert notices[0] == f"confirming (1 of {total}): {names[0]}, round 1"
        assert notices[-1].startswith(f"confirming ({total} of {total}): ")

    def test_steps_are_timed_for_half_of_the_limit_at_most(self, setup, outcomes):
        runner = FakeRunner(COST)
        confirm(dataclasses.replace(setup, time_limit_s=9.0), outcomes, runner)
        assert {spec.timed_s for spec in runner.specs} == {4.5}

    def test_each_is_whole_and_by_its_own_measurements(self, setup, outcomes):
        runner = FakeRunner(COST)
        found = confirm(setup, outcomes, runner)
        for item, spec in zip(found.rounds, runner.specs, strict=True):
            outcome = found.candidates[item.candidate].outcome
            assert spec.config == outcome.config
            counts = {shape: n for shape, n in outcome.figures.shape_counts.items() if n}
            assert set(spec.shapes) == set(counts)
            is_short = spec.config.graph.mode == "dynamic" and len(counts) > 12
            assert spec.timed_steps == (3 if is_short else TIMED_STEPS)
            assert spec.timed_s == 7.0
            if spec.config.graph.mode == "static":
                # By hand: 5 s of compile for every shape, 0.99 s and 0.01 s of update.
                packed = 4.0 if spec.config.batching.strategy == "packed" else 1.0
                steps_s = sum(
                    n * packed * (0.02 + 1.3e-4 * b * t + 2.8e-7 * b * t * t)
                    for (b, t), n in counts.items()
                )
                updates_s = 0.01 * outcome.figures.num_updates
                expected = 5.0 * len(counts) + 0.99 + 300 * (steps_s + updates_s)
                assert item.run_s == pytest.approx(expected)
                assert item.compile_s == pytest.approx(5.0 * len(counts) + 0.99)
            assert item.real_tokens_per_s == pytest.approx(300 * 9_300 / item.run_s)

    def test_a_failed_candidate_is_out_with_its_reason_and_not_run_again(self, setup, outcomes):
        runner = FakeRunner(
            COST,
            noise=0.01,
            noise_per_run=True,
            fails=lambda config: (
                ("oom", "9 GB") if config.batching.strategy == "bucketed" else None
            ),
        )
        found = confirm(setup, outcomes, runner)
        out = {
            name
            for name, item in found.candidates.items()
            if item.outcome.config.batching.strategy == "bucketed"
        }
        assert TEN_QUANTILES in out and len(out) >= 2
        assert found.verdict is not None
        assert {item.name for item in found.verdict.compared} == set(found.candidates) - out
        failed = [item for item in found.rounds if item.candidate in out]
        assert {(item.status, item.reason, item.run_s) for item in failed} == {("oom", "9 GB", 0)}
        assert Counter(item.candidate for item in failed) == dict.fromkeys(out, 1)
        assert found.is_complete and found.winner is not None

    def test_all_failing_leaves_no_winner(self, setup, outcomes):
        runner = FakeRunner(COST, fails=lambda config: ("crashed", "broken"))
        found = confirm(setup, outcomes, runner)
        assert found.verdict is None and found.winner is None
        assert len(runner.specs) == len(found.candidates)

    def test_a_deadline_ends_it_with_what_there_is(self, setup, outcomes):
        late = dataclasses.replace(setup, deadline_s=0.0)
        runner = FakeRunner(COST)
        found = confirm(late, outcomes, runner)
        assert runner.specs == [] and found.rounds == ()
        assert found.verdict is None and not found.is_complete

    def test_an_interrupted_one_goes_on_without_a_finished_round_again(self, setup, outcomes):
        class Interrupted(FakeRunner):
            def run(self, spec, folder, on_measured=lambda shapes: False):
                if len(self.specs) == 8:
                    raise KeyboardInterrupt
                return super().run(spec, folder, on_measured)

        first = Interrupted(COST, noise=0.01, noise_per_run=True)
        with pytest.raises(KeyboardInterrupt):
            confirm(setup, outcomes, first)
        board = ConfirmationBoard(journal_of(setup.folder.path), "confirmed")
        before = read_confirmation(board, choose_candidates(outcomes), 3)
        assert len(before.rounds) == 8 and not before.is_complete
        # One whole round stands, what is left of the second is not compared.
        assert before.verdict is not None and before.verdict.num_rounds == 1
        again = FakeRunner(COST, noise=0.01, noise_per_run=True, salt=(1,))
        found = confirm(setup, outcomes, again)
        assert found.rounds[:8] == before.rounds
        total = 3 * len(found.candidates)
        assert len(found.rounds) == total and len(again.specs) == total - 8
        pairs = Counter((item.candidate, item.number) for item in found.rounds)
        assert set(pairs.values()) == {1} and found.is_complete


class TestTheWinner:
    @pytest.mark.parametrize("salt", range(3))
    def test_with_little_noise_the_truly_fastest_wins_beyond_it(self, setup, outcomes, salt):
        runner = FakeRunner(COST, noise=0.005, noise_per_run=True, salt=(salt,))
        found = confirm(setup, outcomes, runner)
        verdict = found.verdict
        assert verdict is not None and found.winner is not None
        without_noise = {
            name: item.outcome.estimate.estimated_run_s for name, item in found.candidates.items()
        }
        fastest = min(without_noise, key=lambda name: without_noise[name])
        assert verdict.fastest == fastest
        for name in (PAD_TO_LONGEST, RANDOM_BATCHES, TEN_QUANTILES):
            true_ratio = without_noise[fastest] / without_noise[name]
            assert verdict.of(name).is_slower
            assert verdict.of(name).speed_ratio == pytest.approx(true_ratio, rel=0.02)
        if len(found.candidates) == 1 + len(IN_ORDER):
            assert verdict.is_significant and verdict.winner == fastest

    def test_noise_that_hides_the_lead_leaves_the_simpler_one(self, setup, outcomes):
        runner = FakeRunner(COST, noise=0.8, noise_per_run=True)
        found = confirm(setup, outcomes, runner)
        verdict = found.verdict
        assert verdict is not None and not verdict.is_significant
        equal = [item.name for item in verdict.compared if not item.is_slower]
        assert len(equal) >= 2
        assert simplicity(found.winner.outcome) == min(
            simplicity(found.candidates[name].outcome) for name in equal
        )
        assert verdict.noise > 0.1

    def test_a_round_that_is_slow_for_all_moves_nothing(self, setup, outcomes):
        """The machine takes half as long again in the second round."""

        class Slowing(FakeRunner):
            def run(self, spec, folder, on_measured=lambda shapes: False):
                result = super().run(spec, folder, on_measured)
                second = (
                    len(choose_candidates(outcomes))
                    < len(self.specs)
                    <= 2 * len(choose_candidates(outcomes))
                )
                factor = 1.5 if second else 1.0
                shapes = tuple(
                    dataclasses.replace(
                        item,
                        first_call_s=factor * item.first_call_s,
                        steady_s=tuple(factor * seconds for seconds in item.steady_s),
                    )
                    for item in result.shapes
                )
                return dataclasses.replace(result, shapes=shapes)

        quiet = confirm(setup, outcomes, FakeRunner(COST)).verdict
        (setup.folder.path / "study.journal").unlink()
        slow = confirm(setup, outcomes, Slowing(COST)).verdict
        assert quiet is not None and slow is not None
        for item in quiet.compared:
            assert slow.of(item.name).speed_ratio == pytest.approx(item.speed_ratio, rel=0.01)
        assert slow.noise < 0.02

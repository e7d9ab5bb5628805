"""What the report page is told of a study: every figure against a calculation of its own."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics

import numpy as np
import pytest
from result_case import (
    ALL,
    BUDGET,
    EPOCHS,
    FIXED,
    FOUR,
    HIDDEN,
    TOKENS,
    confirmed,
    context_of,
    measured_result,
    result_setup,
    with_failure,
)
from test_html import Page

from tuner.batching.boundaries import solve_least_time
from tuner.batching.bucket_time import RunCost
from tuner.batching.plan import plan_batches
from tuner.config.codec import format_config, read_yaml
from tuner.config.override import override_config
from tuner.config.schema import OP_GROUPS, PrecisionConfig, TrainConfig
from tuner.report.contents import Absent
from tuner.report.gather import best_config, gather_contents
from tuner.report.gather_comparison import gather_comparison
from tuner.report.gather_figures import (
    gather_lengths,
    gather_prediction,
    gather_run_time,
    gather_trials,
    gather_waste,
)
from tuner.report.gather_headline import gather_headline, limit_run_s
from tuner.report.gather_precision import gather_sensitivity
from tuner.report.html import format_html
from tuner.simulate.measurement import CostKey
from tuner.simulate.stats import count_plan
from tuner.study.baselines import PACKED, PAD_TO_LONGEST, RANDOM_BATCHES, TEN_QUANTILES
from tuner.study.outcome import PrecisionCheck
from tuner.study.result import StudyResult
from tuner.study.sensitivity import Tolerances, find_precision
from tuner.trial.deviation import Deviation
from tuner.trial.fake import FakeRunner
from tuner.trial.record import TrialSpec

ROUNDS = {
    "trial 4": [100.0, 102.0, 101.0],
    "trial 5": [131.0, 132.0, 130.0],
    PAD_TO_LONGEST: [200.0, 205.0, 202.0],
    TEN_QUANTILES: [120.0, 121.0, 122.0],
}
STATIC = CostKey(
    device="CPU", graph_mode="static", jit_level="O0", precision="fp32", rows="single"
)


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return result_setup(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def searched(setup):
    return measured_result(setup)


@pytest.fixture(scope="module")
def whole(searched):
    return confirmed(searched, ROUNDS)


def geometric_mean(values):
    return math.exp(statistics.mean(map(math.log, values)))


def headline(result, setup):
    return gather_headline(result, setup, gather_prediction(result, setup))


def figure(result, setup, label):
    return next(item for item in headline(result, setup).key_figures if label in item.label)


def plan_of(setup, config):
    return count_plan(plan_batches(setup.data.lengths, config), config.train.tokens_per_update)


class TestHeadline:
    def test_a_lead_beyond_noise_is_faster(self, whole, setup):
        gain = geometric_mean(ROUNDS[PAD_TO_LONGEST]) / geometric_mean(ROUNDS["trial 4"])
        told = headline(whole, setup)
        assert told.answer == "faster"
        assert told.verdict.startswith(
            f"Yes: training with 8 buckets (trial 4) is {gain:.2f} times as fast as with every "
            "row padded to the longest (95 % interval "
        )
        assert figure(whole, setup, "padding to the longest").value == f"{gain:.2f} x"
        second = geometric_mean(ROUNDS[TEN_QUANTILES]) / geometric_mean(ROUNDS["trial 4"])
        assert figure(whole, setup, "ten quantile").value == f"{second:.2f} x"

    def test_noise_larger_than_the_lead_is_no_difference(self, searched, setup):
        noisy = {"trial 4": [100.0, 150.0], PAD_TO_LONGEST: [150.0, 101.0]}
        told = headline(confirmed(searched, noisy), setup)
        assert told.answer == "no_difference"
        assert told.verdict.startswith(
            "No: nothing is faster than padding everything to the longest beyond noise"
        )

    def test_a_winner_taken_for_simplicity_may_not_be_ahead_of_padding(self, searched, setup):
        """Padding is slower than the fastest beyond noise, but not than the simpler winner."""
        runs = {
            "trial 4": [100.0, 101.0, 100.0],
            "trial 5": [101.5, 100.7, 101.5],
            PAD_TO_LONGEST: [102.3, 103.0, 102.0],
        }
        result = confirmed(searched, runs)
        assert result.confirmation.verdict.winner == "trial 5"
        told = headline(result, setup)
        assert told.answer == "no_difference"
        assert told.verdict.startswith(
            "No difference beyond noise: training with 4 buckets (trial 5) is 1.01 times as fast"
        )

    def test_padding_that_is_the_fastest(self, searched, setup):
        result = confirmed(searched, {"trial 4": [100.0] * 3, PAD_TO_LONGEST: [99.0] * 3})
        told = headline(result, setup)
        assert told.answer == "no_difference"
        assert told.verdict.startswith(
            "No: padding everything to the longest is the fastest here."
        )
        assert "--set train.epochs=N" in told.verdict
        assert not [item for item in told.key_figures if "padding to the" in item.label]

    def test_without_a_confirmation_nothing_is_certain(self, searched, setup):
        told = headline(searched, setup)
        assert told.answer == "unknown"
        assert told.verdict.startswith("Not confirmed: by the estimates training with 8 buckets")
        assert told.trust.startswith("Winner and baselines were not measured again")
        best, fixed = searched.outcomes[4].outcome, searched.outcomes[0].outcome
        gain = best.real_tokens_per_s / fixed.real_tokens_per_s
        assert figure(searched, setup, "padding to the longest").value == f"{gain:.2f} x"

    def test_one_round_says_nothing_about_noise(self, searched, setup):
        result = confirmed(searched, {"trial 4": [100.0], PAD_TO_LONGEST: [200.0]})
        verdict = result.confirmation.verdict
        for winner, words in (
            ("trial 4", "training with 8 buckets (trial 4) is 2.00 times as fast"),
            (PAD_TO_LONGEST, "trial 4 was 2.00 times as fast as padding everything"),
        ):
            taken = dataclasses.replace(
                result.confirmation, verdict=dataclasses.replace(verdict, winner=winner)
            )
            told = headline(dataclasses.replace(result, confirmation=taken), setup)
            assert told.answer == "unknown"
            assert told.verdict.startswith(f"Not certain: {words}")
            assert "one round says nothing about noise" in told.verdict

    def test_a_baseline_that_failed_leaves_the_answer_open(self, searched, setup):
        lost = with_failure(searched, 0, "oom", "9.10 GB, over the limit of 8.00 GB")
        told = headline(lost, setup)
        assert told.answer == "unknown"
        assert told.verdict == (
            "Not known: padding to the longest could not be measured (oom: 9.10 GB, over the "
            "limit of 8.00 GB)."
        )
        again = confirmed(
            searched, {"trial 4": [1.0, 1.0]}, {PAD_TO_LONGEST: ("timeout", "900 s")}
        )
        assert headline(again, setup).verdict == (
            "Not known: padding to the longest could not be measured (timeout: 900 s)."
        )
        missing = dataclasses.replace(searched, outcomes=searched.outcomes[1:])
        assert "there is nothing to hold the best against" in headline(missing, setup).verdict

    def test_padding_alone_by_the_estimates(self, setup):
        result = measured_result(setup, [(PAD_TO_LONGEST, FIXED)])
        told = headline(result, setup)
        assert told.answer == "unknown"
        assert "padding everything to the longest is the fastest here; that was not" in (
            told.verdict
        )

    def test_other_strategies_have_their_names(self, searched, setup):
        packed = dataclasses.replace(searched, outcomes=searched.outcomes[:4])
        told = headline(confirmed(packed, {PACKED: [1.0, 1.0], PAD_TO_LONGEST: [2.0, 2.0]}), setup)
        assert told.verdict.startswith("Yes: training with packed rows is 2.00 times")

    @pytest.mark.parametrize(("number", "told"), [(1, "the only trial"), (2, "none of 2 trials")])
    def test_nothing_could_be_measured(self, setup, number, told):
        runner = FakeRunner(HIDDEN, fails=lambda config: ("crashed", "no device"))
        result = measured_result(setup, ALL[:number], runner)
        assert told in headline(result, setup).verdict
        assert headline(result, setup).trust == "There is no figure to believe yet."

    def test_the_limit_is_every_row_at_its_own_length(self, whole, setup):
        budget = max(b * n for item in whole.outcomes for b, n in item.outcome.shapes)
        rows = np.array(TOKENS, dtype=np.float64)
        by_hand = EPOCHS * float(
            np.sum(
                HIDDEN.overhead_s * rows / budget
                + HIDDEN.token_s * rows
                + HIDDEN.attention_s * rows**2
            )
        )
        limit_s = limit_run_s(whole, setup, whole.best.outcome)
        assert limit_s == pytest.approx(by_hand, rel=1e-3)
        share = limit_s / geometric_mean(ROUNDS["trial 4"])
        told = figure(whole, setup, "without any padding")
        assert told.value.replace("\xa0", " ") == f"{100 * share:.1f} %"
        assert f"{EPOCHS * sum(TOKENS) / limit_s:,.0f} real tokens a second" in told.detail

    def test_effective_tokens_are_counted(self, whole, setup):
        plan = plan_of(setup, whole.best.outcome.config)
        fraction = sum(TOKENS) / plan.padded_tokens
        told = figure(whole, setup, "not padding")
        assert told.value.replace("\xa0", " ") == f"{100 * fraction:.1f} %"
        assert told.basis == "exact"


class TestComparison:
    def test_the_winner_comes_first_then_the_fastest(self, whole, setup):
        rows = gather_comparison(whole, setup).rows
        assert [row.name for row in rows] == [
            "winner: trial 4", TEN_QUANTILES, "trial 5", PAD_TO_LONGEST,
        ]  # fmt: skip
        winner, second = rows[:2]
        assert winner.run_s == pytest.approx(geometric_mean(ROUNDS["trial 4"]))
        assert winner.real_tokens_per_s == pytest.approx(EPOCHS * sum(TOKENS) / winner.run_s)
        assert second.ratio_to_winner.value == pytest.approx(winner.run_s / second.run_s)
        assert second.is_significant and second.ratio_to_winner.high < 1.0
        assert {row.num_rounds for row in rows} == {3}

    def test_the_verdict_of_a_clear_winner(self, whole, setup):
        lead = geometric_mean(ROUNDS[TEN_QUANTILES]) / geometric_mean(ROUNDS["trial 4"])
        assert gather_comparison(whole, setup).verdict.startswith(
            f"trial 4 wins beyond noise: {lead:.3f} times the real tokens a second of the next, "
            "ten quantile buckets, aligned to 32 (95 % interval "
        )

    def test_no_difference_takes_the_simpler_and_says_so(self, searched, setup):
        near = {**ROUNDS, "trial 5": [103.0, 101.0, 102.5]}
        content = gather_comparison(confirmed(searched, near), setup)
        behind = 1 - geometric_mean(near["trial 4"]) / geometric_mean(near["trial 5"])
        assert content.verdict == (
            "No significant difference between trial 4 and trial 5: the simpler config is taken, "
            f"trial 5, though trial 4 was faster by {100 * behind:.1f} % in the mean, which is "
            "within noise."
        )
        assert content.rows[0].name == "winner: trial 5"
        ratio = content.rows[1].ratio_to_winner
        assert ratio.low < 1.0 < ratio.value < ratio.high
        assert content.rows[1].is_significant is False

    def test_a_simpler_one_that_is_also_the_fastest(self, searched, setup):
        near = {"trial 4": [103.0, 101.0, 102.5], "trial 5": [100.0, 102.0, 101.0]}
        verdict = gather_comparison(confirmed(searched, near), setup).verdict
        assert verdict.endswith("trial 5, which also has the shortest mean run.")

    def test_failed_candidates_have_their_reason(self, searched, setup):
        failed = {PACKED: ("oom", "over the limit of 8.00 GB")}
        rows = gather_comparison(confirmed(searched, ROUNDS, failed), setup).rows
        assert (rows[-1].name, rows[-1].status) == (PACKED, "oom")
        assert (rows[-1].reason, rows[-1].run_s) == ("over the limit of 8.00 GB", None)

    def test_a_baseline_that_failed_in_the_search_is_not_missing(self, searched, setup):
        lost = confirmed(with_failure(searched, 1, "crashed", "no kernel"), ROUNDS)
        rows = gather_comparison(lost, setup).rows
        assert (rows[-1].name, rows[-1].reason) == (RANDOM_BATCHES, "no kernel")

    def test_one_round_has_ratios_without_an_interval(self, searched, setup):
        one = confirmed(searched, {"trial 4": [1.0], PAD_TO_LONGEST: [2.0]})
        content = gather_comparison(one, setup)
        assert "One round says nothing about noise" in content.verdict
        ratio = content.rows[1].ratio_to_winner
        assert (ratio.low, ratio.high, content.rows[1].is_significant) == (None, None, None)
        page = format_html(gather_contents(one, setup, context_of(setup)))
        assert "not known" in Page(page).text and "inf" not in Page(page).text.split()

    def test_a_single_candidate(self, searched, setup):
        content = gather_comparison(confirmed(searched, {"trial 4": [1.0, 1.1]}), setup)
        assert content.verdict == (
            "Only trial 4 came through all rounds; there was nothing to compare."
        )

    def test_rounds_that_are_still_to_come(self, searched, setup):
        two = {name: rounds[:2] for name, rounds in ROUNDS.items()}
        content = gather_comparison(confirmed(searched, two, is_complete=False), setup)
        assert "Only 2 of 3 rounds are complete: interrupted, or cut short" in content.verdict

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"confirm_rounds": 0}, "The winner was not measured again: --confirm 0."),
            ({"deadline_s": 1.0}, "the study was interrupted or cut short by --timeout before"),
            ({}, "the study was interrupted before a round of the confirmation was whole."),
        ],
    )
    def test_without_a_confirmation_the_estimates_stand(self, searched, setup, changes, told):
        content = gather_comparison(searched, dataclasses.replace(setup, **changes))
        assert told in content.verdict
        assert [row.name for row in content.rows[:2]] == ["winner: trial 4", TEN_QUANTILES]
        assert {row.num_rounds for row in content.rows} == {0}
        best, fixed = searched.outcomes[4].outcome, searched.outcomes[0].outcome
        slowest = next(row for row in content.rows if row.name == PAD_TO_LONGEST)
        assert slowest.ratio_to_winner.value == pytest.approx(
            fixed.real_tokens_per_s / best.real_tokens_per_s
        )

    def test_when_every_candidate_failed(self, searched, setup):
        lost = confirmed(searched, {}, {"trial 4": ("oom", "x"), PACKED: ("oom", "x")})
        assert gather_comparison(lost, setup).verdict.startswith(
            "Every candidate failed when it was measured again."
        )

    def test_without_any_figure(self, setup):
        content = gather_comparison(StudyResult(outcomes=(), book=measured_result(setup, []).book),
                                    setup)  # fmt: skip
        assert content == Absent(
            reason="There was nothing to compare: no trial could be measured."
        )


class TestPrediction:
    def test_is_of_the_shapes_of_the_best_without_themselves(self, searched, setup):
        content = gather_prediction(searched, setup)
        best = searched.best.outcome
        known = searched.book.known(STATIC).steps_s
        shapes = {(item.batch_size, item.padded_length) for item in content.shapes}
        assert shapes == set(best.shapes) & set(known)
        for item in content.shapes:
            shape = item.batch_size, item.padded_length
            assert item.measured_step_s == pytest.approx(HIDDEN.step_s(shape, STATIC))
            assert item.relative_error == pytest.approx(
                item.predicted_step_s / item.measured_step_s - 1
            )
            assert item.low_s <= item.predicted_step_s <= item.high_s
        # The device follows the fitted formula, so that other shapes foretell these.
        assert content.max_relative_error < 0.01

    def test_the_rounds_of_the_confirmation_are_what_it_is_held_against(self, whole, setup):
        rounds = []
        for item in whole.confirmation.rounds:
            shape = FakeRunner(HIDDEN).run(
                _spec(whole.best.outcome.config, whole.best.outcome.shapes[:3]), None
            )
            slow = [
                dataclasses.replace(one, steady_s=tuple(1.5 * s for s in one.steady_s))
                for one in shape.shapes
            ]
            rounds.append(dataclasses.replace(item, shapes=tuple(slow)))
        confirmation = dataclasses.replace(whole.confirmation, rounds=tuple(rounds))
        content = gather_prediction(dataclasses.replace(whole, confirmation=confirmation), setup)
        measured = {(s.batch_size, s.padded_length): s.measured_step_s for s in content.shapes}
        for shape in whole.best.outcome.shapes[:3]:
            assert measured[shape] == pytest.approx(1.5 * HIDDEN.step_s(shape, STATIC))

    def test_one_shape_is_joined_by_all_of_its_key(self, setup):
        result = measured_result(setup, [(PAD_TO_LONGEST, FIXED), (None, FOUR)])
        fixed = dataclasses.replace(result, outcomes=result.outcomes[:1])
        assert len(gather_prediction(fixed, setup).shapes) == len(
            result.book.known(STATIC).steps_s
        )


def _spec(config, shapes):
    return TrialSpec(
        config=config, lengths_file="", shapes=shapes, timed_steps=3, time_limit_s=1.0,
        memory_limit_bytes=10**12,
    )  # fmt: skip


class TestTrials:
    def test_minutes_are_from_the_first_start(self, searched):
        points = gather_trials(searched.outcomes)
        # A trial ends every two minutes; the first took one.
        assert [point.minutes for point in points] == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0]
        assert [point.is_baseline for point in points] == [True] * 4 + [False] * 3
        speeds = [item.outcome.real_tokens_per_s for item in searched.outcomes]
        best = list(itertools.accumulate((speed or 0.0 for speed in speeds), max))
        assert [point.best_so_far for point in points] == best
        assert (points[-1].status, points[-1].real_tokens_per_s) == ("refused", None)

    def test_what_is_not_exact_enough_is_not_the_best(self, searched):
        check = PrecisionCheck(
            loss_deviation=0.5, gradient_deviation=None, num_nonfinite=3, violation=9.0
        )
        outcomes = [
            dataclasses.replace(item, outcome=dataclasses.replace(item.outcome, precision=check))
            for item in searched.outcomes
        ]
        assert {point.best_so_far for point in gather_trials(outcomes)} == {None}

    def test_none(self):
        assert gather_trials(()) == ()


class TestLengths:
    def test_bins_hold_every_row(self, searched, setup):
        content = gather_lengths(searched.best.outcome, setup)
        assert sum(content.num_rows) == len(TOKENS)
        edges = content.bin_edges
        assert len(content.num_rows) == len(edges) - 1 <= 64
        assert all(edge % 8 == 0 for edge in edges)
        assert edges[-2] < max(TOKENS) <= edges[-1]
        assert content.num_rows[3] == sum(edges[3] <= n < edges[4] for n in TOKENS)
        assert content.boundaries == searched.best.outcome.config.batching.boundaries

    def test_a_long_tail_has_bins_that_grow(self, searched, setup):
        tokens = np.array([20] * 500 + [4000], np.int32)
        lengths = dataclasses.replace(setup.data.lengths, tokens=tokens)
        data = dataclasses.replace(setup.data, lengths=lengths)
        content = gather_lengths(
            searched.outcomes[0].outcome, dataclasses.replace(setup, data=data)
        )
        edges = content.bin_edges
        assert (edges[0], edges[-1], sum(content.num_rows)) == (20, 4000, 501)
        assert len(edges) <= 65 and edges[-1] - edges[-2] > 4 * (edges[1] - edges[0])

    def test_without_boundaries(self, searched, setup):
        assert gather_lengths(searched.outcomes[3].outcome, setup).boundaries == ()


class TestWaste:
    def test_is_that_of_the_plans(self, searched, setup):
        best = searched.best.outcome
        content = gather_waste(best, setup)
        assert [point.num_shapes for point in content.points] == list(range(1, 33))
        for point in content.points[:12]:
            config = override_config(
                setup.base,
                {
                    "batching.strategy": "bucketed",
                    "batching.num_buckets": point.num_shapes,
                    "batching.tokens_per_batch": BUDGET,
                },
            )
            assert point.padding_fraction == plan_of(setup, config).padding_fraction
        assert content.chosen_num_shapes == 8

    def test_of_plans_that_are_none_of_these(self, searched, setup):
        assert gather_waste(searched.outcomes[1].outcome, setup).chosen_num_shapes is None
        assert gather_waste(searched.outcomes[0].outcome, setup).chosen_num_shapes == 1

    def test_batch_sizes_of_its_own_become_a_budget(self, setup):
        own = {
            "batching.boundaries": [64, 256],
            "batching.batch_sizes": [16, 4],
            "batching.tokens_per_batch": None,
        }
        result = measured_result(setup, [(None, own)])
        assert gather_waste(result.outcomes[0].outcome, setup).chosen_num_shapes == 2


class TestRunTime:
    def test_the_curve_follows_the_device(self, searched, setup):
        content = gather_run_time(searched, setup)
        for point in content.points[:10]:
            plan = self.least_time_plan(setup, searched, point.num_shapes)
            steps_s = sum(
                count * HIDDEN.step_s(shape, STATIC) for shape, count in plan.shape_counts.items()
            )
            # The fake takes 1 s for the first update and 0.01 s for each.
            compile_s = point.num_shapes * HIDDEN.compile_s + 0.99
            run_s = compile_s + EPOCHS * (steps_s + 0.01 * plan.num_updates)
            assert point.compile_s == pytest.approx(compile_s, rel=1e-3)
            assert point.estimated_run_s == pytest.approx(run_s, rel=1e-3)
            assert point.low_s < point.estimated_run_s < point.high_s
        best = min(content.points, key=lambda point: point.estimated_run_s)
        assert content.optimum_num_shapes == best.num_shapes
        assert content.epochs == EPOCHS

    @staticmethod
    def least_time_plan(setup, result, num_shapes):
        model = result.book.known(STATIC).model
        cost = RunCost(
            step_s=model.step.step_s, compile_s=model.shape_s, epochs=EPOCHS, world_size=1
        )
        config = result.best.outcome.config
        curve = solve_least_time(np.array(TOKENS), config.batching, cost, num_shapes)
        ends = {
            "batching.boundaries": list(curve.boundaries[-1]),
            "batching.num_buckets": num_shapes,
        }
        return plan_of(setup, override_config(config, ends))

    def test_from_the_break_even_step_on_it_is_ahead(self, searched, setup):
        content = gather_run_time(searched, setup)
        optimum = content.points[content.optimum_num_shapes - 1]
        fixed = searched.outcomes[0].outcome.estimate
        tokens = sum(TOKENS)
        plan = self.least_time_plan(setup, searched, optimum.num_shapes)

        def lead_s(steps):
            """Seconds by which the optimum is ahead after so many of its steps."""
            share = steps / (EPOCHS * plan.num_steps)
            ours = optimum.compile_s + share * (optimum.estimated_run_s - optimum.compile_s)
            theirs = (
                fixed.estimated_compile_s
                + share * EPOCHS * tokens / fixed.estimated_steady_real_tokens_per_s
            )
            return theirs - ours

        steps = content.break_even_steps
        assert 0 < steps < EPOCHS * plan.num_steps
        assert lead_s(steps) >= 0.0 > lead_s(steps - 1)

    def test_runs_that_were_timed_stand_beside_it(self, whole, setup):
        runs = {run.trial: run for run in gather_run_time(whole, setup).timed_runs}
        # The dynamic graph, the packed rows and the refused trial are of another kind.
        assert set(runs) == {0, 2, 4, 5}
        assert runs[4].run_s == pytest.approx(geometric_mean(ROUNDS["trial 4"]))
        assert (runs[4].num_shapes, runs[0].num_shapes) == (8, 1)

    def test_before_a_confirmation_only_what_was_measured_through(self, searched, setup):
        runs = gather_run_time(searched, setup).timed_runs
        assert [run.trial for run in runs] == [0, 2]
        assert runs[0].run_s == searched.outcomes[0].outcome.estimate.estimated_run_s

    def test_without_a_baseline_one_shape_stands_for_it(self, setup):
        result = measured_result(setup, [(None, {"batching.num_buckets": 8})])
        assert gather_run_time(result, setup).break_even_steps > 0


class TestSensitivity:
    @pytest.mark.parametrize("limit", [1e-2, 1e-5])
    def test_every_group_has_its_line(self, searched, setup, limit):
        low = PrecisionConfig(compute_dtype="fp16")

        def evaluate(precisions):
            return [
                Deviation(
                    precision=one,
                    status="ok",
                    loss_deviation=1e-4 * (1 + 50 * ("softmax" not in one.fp32_ops)),
                    gradient_deviation=None if not one.fp32_ops else 1e-4,
                    num_nonfinite_gradients=0 if one.fp32_ops else 7,
                )
                for one in precisions
            ]

        tolerances = Tolerances(max_loss_deviation=limit, max_gradient_deviation=limit)
        findings = find_precision(evaluate, low, tolerances)
        content = gather_sensitivity(dataclasses.replace(searched, findings=(findings,)), setup)
        tries = {item.group: item for item in content.tries}
        assert "On this CPU fp32 is the fastest precision." in content.note
        if limit == 1e-5:
            assert "fp16 is out: matrix products alone" in content.note
            return
        assert set(OP_GROUPS) < set(tries)
        assert [name for name, item in tries.items() if item.is_sensitive] == [
            "softmax", "everything",
        ]  # fmt: skip
        assert tries["softmax"].loss_deviation == pytest.approx(5.1e-3)
        assert math.isnan(tries["everything"].gradient_deviation)
        assert tries["everything"].num_non_finite == 7
        assert "fp16 stays within its tolerances with softmax in fp32" in content.note

    def test_without_it(self, searched, setup):
        assert gather_sensitivity(searched, setup) == Absent(
            reason="Precision was not examined: the search space has fp32 alone."
        )


class TestPage:
    def test_is_whole_and_points_nowhere(self, whole, setup):
        text = format_html(gather_contents(whole, setup, context_of(setup)))
        page = Page(text)
        assert len(page.ids) == len(set(page.ids))
        assert "https://" not in text and "http://" not in text
        told = page.text.replace("\xa0", " ")
        for words in (
            "varseq-train --config results/best.yaml",
            "optuna-dashboard sqlite:///results/study.db",
            "--cost-model results/cost_model.yaml --dry-run",
            "218 static shapes, over max_static_shapes 32",
            "no --config: a small decoder",
            "No other program took 0.3 cores or more while something was timed.",
            "Figures of a CPU do not rank jit levels or precisions for an NPU",
            "Not proposed: strategy fixed, dynamic, packed; graph mode dynamic; jit_level O1, O2;",
            "memory limit of a trial 4.0 GB",
            "processor cores 2",
        ):
            assert words in told
        assert "read the report" not in told

    @pytest.mark.parametrize("chosen", [[], ALL[:1], ALL[6:]], ids=["none", "one", "refused"])
    def test_of_little(self, setup, chosen):
        contents = gather_contents(measured_result(setup, chosen), setup, context_of(setup))
        assert Page(format_html(contents)).tags.count("section") == 12
        assert isinstance(contents.best, Absent) == (chosen != ALL[:1])

    def test_holds_the_best_config_as_it_is_written(self, whole, setup, tmp_path):
        contents = gather_contents(whole, setup, context_of(setup))
        config = best_config(whole, setup)
        assert contents.best.yaml_text == format_config(config)
        (tmp_path / "best.yaml").write_text(contents.best.yaml_text)
        assert TrainConfig.model_validate_json(config.model_dump_json()) == config
        assert read_yaml(tmp_path / "best.yaml")["provenance"]["trial"] == 4
        settings = {item.name: item.value for item in contents.best.settings}
        assert settings["padded lengths are multiples of (tokens)"] == "8"
        assert settings["precision"] == "fp32"

    def test_a_password_is_in_no_place(self, whole, setup):
        secret = "postgresql://tuner:hush@db/studies"
        contents = gather_contents(
            whole,
            dataclasses.replace(setup, storage=secret),
            context_of(setup, storage=secret),
        )
        text = format_html(contents)
        assert "hush" not in text and "postgresql://tuner:***@db/studies" in text

    def test_other_programs_have_their_word(self, whole, setup):
        loud = dataclasses.replace(whole.outcomes[2].outcome, other_cores=1.24)
        items = list(whole.outcomes)
        items[2] = dataclasses.replace(items[2], outcome=loud)
        rounds = list(whole.confirmation.rounds)
        rounds[1] = dataclasses.replace(rounds[1], other_cores=0.5)
        confirmation = dataclasses.replace(whole.confirmation, rounds=tuple(rounds))
        result = dataclasses.replace(whole, outcomes=tuple(items), confirmation=confirmation)
        contents = gather_contents(result, setup, context_of(setup))
        told = "timed: trial 2: 1.2; trial 4, round 2: 0.5."
        assert [note for note in contents.notes if note.endswith(told)]
        assert contents.headline.trust.endswith(
            "Other programs took up to 1.2 cores meanwhile: times may be too long."
        )
        # Trials at a time are each other's other programs.
        both = gather_contents(result, dataclasses.replace(setup, jobs=2), context_of(setup))
        assert "Other programs" not in both.headline.trust
        assert [note for note in both.notes if note.startswith("2 trials ran at a time")]

    def test_the_loss_from_slabs_is_noted(self, searched, setup):
        def in_slabs_of(num_rows):
            items = []
            for item in searched.outcomes:
                config = override_config(
                    item.outcome.config, {"batching.rows_per_slab": num_rows}, source="test"
                )
                outcome = dataclasses.replace(item.outcome, config=config)
                items.append(dataclasses.replace(item, outcome=outcome))
            return dataclasses.replace(searched, outcomes=tuple(items))

        result = in_slabs_of(400)
        plan = plan_batches(setup.data.lengths, result.best.outcome.config)
        notes = gather_contents(result, setup, context_of(setup)).notes
        assert f"The best config: {plan.loss.text}." in notes
        notes = gather_contents(in_slabs_of(900), setup, context_of(setup)).notes
        assert not [note for note in notes if "slab" in note]

    def test_inexact_trials_are_among_the_failed(self, searched, setup):
        check = PrecisionCheck(
            loss_deviation=0.5, gradient_deviation=None, num_nonfinite=3, violation=9.0
        )
        spoilt = dataclasses.replace(searched.outcomes[4].outcome, precision=check)
        items = list(searched.outcomes)
        items[4] = dataclasses.replace(items[4], outcome=spoilt)
        result = dataclasses.replace(searched, outcomes=tuple(items))
        failures = gather_contents(result, setup, context_of(setup)).failures
        assert [(item.number, item.status) for item in failures] == [
            (4, "inexact"),
            (6, "refused"),
        ]
        assert "loss off by 50.00 %, gradient off by no number, 3 values not finite" in (
            failures[0].reason
        )

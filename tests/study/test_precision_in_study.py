"""Precisions on the made-up device: what is looked at, what is refused, what wins."""

from __future__ import annotations

from collections import Counter

import pytest
from search_case import COST, HUNDRED_ROWS, NUM_BASELINES, frozen_trials, proposals, search
from study_case import Seen, make_setup, make_space

from tuner.config.schema import OP_GROUPS, PrecisionConfig
from tuner.study.choose import choose_best, is_feasible
from tuner.study.precision import (
    SENSITIVITY,
    groups_to_decide,
    judge_deviation,
    low_dtypes,
    sets_to_try,
    tolerances_of,
)
from tuner.study.sensitivity import Tolerances
from tuner.trial.deviation import Deviation
from tuner.trial.fake import FakeRunner, HiddenCost

SPACE = make_space(
    strategy=["bucketed", "fixed"],
    num_buckets={"low": 1, "high": 4},
    longest_rows_per_batch=[2, 4],
    compute_dtype=["fp32", "fp16"],
)
TOLERANCES = Tolerances(max_loss_deviation=0.002, max_gradient_deviation=0.03)


class LowRunner(FakeRunner):
    """Keeps the deviation runs that it was asked for."""

    def __init__(self, groups, *, low_factor=0.6, products=(0.0, 0.0, 0), cost=COST):
        super().__init__(HiddenCost(**{**vars(cost), "low_factor": low_factor}))
        self.group_deviations = groups
        self.products_deviation = products
        self.compared = []

    def run_deviation(self, spec, folder):
        self.compared.append([variant.fp32_ops for variant in spec.variants])
        return super().run_deviation(spec, folder)


def make(tmp_path, runner, *, trials=14, space=SPACE, seen=None):
    base = {"train.epochs": 100}
    setup = make_setup(
        tmp_path, HUNDRED_ROWS, space, base=base, trials=trials, memory_limit_bytes=10**12
    )
    return setup, search(setup, runner, seen)


def precision_of(item):
    return item.outcome.config.precision


def test_the_planted_group_stays_in_fp32_and_the_rest_wins(tmp_path):
    runner, seen = LowRunner({"softmax": (0.0, 0.0, 900)}), Seen()
    setup, result = make(tmp_path, runner, seen=seen)
    (findings,) = result.findings
    assert (findings.dtype, findings.safe_fp32_ops) == ("fp16", ("softmax",))
    assert "fp16: sensitive op groups: softmax; kept in fp32 to be safe: softmax" in seen.notices
    best = choose_best(result.outcomes)
    assert best is not None
    assert precision_of(best).compute_dtype == "fp16"
    assert precision_of(best).fp32_ops == ("softmax",)
    assert low_dtypes(setup) == ("fp16",)


def test_the_pass_runs_once_and_is_no_trial(tmp_path):
    runner = LowRunner({"softmax": (0.0, 0.0, 900)})
    setup, result = make(tmp_path, runner, trials=6)
    assert len(proposals(result)) == 6 and len(result.outcomes) == 6 + NUM_BASELINES
    passes = [
        trial
        for trial in frozen_trials(tmp_path)
        if trial.user_attrs.get("baseline", "").startswith(SENSITIVITY)
    ]
    assert [trial.user_attrs["baseline"] for trial in passes] == [f"{SENSITIVITY}fp16"]
    # Ten variants at once, then the set that came out; the same command asks nothing again.
    assert [len(asked) for asked in runner.compared] == [10, 1]
    again = LowRunner({})
    assert search(setup, again).findings == result.findings
    assert again.compared == [] and again.specs == []


def test_sets_that_are_known_to_be_off_are_refused_without_timing(tmp_path):
    runner = LowRunner({"softmax": (0.0, 0.0, 900)})
    _, result = make(tmp_path, runner, trials=30)
    low = [item for item in proposals(result) if precision_of(item).compute_dtype == "fp16"]
    off = [item.outcome for item in low if "softmax" not in precision_of(item).fp32_ops]
    for outcome in off:
        assert outcome.status == "refused" and outcome.measured == ()
        assert outcome.reason == "900 elements of the gradient are not numbers"
        assert outcome.config not in runner.configs
        assert outcome.precision is not None and outcome.precision.violation > 0
    assert off
    # It was compared in the pass: no process of its own for it either.
    assert Counter(map(len, runner.compared)) == {10: 1, 1: 1}


def test_a_set_that_was_not_compared_before_is_checked_first(tmp_path):
    """Three groups are too much together; of the sets in between the pass has not seen all."""
    groups = {
        "softmax": (0.0006, 0.0, 0),
        "norms": (0.0007, 0.0, 0),
        "loss": (0.0008, 0.0, 0),
    }
    runner = LowRunner(groups)
    _, result = make(tmp_path, runner, trials=40)
    checks = [asked for asked in runner.compared if len(asked) == 1]
    assert len(checks) == len({asked[0] for asked in checks}) > 1
    compared_in_pass = {item.precision.fp32_ops for item in result.findings[0].evaluated}
    assert not {asked[0] for asked in checks[1:]} & compared_in_pass
    within = 0
    for item in proposals(result):
        precision = precision_of(item)
        if precision.compute_dtype == "fp32":
            assert item.outcome.precision is None
            continue
        lowered = [group for group in OP_GROUPS if group not in precision.fp32_ops]
        loss = sum(groups.get(group, (0.0, 0.0, 0))[0] for group in lowered)
        check = item.outcome.precision
        if item.outcome.reason.startswith("not measured"):
            # Too slow whatever its deviation: not compared either.
            continue
        assert check is not None and check.loss_deviation == pytest.approx(loss)
        assert check.violation == pytest.approx(loss / 0.002 - 1.0)
        if loss > 0.002:
            assert item.outcome.status == "refused" and not is_feasible(item.outcome)
            assert item.outcome.reason == f"the loss is off by {loss:.2g} (at most 0.002)"
        else:
            within += item.outcome.status == "ok"
    assert within
    best = choose_best(result.outcomes)
    assert best is not None and best.outcome.precision is not None
    assert best.outcome.precision.violation <= 0.0


def test_where_the_low_one_is_slower_fp32_wins(tmp_path):
    runner = LowRunner({"softmax": (0.0, 0.0, 900)}, low_factor=1.6)
    _, result = make(tmp_path, runner)
    best = choose_best(result.outcomes)
    assert best is not None and precision_of(best).compute_dtype == "fp32"
    # It was timed all the same.
    assert any(config.precision.compute_dtype == "fp16" for config in runner.configs)


def test_a_dtype_whose_products_are_off_is_not_proposed_and_said(tmp_path):
    runner, seen = LowRunner({}, products=(0.01, 0.0, 0)), Seen()
    _, result = make(tmp_path, runner, trials=10, seen=seen)
    assert (
        "fp16 is not tried: matrix products alone: the loss is off by 0.01 (at most 0.002)"
        in seen.notices
    )
    assert {config.precision.compute_dtype for config in runner.configs} == {"fp32"}
    low = [item for item in proposals(result) if precision_of(item).compute_dtype == "fp16"]
    assert all(item.outcome.status == "refused" for item in low)
    # What the sampler may still draw costs no process, and is told as violated.
    for item in low:
        trial = frozen_trials(tmp_path)[item.number]
        assert max(trial.constraints.values()) > 0
    best = choose_best(result.outcomes)
    assert best is not None and precision_of(best).compute_dtype == "fp32"


def test_a_violation_is_the_share_over_the_tolerance():
    precision = PrecisionConfig(compute_dtype="fp16")

    def judge(loss, gradient, nonfinite=0):
        deviation = Deviation(
            precision=precision,
            loss_deviation=loss,
            gradient_deviation=gradient,
            num_nonfinite_gradients=nonfinite,
        )
        return judge_deviation(deviation, TOLERANCES)

    check, problem = judge(0.001, 0.03)
    assert check.violation == pytest.approx(0.0) and problem == ""
    check, problem = judge(0.003, 0.003)
    assert check.violation == pytest.approx(0.5) and "0.003" in problem
    check, problem = judge(0.0, None, 7)
    assert check.violation > 1 and check.num_nonfinite == 7 and problem
    died = Deviation(precision=precision, status="oom", reason="too large")
    check, problem = judge_deviation(died, TOLERANCES)
    assert check.violation > 1 and problem == "oom: too large"


def test_of_few_groups_all_subsets_are_tried_of_many_those_near_the_safe_set(tmp_path):
    few = LowRunner({"softmax": (0.0006, 0.0, 0), "norms": (0.0007, 0.0, 0)})
    setup, result = make(tmp_path, few, trials=1)
    (findings,) = result.findings
    assert groups_to_decide(findings) == ("softmax", "norms")
    assert sets_to_try(findings) == [("softmax", "norms"), (), ("softmax",), ("norms",)]
    assert tolerances_of(setup) == TOLERANCES
    (tmp_path / "many").mkdir()
    many = LowRunner(dict.fromkeys(OP_GROUPS[:5], (0.0006, 0.0, 0)))
    _, result = make(tmp_path / "many", many, trials=1)
    (findings,) = result.findings
    safe = findings.safe_fp32_ops
    assert len(safe) == 5
    tried = sets_to_try(findings)
    assert tried[0] == safe
    assert all(set(kept) < set(safe) and len(kept) == 4 for kept in tried[1:])

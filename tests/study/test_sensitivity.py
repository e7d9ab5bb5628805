"""The sensitivity pass on made-up deviations: planted faults are found, and nothing else."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import make_config

from tuner.config.schema import OP_GROUPS, PrecisionConfig
from tuner.study.sensitivity import (
    Tolerances,
    evaluate_by,
    find_precision,
    findings_from_plain,
    findings_to_plain,
    is_within,
)
from tuner.trial.deviation import Deviation, DeviationResult, DeviationSpec
from tuner.trial.fake_deviation import FakeDeviations
from tuner.trial.folder import TrialFolder

TOLERANCES = Tolerances(max_loss_deviation=0.01, max_gradient_deviation=0.1)
LOW = PrecisionConfig(compute_dtype="fp16", loss_scale=1024.0)
SPEC = DeviationSpec(
    config=make_config(),
    lengths_file="lengths.npy",
    variants=(),
    num_batches=2,
    time_limit_s=60.0,
    memory_limit_bytes=10**9,
)


class Runs(FakeDeviations):
    """Counts processes and what they were asked; some variants kill theirs."""

    def __init__(self, groups, products=(0.0, 0.0, 0), deadly=()):
        self.group_deviations = groups
        self.products_deviation = products
        self.deadly = deadly
        self.asked = []
        self.folders = []

    def run_deviation(self, spec, folder):
        self.folders.append(folder.path.name)
        self.asked.append([variant.fp32_ops for variant in spec.variants])
        found = super().run_deviation(spec, folder)
        for number, variant in enumerate(spec.variants):
            if variant.fp32_ops in self.deadly:
                died = Deviation(precision=variant, status="oom", reason="too large")
                kept = (*found.deviations[:number], died)
                return DeviationResult(
                    status="oom", reference=found.reference, deviations=kept, reason="too large"
                )
        return found

    @property
    def evaluate(self):
        return evaluate_by(self.run_deviation, SPEC, lambda n: TrialFolder(SPEC_FOLDER / str(n)))


SPEC_FOLDER = Path("runs")


def find(groups, **more):
    return find_precision(Runs(groups, **more).evaluate, LOW, TOLERANCES)


def all_but(*lowered):
    return tuple(group for group in OP_GROUPS if group not in lowered)


def test_planted_faults_are_kept_in_fp32_and_nothing_else():
    """One overflows, one is far off in the gradient, one adds 30 % of a tolerance."""
    runs = Runs(
        {
            "norms": (0.0, 0.0, 900),
            "loss": (0.0, 0.2, 0),
            "rope": (0.003, 0.0, 0),
            "softmax": (0.002, 0.02, 0),
        },
        products=(0.001, 0.01, 0),
    )
    found = find_precision(runs.evaluate, LOW, TOLERANCES)
    assert found.dtype == "fp16"
    assert found.is_feasible
    assert found.sensitive == found.safe_fp32_ops == ("norms", "rope", "loss")
    assert [row.group for row in found.rows] == list(OP_GROUPS)
    reasons = {row.group: row.reason for row in found.rows}
    assert reasons["norms"] == "900 elements of the gradient are not numbers"
    assert reasons["loss"] == "the gradient is off by 0.21 (at most 0.1)"
    assert reasons["rope"] == "it takes 30% of a tolerance, over 25%"
    assert reasons["softmax"] == "it takes 20% of a tolerance"
    assert reasons["residual"] == "it takes 0% of a tolerance"
    shares = {row.group: row.tolerance_share for row in found.rows}
    assert shares["norms"] is None
    assert shares["loss"] == pytest.approx(2.0)
    assert "norms, rope, loss in fp32" in found.reason
    # One process for the ten of the first round, one for the set that came out.
    assert [len(asked) for asked in runs.asked] == [10, 1]
    assert runs.folders == ["0", "1"]
    assert found.deviation_of(found.safe_fp32_ops).loss_deviation == pytest.approx(0.003)
    assert found.deviation_of(["loss", "norms", "rope"]) is not None
    assert found.deviation_of(["norms"]) is None
    assert {item.precision.loss_scale for item in found.evaluated} == {1024.0}


def test_without_a_fault_everything_is_low_and_asked_in_one_round():
    runs = Runs({group: (0.0001, 0.001, 0) for group in OP_GROUPS})
    found = find_precision(runs.evaluate, LOW, TOLERANCES)
    assert (found.sensitive, found.safe_fp32_ops, found.is_feasible) == ((), (), True)
    assert len(runs.asked) == 1
    assert found.reason == "no group is sensitive"


def test_groups_that_only_together_are_too_much_are_kept_by_falling_deviation():
    """Each alone takes less than a quarter; the sum of 0.8 to 2.4 % of the gradient is 0.128."""
    groups = {group: (0.0, 0.008 + 0.016 * i / 7, 0) for i, group in enumerate(OP_GROUPS)}
    found = find(groups)
    assert found.sensitive == ()
    # By hand: 0.128 - 0.024 = 0.104 is still over 0.1, less 0.0217 it is not.
    assert found.safe_fp32_ops == ("activations", "residual")
    assert found.is_feasible
    assert "without activations, residual in fp32 too, the gradient is off by 0.13" in found.reason


def test_products_that_leave_the_tolerance_make_the_dtype_infeasible():
    found = find({}, products=(0.02, 0.0, 0))
    assert not found.is_feasible
    assert (found.rows, found.sensitive, found.safe_fp32_ops) == ((), (), ())
    assert found.reason == "matrix products alone: the loss is off by 0.02 (at most 0.01)"


def test_a_variant_that_kills_its_process_is_sensitive_and_the_others_are_still_compared():
    deadly = (all_but("norms"), all_but("embedding"), ())
    runs = Runs({"rope": (0.0, 0.05, 0)}, deadly=deadly)
    found = find_precision(runs.evaluate, LOW, TOLERANCES)
    assert found.safe_fp32_ops == ("norms", "rope", "embedding")
    assert next(row.reason for row in found.rows if row.group == "norms") == "oom: too large"
    assert found.deviation_of(()).status == "oom"
    assert found.deviation_of(found.safe_fp32_ops).status == "ok"
    # What was compared is not asked again.
    asked = list(itertools.chain(*runs.asked))
    assert all(asked.count(kept) == 1 for kept in (OP_GROUPS, all_but("softmax")))


def test_a_process_that_dies_before_fp32_is_asked_once():
    calls = []

    def run(spec, folder):
        calls.append(spec)
        return DeviationResult(status="timeout", reason="over the time limit of 60 s")

    evaluate = evaluate_by(run, SPEC, lambda n: TrialFolder(SPEC_FOLDER / str(n)))
    found = find_precision(evaluate, LOW, TOLERANCES)
    assert not found.is_feasible
    assert found.reason == "matrix products alone: timeout: over the time limit of 60 s"
    assert len(calls) == 1


def test_no_answer_at_all_does_not_ask_for_ever():
    found = find_precision(lambda variants: [], LOW, TOLERANCES)
    assert not found.is_feasible
    assert "no answer" in found.reason


deviations = st.tuples(
    st.floats(0, 0.012), st.floats(0, 0.12), st.sampled_from([0, 0, 0, 0, 0, 3])
)


@given(st.dictionaries(st.sampled_from(OP_GROUPS), deviations), deviations)
def test_a_safe_set_is_within_holds_the_sensitive_and_no_smaller_step_would_do(groups, products):
    found = find(groups, products=products)
    loss, gradient, overflows = products
    base_holds = loss <= 0.01 and gradient <= 0.1 and not overflows
    assert found.is_feasible == base_holds
    assert findings_from_plain(json.loads(json.dumps(findings_to_plain(found)))) == found
    if not base_holds:
        return
    kept = set(found.safe_fp32_ops)
    assert kept >= set(found.sensitive)
    assert {group for group, item in groups.items() if item[2]} <= set(found.sensitive)
    assert is_within(found.deviation_of(kept), TOLERANCES)
    added = kept - set(found.sensitive)
    if added:
        least = min(added, key=lambda g: (max(groups[g][0] / 0.01, groups[g][1] / 0.1)
                                          if g in groups else 0.0))  # fmt: skip
        lowered = [groups.get(group, (0, 0, 0)) for group in set(OP_GROUPS) - (kept - {least})]
        total = [products[i] + sum(item[i] for item in lowered) for i in (0, 1)]
        assert total[0] > 0.01 * (1 - 1e-9) or total[1] > 0.1 * (1 - 1e-9)

"""Precisions in a study: the sensitivity pass, sets of op groups worth a trial, their checks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tuner.batching.align import align_length
from tuner.config.override import override_config
from tuner.config.schema import OP_GROUPS, PrecisionConfig, TrainConfig
from tuner.study.outcome import PrecisionCheck
from tuner.study.sensitivity import (
    PrecisionFindings,
    Tolerances,
    describe_deviation,
    evaluate_by,
    find_precision,
    is_within,
)
from tuner.study.setup import StudySetup
from tuner.trial.deviation import Deviation, DeviationSpec
from tuner.trial.folder import TrialFolder
from tuner.trial.runner import TrialRunner

SENSITIVITY = "sensitivity of "
"""Begins the name of the unit of work that finds the op groups of a dtype."""

MOST_SETS_OF = 3
"""Sensitive groups of which all subsets are looked at; of more only those near the safe set."""

COMPARED_BATCHES = 2
COMPARED_ROWS = 2
"""Rows of a compared batch, of the longest length: one graph for each variant, soon compiled."""

NOT_A_NUMBER = 10.0
"""Violation of a precision that gives numbers that are none, or none at all."""


def low_dtypes(setup: StudySetup) -> tuple[str, ...]:
    """The compute dtypes below fp32 that the space holds."""
    return tuple(dtype for dtype in setup.space.compute_dtype if dtype != "fp32")


def tolerances_of(setup: StudySetup) -> Tolerances:
    """What the space asks for."""
    return Tolerances(
        max_loss_deviation=setup.space.max_loss_deviation,
        max_gradient_deviation=setup.space.max_gradient_deviation,
    )


def run_sensitivity(
    setup: StudySetup, runner: TrialRunner, dtype: str, number: int, device_id: int
) -> PrecisionFindings:
    """Find which op groups of a dtype need fp32; whatever goes wrong is in the findings.

    Args:
        setup: Data, limits, tolerances.
        runner: Runs the comparisons.
        dtype: Below fp32.
        number: Of the trial whose folder is taken.
        device_id: To run on.
    """
    spec = _spec(setup, setup.base, (), device_id)
    low = _low(setup, dtype, ())
    folder = setup.folder.trial(number)
    evaluate = evaluate_by(
        runner.run_deviation, spec, lambda count: TrialFolder(folder.path / f"round{count}")
    )
    return find_precision(evaluate, low, tolerances_of(setup))


def check_precision(
    setup: StudySetup, runner: TrialRunner, config: TrainConfig, folder: TrialFolder
) -> tuple[PrecisionCheck, str]:
    """Compare one config's precision with fp32, in a process; with what is wrong, if it is."""
    spec = _spec(setup, config, (config.precision,), 0)
    # Not inside the trial's own folder, which `run` clears.
    beside = TrialFolder(folder.path.with_name(f"{folder.path.name}-precision"))
    result = runner.run_deviation(spec, beside)
    failed = Deviation(precision=config.precision, status=result.status, reason=result.reason)
    deviation = result.deviations[0] if result.deviations else failed
    return judge_deviation(deviation, tolerances_of(setup))


def judge_deviation(deviation: Deviation, tolerances: Tolerances) -> tuple[PrecisionCheck, str]:
    """A deviation as a constraint, and in words what breaks it; "" if it holds.

    Args:
        deviation: From fp32.
        tolerances: Inclusive.
    """
    loss, gradient = deviation.loss_deviation, deviation.gradient_deviation
    num_nonfinite = deviation.num_nonfinite_gradients + deviation.num_nonfinite_losses
    holds = is_within(deviation, tolerances)
    if loss is None or gradient is None or num_nonfinite or deviation.status != "ok":
        violation = NOT_A_NUMBER
    else:
        shares = (
            loss / tolerances.max_loss_deviation,
            gradient / tolerances.max_gradient_deviation,
        )
        violation = max(shares) - 1.0
    check = PrecisionCheck(
        loss_deviation=loss,
        gradient_deviation=gradient,
        num_nonfinite=num_nonfinite,
        violation=violation,
    )
    return check, "" if holds else describe_deviation(deviation, tolerances)


def known_check(
    findings: Mapping[str, PrecisionFindings], precision: PrecisionConfig
) -> tuple[PrecisionCheck, str] | None:
    """What the sensitivity pass says of a precision; None if it did not compare just this one."""
    found = findings.get(precision.compute_dtype)
    if found is None:
        return None
    deviation = found.deviation_of(precision.fp32_ops)
    if deviation is not None:
        return judge_deviation(deviation, found.tolerances)
    if not found.is_feasible:
        check, _ = judge_deviation(found.evaluated[0], found.tolerances)
        return check, found.reason
    return None


def groups_to_decide(findings: PrecisionFindings) -> tuple[str, ...]:
    """The op groups that a proposal decides about; the others may be low."""
    wanted = {*findings.sensitive, *findings.safe_fp32_ops}
    return tuple(group for group in OP_GROUPS if group in wanted)


def sets_to_try(findings: PrecisionFindings) -> list[tuple[str, ...]]:
    """Sets of op groups in fp32 that may hold the tolerances, the safe one first.

    All subsets of a few groups; of many the safe set and those with one group less. What was
    compared and does not hold is left out.
    """
    if not findings.is_feasible:
        return []
    groups = groups_to_decide(findings)
    safe: tuple[str, ...] = findings.safe_fp32_ops
    if len(groups) <= MOST_SETS_OF:
        sets = [
            chosen
            for count in range(len(groups) + 1)
            for chosen in itertools.combinations(groups, count)
        ]
    else:
        sets = [tuple(other for other in safe if other != group) for group in safe]
    return [kept for kept in dict.fromkeys([safe, *sets]) if _may_hold(findings, kept)]


def describe_findings(findings: PrecisionFindings) -> str:
    """What a sensitivity pass found, in one line."""
    if not findings.is_feasible:
        return f"{findings.dtype} is not tried: {findings.reason}"
    named = ", ".join(findings.sensitive) or "none"
    kept = ", ".join(findings.safe_fp32_ops) or "none"
    return f"{findings.dtype}: sensitive op groups: {named}; kept in fp32 to be safe: {kept}"


def _may_hold(findings: PrecisionFindings, kept: Sequence[str]) -> bool:
    deviation = findings.deviation_of(kept)
    return deviation is None or is_within(deviation, findings.tolerances)


def _low(setup: StudySetup, dtype: str, groups: Sequence[str]) -> PrecisionConfig:
    changes = {"compute_dtype": dtype, "fp32_ops": tuple(groups)}
    return PrecisionConfig(**{**dict(setup.base.precision), **changes})


def _spec(
    setup: StudySetup,
    config: TrainConfig,
    variants: tuple[PrecisionConfig, ...],
    device_id: int,
) -> DeviationSpec:
    align = min(8, setup.data.longest)
    few_rows: dict[str, Any] = {
        "batching.strategy": "fixed",
        "batching.boundaries": [],
        "batching.batch_sizes": [],
        "batching.samples_per_batch": None,
        "batching.align": align,
        "batching.tokens_per_batch": COMPARED_ROWS * align_length(setup.data.longest, align),
    }
    return DeviationSpec(
        config=override_config(config, few_rows, source="precision"),
        lengths_file=str(setup.folder.lengths.absolute()),
        variants=variants,
        num_batches=COMPARED_BATCHES,
        time_limit_s=setup.time_limit_s,
        memory_limit_bytes=setup.memory_limit_bytes,
        device_id=device_id,
    )

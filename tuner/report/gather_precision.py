"""Which op groups need fp32, as the report page shows it; pure."""

from __future__ import annotations

import math

from tuner.config.schema import OP_GROUPS
from tuner.report.contents import Absent, PrecisionTry, Sensitivity
from tuner.study.result import StudyResult
from tuner.study.sensitivity import PrecisionFindings, is_within
from tuner.study.setup import StudySetup
from tuner.trial.deviation import Deviation

PRODUCTS = "matrix products alone, all groups in fp32"
ALL_LOW = "everything"

ON_CPU = (
    "On this CPU fp32 is the fastest precision. That does not carry over to an NPU, which "
    "computes fastest in lower precision; the deviations say what such a run would have to keep "
    "in fp32."
)


def gather_sensitivity(result: StudyResult, setup: StudySetup) -> Sensitivity | Absent:
    """The groups lowered one by one, for every compute dtype that was looked at."""
    if not result.findings:
        if setup.space.compute_dtype == ("fp32",):
            return Absent(reason="Precision was not examined: the search space has fp32 alone.")
        return Absent()
    on_device = [ON_CPU] if setup.installation.device == "CPU" else []
    return Sensitivity(
        tries=tuple(row for findings in result.findings for row in _tries(findings)),
        note=" ".join([*map(_told, result.findings), *on_device]),
    )


def _told(findings: PrecisionFindings) -> str:
    limits = findings.tolerances
    allowed = (
        f"at most {100 * limits.max_loss_deviation:g} % of the loss and "
        f"{100 * limits.max_gradient_deviation:g} % of the gradient off fp32 on the same batches"
    )
    if not findings.is_feasible:
        return f"{findings.dtype} is out: {findings.reason} (allowed is {allowed})."
    kept = ", ".join(findings.safe_fp32_ops)
    return (
        f"{findings.dtype} stays within its tolerances with "
        f"{f'{kept} in fp32' if kept else 'no group in fp32'} (allowed is {allowed})."
    )


def _tries(findings: PrecisionFindings) -> list[PrecisionTry]:
    tries = [
        _try(findings, row.group, row.deviation, is_sensitive=row.is_sensitive)
        for row in findings.rows
    ]
    for name, kept in ((PRODUCTS, OP_GROUPS), (ALL_LOW, ())):
        deviation = findings.deviation_of(kept)
        if deviation is not None:
            is_out = not is_within(deviation, findings.tolerances)
            tries.append(_try(findings, name, deviation, is_sensitive=is_out))
    return tries


def _try(
    findings: PrecisionFindings, name: str, deviation: Deviation, *, is_sensitive: bool
) -> PrecisionTry:
    failure = "" if deviation.status == "ok" else f" ({deviation.status}: {deviation.reason})"
    return PrecisionTry(
        dtype=findings.dtype,
        group=f"{name}{failure}",
        loss_deviation=_number(deviation.loss_deviation),
        gradient_deviation=_number(deviation.gradient_deviation),
        num_non_finite=deviation.num_nonfinite_losses + deviation.num_nonfinite_gradients,
        is_sensitive=is_sensitive,
    )


def _number(deviation: float | None) -> float:
    return math.nan if deviation is None else deviation

"""Which op groups a lower precision can do without fp32: found by lowering each alone.

Compared are the loss and the whole gradient of real batches with those of fp32:

1. all groups in fp32 (only matrix products are low), each group alone lowered, all lowered;
2. a group is sensitive if lowering it alone leaves the tolerances, gives a number that is none, or
   adds more than a share of a tolerance to what the products take of it;
3. the set "sensitive groups in fp32, the rest low" is checked itself, since deviations add up;
4. if it leaves the tolerances, more groups are kept, those that add most first, until it holds.

It takes at most three rounds of comparisons, each one process if none dies.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.config.schema import OP_GROUPS, ComputeDtype, OpGroup, PrecisionConfig
from tuner.trial.deviation import Deviation, DeviationResult, DeviationSpec
from tuner.trial.folder import TrialFolder
from tuner.trial.record import parse_json, to_json

SENSITIVE_SHARE = 0.25
"""Of a tolerance: with eight groups, a few may come close to it before the sum leaves it."""

Evaluate = Callable[[Sequence[PrecisionConfig]], Sequence[Deviation]]
"""Compares precisions with fp32, in the order given; may stop short after one that failed."""


@dataclass(frozen=True, kw_only=True)
class Tolerances:
    """How far a precision may be from fp32, inclusive.

    Attributes:
        max_loss_deviation: |loss - fp32| / |fp32|.
        max_gradient_deviation: |g - fp32| / |fp32|, over all parameters.
    """

    max_loss_deviation: float
    max_gradient_deviation: float


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    """What lowering one group alone does.

    Attributes:
        group: The group.
        deviation: With this group lowered and all others in fp32.
        tolerance_share: What it adds to the products' deviation, as a share of the tolerance, the
            larger one of loss and gradient; None if that is no number or was not measured.
        is_sensitive: Whether it should stay in fp32.
        reason: Why, in a few words.
    """

    group: OpGroup
    deviation: Deviation
    tolerance_share: float | None
    is_sensitive: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class PrecisionFindings:
    """What a sensitivity pass found for one compute dtype.

    Attributes:
        dtype: The compute dtype.
        tolerances: What it was held to.
        rows: One for each group, in the order of OP_GROUPS; empty if not even products may be low.
        sensitive: Groups that are sensitive by themselves.
        safe_fp32_ops: Groups to keep in fp32 so that the tolerances hold, as measured; without a
            meaning if not feasible.
        is_feasible: Whether there is such a set.
        reason: How the set came about, or why there is none; one line.
        evaluated: Everything that was compared.
    """

    dtype: ComputeDtype
    tolerances: Tolerances
    rows: tuple[GroupRow, ...]
    sensitive: tuple[OpGroup, ...]
    safe_fp32_ops: tuple[OpGroup, ...]
    is_feasible: bool
    reason: str
    evaluated: tuple[Deviation, ...]

    def deviation_of(self, fp32_ops: Iterable[str]) -> Deviation | None:
        """What was compared with just these groups in fp32; None if that was not."""
        kept = set(fp32_ops)
        found = (item for item in self.evaluated if set(item.precision.fp32_ops) == kept)
        return next(found, None)


def is_within(deviation: Deviation, tolerances: Tolerances) -> bool:
    """Whether a precision was measured, gives numbers only, and is near enough to fp32."""
    loss, gradient = deviation.loss_deviation, deviation.gradient_deviation
    if deviation.status != "ok" or loss is None or gradient is None:
        return False
    if deviation.num_nonfinite_losses or deviation.num_nonfinite_gradients:
        return False
    return loss <= tolerances.max_loss_deviation and gradient <= tolerances.max_gradient_deviation


def describe_deviation(deviation: Deviation, tolerances: Tolerances) -> str:
    """What is wrong with a deviation that is not within, in a few words; else its figures."""
    if deviation.status != "ok":
        return f"{deviation.status}: {deviation.reason}"
    if deviation.num_nonfinite_losses:
        return "the loss is not a number"
    if deviation.num_nonfinite_gradients:
        return f"{deviation.num_nonfinite_gradients} elements of the gradient are not numbers"
    loss, gradient = deviation.loss_deviation or 0.0, deviation.gradient_deviation or 0.0
    if loss > tolerances.max_loss_deviation:
        return f"the loss is off by {loss:.2g} (at most {tolerances.max_loss_deviation:g})"
    if gradient > tolerances.max_gradient_deviation:
        limit = tolerances.max_gradient_deviation
        return f"the gradient is off by {gradient:.2g} (at most {limit:g})"
    return f"off by {loss:.2g} (loss) and {gradient:.2g} (gradient)"


def find_precision(
    evaluate: Evaluate,
    low: PrecisionConfig,
    tolerances: Tolerances,
    sensitive_share: float = SENSITIVE_SHARE,
) -> PrecisionFindings:
    """Run the sensitivity pass of one compute dtype.

    Args:
        evaluate: Compares precisions with fp32.
        low: Compute dtype and loss scale; its fp32_ops do not matter.
        tolerances: Both above 0.
        sensitive_share: Of a tolerance, in (0, 1], that a group may add alone.
    """
    compared = _Compared(evaluate, low)
    alone = {group: _without(OP_GROUPS, (group,)) for group in OP_GROUPS}
    compared.ask([OP_GROUPS, *alone.values(), ()])
    base = compared.by_set[OP_GROUPS]
    if not is_within(base, tolerances):
        reason = f"matrix products alone: {describe_deviation(base, tolerances)}"
        return _findings(compared, tolerances, (), None, reason)
    rows = tuple(
        _row(group, compared.by_set[alone[group]], base, tolerances, sensitive_share)
        for group in OP_GROUPS
    )
    kept, reason = _safe_set(compared, rows, tolerances)
    return _findings(compared, tolerances, rows, kept, reason)


class _Compared:
    """Deviations by the groups that are kept in fp32; nothing is compared twice."""

    def __init__(self, evaluate: Evaluate, low: PrecisionConfig) -> None:
        self._evaluate = evaluate
        self.low = low
        self.by_set: dict[tuple[OpGroup, ...], Deviation] = {}

    def ask(self, sets: Sequence[tuple[OpGroup, ...]]) -> None:
        """Compare until there is an answer for each, also if some end the process."""
        missing = [kept for kept in dict.fromkeys(sets) if kept not in self.by_set]
        while missing:
            variants = [
                PrecisionConfig(**{**dict(self.low), "fp32_ops": kept}) for kept in missing
            ]
            found = self._evaluate(variants)
            for kept, deviation in zip(missing, found, strict=False):
                self.by_set[kept] = deviation
            if not found:
                lost = Deviation(precision=variants[0], status="crashed", reason="no answer")
                self.by_set[missing[0]] = lost
            missing = missing[max(1, len(found)) :]


def _row(
    group: OpGroup, alone: Deviation, base: Deviation, tolerances: Tolerances, limit: float
) -> GroupRow:
    share = _added_share(alone, base, tolerances)
    is_sensitive = share is None or share > limit or not is_within(alone, tolerances)
    if share is None or not is_within(alone, tolerances):
        reason = describe_deviation(alone, tolerances)
    elif is_sensitive:
        reason = f"it takes {share:.0%} of a tolerance, over {limit:.0%}"
    else:
        reason = f"it takes {share:.0%} of a tolerance"
    return GroupRow(
        group=group,
        deviation=alone,
        tolerance_share=share,
        is_sensitive=is_sensitive,
        reason=reason,
    )


def _added_share(alone: Deviation, base: Deviation, tolerances: Tolerances) -> float | None:
    if alone.loss_deviation is None or alone.gradient_deviation is None:
        return None
    # The base is within the tolerances, so it has both figures; rounding errors that happen to
    # cancel those of the products count as nothing added.
    loss = alone.loss_deviation - (base.loss_deviation or 0.0)
    gradient = alone.gradient_deviation - (base.gradient_deviation or 0.0)
    shares = (loss / tolerances.max_loss_deviation, gradient / tolerances.max_gradient_deviation)
    return max(0.0, *shares)


def _safe_set(
    compared: _Compared, rows: Sequence[GroupRow], tolerances: Tolerances
) -> tuple[tuple[OpGroup, ...], str]:
    """The fewest groups to keep in fp32, found from the sensitive ones upwards; and how."""
    sensitive = _in_order(row.group for row in rows if row.is_sensitive)
    compared.ask([sensitive])
    first = compared.by_set[sensitive]
    if is_within(first, tolerances):
        return sensitive, (
            f"{', '.join(sensitive)} in fp32, the rest low"
            if sensitive
            else "no group is sensitive"
        )
    more = sorted(
        (row for row in rows if not row.is_sensitive),
        key=lambda row: row.tolerance_share or 0.0,
        reverse=True,
    )
    steps = itertools.accumulate(((row.group,) for row in more), initial=sensitive)
    growing = [_in_order(groups) for groups in steps][1:]
    compared.ask(growing)
    # The last one is the base, which is within.
    kept = next(groups for groups in growing if is_within(compared.by_set[groups], tolerances))
    added = [group for group in kept if group not in sensitive]
    problem = describe_deviation(first, tolerances)
    return kept, f"without {', '.join(added)} in fp32 too, {problem}"


def _findings(
    compared: _Compared,
    tolerances: Tolerances,
    rows: tuple[GroupRow, ...],
    kept: tuple[OpGroup, ...] | None,
    reason: str,
) -> PrecisionFindings:
    return PrecisionFindings(
        dtype=compared.low.compute_dtype,
        tolerances=tolerances,
        rows=rows,
        sensitive=_in_order(row.group for row in rows if row.is_sensitive),
        safe_fp32_ops=kept or (),
        is_feasible=kept is not None,
        reason=reason,
        evaluated=tuple(compared.by_set.values()),
    )


def _in_order(groups: Iterable[OpGroup]) -> tuple[OpGroup, ...]:
    wanted = set(groups)
    return tuple(group for group in OP_GROUPS if group in wanted)


def _without(groups: Iterable[OpGroup], left_out: Iterable[OpGroup]) -> tuple[OpGroup, ...]:
    return _in_order(set(groups) - set(left_out))


def evaluate_by(
    run: Callable[[DeviationSpec, TrialFolder], DeviationResult],
    spec: DeviationSpec,
    folder_of: Callable[[int], TrialFolder],
) -> Evaluate:
    """An Evaluate that makes a deviation run for every round.

    Args:
        run: `run_deviation` of a runner.
        spec: Everything but the variants.
        folder_of: The folder of the n-th process, from 0.
    """
    numbers = itertools.count()

    def evaluate(variants: Sequence[PrecisionConfig]) -> Sequence[Deviation]:
        asked = dataclasses.replace(spec, variants=tuple(variants))
        result = run(asked, folder_of(next(numbers)))
        if result.reference is not None:
            return result.deviations
        # Without fp32 there is nothing to compare with, now or in another try.
        return [
            Deviation(precision=variant, status=result.status, reason=result.reason)
            for variant in variants
        ]

    return evaluate


def findings_to_plain(findings: PrecisionFindings) -> dict[str, Any]:
    """JSON-ready; the inverse of `findings_from_plain`."""
    plain: dict[str, Any] = json.loads(to_json(findings))
    return plain


def findings_from_plain(plain: dict[str, Any]) -> PrecisionFindings:
    """Read findings back.

    Raises:
        UnreadableRecordError: they are not such a record.
    """
    return parse_json(PrecisionFindings, json.dumps(plain))

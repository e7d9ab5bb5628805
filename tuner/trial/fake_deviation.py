"""Deviation runs without a device: every op group adds what it is told to."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tuner.config.schema import OP_GROUPS, OpGroup, PrecisionConfig
from tuner.trial.deviation import Deviation, DeviationResult, DeviationSpec, Reference
from tuner.trial.folder import TrialFolder

GroupDeviation = tuple[float, float, int]
"""Deviation of the loss, deviation of the gradient, elements of the gradient that overflow."""


class FakeDeviations:
    """Answers deviation runs at once; to be mixed into a runner that fakes trials.

    Attributes:
        group_deviations: What lowering a group adds; nothing for a group that is not named.
        products_deviation: What matrix products add, in every variant below fp32.
    """

    group_deviations: Mapping[OpGroup, GroupDeviation] = MappingProxyType({})
    products_deviation: GroupDeviation = (0.0, 0.0, 0)

    def run_deviation(self, spec: DeviationSpec, folder: TrialFolder) -> DeviationResult:
        """Add up the lowered groups of every variant; nothing is written."""
        return DeviationResult(
            status="ok",
            reference=Reference(
                loss=4.0, gradient_norm=10.0, num_gradients=10**6, label_tokens=1000, batches=()
            ),
            deviations=tuple(map(self._deviation, spec.variants)),
            wall_s=1.0,
        )

    def _deviation(self, precision: PrecisionConfig) -> Deviation:
        added: list[GroupDeviation] = []
        if precision.compute_dtype != "fp32":
            lowered = [group for group in OP_GROUPS if group not in precision.fp32_ops]
            added = [self.group_deviations.get(group, (0.0, 0.0, 0)) for group in lowered]
            added.append(self.products_deviation)
        num_nonfinite = sum(item[2] for item in added)
        return Deviation(
            precision=precision,
            loss_deviation=sum(item[0] for item in added),
            gradient_deviation=None if num_nonfinite else sum(item[1] for item in added),
            num_nonfinite_gradients=num_nonfinite,
            loss_scale=precision.loss_scale if precision.compute_dtype == "fp16" else None,
        )

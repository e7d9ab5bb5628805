"""Whether a config that was tuned on other rows is still good for the rows at hand.

Two runs of the rows at hand are estimated under the same costs: with the tuned shapes, and with
padded lengths solved anew for these rows, strategy, alignment and token budget staying as they
are. What the tuned shapes lose against that is what tuning again can gain at least; how far the
lengths are apart says nothing about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tuner.batching.align import align_length
from tuner.batching.boundaries import solve_least_time
from tuner.batching.packed_lengths import solve_packed_lengths
from tuner.batching.pinned_shapes import pin_shapes
from tuner.config.override import override_config
from tuner.config.schema import CostRecord, ProvenanceConfig, TrainConfig
from tuner.data.lengths import Lengths
from tuner.simulate.cost import CostModel, StepCost, default_cost_model
from tuner.simulate.cost_book import NO_UPDATE, KnownCosts
from tuner.simulate.estimate import Estimate, estimate_run
from tuner.simulate.histogram import LengthHistogram
from tuner.simulate.length_shift import LengthShift, compare_lengths
from tuner.simulate.measurement import CostKey
from tuner.simulate.screen import Screen, ScreenedPlan

WORTH_TUNING_AGAIN = 0.03
"""Share of the speed, or of the tokens, whose loss is worth another study: about what two runs of
one config differ by between processes."""

LEAST_MOST_BUCKETS = 8
LEAST_MOST_PACKED_LENGTHS = 3
"""Padded lengths that the comparison may have, or as many as were tuned if that is more: a study
that stopped at so many may have had its reasons, as memory, and one that found a single length for
even rows may find more for others."""


@dataclass(frozen=True, kw_only=True)
class DriftPlan:
    """What a config makes of the rows at hand.

    Attributes:
        padded_lengths: In tokens, rising.
        real_tokens: Of an epoch, after truncation.
        effective_token_fraction: Real tokens / padded tokens.
        real_tokens_per_s: Estimated over the whole run, compile time included.
    """

    padded_lengths: tuple[int, ...]
    real_tokens: int
    effective_token_fraction: float
    real_tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class Drift:
    """A tuned config on other rows.

    Attributes:
        shift: How far the lengths are apart; None where the config does not say what they were.
        tuned: With the tuned shapes.
        anew: With padded lengths solved for the rows at hand.
        num_over_long: Rows longer than every tuned shape.
        cost_source: Where the seconds come from, for people.
    """

    shift: LengthShift | None
    tuned: DriftPlan
    anew: DriftPlan
    num_over_long: int
    cost_source: str

    @property
    def speed_loss(self) -> float:
        """Share of the speed that the tuned shapes lose; below 0 where they are the faster."""
        return 1.0 - self.tuned.real_tokens_per_s / self.anew.real_tokens_per_s

    @property
    def token_loss(self) -> float:
        """Share of the tokens that are cut or dropped since they fit into no tuned shape."""
        return 1.0 - self.tuned.real_tokens / self.anew.real_tokens

    @property
    def advice(self) -> Literal["keep", "retune"]:
        """What to do."""
        loss = max(self.speed_loss, self.token_loss)
        return "keep" if loss < WORTH_TUNING_AGAIN else "retune"


def find_drift(config: TrainConfig, tuned: ProvenanceConfig, lengths: Lengths) -> Drift:
    """Compare the rows at hand with those that a config was tuned on.

    Args:
        config: The tuned config.
        tuned: Its provenance.
        lengths: The rows at hand, those that are not trained on left out.

    Raises:
        BadInputError: no row is left to batch, or one is too long under `overflow: error`.
    """
    histogram = LengthHistogram.from_tokens(lengths.own_tokens)
    rows = histogram.admit(config.data, config.data.max_length)
    costs = _known_costs(config, tuned)
    screen = Screen(histogram)
    longest = max(length for _, length in tuned.shapes)
    return Drift(
        shift=_shift(tuned, rows),
        tuned=_planned(screen.plan(pin_shapes(config, tuned.shapes)), config, costs),
        anew=max(
            (
                _planned(screen.plan(candidate), config, costs)
                for candidate in _solved_anew(config, tuned, rows, costs)
            ),
            key=lambda plan: plan.real_tokens_per_s,
        ),
        num_over_long=rows.num_rows - int(rows.rows_up_to(np.array([longest]))[0]),
        cost_source=costs.model.source,
    )


def _shift(tuned: ProvenanceConfig, rows: LengthHistogram) -> LengthShift | None:
    if not tuned.length_percentiles:
        return None
    tokens = np.repeat(rows.lengths, rows.counts)
    return compare_lengths(tuned.length_percentiles, tuned.num_samples, tokens)


def _solved_anew(
    config: TrainConfig, tuned: ProvenanceConfig, rows: LengthHistogram, costs: KnownCosts
) -> list[TrainConfig]:
    """The config with padded lengths for these rows, for every number of them."""
    free = override_config(config, _free_sizes(config, tuned, rows), source="drift")
    cost = costs.run_cost(config.train.epochs)
    batching = free.batching
    if batching.strategy == "bucketed":
        most = max(LEAST_MOST_BUCKETS, len(tuned.shapes))
        found = solve_least_time(rows.lengths, batching, cost, most, rows.counts).boundaries
    elif batching.strategy == "packed":
        most = max(LEAST_MOST_PACKED_LENGTHS, len(tuned.shapes))
        found = solve_packed_lengths(rows.lengths, rows.counts, batching, cost, most)
    else:
        return [free]
    return [
        override_config(free, {"batching.boundaries": boundaries}, source="drift")
        for boundaries in found
    ]


def _free_sizes(
    config: TrainConfig, tuned: ProvenanceConfig, rows: LengthHistogram
) -> dict[str, object]:
    """Without boundaries and sizes of their own; a budget that holds the longest row."""
    batching = config.batching
    changes: dict[str, object] = {"batching.boundaries": [], "batching.batch_sizes": []}
    if batching.samples_per_batch is None:
        budget = batching.tokens_per_batch or max(size * length for size, length in tuned.shapes)
        longest = align_length(rows.longest, batching.align)
        changes["batching.tokens_per_batch"] = max(budget, longest)
    return changes


def _planned(plan: ScreenedPlan, config: TrainConfig, costs: KnownCosts) -> DriftPlan:
    estimate: Estimate = estimate_run(plan, config.train.epochs, costs)
    return DriftPlan(
        padded_lengths=tuple(sorted({length for _, length in plan.shape_counts})),
        real_tokens=plan.real_tokens,
        effective_token_fraction=plan.effective_token_fraction,
        real_tokens_per_s=estimate.estimated_real_tokens_per_s,
    )


def _known_costs(config: TrainConfig, tuned: ProvenanceConfig) -> KnownCosts:
    """The fit alone, for tuned shapes too: single measurements would favour or harm these."""
    return KnownCosts(
        key=CostKey.of(config, tuned.device),
        model=_model(config, tuned.cost),
        steps_s={},
        first_calls_s={},
        update=NO_UPDATE,
        memory=None,
    )


def _model(config: TrainConfig, record: CostRecord | None) -> CostModel:
    if record is None:
        return default_cost_model()
    overhead_s, token_s, attention_s = record.step_s
    return CostModel(
        step=StepCost(
            overhead_s=overhead_s,
            token_s=token_s,
            attention_s=attention_s,
            max_relative_error=0.0,
        ),
        compile_base_s=record.compile_s[0],
        compile_per_step_s=record.compile_s[1],
        is_one_graph=config.graph.mode == "dynamic",
        source="the study that tuned it",
    )

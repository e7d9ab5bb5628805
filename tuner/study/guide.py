"""Ranking the whole space under what is known about costs, without running anything.

For every key of costs (graph mode, level, precision, packed or not) and every alignment and budget
the boundaries of least time are solved for all numbers of buckets at once; of these curves the few
best numbers of buckets are screened in full, with whole steps and all compiles. What comes out is
the run seconds of every point with their interval: the next trial can be the optimum as far as is
known, or the point that may be it though little is known of it.

Cost: about 1 ms a screened plan, one dynamic program for each curve; curves are kept until the
fit of their key changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tuner.batching.boundaries import BoundaryCurve, solve_least_time
from tuner.batching.grouping import rows_per_batch
from tuner.batching.packed_lengths import solve_packed_lengths
from tuner.batching.plan import length_limit
from tuner.config.override import override_config
from tuner.config.schema import OP_GROUPS, TrainConfig
from tuner.errors import BadInputError
from tuner.simulate.cost import CostModel
from tuner.simulate.cost_book import CostBook
from tuner.simulate.estimate import Estimate, estimate_run
from tuner.simulate.histogram import LengthHistogram
from tuner.simulate.measurement import CostKey
from tuner.simulate.screen import Screen
from tuner.study.outcome import OVER_MEMORY
from tuner.study.setup import StudySetup
from tuner.study.space import (
    Choice,
    all_choices,
    choice_overrides,
    is_compilable,
    tokens_per_update,
)

SCREENED_PER_CURVE = 3
"""Numbers of buckets of a curve that are screened: its seconds are those of the fit, from which
shapes that were measured differ."""

MOVED = 0.05
"""Share of a step or a compile by which it must have changed for packed lengths to be solved
again."""

WORTH_ANOTHER_TRIAL = 0.005
"""Share of the run's seconds that new boundaries of a tried point must save."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of the space, planned and estimated.

    Attributes:
        choice: The point.
        config: The whole config, boundaries solved.
        estimate: Of its run.
        num_shapes: Planned shapes that an epoch meets.
        fits: Its shapes fit together in memory and under the cap, as far as is known.
    """

    choice: Choice
    config: TrainConfig
    estimate: Estimate
    num_shapes: int
    fits: bool

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Solved boundaries in tokens; () where there are none to solve."""
        return self.config.batching.boundaries


class Guide:
    """The space of one study."""

    def __init__(self, setup: StudySetup) -> None:
        self._setup = setup
        histogram = LengthHistogram.from_tokens(setup.data.lengths.own_tokens)
        self._screen = Screen(histogram)
        self._rows = histogram.admit(setup.base.data, length_limit(setup.base))
        self._curves: dict[tuple[object, ...], tuple[CostModel, BoundaryCurve]] = {}
        self._packed: dict[tuple[object, ...], tuple[CostModel, tuple[tuple[int, ...], ...]]] = {}
        self._configs: dict[Choice, TrainConfig] = {}

    def resolve(self, choice: Choice, book: CostBook) -> TrainConfig:
        """The config of a point; boundaries of least time with at most its number of buckets.

        Raises:
            BadInputError: the longest row is over the token budget.
        """
        config = self._plain(choice)
        if choice.strategy == "packed":
            solved = self._row_lengths(config, book)
            return with_boundaries(config, solved[min(choice.packed_lengths, len(solved)) - 1])
        if choice.num_buckets is None:
            return config
        curve = self._curve(config, book)
        return with_boundaries(config, curve.best(self._most_buckets(choice)))

    def rank(
        self, book: CostBook, choices: Sequence[Choice], *, at_lower_end: bool = False
    ) -> list[Point]:
        """Points that can be planned, the one of least estimated run seconds first.

        Args:
            book: What is known.
            choices: Points to look at, as `candidates` gives them.
            at_lower_end: By the lower end of their intervals instead: those that may be the
                fastest, of which less is known, come first.
        """
        points = [point for choice in choices if (point := self.point(choice, book))]

        def seconds(point: Point) -> float:
            estimate = point.estimate
            return estimate.low_run_s if at_lower_end else estimate.estimated_run_s

        return sorted(points, key=lambda point: (seconds(point), str(point.choice)))

    def candidates(
        self, book: CostBook, precisions: Iterable[tuple[str, tuple[str, ...]]]
    ) -> list[Choice]:
        """The points worth a look: of every curve only the few best numbers of buckets.

        Args:
            book: What is known.
            precisions: (compute dtype, op groups in fp32) to look at.
        """
        plain = all_choices(self._setup.space)
        found = []
        for dtype, groups in precisions:
            of_curve: dict[tuple[object, ...], list[Choice]] = {}
            for choice in plain:
                full = dataclasses.replace(choice, compute_dtype=dtype, fp32_ops=groups)
                if full.num_buckets is None:
                    found.append(full)
                else:
                    of_curve.setdefault(_curve_of(full), []).append(full)
            for choices in of_curve.values():
                found.extend(self._best_of_curve(choices, book))
        return found

    def point(self, choice: Choice, book: CostBook) -> Point | None:
        """Screen and estimate a point; None if it cannot be planned."""
        try:
            config = self.resolve(choice, book)
            plan = self._screen.plan(config)
        except BadInputError:
            return None
        costs = book.known(self.key(config))
        shapes = [shape for shape, count in plan.shape_counts.items() if count]
        return Point(
            choice=choice,
            config=config,
            estimate=estimate_run(plan, config.train.epochs, costs),
            num_shapes=len(shapes),
            fits=why_not_run(self._setup, config, shapes, book) is None,
        )

    def key(self, config: TrainConfig) -> CostKey:
        """What a config's costs are kept under."""
        return CostKey.of(config, self._setup.installation.device)

    def run_s(self, config: TrainConfig, book: CostBook) -> float:
        """Estimated run seconds of a config that can be planned."""
        costs = book.known(self.key(config))
        plan = self._screen.plan(config)
        return estimate_run(plan, config.train.epochs, costs).estimated_run_s

    def _best_of_curve(self, choices: Sequence[Choice], book: CostBook) -> list[Choice]:
        try:
            curve = self._curve(self._plain(choices[0]), book)
        except BadInputError:
            return []
        known = [choice for choice in choices if (choice.num_buckets or 0) <= len(curve.cost)]
        known.sort(key=lambda choice: float(curve.cost[(choice.num_buckets or 1) - 1]))
        return known[:SCREENED_PER_CURVE]

    def _most_buckets(self, choice: Choice) -> int:
        """Of static graphs no more than are allowed, whatever number was proposed."""
        num_buckets = choice.num_buckets or 1
        if choice.graph_mode == "dynamic":
            return num_buckets
        return min(num_buckets, self._setup.space.max_static_shapes)

    def _curve(self, config: TrainConfig, book: CostBook) -> BoundaryCurve:
        costs = book.known(self.key(config))
        batching = config.batching
        place = (costs.key, batching.align, batching.tokens_per_batch)
        model, curve = self._curves.get(place, (None, None))
        if curve is None or model != costs.model:
            curve = solve_least_time(
                self._rows.lengths,
                batching,
                costs.run_cost(config.train.epochs),
                self._setup.space.num_buckets.high,
                self._rows.counts,
            )
            self._curves[place] = costs.model, curve
        return curve

    def _row_lengths(self, config: TrainConfig, book: CostBook) -> tuple[tuple[int, ...], ...]:
        costs = book.known(self.key(config))
        batching = config.batching
        place = (costs.key, batching.align, batching.tokens_per_batch)
        model, solved = self._packed.get(place, (None, None))
        if solved is None or model is None or _have_moved(model, costs.model, solved[-1], config):
            solved = solve_packed_lengths(
                self._rows.lengths,
                self._rows.counts,
                batching,
                costs.run_cost(config.train.epochs),
                self._setup.space.packed_lengths.high,
            )
            self._packed[place] = costs.model, solved
        return solved

    def _plain(self, choice: Choice) -> TrainConfig:
        if choice not in self._configs:
            self._configs[choice] = configure(self._setup, choice)
        return self._configs[choice]


def _have_moved(
    before: CostModel, after: CostModel, lengths: Sequence[int], config: TrainConfig
) -> bool:
    """Whether costs have changed so far that other lengths of packed rows may be better.

    Solving them packs all rows some forty times, so it is not done for every measurement.
    """
    for length in lengths:
        shape = (rows_per_batch(config.batching, length), length)
        if abs(after.step.step_s(shape) / before.step.step_s(shape) - 1.0) > MOVED:
            return True
    return abs(after.compile_base_s - before.compile_base_s) > MOVED * before.compile_base_s


def configure(setup: StudySetup, choice: Choice) -> TrainConfig:
    """The whole config of a choice; boundaries are not solved yet."""
    overrides = choice_overrides(choice, setup.data.longest)
    overrides["train.tokens_per_update"] = tokens_per_update(
        setup.space, setup.base, setup.data.longest
    )
    return override_config(setup.base, overrides, source="search space")


def with_boundaries(config: TrainConfig, boundaries: tuple[int, ...]) -> TrainConfig:
    """The config with boundaries written out, its number of buckets theirs."""
    update = {"boundaries": boundaries, "num_buckets": len(boundaries)}
    return config.model_copy(update={"batching": config.batching.model_copy(update=update)})


def why_not_run(
    setup: StudySetup, config: TrainConfig, shapes: Sequence[tuple[int, int]], book: CostBook
) -> str | None:
    """Why a plan is infeasible before it is run; None if it may be run.

    Args:
        setup: Limits.
        config: Whose plan it is.
        shapes: Of the plan.
        book: What is known about memory.
    """
    graph = config.graph
    if not is_compilable(graph.mode, graph.jit_level):
        return f"jit_level {graph.jit_level} compiles static graphs only"
    limit = setup.space.max_static_shapes
    if config.graph.mode == "static" and len(shapes) > limit:
        return f"{len(shapes)} static shapes, over max_static_shapes {limit}"
    memory = book.known(CostKey.of(config, setup.installation.device)).memory
    if memory is None or memory.least_peak_bytes(shapes) <= setup.memory_limit_bytes:
        return None
    return (
        f"its {len(shapes)} shapes together would take {memory.peak_bytes(shapes) / 1e9:.2f} GB "
        f"(estimated; {setup.memory_limit_bytes / 1e9:.2f} GB are allowed), {OVER_MEMORY}"
    )


def _curve_of(choice: Choice) -> tuple[object, ...]:
    return choice.align, choice.longest_rows_per_batch, choice.graph_mode, choice.jit_level


def precisions_without_trials(dtypes: Iterable[str]) -> list[tuple[str, tuple[str, ...]]]:
    """fp32, and every lower dtype with all op groups in fp32: what is safe without a look."""
    return [(dtype, () if dtype == "fp32" else OP_GROUPS) for dtype in dtypes]


def precisions_of(
    dtypes: Iterable[str], sensitive: Mapping[str, Sequence[tuple[str, ...]]]
) -> list[tuple[str, tuple[str, ...]]]:
    """What `candidates` looks at: fp32, and for each lower dtype the sets that may be chosen.

    Args:
        dtypes: Of the space.
        sensitive: Compute dtype -> sets of op groups in fp32 that are not known to be infeasible.
    """
    return [
        (dtype, groups)
        for dtype in dtypes
        for groups in ([()] if dtype == "fp32" else sensitive.get(dtype, ()))
    ]

"""How many buckets, which alignment, and what that would gain: estimated from lengths and costs.

For each alignment and each number of buckets K the plan with boundaries of least padding is
screened and its run estimated, compile seconds of all shapes included. More buckets pad less and
compile more, so the seconds have a minimum. A percent from it is not worth another shape or a
finer alignment: the coarsest alignment whose best K is within that percent is suggested, and for
it the smallest such K.
"""

from __future__ import annotations

from dataclasses import dataclass

from tuner.batching.align import align_length
from tuner.batching.slabs import SlabLoss
from tuner.config.schema import (
    BatchingConfig,
    DataConfig,
    ModelConfig,
    StrategyName,
    TrainConfig,
)
from tuner.simulate.break_even import BreakEven, find_break_even
from tuner.simulate.cost import CostModel
from tuner.simulate.estimate import Estimate, estimate_from_model
from tuner.simulate.histogram import LengthHistogram
from tuner.simulate.screen import Screen, ScreenedPlan
from tuner.simulate.slab_loss import estimate_slab_loss

MAX_BUCKETS = 32
ALIGNMENTS = (8, 16, 32, 64, 128)
NOT_WORTH_MORE = 0.01
"""Share of the run's seconds that fewer shapes or a coarser alignment may cost."""

ROWS_PER_SLAB: int = BatchingConfig.model_fields["rows_per_slab"].default


@dataclass(frozen=True, kw_only=True)
class RunSetting:
    """What is planned.

    Attributes:
        tokens_per_batch: Padded tokens of a batch at most.
        epochs: Passes over the data, >= 1.
        cost: Seconds of steps and compiles.
        rows_per_slab: Rows that are planned at a time at most.
    """

    tokens_per_batch: int
    epochs: int
    cost: CostModel
    rows_per_slab: int = ROWS_PER_SLAB


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """A way to batch, screened and estimated.

    Attributes:
        name: Strategy.
        boundaries: Padded lengths in tokens, rising.
        align: Multiple that they follow.
        plan: One epoch.
        estimate: All epochs, compile seconds included.
        break_even: When it is ahead of padding to the longest; None: never.
    """

    name: str
    boundaries: tuple[int, ...]
    align: int
    plan: ScreenedPlan
    estimate: Estimate
    break_even: BreakEven | None

    @property
    def num_shapes(self) -> int:
        """Graphs to compile."""
        return len(self.plan.shape_counts)


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """What to take, and all that it was compared with.

    Attributes:
        fixed: Every row padded to the longest.
        packed: Several samples in a row of the longest length.
        best: The suggested buckets.
        curve: Entry K-1: K buckets of the suggested alignment.
        best_of_align: For each alignment its fastest number of buckets.
        setting: What was assumed.
        slab_loss: Of the suggestion; None: its rows are planned together.
    """

    fixed: PlanChoice
    packed: PlanChoice
    best: PlanChoice
    curve: tuple[PlanChoice, ...]
    best_of_align: tuple[PlanChoice, ...]
    setting: RunSetting
    slab_loss: SlabLoss | None

    @property
    def gain(self) -> float:
        """Estimated real tokens per second of the suggestion over padding to the longest."""
        return _speed(self.best) / _speed(self.fixed)


def suggest_buckets(histogram: LengthHistogram, setting: RunSetting) -> Suggestion:
    """Suggest buckets.

    Args:
        histogram: Rows by length; at least one is not empty.
        setting: Budget, epochs and costs.

    Raises:
        BadInputError: the longest padded row is over the token budget.
    """
    screen = Screen(histogram)
    aligns = _fitting_alignments(histogram.longest, setting.tokens_per_batch)
    of_align = {align: _Alignment(screen, setting, align) for align in aligns}
    curves = {align: of_align[align].curve() for align in aligns}
    fastest = {align: min(curve, key=_seconds) for align, curve in curves.items()}
    least_s = min(map(_seconds, fastest.values()))
    align = max(align for align in aligns if _is_close(fastest[align], least_s))
    least_s = _seconds(fastest[align])
    best = next(choice for choice in curves[align] if _is_close(choice, least_s))
    return Suggestion(
        fixed=of_align[align].choose("fixed"),
        packed=of_align[align].choose("packed"),
        best=best,
        curve=curves[align],
        best_of_align=tuple(fastest.values()),
        setting=setting,
        slab_loss=of_align[align].slab_loss(best.num_shapes),
    )


class _Alignment:
    """Ways to batch under one alignment, screened and estimated."""

    def __init__(self, screen: Screen, setting: RunSetting, align: int) -> None:
        self._screen = screen
        self._setting = setting
        self._align = align
        self._baseline = self._estimate(self._plan("fixed"))

    def curve(self) -> tuple[PlanChoice, ...]:
        """One to MAX_BUCKETS buckets, as far as there are so many aligned lengths."""
        choices: list[PlanChoice] = []
        for num_buckets in range(1, MAX_BUCKETS + 1):
            choice = self.choose("bucketed", num_buckets)
            if choice.num_shapes < num_buckets:
                break
            choices.append(choice)
        return tuple(choices)

    def choose(self, strategy: StrategyName, num_buckets: int = 1) -> PlanChoice:
        """Screen and estimate one way to batch."""
        plan = self._plan(strategy, num_buckets)
        estimate = self._estimate(plan)
        tokens_per_step = plan.real_tokens / plan.num_steps
        return PlanChoice(
            name=strategy,
            boundaries=tuple(sorted(length for _, length in plan.shape_counts)),
            align=self._align,
            plan=plan,
            estimate=estimate,
            break_even=find_break_even(estimate, self._baseline, tokens_per_step),
        )

    def slab_loss(self, num_buckets: int) -> SlabLoss | None:
        """What slabs cost so many buckets."""
        return estimate_slab_loss(self._screen, self._config("bucketed", num_buckets))

    def _plan(self, strategy: StrategyName, num_buckets: int = 1) -> ScreenedPlan:
        return self._screen.plan(self._config(strategy, num_buckets))

    def _config(self, strategy: StrategyName, num_buckets: int) -> TrainConfig:
        batching = BatchingConfig(
            strategy=strategy,
            num_buckets=num_buckets,
            align=self._align,
            tokens_per_batch=self._setting.tokens_per_batch,
            rows_per_slab=self._setting.rows_per_slab,
        )
        return TrainConfig(
            data=DataConfig(path=""), batching=batching, model=ModelConfig(vocab_size=1)
        )

    def _estimate(self, plan: ScreenedPlan) -> Estimate:
        return estimate_from_model(plan, self._setting.cost, self._setting.epochs)


def _fitting_alignments(longest: int, tokens_per_batch: int) -> list[int]:
    """Those that are not coarser than the longest row, nor take it over the budget."""
    fitting = [
        align
        for align in ALIGNMENTS
        if align <= longest and align_length(longest, align) <= tokens_per_batch
    ]
    return fitting or [ALIGNMENTS[0]]


def _seconds(choice: PlanChoice) -> float:
    return choice.estimate.estimated_run_s


def _speed(choice: PlanChoice) -> float:
    return choice.estimate.estimated_real_tokens_per_s


def _is_close(choice: PlanChoice, least_s: float) -> bool:
    return _seconds(choice) <= least_s * (1.0 + NOT_WORTH_MORE)

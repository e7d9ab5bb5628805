"""Kinds of configs: of one kind many plans cost nearly the same.

Between kinds a fit may be off by as much as the machine was slower while one of them was measured.
So a search that follows the fit alone may spend itself on plans of one kind that hardly differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tuner.config.schema import TrainConfig
from tuner.study.guide import Point
from tuner.study.unit import is_hopeless


def kind_of(config: TrainConfig) -> tuple[str, str]:
    """Strategy and graph mode."""
    return config.batching.strategy, config.graph.mode


def least_proposed_first(
    points: Sequence[Point], proposed: Iterable[TrainConfig], best_real_tokens_per_s: float
) -> list[Point]:
    """Points that may be the fastest, those of the kind that was proposed the least first.

    Args:
        points: The likeliest first; of one kind they stay in this order.
        proposed: Configs that were proposed before.
        best_real_tokens_per_s: Of the best so far. Points that cannot reach it come last.
    """
    counts = Counter(map(kind_of, proposed))
    return sorted(
        points,
        key=lambda point: (
            is_hopeless(point.estimate, best_real_tokens_per_s),
            counts[kind_of(point.config)],
        ),
    )

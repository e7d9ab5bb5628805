"""Seconds of steps by shape: which step was far slower than its like, and how even they were.

All seconds of this process are kept, 4 bytes each, so that medians and percentiles are exact; a
running median looks at the last ones only.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

MEDIAN_STEPS = 64
"""Last seconds of a key whose median a new one is compared with."""

LEAST_STEPS = 8
"""Of them there must be so many before any is called slow."""

SLOW_FACTOR = 3.0
SLOW_EXCESS_S = 0.05
"""A slow step takes more than SLOW_FACTOR times the running median and this much over it."""

FLAT_STEPS = 12
"""Steps from which on it is said whether a curve is flat."""

FLAT_TREND = 0.10
"""A flat curve's last third is within so much of its first."""

FLAT_SPREAD = 1.5
"""A flat curve's 95th percentile is below so many medians."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class StepCurve:
    """Step seconds of one key over the run.

    Attributes:
        num_steps: How many, >= 1.
        median_s: Their median.
        p95_s: Their 95th percentile.
        total_s: Their sum.
        trend: Median of the last third over that of the first, minus 1; None of fewer than
            FLAT_STEPS.
    """

    num_steps: int
    median_s: float
    p95_s: float
    total_s: float
    trend: float | None

    @property
    def spread(self) -> float:
        """95th percentile over median, >= 1."""
        return self.p95_s / self.median_s

    @property
    def is_flat(self) -> bool | None:
        """Whether the steps are even; None where there are too few to say."""
        if self.trend is None:
            return None
        return abs(self.trend) <= FLAT_TREND and self.spread < FLAT_SPREAD


class StepTimes(Generic[Key]):
    """Seconds by key: the shape of a step, or whatever else takes about the same time each."""

    def __init__(self) -> None:
        self._seconds: dict[Key, array[float]] = {}

    def add(self, key: Key, seconds: float) -> float | None:
        """Take a step in; the running median that it is far slower than, else None."""
        kept = self._seconds.setdefault(key, array("f"))
        last = np.array(kept[-MEDIAN_STEPS:], dtype=np.float64)
        usual_s = float(np.median(last)) if len(kept) >= LEAST_STEPS else None
        kept.append(seconds)
        if usual_s is None:
            return None
        is_slow = seconds > SLOW_FACTOR * usual_s and seconds - usual_s > SLOW_EXCESS_S
        return usual_s if is_slow else None

    def curves(self) -> Mapping[Key, StepCurve]:
        """Of every key that was met."""
        return {key: _curve(seconds) for key, seconds in self._items()}

    def _items(self) -> Iterator[tuple[Key, array[float]]]:
        yield from self._seconds.items()


def _curve(seconds: array[float]) -> StepCurve:
    values = np.frombuffer(seconds, dtype=np.float32).astype(np.float64)
    third = len(values) // 3
    trend = None
    if len(values) >= FLAT_STEPS:
        trend = float(np.median(values[-third:]) / np.median(values[:third]) - 1.0)
    return StepCurve(
        num_steps=len(values),
        median_s=float(np.median(values)),
        p95_s=float(np.percentile(values, 95)),
        total_s=float(values.sum()),
        trend=trend,
    )

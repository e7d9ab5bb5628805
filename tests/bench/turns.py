"""Seconds of several ways to do one thing: they take turns, so that other work meets them all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

Clock = Callable[[], float]


def median_seconds(
    works: Mapping[str, Callable[[], object]],
    *,
    num_turns: int,
    clock: Clock = time.process_time,
) -> dict[str, float]:
    """The median of each.

    Args:
        works: Name -> what is timed; if it returns a float, these are its seconds.
        num_turns: Runs of each.
        clock: Seconds of the processor, of all threads; time.perf_counter: seconds that passed.
    """
    (medians,) = medians_by_clock(works, num_turns=num_turns, clocks=[clock])
    return medians


def medians_by_clock(
    works: Mapping[str, Callable[[], object]], *, num_turns: int, clocks: list[Clock]
) -> list[dict[str, float]]:
    """As `median_seconds`, by several clocks in the same runs."""
    taken = [{name: [] for name in works} for _ in clocks]
    for _ in range(num_turns):
        for name, work in works.items():
            starts = [clock() for clock in clocks]
            own = work()
            ends = [clock() for clock in clocks]
            for seconds, start, end in zip(taken, starts, ends, strict=True):
                seconds[name].append(own if isinstance(own, float) else end - start)
    return [{name: statistics.median(runs) for name, runs in one.items()} for one in taken]

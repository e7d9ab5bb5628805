"""Seconds of several ways to do one thing: they take turns, so that other work meets them all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def median_seconds(
    works: Mapping[str, Callable[[], object]],
    *,
    num_turns: int,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """The median of each.

    Args:
        works: Name -> what is timed; if it returns a float, these are its seconds.
        num_turns: Runs of each.
        clock: Seconds of the processor, of all threads; time.perf_counter: seconds that passed.
    """
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(num_turns):
        for name, work in works.items():
            start = clock()
            own = work()
            taken[name].append(own if isinstance(own, float) else clock() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}

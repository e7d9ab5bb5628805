"""Accumulation windows: after which steps an optimizer update comes.

One rule for simulation and training. An epoch of T real tokens has n = T / tokens_per_update
updates, rounded, at least one; the k-th of them comes after the step whose running total is
nearest to k * tokens_per_update, the last one at the end of the epoch, so that no gradient is
carried into the next epoch or lost. So two plans of the same data train the same number of updates
of the same mean size, whatever the size of their batches; a rule of "at least" would give a plan
of large batches up to twice the tokens an update. Steps larger than a window each end one.

Counted in steps instead, a window is n of them whatever they hold; the last of an epoch has what
is left and is an update of its own: 10 steps at 4 an update are windows of 4, 4 and 2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def update_after_step(
    real_tokens: NDArray[np.int64], tokens_per_update: int | None, steps_per_update: int = 1
) -> NDArray[np.bool_]:
    """Which steps of an epoch end a window.

    Args:
        real_tokens: int64 [S], real tokens of each step over all ranks, >= 1.
        tokens_per_update: Real tokens of a window on average; None: windows are counted in steps.
        steps_per_update: Steps of a window then, >= 1.

    Returns:
        bool [S]; the last entry is True.
    """
    if not len(real_tokens):
        return np.ones(0, dtype=bool)
    if tokens_per_update is None:
        ends = np.zeros(len(real_tokens), dtype=bool)
        ends[steps_per_update - 1 :: steps_per_update] = True
        ends[-1] = True
        return ends
    # Whole numbers, so that every machine agrees. Step i is nearest to the milestones between the
    # middle of totals i - 1 and i and that of i and i + 1, the latter included: a milestone as
    # near to two steps goes to the first.
    running = np.cumsum(real_tokens, dtype=np.int64)
    num_updates = max(1, int(2 * running[-1] + tokens_per_update) // (2 * tokens_per_update))
    up_to_middle = np.minimum(
        (running[:-1] + running[1:]) // (2 * tokens_per_update), num_updates - 1
    )
    ends = np.ones(len(running), dtype=bool)
    ends[:-1] = np.diff(up_to_middle, prepend=0) > 0
    return ends

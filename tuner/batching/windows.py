"""Accumulation windows: after which steps an optimizer update comes.

One rule for simulation and training: the k-th update comes after the step whose running total of
real tokens first rounds to k * tokens_per_update, counted from the start of the epoch. So an epoch
has total / tokens_per_update updates whatever the size of its batches, and two plans of the same
data train the same number of updates of the same mean size; a rule of "at least" would give a plan
of large batches up to twice the tokens an update. The last window of an epoch ends with the epoch,
however few tokens it holds, so no gradient is carried into the next epoch or lost.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def update_after_step(
    real_tokens: NDArray[np.int64], tokens_per_update: int | None
) -> NDArray[np.bool_]:
    """Which steps of an epoch end a window.

    Args:
        real_tokens: int64 [S], real tokens of each step over all ranks.
        tokens_per_update: Real tokens of a window on average; steps larger than that each end
            one. None: every step ends one.

    Returns:
        bool [S]; the last entry is True.
    """
    if tokens_per_update is None or not len(real_tokens):
        return np.ones(len(real_tokens), dtype=bool)
    total = np.cumsum(real_tokens, dtype=np.int64)
    # floor(total / target + 1/2) in whole numbers, so that every machine agrees.
    updates = (2 * total + tokens_per_update) // (2 * tokens_per_update)
    ends: NDArray[np.bool_] = np.diff(updates, prepend=0) > 0
    ends[-1] = True
    return ends

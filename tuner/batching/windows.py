"""Accumulation windows: after which steps an optimizer update comes.

One rule for simulation and training: a window takes steps until it holds at least
`tokens_per_update` real tokens of all ranks; the last window of an epoch ends with the epoch,
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
        tokens_per_update: Least real tokens of a window; None: every step ends one.

    Returns:
        bool [S]; the last entry is True.
    """
    if tokens_per_update is None:
        return np.ones(len(real_tokens), dtype=bool)
    ends = np.zeros(len(real_tokens), dtype=bool)
    gathered = 0
    for step, tokens in enumerate(real_tokens.tolist()):
        gathered += tokens
        if gathered >= tokens_per_update:
            ends[step] = True
            gathered = 0
    if len(ends):
        ends[-1] = True
    return ends

"""After how much training a config has earned back what it compiled more than another.

With compile seconds c and steady real tokens a second r, x real tokens take c + x / r seconds. A
candidate that compiles longer and runs faster is level with the baseline at
    x = (c_candidate - c_baseline) / (1 / r_baseline - 1 / r_candidate).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tuner.simulate.estimate import Estimate

# Numbers that differ by less are equal: the rest is the rounding of floating point.
RELATIVE_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """Where a candidate has caught up with a baseline.

    Attributes:
        real_tokens: Real tokens from which on it is not behind.
        steps: Steps of the candidate that hold so many tokens on average, rounded up.
    """

    real_tokens: int
    steps: int


def find_break_even(
    candidate: Estimate, baseline: Estimate, real_tokens_per_step: float
) -> BreakEven | None:
    """When the candidate, compile seconds included, is ahead of the baseline.

    Both are compared at the same number of real tokens, however many steps the baseline takes for
    them. A lead from the start may be lost later: exchange the two to learn when.

    Args:
        candidate: The config that is judged.
        baseline: The config that it is compared with.
        real_tokens_per_step: Mean real tokens of a step of the candidate over all ranks, > 0.

    Returns:
        0 tokens and steps if it is ahead from the start; None if it never is.
    """
    behind_s = candidate.estimated_compile_s - baseline.estimated_compile_s
    baseline_s = 1.0 / baseline.estimated_steady_real_tokens_per_s
    gained_s = baseline_s - 1.0 / candidate.estimated_steady_real_tokens_per_s
    is_faster = gained_s > RELATIVE_ROUNDING * baseline_s
    if behind_s < 0 or (behind_s == 0 and is_faster):
        return BreakEven(real_tokens=0, steps=0)
    if not is_faster:
        return None
    level_tokens = behind_s / gained_s * (1.0 - RELATIVE_ROUNDING)
    return BreakEven(
        real_tokens=math.ceil(level_tokens), steps=math.ceil(level_tokens / real_tokens_per_step)
    )

"""How long ranks must be ready to wait for each other while shapes compile.

Every rank compiles all shapes before its first step. Ranks that start at the same time end that
at different ones: one takes its graphs from the disk, another shares its cores with seven others.
In the worst case one has finished before another begins, so what a rank may have to wait is the
warm-up of a whole plan. If that is longer than HCCL allows, the run ends, though nothing is wrong:
- HCCL_CONNECT_TIMEOUT limits the wait for the connection, which the first collective makes.
  CANN takes 120 to 7,200 s and 120 s if it is not set; MindSpore sets 600 s where it is not.
- HCCL_EXEC_TIMEOUT limits the wait inside a collective (error EI0002). It is 1,836 s (27 * 68) if
  it is not set, 1,800 s in older versions. Atlas training products take whole multiples of 68 s,
  rounding down, up to 17,340 s (255 * 68); A2 and A3 take any number of seconds. 0 stands for "no
  limit" in the documentation of some versions and was seen to change nothing, so it is never set.
With HCCL_OP_EXPANSION_MODE=AIV the wait in a collective ends after 1,091 s whatever is set.
From the documentation, not run on an NPU.

Source: CANN's pages of both variables (versions 6.0.1 to 9.0), MindSpore 2.10
(`_init_parallel_env` in context.py), issue 54 of Ascend/pytorch (0 has no effect).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tuner.errors import BadInputError

CONNECT = "HCCL_CONNECT_TIMEOUT"
EXECUTE = "HCCL_EXEC_TIMEOUT"

LEAST_CONNECT_S = 600
"""What MindSpore sets: a plan that compiles in no time has no reason for less."""
MOST_CONNECT_S = 7200
"""What CANN takes."""

EXECUTE_UNIT_S = 68
"""Atlas training products count in whole multiples of it."""
LEAST_EXECUTE_S = 27 * EXECUTE_UNIT_S
"""The default, 1,836 s."""
MOST_EXECUTE_S = 255 * EXECUTE_UNIT_S
"""What every product takes, 17,340 s."""

SAFETY_FACTOR = 3.0
"""Times the estimated warm-up. Eight ranks of a server compile on the same host cores at once,
where the study compiled alone, and the estimate of a compile errs by tens of percent."""


@dataclass(frozen=True, kw_only=True)
class CollectiveTimeouts:
    """Time limits of HCCL for a run of several ranks.

    Attributes:
        connect_s: HCCL_CONNECT_TIMEOUT, 600..7,200 s.
        execute_s: HCCL_EXEC_TIMEOUT, 1,836..17,340 s, a multiple of 68.
        wait_s: What a rank may have to wait by the estimate, times the factor; seconds.
    """

    connect_s: int
    execute_s: int
    wait_s: float

    @property
    def is_enough(self) -> bool:
        """Whether both are as long as the wait; HCCL takes no longer ones."""
        return self.wait_s <= min(self.connect_s, self.execute_s)

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables to set before MindSpore is imported."""
        return {CONNECT: str(self.connect_s), EXECUTE: str(self.execute_s)}


def choose_timeouts(compile_s: float, factor: float = SAFETY_FACTOR) -> CollectiveTimeouts:
    """Time limits for a warm-up of so many seconds.

    Both are factor * compile_s, at least the defaults, rounded up to what HCCL counts in, and at
    most what it takes.

    Args:
        compile_s: Estimated seconds of compiling all shapes and the update on one rank, >= 0:
            `KnownCosts.compile_s`, or estimated_compile_s of a config's provenance.
        factor: How much longer it may be, >= 1.

    Raises:
        BadInputError: compile_s is no number of seconds, or factor is below 1.
    """
    if not (math.isfinite(compile_s) and compile_s >= 0.0):
        raise BadInputError(
            f"the seconds of a warm-up must be a number >= 0 (got {compile_s})",
            fix="give the estimate of the study, estimated_compile_s",
        )
    if not (math.isfinite(factor) and factor >= 1.0):
        raise BadInputError(
            f"the factor on the seconds of a warm-up must be at least 1 (got {factor})",
            fix=f"leave it at {SAFETY_FACTOR:g}",
        )
    wait_s = factor * compile_s
    in_units_s = EXECUTE_UNIT_S * math.ceil(wait_s / EXECUTE_UNIT_S)
    return CollectiveTimeouts(
        connect_s=min(MOST_CONNECT_S, max(LEAST_CONNECT_S, math.ceil(wait_s))),
        execute_s=min(MOST_EXECUTE_S, max(LEAST_EXECUTE_S, in_units_s)),
        wait_s=wait_s,
    )


def describe_timeouts(timeouts: CollectiveTimeouts) -> str:
    """What to set and why, in two sentences or three."""
    settings = " ".join(f"{name}={value}" for name, value in timeouts.variables.items())
    told = (
        f"On Ascend set {settings}: while shapes compile, ranks may have to wait "
        f"{timeouts.wait_s:,.0f} s for each other by the estimate and a margin, and HCCL ends a "
        "run that waits longer."
    )
    if timeouts.is_enough:
        return told
    return (
        f"{told} It takes no more than {min(timeouts.connect_s, timeouts.execute_s):,} s, which "
        "is less than that: take fewer shapes, or one dynamic graph."
    )

"""How a checkpoint names what ranks other than the first have of their own, and who takes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.train.world import World

MARK = "@"


def name_of_rank(name: str, rank: int) -> str:
    """The name of a parameter as one rank has it."""
    return f"{name}{MARK}{rank}"


def is_of_other_rank(name: str) -> bool:
    """Whether `name_of_rank` made it."""
    return MARK in name


def take_own(
    stored: Mapping[str, NDArray[Any]], world: World, own: Collection[str]
) -> dict[str, NDArray[Any]]:
    """What one rank takes of a checkpoint, by plain name.

    Buffers go to the ranks in turn, the first to rank 0: as many ranks as have saved get their own
    back, of fewer each gets the sum of several, of more the last get zeros. So over all ranks
    nothing of a window is lost or counted twice.

    Args:
        stored: By the names of the checkpoint.
        world: Who takes.
        own: Names of those that every rank has of its own: the gradient buffers.
    """
    return {
        name: _share(stored, name, world) if name in own else value
        for name, value in stored.items()
        if not is_of_other_rank(name)
    }


def _share(stored: Mapping[str, NDArray[Any]], name: str, world: World) -> NDArray[Any]:
    of_ranks = [stored[name]]
    while (next_name := name_of_rank(name, len(of_ranks))) in stored:
        of_ranks.append(stored[next_name])
    taken = of_ranks[world.rank :: world.size]
    # A single one goes as it is, so that as many ranks go on to the same bits.
    total = taken[0] if taken else np.zeros_like(stored[name])
    for other in taken[1:]:
        total = total + other
    return total

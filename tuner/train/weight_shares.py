"""Which rank keeps the optimizer's state of which weight, where that is shared out.

Stage 1 of ZeRO (Rajbhandari et al., arXiv 1910.02054) by whole weights: a rank holds the moments
of its own weights and updates these; then all ranks get the weights of all.
"""

from __future__ import annotations

from collections.abc import Sequence


def owners_of_weights(sizes: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """The rank of each weight; the same on every rank.

    The largest weight first, each to the rank that has the least so far: the fullest rank holds
    at most 4/3 of what it would in the best split (Graham 1969, "Bounds on multiprocessing timing
    anomalies"). One table of embeddings may still be more than a fair share.

    Args:
        sizes: Elements of each weight.
        num_ranks: >= 1.

    Returns:
        For each weight a rank in [0, num_ranks).
    """
    owners = [0] * len(sizes)
    held = [0] * num_ranks
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = held.index(min(held))
        held[owners[place]] += sizes[place]
    return tuple(owners)

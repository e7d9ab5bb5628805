"""The threshold of gradient clipping: fixed, or a running quantile of the gradient norms.

With rows of varied length gradient norms vary more between updates, so that one fixed threshold is
too tight for some and too loose for others. A quantile of the norms of the last updates follows
them: with 0.9 about one update in ten is scaled down, whatever the norms are (Seetharaman et al.,
AutoClip, arXiv 2007.14469, there over all norms so far).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tuner.config.schema import LoopConfig

LEAST_NORMS = 10
"""Norms from which on their quantile is the threshold; before, clip_norm is."""

# Added to the norm that the threshold is divided by, in the update's graph too.
NORM_EPS = 1e-6


def clip_threshold(norms: Sequence[float], config: LoopConfig) -> float:
    """The largest norm that the gradients of the next update keep; infinite: any.

    Args:
        norms: Of the last updates, before clipping; `norms_after` made them.
        config: clip_norm, clip_quantile.
    """
    if config.clip_quantile is not None and len(norms) >= LEAST_NORMS:
        return float(np.quantile(norms, config.clip_quantile))
    return math.inf if config.clip_norm is None else config.clip_norm


def norms_after(norms: tuple[float, ...], norm: float, config: LoopConfig) -> tuple[float, ...]:
    """The norms that the next threshold is taken from.

    Args:
        norms: Before the update.
        norm: Of its gradients before clipping; finite, since an update that overflowed or was
            skipped has none to give.
        config: clip_quantile, clip_window.

    Returns:
        The last clip_window of them; none are kept for a fixed threshold.
    """
    if config.clip_quantile is None:
        return ()
    return (*norms, norm)[-config.clip_window :]


def is_clipped(norm: float, threshold: float) -> bool:
    """Whether an update's gradients were scaled down, by the arithmetic of its graph (float32)."""
    return bool(np.float32(threshold) < np.float32(norm) + np.float32(NORM_EPS))

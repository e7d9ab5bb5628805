"""Dynamic loss scaling for fp16.

Small gradients vanish in fp16 (below 6e-8) and large ones overflow (above 65504), so the loss is
multiplied before the backward pass and its gradients, then float32, are divided again. The scale
is halved at an update whose gradients overflowed, which is skipped, and doubled after a window of
updates that did not (Micikevicius et al., Mixed Precision Training, arXiv 1710.03740).

The loss here is a sum over labels. A scale is meant for a mean, so a batch's loss is multiplied by
the scale over its labels, these rounded up to a power of 2: with a scale that is one too, dividing
again changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

# Gradients of a mean loss that overflow even here are no matter of the scale.
LEAST_SCALE = 2.0**-10
LARGEST_SCALE = 2.0**24


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The scale and what decides its next change.

    Attributes:
        scale: What the mean loss of a batch is multiplied with, > 0.
        good_updates: Updates without an overflow since the scale last changed.
    """

    scale: float
    good_updates: int = 0

    def after_update(self, *, is_finite: bool, window: int) -> LossScale:
        """The scale of the next update.

        Args:
            is_finite: Whether all gradients of this one were numbers.
            window: Good updates after which the scale doubles, >= 1.
        """
        if not is_finite:
            return LossScale(scale=self.scale / 2)
        if self.good_updates + 1 < window:
            return LossScale(scale=self.scale, good_updates=self.good_updates + 1)
        return LossScale(scale=max(self.scale, min(self.scale * 2, LARGEST_SCALE)))

    def factor(self, label_tokens: int) -> float:
        """What the summed loss of a batch of so many labels is multiplied with."""
        power_of_two = 1 << max(0, label_tokens - 1).bit_length()
        return self.scale / power_of_two

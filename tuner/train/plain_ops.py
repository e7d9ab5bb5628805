"""Parts of the decoder from MindSpore's own ops, with the backward that MindSpore derives.

Shapes: B batch, T padded tokens, M rows of what is normalised, D width, N heads, H head size.
"""

from __future__ import annotations

from mindspore import Tensor, nn, ops


class Norm(nn.Cell):
    """x / sqrt(mean(x^2) + eps) * weight.

    Args:
        eps: Added to the mean.
    """

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def construct(self, x_MD: Tensor, weight_D: Tensor) -> Tensor:
        """[M, D] and [D] to [M, D], all of one dtype."""
        mean_square_M1 = ops.mean(x_MD * x_MD, -1, True)
        return x_MD * ops.rsqrt(mean_square_M1 + self.eps) * weight_D


class MaskedSoftmax(nn.Cell):
    """softmax(scores + mask) of the last axis."""

    def construct(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Of one dtype; the mask broadcasts to the scores and gets no gradient."""
        return ops.softmax(scores + mask, -1)


class LogSoftmax(nn.Cell):
    """Log-softmax of the last axis."""

    def __init__(self) -> None:
        super().__init__()
        self.log_softmax = ops.LogSoftmax(-1)

    def construct(self, x: Tensor) -> Tensor:
        """Of any shape and dtype."""
        return self.log_softmax(x)


class Rotation(nn.Cell):
    """Turns each pair (x_i, x_{i + H/2}) by its angle."""

    def construct(self, x_BNTH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, N, T, H] to the same; the angles broadcast to it and get no gradient."""
        half = x_BNTH.shape[-1] // 2
        first, second = x_BNTH[..., :half], x_BNTH[..., half:]
        return x_BNTH * cos + ops.cat((-second, first), -1) * sin


class Gate(nn.Cell):
    """silu(gate) * up."""

    def construct(self, gate: Tensor, up: Tensor) -> Tensor:
        """Both of one shape and dtype."""
        return ops.silu(gate) * up


class Sum(nn.Cell):
    """The sum of two."""

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        """Both of one shape and dtype."""
        return x + y

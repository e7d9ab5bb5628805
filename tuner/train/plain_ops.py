"""Parts of the decoder from MindSpore's own ops; but for norms MindSpore derives the backward.

Shapes: B batch, T padded tokens, M rows of what is normalised, D width, N heads, H head size.
"""

from __future__ import annotations

from mindspore import Tensor, nn, ops

# As a function, ops.mean makes a graph; used twice in a backward it failed to compile ("The func
# graph is empty", 2.10).
MEAN = ops.ReduceMean(keep_dims=True)


class Norm(nn.Cell):
    """x / sqrt(mean(x^2) + eps) * weight.

    Its backward is written out: the one that MindSpore derives holds 1 / root^3, at the usual
    initial weights 125,000, which fp16 does not.

    Args:
        eps: Added to the mean.
    """

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def construct(self, x_MD: Tensor, weight_D: Tensor) -> Tensor:
        """[M, D] and [D] to [M, D], all of one dtype."""
        return x_MD * self.inverse_root(x_MD) * weight_D

    def inverse_root(self, x_MD: Tensor) -> Tensor:
        """1 / sqrt(mean(x^2) + eps) of each row, [M, 1]."""
        return ops.rsqrt(MEAN(x_MD * x_MD, -1) + self.eps)

    def bprop(
        self, x_MD: Tensor, weight_D: Tensor, out: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor]:
        """With n = x / root and g = dout * weight: dx = (g - n * mean(g * n)) / root."""
        inverse_M1 = self.inverse_root(x_MD)
        normed_MD = x_MD * inverse_M1
        scaled_MD = dout * weight_D
        means_M1 = MEAN(scaled_MD * normed_MD, -1)
        dx_MD = inverse_M1 * (scaled_MD - normed_MD * means_M1)
        return dx_MD, ops.reduce_sum(dout * normed_MD, 0)


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

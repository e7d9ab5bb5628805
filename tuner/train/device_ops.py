"""Norms, softmax, broadcasts and transposes in the form that the device's kernels take fastest.

On CPU (2.10, 2 cores) a kernel that broadcasts, reduces or transposes follows lists of places of
elements, and in a dynamic graph makes them anew at each call, on one thread: a step of 8 x 512 of
a decoder of two layers, width 128, took 1.2 s in a dynamic graph and 0.62 s in a static one, all
of the difference in these lists. Copies to the full size, slices that are joined again and sums
as matrix products need none: the same steps take 0.42 to 0.46 s and 0.42 s. The sums in the
backward of softmax and log-softmax alone had been a quarter of the static step.

An NPU's kernels broadcast, reduce and transpose as they go, and copies would cost memory traffic:
there these are the plain ops.

Shapes: B batch, T padded tokens, M rows of what is normalised, D width, N heads, H head size.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn, ops

# As functions, ops.tile and ops.matmul make a graph each; used twice in a backward they failed to
# compile ("The func graph is empty", 2.10).
TILE = ops.Tile()
MATMUL = ops.MatMul()


def needs_full_sizes() -> bool:
    """Whether the chosen device is one whose kernels are slow at broadcasts and transposes."""
    return bool(ms.get_context("device_target") == "CPU")


class Spread(nn.Cell):
    """Repeats axes of size 1, where the device wants operands of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = needs_full_sizes()

    def construct(self, x: Tensor, repeats: tuple[int, ...]) -> Tensor:
        """Of any shape; repeats for each axis, 1 for those that stay."""
        return TILE(x, repeats) if self.copies else x


class ToHeads(nn.Cell):
    """[B, T, N * H] to [B, N, T, H].

    Args:
        num_heads: N.
        head_size: H.
    """

    def __init__(self, num_heads: int, head_size: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size
        self.slices = needs_full_sizes()

    def construct(self, x: Tensor) -> Tensor:
        """Of any dtype."""
        if self.slices:
            return ops.stack(ops.split(x, self.head_size, -1), 1)
        B, T, _ = x.shape
        return x.reshape(B, T, self.num_heads, self.head_size).transpose(0, 2, 1, 3)


class FromHeads(nn.Cell):
    """[B, N, T, H] to [B, T, N * H]."""

    def __init__(self) -> None:
        super().__init__()
        self.slices = needs_full_sizes()

    def construct(self, x: Tensor) -> Tensor:
        """Of any dtype."""
        if self.slices:
            return ops.cat(ops.unstack(x, 1), -1)
        B, N, T, H = x.shape
        return x.transpose(0, 2, 1, 3).reshape(B, T, N * H)


class FullSizeNorm(nn.Cell):
    """x / sqrt(mean(x^2) + eps) * weight, with a backward of its own.

    Args:
        eps: Added to the mean.
    """

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def construct(self, x_MD: Tensor, weight_D: Tensor) -> Tensor:
        """[M, D] and [D] to [M, D], all of one dtype."""
        return x_MD * self.inverse_root(x_MD) * _each_row(weight_D, x_MD)

    def inverse_root(self, x_MD: Tensor) -> Tensor:
        """1 / sqrt(mean(x^2) + eps) of each row, repeated, [M, D]."""
        width = x_MD.shape[-1]
        inverse_M1 = ops.rsqrt(_row_sums(x_MD * x_MD) * (1.0 / width) + self.eps)
        return TILE(inverse_M1, (1, width))

    def bprop(
        self, x_MD: Tensor, weight_D: Tensor, out: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor]:
        """With n = x / root and g = dout * weight: dx = (g - n * mean(g * n)) / root."""
        width = x_MD.shape[-1]
        inverse_MD = self.inverse_root(x_MD)
        normed_MD = x_MD * inverse_MD
        scaled_MD = dout * _each_row(weight_D, x_MD)
        means_M1 = _row_sums(scaled_MD * normed_MD) * (1.0 / width)
        dx_MD = inverse_MD * (scaled_MD - normed_MD * TILE(means_M1, (1, width)))
        ones_1M = ops.ones((1, x_MD.shape[0]), x_MD.dtype)
        dweight_D = MATMUL(ones_1M, dout * normed_MD).reshape(width)
        return dx_MD, dweight_D


class PlainNorm(nn.Cell):
    """The same from plain ops, as `FullSizeNorm` takes it."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def construct(self, x_MD: Tensor, weight_D: Tensor) -> Tensor:
        """[M, D] and [D] to [M, D], all of one dtype."""
        mean_square_M1 = ops.mean(x_MD * x_MD, -1, True)
        return x_MD * ops.rsqrt(mean_square_M1 + self.eps) * weight_D


class FullSizeSoftmax(nn.Cell):
    """Softmax of the last axis with a backward of its own."""

    def construct(self, x: Tensor) -> Tensor:
        """Of any shape and dtype."""
        return ops.softmax(x, -1)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        """Gives out * (dout - sum(out * dout))."""
        return (out * (dout - _repeated_sum(out * dout)),)


class FullSizeLogSoftmax(nn.Cell):
    """Log-softmax of the last axis with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.log_softmax = ops.LogSoftmax(-1)

    def construct(self, x: Tensor) -> Tensor:
        """Of any shape and dtype."""
        return self.log_softmax(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        """Gives dout - exp(out) * sum(dout)."""
        return (dout - ops.exp(out) * _repeated_sum(dout),)


def norm_of_device(eps: float) -> nn.Cell:
    """Takes [M, D] and its weight [D] to x / sqrt(mean(x^2) + eps) * weight."""
    return FullSizeNorm(eps) if needs_full_sizes() else PlainNorm(eps)


def softmax_of_device() -> nn.Cell:
    """Softmax of the last axis."""
    return FullSizeSoftmax() if needs_full_sizes() else nn.Softmax(-1)


def log_softmax_of_device() -> nn.Cell:
    """Log-softmax of the last axis."""
    return FullSizeLogSoftmax() if needs_full_sizes() else nn.LogSoftmax(-1)


def _row_sums(x_MD: Tensor) -> Tensor:
    """Inside a graph: [M, D] to [M, 1]."""
    return MATMUL(x_MD, ops.ones((x_MD.shape[-1], 1), x_MD.dtype))


def _each_row(weight_D: Tensor, x_MD: Tensor) -> Tensor:
    """Inside a graph: [D] to [M, D]."""
    return TILE(weight_D.reshape(1, -1), (x_MD.shape[0], 1))


def _repeated_sum(x: Tensor) -> Tensor:
    """Inside a graph: the sum of the last axis, of the size of what it sums."""
    width = x.shape[-1]
    return TILE(_row_sums(x.reshape(-1, width)), (1, width)).reshape(x.shape)

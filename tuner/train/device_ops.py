"""Parts of the decoder in the form that the kernels of the device take fastest.

On CPU (2.10, 2 cores) a kernel that broadcasts, reduces or transposes follows lists of places of
elements, and in a dynamic graph makes them anew at each call, on one thread; and since a dynamic
graph does not know that operands are of one size, the backward of every sum and product reduces
over axes that may be none. A step of 8 x 512 of a decoder of two layers, width 128, took 1.2 s in
a dynamic graph and 0.62 s in a static one. Copies to the full size, slices that are joined again,
sums as matrix products and backwards of our own (see `full_size_ops`) need none of it: the same
steps take about 0.46 s and 0.38 s.

An NPU's kernels broadcast, reduce and transpose as they go, and copies would cost memory traffic:
there these are the plain ops.

Shapes: B batch, T padded tokens, M rows of what is normalised, D width, N heads, H head size.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn, ops

from tuner.train.full_size_ops import (
    TILE,
    FullSizeFromHeads,
    FullSizeGate,
    FullSizeHead,
    FullSizeMix,
    FullSizeNorm,
    FullSizeRotation,
    FullSizeSum,
)
from tuner.train.plain_ops import Gate, Head, Mix, Norm, Rotation, Sum
from tuner.train.precision import Dtype, Dtypes


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
    """[B, N, T, H] to [B, T, N * H].

    Args:
        num_heads: N.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.slices = needs_full_sizes()
        self.by_slices = FullSizeFromHeads(num_heads)

    def construct(self, x: Tensor) -> Tensor:
        """Of any dtype."""
        if self.slices:
            return self.by_slices(x)
        B, N, T, H = x.shape
        return x.transpose(0, 2, 1, 3).reshape(B, T, N * H)


def norm_of_device(eps: float, width: int, dtype: Dtype) -> nn.Cell:
    """Takes [M, D] and its weight [D] to x / sqrt(mean(x^2) + eps) * weight.

    Args:
        eps: Added to the mean.
        width: D.
        dtype: Of all; below float32 the other order of products would overflow.
    """
    is_fp32 = dtype == ms.float32
    return FullSizeNorm(eps, width) if needs_full_sizes() and is_fp32 else Norm(eps)


def mix_of_device(softmax_dtype: Dtype) -> nn.Cell:
    """Takes scaled queries, keys, values and a mask to softmax(q k^T + mask) v.

    Args:
        softmax_dtype: As `Mix` takes it.
    """
    return FullSizeMix(softmax_dtype) if needs_full_sizes() else Mix(softmax_dtype)


def head_of_device(dtypes: Dtypes) -> nn.Cell:
    """Takes [M, D], weight [V, D] and labels [M, 1] to the labels' log-probabilities [M, 1]."""
    is_fp32 = dtypes.logits == dtypes.loss == ms.float32
    return FullSizeHead() if needs_full_sizes() and is_fp32 else Head(dtypes.loss)


def rotation_of_device(head_size: int) -> nn.Cell:
    """Turns the pairs of every head by their angles."""
    return FullSizeRotation(head_size) if needs_full_sizes() else Rotation()


def gate_of_device() -> nn.Cell:
    """Takes gate and up to silu(gate) * up."""
    return FullSizeGate() if needs_full_sizes() else Gate()


def sum_of_device() -> nn.Cell:
    """Takes two of one size to their sum."""
    return FullSizeSum() if needs_full_sizes() else Sum()

"""The same parts for kernels that are slow at broadcasts and reductions: see `device_ops`.

Each has the backward written out, over operands of one size; what is of another size is copied to
the full one. Angles and masks are constants: their gradients are given as zeros, which nobody
reads and the compiler drops.

Shapes: B batch, T padded tokens, M rows of what is normalised, D width, N heads, H head size.
"""

from __future__ import annotations

from mindspore import Tensor, ops

from tuner.train.plain_ops import Gate, LogSoftmax, MaskedSoftmax, Norm, Rotation, Sum

# As functions, ops.tile and ops.matmul make a graph each; used twice in a backward they failed to
# compile ("The func graph is empty", 2.10).
TILE = ops.Tile()
MATMUL = ops.MatMul()


class FullSizeNorm(Norm):
    """Over sums as matrix products."""

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


class FullSizeSoftmax(MaskedSoftmax):
    """Of scores and a mask of one size."""

    def bprop(
        self, scores: Tensor, mask: Tensor, out: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gives out * (dout - sum(out * dout))."""
        return out * (dout - _repeated_sum(out * dout)), ops.zeros_like(mask)


class FullSizeLogSoftmax(LogSoftmax):
    """Of any shape."""

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        """Gives dout - exp(out) * sum(dout)."""
        return (dout - ops.exp(out) * _repeated_sum(dout),)


class FullSizeRotation(Rotation):
    """By angles of the size of what is turned."""

    def bprop(
        self, x_BNTH: Tensor, cos: Tensor, sin: Tensor, out: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Turns back: the transposed rotation."""
        half = x_BNTH.shape[-1] // 2
        crossed = dout * sin
        first, second = crossed[..., :half], crossed[..., half:]
        dx_BNTH = dout * cos + ops.cat((second, -first), -1)
        return dx_BNTH, ops.zeros_like(cos), ops.zeros_like(sin)


class FullSizeGate(Gate):
    """Of two of one size."""

    def bprop(self, gate: Tensor, up: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        """With s = sigmoid(gate): (dout * up * s * (1 + gate * (1 - s)), dout * gate * s)."""
        share = ops.sigmoid(gate)
        activated = gate * share
        slope = share + activated * (1.0 - share)
        return dout * up * slope, dout * activated


class FullSizeSum(Sum):
    """Of two of one size."""

    def bprop(self, x: Tensor, y: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        """Both get what comes."""
        return dout, dout


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

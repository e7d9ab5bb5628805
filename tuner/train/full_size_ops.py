"""The same parts for kernels that are slow at broadcasts and reductions: see `device_ops`.

Each has the backward written out, over operands of one size; what is of another size is copied to
the full one. Angles and masks are constants: their gradients are given as zeros, which nobody
reads and the compiler drops. None inherits the plain form: a backward written out there would come
with it.

Shapes: B batch, T padded tokens, M rows of what is normalised, D width, N heads, H head size.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from tuner.train.precision import Dtype

# As functions, ops.tile and ops.matmul make a graph each; used twice in a backward they failed to
# compile ("The func graph is empty", 2.10).
TILE = ops.Tile()
MATMUL = ops.MatMul()
MATMUL_OF_COLUMNS = ops.MatMul(transpose_a=True)
PRODUCTS = ops.BatchMatMul()
PRODUCTS_OF_ROWS = ops.BatchMatMul(transpose_b=True)
PRODUCTS_OF_COLUMNS = ops.BatchMatMul(transpose_a=True)
STACK_AS_HEADS = ops.Stack(1)
SUM_BY_ROW = ops.UnsortedSegmentSum()


class FullSizeNorm(nn.Cell):
    """As `plain_ops.Norm`, in float32, over sums as matrix products.

    Args:
        eps: Added to the mean.
        width: D.
    """

    def __init__(self, eps: float, width: int) -> None:
        super().__init__()
        self.with_roots = _NormAndRoots(eps, width)

    def construct(self, x_MD: Tensor, weight_D: Tensor) -> Tensor:
        """[M, D] and [D] to [M, D]."""
        return self.with_roots(x_MD, weight_D)[0]


class _NormAndRoots(nn.Cell):
    """The norm, and for the backward 1 / root of each row and that times the weight."""

    def __init__(self, eps: float, width: int) -> None:
        super().__init__()
        self.eps = eps
        self.width = width
        # A product with it is the mean of a row.
        self.shares_D1 = Tensor(np.full((width, 1), 1.0 / width), ms.float32)

    def construct(self, x_MD: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inverse_M1 = ops.rsqrt(MATMUL(x_MD * x_MD, self.shares_D1) + self.eps)
        factors_MD = MATMUL(inverse_M1, weight_D.reshape(1, self.width))
        return x_MD * factors_MD, inverse_M1, factors_MD

    def bprop(
        self,
        x_MD: Tensor,
        weight_D: Tensor,
        out: tuple[Tensor, Tensor, Tensor],
        dout: tuple[Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """With r = 1 / root and g = do * weight * r: dx = g - x * r^2 * mean(g * x)."""
        _, inverse_M1, factors_MD = out
        scaled_MD = dout[0] * factors_MD
        means_M1 = MATMUL(scaled_MD * x_MD, self.shares_D1) * inverse_M1 * inverse_M1
        dx_MD = scaled_MD - x_MD * TILE(means_M1, (1, self.width))
        dweight_1D = MATMUL_OF_COLUMNS(inverse_M1, dout[0] * x_MD)
        return dx_MD, dweight_1D.reshape(self.width)


class FullSizeMix(nn.Cell):
    """As `plain_ops.Mix`, with a mask of the scores' size.

    Args:
        softmax_dtype: The mask's sum and the softmax compute in this.
    """

    def __init__(self, softmax_dtype: Dtype) -> None:
        super().__init__()
        self.with_weights = _MixAndWeights(softmax_dtype)

    def construct(
        self, q_BKSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, mask_BKST: Tensor
    ) -> Tensor:
        """As `Mix`, but for the mask."""
        return self.with_weights(q_BKSH, k_BKTH, v_BKTH, mask_BKST)[0]


class _MixAndWeights(nn.Cell):
    """The mix, and the softmax's weights for the backward."""

    def __init__(self, softmax_dtype: Dtype) -> None:
        super().__init__()
        self.softmax_dtype = softmax_dtype

    def construct(
        self, q_BKSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, mask_BKST: Tensor
    ) -> tuple[Tensor, Tensor]:
        scores = PRODUCTS_OF_ROWS(q_BKSH, k_BKTH).astype(self.softmax_dtype)
        weights = ops.softmax(scores + mask_BKST, -1)
        return PRODUCTS(weights.astype(v_BKTH.dtype), v_BKTH), weights

    def bprop(  # noqa: PLR0913 (what MindSpore hands to a backward)
        self,
        q_BKSH: Tensor,
        k_BKTH: Tensor,
        v_BKTH: Tensor,
        mask_BKST: Tensor,
        out: tuple[Tensor, Tensor],
        dout: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """With p the weights and o the mix: dscores = p * (do v^T - sum(do * o)).

        The sum is that of p * dp over the keys, but of what is as small as the mix (Dao et al.,
        FlashAttention, arXiv 2205.14135, appendix B.2). As one column more of do, against a column
        of ones beside v, it costs no pass over what has the scores' size.
        """
        mixed, weights = out
        dmixed = dout[0]
        dtype, softmax_dtype = v_BKTH.dtype, self.softmax_dtype
        B, K, S, H = q_BKSH.shape
        products = (mixed.astype(softmax_dtype) * dmixed.astype(softmax_dtype)).reshape(-1, H)
        negative_BKS1 = _negative_row_sums(products).reshape(B, K, S, 1).astype(dtype)
        ones_BKT1 = ops.ones((B, K, k_BKTH.shape[2], 1), dtype)
        shifted = PRODUCTS_OF_ROWS(
            ops.cat((dmixed, negative_BKS1), -1), ops.cat((v_BKTH, ones_BKT1), -1)
        )
        dscores = (weights * shifted.astype(softmax_dtype)).astype(dtype)
        return (
            PRODUCTS(dscores, k_BKTH),
            PRODUCTS_OF_COLUMNS(dscores, q_BKSH),
            PRODUCTS_OF_COLUMNS(weights.astype(dtype), dmixed),
            ops.zeros_like(mask_BKST),
        )


class FullSizeHead(nn.Cell):
    """As `plain_ops.Head`, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.with_all = _LabelAndAllLogProbs()

    def construct(self, x_MD: Tensor, weight_VD: Tensor, labels_M1: Tensor) -> Tensor:
        """As `Head`."""
        return self.with_all(x_MD, weight_VD, labels_M1)[0]


class _LabelAndAllLogProbs(nn.Cell):
    """Those of labels, and all of them for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = ops.MatMul(transpose_b=True)
        self.log_softmax = ops.LogSoftmax(-1)

    def construct(
        self, x_MD: Tensor, weight_VD: Tensor, labels_M1: Tensor
    ) -> tuple[Tensor, Tensor]:
        log_probs_MV = self.log_softmax(self.logits(x_MD, weight_VD))
        return ops.gather_elements(log_probs_MV, 1, labels_M1), log_probs_MV

    def bprop(
        self,
        x_MD: Tensor,
        weight_VD: Tensor,
        labels_M1: Tensor,
        out: tuple[Tensor, Tensor],
        dout: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """With p the probabilities: dx = do * (w[label] - p w), dw = (onehot - p)^T (do * x).

        So what comes is multiplied into rows of width D and never into those of width V.
        """
        probs_MV = ops.exp(out[1])
        labels_M = labels_M1.reshape(-1)
        douts_MD = TILE(dout[0], (1, x_MD.shape[-1]))
        dx_MD = douts_MD * (ops.gather(weight_VD, labels_M, 0) - MATMUL(probs_MV, weight_VD))
        scaled_MD = douts_MD * x_MD
        of_labels_VD = SUM_BY_ROW(scaled_MD, labels_M, weight_VD.shape[0])
        return (
            dx_MD,
            # The product that reads the wide rows in order takes half the time of the other.
            of_labels_VD - MATMUL_OF_COLUMNS(scaled_MD, probs_MV).transpose(1, 0),
            ops.zeros_like(labels_M1),
        )


class FullSizeRotation(nn.Cell):
    """As `plain_ops.Rotation`, of rows [R, H] of all heads, by angles of that size.

    With the matrix Q that takes (first half, second half) to (-second, first) it is
    x * cos + (x Q) * sin, which needs no slices.

    Args:
        head_size: H.
    """

    def __init__(self, head_size: int) -> None:
        super().__init__()
        self.head_size = head_size
        self.of_rows = _RotationOfRows(head_size)

    def construct(self, x_BNTH: Tensor, cos_RH: Tensor, sin_RH: Tensor) -> Tensor:
        """[B, N, T, H] to [R, H]; angles of the size of what comes out, R = B * N * T."""
        return self.of_rows(x_BNTH.reshape(-1, self.head_size), cos_RH, sin_RH)


class _RotationOfRows(nn.Cell):
    """The rotation. The reshape before it has a backward of two kernels outside, five inside."""

    def __init__(self, head_size: int) -> None:
        super().__init__()
        half = head_size // 2
        crossing = np.zeros((head_size, head_size))
        crossing[half:, :half] = -np.eye(half)
        crossing[:half, half:] = np.eye(half)
        self.crossing_HH = Tensor(crossing, ms.float32)

    def construct(self, x_RH: Tensor, cos_RH: Tensor, sin_RH: Tensor) -> Tensor:
        crossing_HH = self.crossing_HH.astype(x_RH.dtype)
        return x_RH * cos_RH + MATMUL(x_RH, crossing_HH) * sin_RH

    def bprop(
        self, x_RH: Tensor, cos_RH: Tensor, sin_RH: Tensor, out: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Turns back: the transposed rotation."""
        crossing_HH = self.crossing_HH.astype(dout.dtype)
        dx_RH = dout * cos_RH - MATMUL(dout * sin_RH, crossing_HH)
        return dx_RH, ops.zeros_like(cos_RH), ops.zeros_like(sin_RH)


class FullSizeFromHeads(nn.Cell):
    """[B, N, T, H] to [B, T, N * H] by slices.

    The backward that MindSpore derives asks for the shape of every slice: in a dynamic graph
    twelve kernels where these are two.

    Args:
        num_heads: N.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.split = ops.Split(2, num_heads)

    def construct(self, x: Tensor) -> Tensor:
        """Of any dtype."""
        return ops.cat(ops.unstack(x, 1), -1)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        """To heads again."""
        return (STACK_AS_HEADS(self.split(dout)),)


class FullSizeGate(nn.Cell):
    """As `plain_ops.Gate`, of two of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.with_share = _GateAndShare()

    def construct(self, gate: Tensor, up: Tensor) -> Tensor:
        """Both of one shape and dtype."""
        return self.with_share(gate, up)[0]


class _GateAndShare(nn.Cell):
    """The gate, and for the backward sigmoid(gate) and silu(gate)."""

    def construct(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        share = ops.sigmoid(gate)
        activated = gate * share
        return activated * up, share, activated

    def bprop(
        self,
        gate: Tensor,
        up: Tensor,
        out: tuple[Tensor, Tensor, Tensor],
        dout: tuple[Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """With s = sigmoid(gate), a = gate * s: (do * up * (s + a - a * s), do * a)."""
        _, share, activated = out
        slope = share + activated - activated * share
        return dout[0] * up * slope, dout[0] * activated


class FullSizeSum(nn.Cell):
    """As `plain_ops.Sum`, of two of one size."""

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        """Both of one shape and dtype."""
        return x + y

    def bprop(self, x: Tensor, y: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        """Both get what comes."""
        return dout, dout


def _negative_row_sums(x_MD: Tensor) -> Tensor:
    """Inside a graph: [M, D] to [M, 1]."""
    return MATMUL(x_MD, -ops.ones((x_MD.shape[-1], 1), x_MD.dtype))

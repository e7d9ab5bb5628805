"""Parts of the decoder from MindSpore's own ops; but for norms MindSpore derives the backward.

Shapes: B batch, T padded tokens, M rows of what is normalised, D width, N heads, H head size.
"""

from __future__ import annotations

from mindspore import Tensor, nn, ops

from tuner.train.precision import Dtype

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


class Mix(nn.Cell):
    """softmax(q k^T + mask) v, of every head; what `flash.FlashMix` is compared with.

    Args:
        softmax_dtype: The mask's sum and the softmax compute in this.
    """

    def __init__(self, softmax_dtype: Dtype) -> None:
        super().__init__()
        self.softmax_dtype = softmax_dtype
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.weigh = ops.BatchMatMul()

    def construct(self, q_BKSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, mask: Tensor) -> Tensor:
        """[B, K, S, H] queries and [B, K, T, H] keys and values to [B, K, S, H], of one dtype.

        Args:
            q_BKSH: Scaled. S = G * T: the G query heads of a key head are stacked, so keys need
                no copies.
            k_BKTH: Keys.
            v_BKTH: Values.
            mask: Broadcasts to [B, K, G, T, T], of softmax's dtype; it gets no gradient.
        """
        B, K, S, _ = q_BKSH.shape
        T = k_BKTH.shape[2]
        scores = self.scores(q_BKSH, k_BKTH).astype(self.softmax_dtype)
        weights = ops.softmax(scores.reshape(B, K, S // T, T, T) + mask, -1)
        return self.weigh(weights.reshape(B, K, S, T).astype(v_BKTH.dtype), v_BKTH)


class LabelLogProbs(nn.Cell):
    """The log-probability of every token's label.

    As log-softmax and gather, since on CPU with 2.10 (4096 tokens, vocabulary 4000)
    `ops.cross_entropy` took 1.5 times the time and 1.7 times the memory of the whole step, and
    `ops.NLLLoss` without reduction gave a wrong sum in a dynamic graph.

    Args:
        dtype: Of the log-softmax.
    """

    def __init__(self, dtype: Dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.log_softmax = ops.LogSoftmax(-1)

    def construct(self, logits_MV: Tensor, labels_M1: Tensor) -> Tensor:
        """[M, V] of any dtype and int32 [M, 1], >= 0, to [M, 1] of its dtype."""
        return ops.gather_elements(self.log_softmax(logits_MV.astype(self.dtype)), 1, labels_M1)


class Head(nn.Cell):
    """The last product and the log-probabilities of labels in one.

    Args:
        dtype: As of `LabelLogProbs`.
    """

    def __init__(self, dtype: Dtype) -> None:
        super().__init__()
        self.logits = ops.MatMul(transpose_b=True)
        self.label_log_probs = LabelLogProbs(dtype)

    def construct(self, x_MD: Tensor, weight_VD: Tensor, labels_M1: Tensor) -> Tensor:
        """[M, D] and [V, D] of one dtype and int32 [M, 1], >= 0, to [M, 1]."""
        return self.label_log_probs(self.logits(x_MD, weight_VD), labels_M1)


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

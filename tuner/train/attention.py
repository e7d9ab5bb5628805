"""Causal grouped-query attention with rotary positions, as plain matrix products.

Rows are padded on the right and attention is causal, so no real token ever sees padding and no
padding mask is needed: what padding rows compute is never read.

Shapes: B batch, T padded tokens, D width, N query heads, K key heads, G = N / K, H head size.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mindspore import Tensor, nn, ops

from tuner.config.schema import ModelConfig
from tuner.train.precision import Dtype, Dtypes


def rotary_tables(config: ModelConfig, max_length: int, dtype: Dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, [max_length, H] of a dtype each.

    The angle of position p and pair i is p * theta^(-2i / H); both halves of a head share them
    (Su et al., RoFormer, arXiv 2104.09864, in the half-split order that Llama uses).
    """
    head_size = config.width // config.num_heads
    frequencies = config.rope_theta ** (-np.arange(0, head_size, 2) / head_size)
    angles = np.outer(np.arange(max_length), frequencies)
    both_halves = np.concatenate([angles, angles], axis=1)
    return Tensor(np.cos(both_halves), dtype), Tensor(np.sin(both_halves), dtype)


class Attention(nn.Cell):
    """Self-attention of one layer."""

    def __init__(
        self, config: ModelConfig, dtypes: Dtypes, new_dense: Callable[[int, int, Dtype], nn.Cell]
    ) -> None:
        super().__init__()
        self.products = dtypes.products
        self.rope = dtypes.rope
        self.softmax = dtypes.softmax
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.group_size = config.num_heads // config.num_kv_heads
        self.head_size = config.width // config.num_heads
        self.half = self.head_size // 2
        self.scale = self.head_size**-0.5
        kv_width = self.num_kv_heads * self.head_size
        self.q_proj = new_dense(config.width, config.width, dtypes.products)
        self.k_proj = new_dense(config.width, kv_width, dtypes.products)
        self.v_proj = new_dense(config.width, kv_width, dtypes.products)
        self.o_proj = new_dense(config.width, config.width, dtypes.products)
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.weigh = ops.BatchMatMul()

    def rotate(self, x_BNTH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn each pair (x_i, x_{i + H/2}) by its angle."""
        x_BNTH = x_BNTH.astype(self.rope)
        first, second = x_BNTH[..., : self.half], x_BNTH[..., self.half :]
        return x_BNTH * cos + ops.cat((-second, first), -1) * sin

    def construct(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Attend; [B, T, D] to [B, T, D] of the products' dtype.

        Args:
            x_BTD: Normalised input.
            cos: Of the rotary angles, [T, H] for all rows or [B, 1, T, H] for each; of rope's
                dtype.
            sin: The same.
            mask: Added to the scores, [T, T] or [B, 1, 1, T, T]; 0, or where hidden the masked
                score of softmax's dtype.
        """
        B, T, D = x_BTD.shape
        q_BNTH = self.q_proj(x_BTD).reshape(B, T, self.num_heads, self.head_size)
        k_BKTH = self.k_proj(x_BTD).reshape(B, T, self.num_kv_heads, self.head_size)
        v_BKTH = self.v_proj(x_BTD).reshape(B, T, self.num_kv_heads, self.head_size)
        q_BNTH = self.rotate(q_BNTH.transpose(0, 2, 1, 3), cos, sin) * self.scale
        k_BKTH = self.rotate(k_BKTH.transpose(0, 2, 1, 3), cos, sin)
        v_BKTH = v_BKTH.transpose(0, 2, 1, 3)
        # The G query heads of a key head are stacked along T, so keys need no copies.
        q_BKGTH = q_BNTH.reshape(B, self.num_kv_heads, self.group_size * T, self.head_size)
        scores = self.scores(q_BKGTH.astype(self.products), k_BKTH.astype(self.products))
        scores = scores.astype(self.softmax)
        scores = scores.reshape(B, self.num_kv_heads, self.group_size, T, T) + mask
        weights = ops.softmax(scores, -1)
        weights = weights.reshape(B, self.num_kv_heads, self.group_size * T, T)
        mixed = self.weigh(weights.astype(self.products), v_BKTH)
        mixed = mixed.reshape(B, self.num_heads, T, self.head_size)
        return self.o_proj(mixed.transpose(0, 2, 1, 3).reshape(B, T, D))

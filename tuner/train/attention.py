"""Causal grouped-query attention with rotary positions, as plain matrix products.

Rows are padded on the right and attention is causal, so no real token ever sees padding and no
padding mask is needed: what padding rows compute is never read.

Shapes: B batch, T padded tokens, D width, N query heads, K key heads, G = N / K, H head size.
"""

from __future__ import annotations

from mindspore import Tensor, nn, ops

from tuner.config.schema import ModelConfig
from tuner.train.layers import RMSNorm, projection
from tuner.train.precision import Dtypes


class Attention(nn.Cell):
    """Self-attention of one layer."""

    def __init__(self, config: ModelConfig, dtypes: Dtypes) -> None:
        super().__init__()
        self.products = dtypes.products
        self.rope = dtypes.rope
        self.softmax = dtypes.softmax
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.group_size = config.num_heads // config.num_kv_heads
        self.head_size = config.size_of_head
        self.heads_width = self.num_heads * self.head_size
        self.half = self.head_size // 2
        self.scale = self.head_size**-0.5
        self.is_rotary = config.positions == "rotary"
        self.has_qk_norm = config.qk_norm
        if self.has_qk_norm:
            self.q_norm = RMSNorm(self.head_size, config.norm_eps, dtypes.norms)
            self.k_norm = RMSNorm(self.head_size, config.norm_eps, dtypes.norms)
        self._add_projections(config, dtypes)
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.weigh = ops.BatchMatMul()

    def _add_projections(self, config: ModelConfig, dtypes: Dtypes) -> None:
        to_heads = (config.width, self.heads_width)
        to_kv_heads = (config.width, self.num_kv_heads * self.head_size)
        to_width = (self.heads_width, config.width)
        has_bias = config.attention_bias != "none"
        ends_with_bias = config.attention_bias == "qkvo"
        dtype = dtypes.products
        self.q_proj = projection(config, "q_proj", to_heads, dtype, has_bias=has_bias)
        self.k_proj = projection(config, "k_proj", to_kv_heads, dtype, has_bias=has_bias)
        self.v_proj = projection(config, "v_proj", to_kv_heads, dtype, has_bias=has_bias)
        self.o_proj = projection(config, "o_proj", to_width, dtype, has_bias=ends_with_bias)

    def rotate(self, x_BNTH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn each pair (x_i, x_{i + H/2}) by its angle."""
        x_BNTH = x_BNTH.astype(self.rope)
        if not self.is_rotary:
            return x_BNTH
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
        B, T, _ = x_BTD.shape
        q_BNTH = self.q_proj(x_BTD).reshape(B, T, self.num_heads, self.head_size)
        k_BKTH = self.k_proj(x_BTD).reshape(B, T, self.num_kv_heads, self.head_size)
        v_BKTH = self.v_proj(x_BTD).reshape(B, T, self.num_kv_heads, self.head_size)
        if self.has_qk_norm:
            q_BNTH = self.q_norm(q_BNTH)
            k_BKTH = self.k_norm(k_BKTH)
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
        return self.o_proj(mixed.transpose(0, 2, 1, 3).reshape(B, T, self.heads_width))

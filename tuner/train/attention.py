"""Causal grouped-query attention with rotary positions: matrix products, or flash attention.

Rows are padded on the right and attention is causal, so no real token ever sees padding and no
padding mask is needed: what padding rows compute is never read.

Shapes: B batch, T padded tokens, D width, N query heads, K key heads, G = N / K, H head size.
"""

from __future__ import annotations

from mindspore import Tensor, nn

from tuner.config.schema import ModelConfig
from tuner.train.device_ops import FromHeads, ToHeads, mix_of_device, rotation_of_device
from tuner.train.flash import FlashMix
from tuner.train.layers import RMSNorm, projection
from tuner.train.precision import Dtypes


class Attention(nn.Cell):
    """Self-attention of one layer.

    Args:
        config: Sizes.
        dtypes: Of its parts.
        is_flash: Whether it attends by flash attention.
    """

    def __init__(self, config: ModelConfig, dtypes: Dtypes, *, is_flash: bool = False) -> None:
        super().__init__()
        self.products = dtypes.products
        self.rope = dtypes.rope
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.group_size = config.num_heads // config.num_kv_heads
        self.head_size = config.size_of_head
        self.heads_width = self.num_heads * self.head_size
        self.scale = self.head_size**-0.5
        self.is_rotary = config.positions == "rotary"
        # Flash attention multiplies the scores, and rotary angles of queries hold the scale.
        self.scales_queries = not is_flash and not self.is_rotary
        self.has_qk_norm = config.qk_norm
        if self.has_qk_norm:
            self.q_norm = RMSNorm(self.head_size, config.norm_eps, dtypes.norms)
            self.k_norm = RMSNorm(self.head_size, config.norm_eps, dtypes.norms)
        self._add_projections(config, dtypes)
        self.to_heads = ToHeads(self.num_heads, self.head_size)
        self.to_kv_heads = ToHeads(self.num_kv_heads, self.head_size)
        self.from_heads = FromHeads(self.num_heads)
        self.rotation = rotation_of_device(self.head_size)
        self.mix = FlashMix(config) if is_flash else mix_of_device(dtypes.softmax)

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
        """Turn each pair (x_i, x_{i + H/2}) by its angle; rows in whatever shape."""
        x_BNTH = x_BNTH.astype(self.rope)
        if not self.is_rotary:
            return x_BNTH
        return self.rotation(x_BNTH, cos, sin)

    def construct(
        self,
        x_MD: Tensor,
        B: int,
        T: int,
        angles: tuple[tuple[Tensor, Tensor], ...],
        mask: Tensor | tuple[Tensor, ...],
    ) -> Tensor:
        """Attend; [M, D] to [M, D] of the products' dtype.

        Args:
            x_MD: Normalised input.
            B: Rows.
            T: Tokens of each.
            angles: Cosine and sine of the rotary angles, for queries and for keys, as the
                device's rotation takes them; of rope's dtype. Those for queries times the scale
                of the scores, but for flash attention.
            mask: Added to the scores, as the device's mix takes it; 0, or where hidden the masked
                score of softmax's dtype. Of flash attention as `FlashMask` makes it.
        """
        H, N, K = self.head_size, self.num_heads, self.num_kv_heads
        q = self.to_heads(self.q_proj(x_MD).reshape(B, T, N * H))
        k = self.to_kv_heads(self.k_proj(x_MD).reshape(B, T, K * H))
        v_BKTH = self.to_kv_heads(self.v_proj(x_MD).reshape(B, T, K * H))
        if self.has_qk_norm:
            q = self.q_norm(q.reshape(-1, H)).reshape(B, N, T, H)
            k = self.k_norm(k.reshape(-1, H)).reshape(B, K, T, H)
        q = self.rotate(q, *angles[0])
        if self.scales_queries:
            q = q * self.scale
        k = self.rotate(k, *angles[1])
        # The G query heads of a key head are stacked along T, so keys need no copies.
        q_BKSH = q.reshape(B, K, self.group_size * T, H).astype(self.products)
        k_BKTH = k.reshape(B, K, T, H).astype(self.products)
        mixed = self.mix(q_BKSH, k_BKTH, v_BKTH, mask)
        return self.o_proj(self.from_heads(mixed.reshape(B, N, T, H)).reshape(-1, N * H))

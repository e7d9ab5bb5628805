"""The built-in decoder: RMSNorm, rotary grouped-query attention, SwiGLU, tied embedding.

Shapes: B batch, T padded tokens, D width, V vocabulary, F width of the SwiGLU layer.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from tuner.config.schema import ModelConfig
from tuner.train.attention import Attention, rotary_tables
from tuner.train.precision import FP32, MASKED_SCORES, Dtype, Dtypes


class Dense(nn.Cell):
    """Linear map without a bias; weight float32 [num_out, num_in]."""

    def __init__(self, num_in: int, num_out: int, dtype: Dtype) -> None:
        super().__init__()
        self.dtype = dtype
        # Filled by initial weights; zeros here so that building costs no random numbers.
        self.weight = Parameter(Tensor(np.zeros((num_out, num_in)), ms.float32), name="weight")
        self.product = ops.MatMul(transpose_b=True)
        self.num_in = num_in
        self.num_out = num_out

    def construct(self, x: Tensor) -> Tensor:
        """[..., num_in] to [..., num_out] of its dtype."""
        flat = x.reshape(-1, self.num_in).astype(self.dtype)
        flat = self.product(flat, self.weight.astype(self.dtype))
        return flat.reshape((*x.shape[:-1], self.num_out))


class RMSNorm(nn.Cell):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float, dtype: Dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.weight = Parameter(Tensor(np.ones(width), ms.float32), name="weight")
        self.eps = eps

    def construct(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D] of its dtype."""
        x_BTD = x_BTD.astype(self.dtype)
        mean_square = ops.mean(x_BTD * x_BTD, -1, True)
        return x_BTD * ops.rsqrt(mean_square + self.eps) * self.weight.astype(self.dtype)


class SwiGLU(nn.Cell):
    """down(silu(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, dtypes: Dtypes) -> None:
        super().__init__()
        self.activations = dtypes.activations
        self.gate_proj = Dense(config.width, config.ffn_width, dtypes.products)
        self.up_proj = Dense(config.width, config.ffn_width, dtypes.products)
        self.down_proj = Dense(config.ffn_width, config.width, dtypes.products)

    def construct(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D] of the products' dtype."""
        gate_BTF = self.gate_proj(x_BTD).astype(self.activations)
        up_BTF = self.up_proj(x_BTD).astype(self.activations)
        return self.down_proj(ops.silu(gate_BTF) * up_BTF)


class DecoderLayer(nn.Cell):
    """Attention and SwiGLU, each after a norm and added to its input."""

    def __init__(self, config: ModelConfig, dtypes: Dtypes) -> None:
        super().__init__()
        self.residual = dtypes.residual
        self.input_norm = RMSNorm(config.width, config.norm_eps, dtypes.norms)
        self.attention = Attention(config, dtypes, Dense)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps, dtypes.norms)
        self.mlp = SwiGLU(config, dtypes)

    def construct(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D] of residual's dtype; the others as `Attention` takes them."""
        branch_BTD = self.attention(self.input_norm(x_BTD), cos, sin, mask)
        x_BTD = x_BTD.astype(self.residual) + branch_BTD.astype(self.residual)
        branch_BTD = self.mlp(self.mlp_norm(x_BTD))
        return x_BTD + branch_BTD.astype(self.residual)


class Decoder(nn.Cell):
    """Token ids to logits.

    Args:
        config: Sizes.
        max_length: Longest padded row in tokens, inclusive.
        seed: Of the initial weights: normal with init_std, the projections that end a branch
            divided by sqrt(2 * num_layers) as in GPT-2, norms 1.
        dtypes: Of its parts; the weights are float32 whatever these are.
    """

    def __init__(
        self, config: ModelConfig, max_length: int, seed: int, dtypes: Dtypes = FP32
    ) -> None:
        super().__init__()
        self.embedding = Parameter(
            Tensor(np.zeros((config.vocab_size, config.width)), ms.float32), name="embedding"
        )
        self.layers = nn.CellList([DecoderLayer(config, dtypes) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.width, config.norm_eps, dtypes.norms)
        self.cos, self.sin = rotary_tables(config, max_length, dtypes.rope)
        self.embedding_dtype = dtypes.embedding
        self.softmax_dtype = dtypes.softmax
        self.logits_dtype = dtypes.logits
        self.masked_score = MASKED_SCORES[dtypes.softmax]
        self.logits = ops.MatMul(transpose_b=True)
        self.width = config.width
        self.vocab_size = config.vocab_size
        _set_initial_weights(self, config, seed)

    def construct(self, input_ids_BT: Tensor, *packing: Tensor) -> Tensor:
        """int32 [B, T] ids to logits [B, T, V] of the logits' dtype.

        Args:
            input_ids_BT: Token ids.
            packing: Of packed rows segment ids and positions, int32 [B, T] each: tokens see only
                their own segment. Without them a row is one sample.
        """
        B, T = input_ids_BT.shape
        places = ops.arange(T)
        is_hidden = places.reshape(1, T) > places.reshape(T, 1)
        cos, sin = self.cos[:T], self.sin[:T]
        if packing:
            segment_ids_BT, positions_BT = packing
            is_other = segment_ids_BT.reshape(B, 1, 1, 1, T) != segment_ids_BT.reshape(
                B, 1, 1, T, 1
            )
            is_hidden = ops.logical_or(is_hidden, is_other)
            cos = ops.gather(self.cos, positions_BT, 0).reshape(B, 1, T, -1)
            sin = ops.gather(self.sin, positions_BT, 0).reshape(B, 1, T, -1)
        mask = is_hidden.astype(self.softmax_dtype) * self.masked_score
        x_BTD = ops.gather(self.embedding, input_ids_BT, 0).astype(self.embedding_dtype)
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos, sin, mask)
        x_MD = self.final_norm(x_BTD).reshape(-1, self.width).astype(self.logits_dtype)
        logits_MV = self.logits(x_MD, self.embedding.astype(self.logits_dtype))
        return logits_MV.reshape(B, T, self.vocab_size)


def _set_initial_weights(model: Decoder, config: ModelConfig, seed: int) -> None:
    rng = np.random.default_rng(seed)
    branch_scale = (2 * config.num_layers) ** -0.5
    for name, parameter in model.parameters_and_names():
        if parameter.ndim < 2:
            continue
        ends_branch = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = config.init_std * (branch_scale if ends_branch else 1.0)
        weights = rng.standard_normal(parameter.shape, dtype=np.float32) * np.float32(std)
        parameter.set_data(Tensor(weights, ms.float32))

"""The built-in decoder: RMSNorm, grouped-query attention, SwiGLU; also what Llama and Qwen have.

Shapes: B batch, T padded tokens, D width, V vocabulary, F width of the SwiGLU layer.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from tuner.config.schema import ModelConfig
from tuner.train.attention import Attention
from tuner.train.device_ops import Spread, gate_of_device, head_of_device, sum_of_device
from tuner.train.flash import FlashMask
from tuner.train.layers import RMSNorm, projection
from tuner.train.lora import is_adapter
from tuner.train.precision import FP32, MASKED_SCORES, Dtypes
from tuner.train.rotary import rotary_tables


class SwiGLU(nn.Cell):
    """down(silu(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, dtypes: Dtypes) -> None:
        super().__init__()
        self.activations = dtypes.activations
        self.gate = gate_of_device()
        widen, narrow = (config.width, config.ffn_width), (config.ffn_width, config.width)
        self.gate_proj = projection(config, "gate_proj", widen, dtypes.products)
        self.up_proj = projection(config, "up_proj", widen, dtypes.products)
        self.down_proj = projection(config, "down_proj", narrow, dtypes.products)

    def construct(self, x_MD: Tensor) -> Tensor:
        """[M, D] to [M, D] of the products' dtype."""
        gate_MF = self.gate_proj(x_MD).astype(self.activations)
        up_MF = self.up_proj(x_MD).astype(self.activations)
        return self.down_proj(self.gate(gate_MF, up_MF))


class DecoderLayer(nn.Cell):
    """Attention and SwiGLU, each after a norm and added to its input."""

    def __init__(self, config: ModelConfig, dtypes: Dtypes, *, is_flash: bool) -> None:
        super().__init__()
        self.residual = dtypes.residual
        self.sum = sum_of_device()
        self.input_norm = RMSNorm(config.width, config.norm_eps, dtypes.norms)
        self.attention = Attention(config, dtypes, is_flash=is_flash)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps, dtypes.norms)
        self.mlp = SwiGLU(config, dtypes)

    def construct(
        self,
        x_MD: Tensor,
        B: int,
        T: int,
        angles: tuple[tuple[Tensor, Tensor], ...],
        mask: Tensor | tuple[Tensor, ...],
    ) -> Tensor:
        """[M, D] to [M, D] of residual's dtype; the others as `Attention` takes them."""
        branch_MD = self.attention(self.input_norm(x_MD), B, T, angles, mask)
        x_MD = self.sum(x_MD.astype(self.residual), branch_MD.astype(self.residual))
        branch_MD = self.mlp(self.mlp_norm(x_MD))
        return self.sum(x_MD, branch_MD.astype(self.residual))


class Decoder(nn.Cell):
    """Token ids to logits.

    Args:
        config: Sizes.
        max_length: Longest padded row in tokens, inclusive.
        seed: Of the initial weights: normal with init_std, the projections that end a branch
            divided by sqrt(2 * num_layers) as in GPT-2, norms 1, biases and adapters 0. With a
            source all are 0: they are read from there.
        dtypes: Of its parts; the weights are float32 whatever these are.
        is_flash: Whether it attends by flash attention.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_length: int,
        seed: int,
        dtypes: Dtypes = FP32,
        *,
        is_flash: bool = False,
    ) -> None:
        super().__init__()
        self.is_flash = is_flash
        table = (config.vocab_size, config.width)
        self.embedding = _zeros(table, "embedding")
        self.is_tied = config.tie_embedding
        if not self.is_tied:
            self.logits_weight = _zeros(table, "logits_weight")
        self.has_learned_positions = config.positions == "learned"
        if self.has_learned_positions:
            positions = (config.max_positions or max_length, config.width)
            self.position_embedding = _zeros(positions, "position_embedding")
        layers = range(config.num_layers)
        self.layers = nn.CellList(
            [DecoderLayer(config, dtypes, is_flash=self.is_flash) for _ in layers]
        )
        if self.is_flash:
            self.flash_mask = FlashMask()
        self.final_norm = RMSNorm(config.width, config.norm_eps, dtypes.norms)
        self.cos, self.sin = rotary_tables(config, max_length, dtypes.rope)
        self.embedding_dtype = dtypes.embedding
        self.softmax_dtype = dtypes.softmax
        self.logits_dtype = dtypes.logits
        self.masked_score = MASKED_SCORES[dtypes.softmax]
        self.logits = ops.MatMul(transpose_b=True)
        self.head = head_of_device(dtypes)
        self.spread = Spread()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_size = config.size_of_head
        self.scale = config.size_of_head**-0.5
        self.width = config.width
        self.vocab_size = config.vocab_size
        if config.source is None:
            _set_initial_weights(self, config, seed)

    def construct(self, input_ids_BT: Tensor, *packing: Tensor) -> Tensor:
        """int32 [B, T] ids to logits [B, T, V] of the logits' dtype.

        Args:
            input_ids_BT: Token ids.
            packing: Of packed rows segment ids and positions, int32 [B, T] each: tokens see only
                their own segment. Without them a row is one sample. Flash attention takes
                cumulative lengths too, int64 [E], which say the same as the ids.
        """
        B, T = input_ids_BT.shape
        logits_MV = self.logits(self.hidden(input_ids_BT, packing), self.head_weight())
        return logits_MV.reshape(B, T, self.vocab_size)

    def label_log_probs(
        self, input_ids_BT: Tensor, labels_M1: Tensor, packing: tuple[Tensor, ...]
    ) -> Tensor:
        """Log-probability of every token's label, [M, 1] of the loss's dtype.

        Args:
            input_ids_BT: As `construct` takes them.
            labels_M1: int32 [M, 1], >= 0.
            packing: As `construct` takes it.
        """
        return self.head(self.hidden(input_ids_BT, packing), self.head_weight(), labels_M1)

    def head_weight(self) -> Tensor:
        """Of the last product, [V, D] of the logits' dtype."""
        weight = self.embedding if self.is_tied else self.logits_weight
        return weight.astype(self.logits_dtype)

    def hidden(self, input_ids_BT: Tensor, packing: tuple[Tensor, ...]) -> Tensor:
        """What the last product takes, [M, D] of the logits' dtype; arguments as above."""
        B, T = input_ids_BT.shape
        angles, mask = self.angles(B, T, packing), self.mask(B, T, packing)
        x_MD = ops.gather(self.embedding, input_ids_BT.reshape(-1), 0)
        x_MD = x_MD.astype(self.embedding_dtype)
        if self.has_learned_positions:
            if packing:
                offsets = ops.gather(self.position_embedding, packing[1].reshape(-1), 0)
            else:
                offsets = self.position_embedding[:T].reshape(1, T, self.width)
                offsets = ops.tile(offsets, (B, 1, 1)).reshape(-1, self.width)
            x_MD = x_MD + offsets.astype(self.embedding_dtype)
        for layer in self.layers:
            x_MD = layer(x_MD, B, T, angles, mask)
        return self.final_norm(x_MD).astype(self.logits_dtype)

    def angles(
        self, B: int, T: int, packing: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, Tensor], ...]:
        """Cosine and sine for queries and for keys, as `Attention` takes them."""
        if packing:
            cos = ops.gather(self.cos, packing[1], 0).reshape(B, 1, T, -1)
            sin = ops.gather(self.sin, packing[1], 0).reshape(B, 1, T, -1)
        else:
            cos, sin = self.cos[:T], self.sin[:T]
        N, K = self.num_heads, self.num_kv_heads
        of_keys = self.of_heads(cos, B, K), self.of_heads(sin, B, K)
        if not self.is_flash:
            # Here the scale of the scores costs the size of one row, not that of all queries.
            cos, sin = cos * self.scale, sin * self.scale
        return (self.of_heads(cos, B, N), self.of_heads(sin, B, N)), of_keys

    def of_heads(self, angles: Tensor, B: int, num_heads: int) -> Tensor:
        """[T, H], of packed rows [B, 1, T, H], as the rotation of so many heads takes it."""
        if not self.spread.copies:
            return angles
        if angles.ndim == 2:
            return self.spread(angles, (B * num_heads, 1))
        return self.spread(angles, (1, num_heads, 1, 1)).reshape(-1, self.head_size)

    def mask(self, B: int, T: int, packing: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """What is added to the scores or hides them, as `Attention` takes it."""
        if self.is_flash:
            return self.flash_mask(packing)
        places = ops.arange(T)
        is_hidden = places.reshape(1, T) > places.reshape(T, 1)
        is_hidden = is_hidden.reshape(1, 1, 1, T, T)
        if packing:
            segment_ids_BT = packing[0]
            of_key = self.spread(segment_ids_BT.reshape(B, 1, 1, 1, T), (1, 1, 1, T, 1))
            of_query = self.spread(segment_ids_BT.reshape(B, 1, 1, T, 1), (1, 1, 1, 1, T))
            is_hidden = self.spread(is_hidden, (B, 1, 1, 1, 1))
            is_hidden = ops.logical_or(is_hidden, of_key != of_query)
        mask = is_hidden.astype(self.softmax_dtype) * self.masked_score
        K, G = self.num_kv_heads, self.num_heads // self.num_kv_heads
        mask = self.spread(mask, (1 if packing else B, K, G, 1, 1))
        return mask.reshape(B, K, G * T, T) if self.spread.copies else mask


def _zeros(shape: tuple[int, int], name: str) -> Parameter:
    return Parameter(Tensor(np.zeros(shape), ms.float32), name=name)


def _set_initial_weights(model: Decoder, config: ModelConfig, seed: int) -> None:
    rng = np.random.default_rng(seed)
    branch_scale = (2 * config.num_layers) ** -0.5
    for name, parameter in model.parameters_and_names():
        if parameter.ndim < 2 or is_adapter(name):
            continue
        ends_branch = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = config.init_std * (branch_scale if ends_branch else 1.0)
        weights = rng.standard_normal(parameter.shape, dtype=np.float32) * np.float32(std)
        parameter.set_data(Tensor(weights, ms.float32))

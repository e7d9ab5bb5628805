"""Attention by MindSpore's `ops.flash_attention_score`, behind the interface of `plain_ops.Mix`.

From the documentation, not run: the op exists on Ascend only ("The kernel FlashAttentionScore
unregistered" on CPU, 2.10); there its arguments are compared with a NumPy model of what is
documented. `flash_arguments` has the sources of all rules.

- Rows of one sample are causal: sparse mode 2 with the 2048 x 2048 mask, one constant for every
  shape. Padding stands behind all real tokens, so no real token sees it.
- Packed rows get a full bool mask [B, 1, T, T] in sparse mode 1, and not layout TND. Under static
  shapes TND needs cumulative lengths of a fixed size for a number of samples that varies.
  MindSpore forbids sequences without keys, so the lengths cannot be filled up by repeating T.
  Filling up by extra tokens, a sequence each, would obey; but the kernel takes the lengths from
  the host, which would wait for the graph in every layer, it takes 1024 of them, and a graph
  cannot refuse a batch that holds more. TND is marked experimental besides. The full mask takes
  B * T * T bytes once a step, not once a layer, and every token sees at least itself, fillers and
  padding too: no row of it is all hidden.
- The scale 1 / sqrt(head size) is the kernel's (scalar_value), so queries come unscaled.
- Its softmax is in fp32 in every dtype: CANN's vector unit computes in float32 and the products
  come out as float32 (CANN, design of the FA and FAG operators, section 2.1), and the outputs
  softmax_max and softmax_sum are float32. So `softmax` in precision.fp32_ops is satisfied.
- A query head n belongs to key head n // (N / K), as everywhere in grouped-query attention.

Shapes: B batch, T padded tokens, N query heads, K key heads, G = N / K, H head size, S = G * T.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import mindspore as ms
from mindspore import Tensor, nn, ops

from tuner.config.schema import AttentionName, ModelConfig, PrecisionConfig, TrainConfig
from tuner.errors import BadInputError
from tuner.train.flash_arguments import (
    ALL_MASK,
    ALL_TOKENS,
    LEFT_UP_CAUSAL,
    compressed_causal_mask,
    size_refusal,
)

FLASH_DEVICE = "Ascend"
COMPRESSED_RANK = 2


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """How a run attends, for people.

    Attributes:
        name: `math` or `flash`.
        reason: Why it is math, as half a sentence; empty for flash.
    """

    name: Literal["math", "flash"]
    reason: str = ""

    def __str__(self) -> str:
        if self.name == "flash":
            return "attention: flash_attention_score"
        return f"attention: matrix products, since {self.reason}"


def flash_refusal(
    model: ModelConfig,
    precision: PrecisionConfig,
    device_name: str,
    max_length: int,
    batch_size: int = 1,
) -> str | None:
    """Why a model cannot attend by flash attention, as half a sentence; None if it can.

    Args:
        model: Heads and head size.
        precision: Compute dtype.
        device_name: `CPU` or `Ascend`.
        max_length: Longest padded row in tokens.
        batch_size: Most rows of a batch.
    """
    if model.factory is not None:
        return "the Cell of model.factory brings attention of its own"
    if device_name != FLASH_DEVICE:
        return f"flash attention needs Ascend (here: {device_name})"
    if precision.compute_dtype not in ("fp16", "bf16"):
        return (
            "flash attention computes in fp16 and bf16 only "
            f"(precision.compute_dtype is {precision.compute_dtype})"
        )
    refusal = size_refusal(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_size=model.size_of_head,
        max_length=max_length,
        batch_size=batch_size,
    )
    return None if refusal is None else f"of flash attention {refusal}"


def choose_attention(wanted: AttentionName, refusal: str | None) -> AttentionChoice:
    """What graph.attention means where flash attention can or cannot be.

    Args:
        wanted: The field.
        refusal: Of `flash_refusal`.

    Raises:
        BadInputError: flash is wanted and cannot be.
    """
    if wanted == "math":
        return AttentionChoice(name="math", reason="graph.attention is math")
    if refusal is None:
        return AttentionChoice(name="flash")
    if wanted == "flash":
        raise BadInputError(
            f"graph.attention flash cannot be: {refusal}",
            fix="set graph.attention to auto or math",
        )
    return AttentionChoice(name="math", reason=refusal)


def attention_of(
    config: TrainConfig, device_name: str, max_length: int, batch_size: int = 1
) -> AttentionChoice:
    """How a run attends.

    Args:
        config: The whole config.
        device_name: As `flash_refusal` takes it, like the others.
        max_length: Longest padded row in tokens.
        batch_size: Most rows of a batch.

    Raises:
        BadInputError: as `choose_attention`.
    """
    refusal = flash_refusal(config.model, config.precision, device_name, max_length, batch_size)
    return choose_attention(config.graph.attention, refusal)


def chosen_device() -> str:
    """Name of the device that this process was opened for."""
    return str(ms.get_context("device_target"))


class FlashMix(nn.Cell):
    """softmax(scale q k^T, where not hidden) v, of every head.

    Args:
        config: Heads and head size.
        attend: Takes the arguments of `ops.flash_attention_score`; None: that op.
    """

    def __init__(self, config: ModelConfig, attend: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.scale = config.size_of_head**-0.5
        self.attend = attend or ops.flash_attention_score

    def construct(self, q_BKSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, mask: Tensor) -> Tensor:
        """[B, K, S, H] unscaled queries and [B, K, T, H] keys and values to [B, K, S, H].

        Args:
            q_BKSH: As `Mix` takes them, so that the heads stand in their order.
            k_BKTH: Keys.
            v_BKTH: Values.
            mask: Of `FlashMask`: the compressed one, or bool [B, 1, T, T]; 1 hides a key.
        """
        B, K, S, H = q_BKSH.shape
        T = k_BKTH.shape[2]
        mixed_BNTH = self.attend(
            q_BKSH.reshape(B, self.num_heads, T, H),
            k_BKTH,
            v_BKTH,
            self.num_heads,
            attn_mask=mask,
            keep_prob=1.0,
            scalar_value=self.scale,
            pre_tokens=ALL_TOKENS,
            next_tokens=0,
            input_layout="BNSD",
            sparse_mode=LEFT_UP_CAUSAL if mask.ndim == COMPRESSED_RANK else ALL_MASK,
        )
        return mixed_BNTH.reshape(B, K, S, H)


class FlashMask(nn.Cell):
    """What a token must not see, as `FlashMix` takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.compressed = Tensor(compressed_causal_mask())

    def construct(self, packing: tuple[Tensor, ...]) -> Tensor:
        """uint8 [2048, 2048] of rows of one sample; bool [B, 1, T, T] of packed rows.

        Args:
            packing: Of packed rows segment ids and positions, int32 [B, T] each; else ().
        """
        if not packing:
            return self.compressed
        segment_ids_BT = packing[0]
        B, T = segment_ids_BT.shape
        places = ops.arange(T)
        is_later = places.reshape(1, 1, 1, T) > places.reshape(1, 1, T, 1)
        is_other = segment_ids_BT.reshape(B, 1, 1, T) != segment_ids_BT.reshape(B, 1, T, 1)
        return ops.logical_or(is_later, is_other)

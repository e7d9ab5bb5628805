"""Attention by MindSpore's `ops.flash_attention_score`, behind the interface of `plain_ops.Mix`.

From the documentation, not run: the op exists on Ascend only ("The kernel FlashAttentionScore
unregistered" on CPU, 2.10); there its arguments are compared with a NumPy model of what is
documented. `flash_arguments` has the sources of all rules.

- Rows of one sample are causal: sparse mode 2 with the 2048 x 2048 mask, one constant for every
  shape. Padding stands behind all real tokens, so no real token sees it.
- Packed rows go in layout TND: all tokens of the batch one behind the other, and where their
  sequences end, as a Tensor; `flash_lengths` has how that is filled up to one size, why it comes
  with the batch, and the sources. The mask is the same constant, in sparse mode 3: with as many
  keys as queries in every sequence it is mode 2, and 3 is what MindFormers passes with TND.
- Where a batch may hold more sequences or tokens than layout TND takes, and where no lengths are
  given, packed rows get a full bool mask [B, 1, T, T] in sparse mode 1. It takes B * T * T bytes
  once a step, not once a layer, and every token sees at least itself, fillers and padding too: no
  row of it is all hidden.
- The scale 1 / sqrt(head size) is the kernel's (scalar_value), so queries come unscaled.
- Its softmax is in fp32 in every dtype: CANN's vector unit computes in float32 and the products
  come out as float32 (CANN, design of the FA and FAG operators, section 2.1), and the outputs
  softmax_max and softmax_sum are float32. So `softmax` in precision.fp32_ops is satisfied.
- A query head n belongs to key head n // (N / K), as everywhere in grouped-query attention.

Shapes: B batch, T padded tokens, M = B * T, N query heads, K key heads, G = N / K, H head size,
S = G * T, E cumulative lengths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import mindspore as ms
from mindspore import Tensor, nn, ops

from tuner.batching.packed_bounds import PackedBounds
from tuner.config.schema import AttentionName, ModelConfig, PrecisionConfig, TrainConfig
from tuner.errors import BadInputError
from tuner.train.flash_arguments import (
    ALL_MASK,
    ALL_TOKENS,
    LEFT_UP_CAUSAL,
    RIGHT_DOWN_CAUSAL,
    compressed_causal_mask,
    size_refusal,
)
from tuner.train.flash_lengths import layout_refusal

FLASH_DEVICE = "Ascend"
COMPRESSED_RANK = 2


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """How a run attends, for people.

    Attributes:
        name: `math` or `flash`.
        reason: Why it is math, as half a sentence; empty for flash.
        packed: How flash attention takes packed rows; empty: there are none, or what their batches
            hold is not known.
    """

    name: Literal["math", "flash"]
    reason: str = ""
    packed: str = ""

    def __str__(self) -> str:
        if self.name == "flash":
            return ", ".join(filter(None, ["attention: flash_attention_score", self.packed]))
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
    config: TrainConfig,
    device_name: str,
    max_length: int,
    batch_size: int = 1,
    bounds: PackedBounds | None = None,
) -> AttentionChoice:
    """How a run attends.

    Args:
        config: The whole config.
        device_name: As `flash_refusal` takes it, like the next two.
        max_length: Longest padded row in tokens.
        batch_size: Most rows of a batch.
        bounds: Of the batches of packed rows; None: there are none, or they are not known.

    Raises:
        BadInputError: as `choose_attention`.
    """
    refusal = flash_refusal(config.model, config.precision, device_name, max_length, batch_size)
    choice = choose_attention(config.graph.attention, refusal)
    if choice.name == "math" or bounds is None:
        return choice
    too_much = layout_refusal(bounds)
    full = f"packed rows with full masks, since {too_much}"
    packed = "packed rows in layout TND" if too_much is None else full
    return dataclasses.replace(choice, packed=packed)


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
        self.num_kv_heads = config.num_kv_heads
        self.head_size = config.size_of_head
        self.scale = config.size_of_head**-0.5
        self.attend = attend or ops.flash_attention_score

    def construct(
        self, q_BKSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, mask: tuple[Tensor, ...]
    ) -> Tensor:
        """[B, K, S, H] unscaled queries and [B, K, T, H] keys and values to [B, K, S, H].

        Args:
            q_BKSH: As `Mix` takes them, so that the heads stand in their order.
            k_BKTH: Keys.
            v_BKTH: Values.
            mask: Of `FlashMask`.
        """
        B, K, S, H = q_BKSH.shape
        q_BNTH = q_BKSH.reshape(B, self.num_heads, k_BKTH.shape[2], H)
        if len(mask) == 1:
            mixed_BNTH = self.by_rows(q_BNTH, k_BKTH, v_BKTH, mask[0])
        else:
            mixed_BNTH = self.by_sequences(q_BNTH, k_BKTH, v_BKTH, mask[0], mask[1])
        return mixed_BNTH.reshape(B, K, S, H)

    def by_rows(self, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, mask: Tensor) -> Tensor:
        """[B, N, T, H]: within rows, as far as the compressed or the full mask lets them."""
        return self.attend(
            q_BNTH,
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

    def by_sequences(
        self, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, mask: Tensor, ends_E: Tensor
    ) -> Tensor:
        """[B, N, T, H]: causal within sequences, whose ends are given."""
        B, N, T, H = q_BNTH.shape
        mixed_MNH = self.attend(
            q_BNTH.transpose(0, 2, 1, 3).reshape(-1, self.num_heads, self.head_size),
            k_BKTH.transpose(0, 2, 1, 3).reshape(-1, self.num_kv_heads, self.head_size),
            v_BKTH.transpose(0, 2, 1, 3).reshape(-1, self.num_kv_heads, self.head_size),
            self.num_heads,
            attn_mask=mask,
            actual_seq_qlen=ends_E,
            actual_seq_kvlen=ends_E,
            keep_prob=1.0,
            scalar_value=self.scale,
            pre_tokens=ALL_TOKENS,
            next_tokens=0,
            input_layout="TND",
            sparse_mode=RIGHT_DOWN_CAUSAL,
        )
        return mixed_MNH.reshape(B, T, N, H).transpose(0, 2, 1, 3)


class FlashMask(nn.Cell):
    """What a token must not see, as `FlashMix` takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.compressed = Tensor(compressed_causal_mask())

    def construct(self, packing: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A mask, 1 where a key is hidden, and of packed rows the ends of their sequences.

        Args:
            packing: Of packed rows segment ids and positions, int32 [B, T] each, and if they
                attend in layout TND their cumulative lengths, int64 [E]; else ().

        Returns:
            uint8 [2048, 2048], with lengths these too; bool [B, 1, T, T] of packed rows without.
        """
        if len(packing) == 0:
            return (self.compressed,)
        if len(packing) > 2:
            return self.compressed, packing[2]
        segment_ids_BT = packing[0]
        B, T = segment_ids_BT.shape
        places = ops.arange(T)
        is_later = places.reshape(1, 1, 1, T) > places.reshape(1, 1, T, 1)
        is_other = segment_ids_BT.reshape(B, 1, 1, T) != segment_ids_BT.reshape(B, 1, T, 1)
        return (ops.logical_or(is_later, is_other),)

"""The model section: built-in decoder, Hugging Face checkpoint, or your own Cell."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tuner.config.sections import PositiveFloat, PositiveInt, Section

ProjectionName = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
]

FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class RopeScalingConfig(Section):
    """How rotary frequencies are stretched for contexts longer than the pre-trained one."""

    kind: Literal["linear", "llama3"]
    """linear divides all frequencies by factor; llama3 the low ones, and blends between."""
    factor: PositiveFloat
    """How many times as long."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: wavelengths over original_max_positions / this are divided by factor."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: wavelengths under original_max_positions / this stay."""
    original_max_positions: PositiveInt = 8192
    """llama3: tokens of the pre-trained context."""

    @model_validator(mode="after")
    def _blends_between(self) -> RopeScalingConfig:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                "high_freq_factor must be above low_freq_factor "
                f"(got {self.high_freq_factor} and {self.low_freq_factor})"
            )
        return self


class LoraConfig(Section):
    """Low-rank adapters: only these are trained, the model's own weights stay as they are."""

    rank: PositiveInt = 8
    """Rank of the adapters."""
    alpha: PositiveFloat = 16.0
    """The adapters' product is multiplied by alpha / rank."""
    projections: tuple[ProjectionName, ...] = ("q_proj", "v_proj")
    """Projections that get an adapter, in every layer."""

    @model_validator(mode="after")
    def _names_projections_once(self) -> LoraConfig:
        if not self.projections or len(set(self.projections)) < len(self.projections):
            raise ValueError(
                "projections must name at least one projection and each once "
                f"(got {', '.join(self.projections) or 'none'})"
            )
        return self


class ModelConfig(Section):
    """The built-in decoder: RMSNorm, SwiGLU, grouped-query attention.

    With `source` alone the sizes are read from the config.json there. With `factory` the Cell is
    the user's, and of the sizes only vocab_size and max_positions have a meaning.
    """

    vocab_size: PositiveInt
    """Token ids are in [0, vocab_size)."""
    width: PositiveInt = 128
    """Model width; without head_size a multiple of num_heads, with an even head size."""
    num_layers: PositiveInt = 2
    """Decoder layers."""
    num_heads: PositiveInt = 4
    """Query heads."""
    num_kv_heads: PositiveInt = 2
    """Key and value heads; divides num_heads."""
    head_size: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    """Width of a head, even; null: width / num_heads."""
    ffn_width: PositiveInt = 384
    """Width of the SwiGLU layer."""
    positions: Literal["rotary", "learned"] = "rotary"
    """rotary: turned queries and keys; learned: a table of max_positions rows."""
    max_positions: PositiveInt | None = None
    """Longest padded row in tokens, inclusive, that the model takes; null: any (rotary only)."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScalingConfig | None = None
    """Stretching of the rotary frequencies; null: none."""
    norm_eps: PositiveFloat = 1e-6
    """Added to the mean square inside RMSNorm."""
    qk_norm: bool = False
    """Whether queries and keys of every head are normalised, as in Qwen3."""
    attention_bias: Literal["none", "qkv", "qkvo"] = "none"
    """Which projections of attention have a bias; Qwen2: qkv."""
    tie_embedding: bool = True
    """Whether logits are taken against the embedding, or against weights of their own."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights; without source."""
    source: str | None = None
    """Folder with config.json and model.safetensors that the initial weights come from."""
    factory: str | None = None
    """package.module:function that makes the Cell to be trained; null: the built-in decoder."""
    lora: LoraConfig | None = None
    """Train low-rank adapters only; null: all weights."""

    @property
    def size_of_head(self) -> int:
        """Width of a head."""
        return self.head_size or self.width // self.num_heads

    @model_validator(mode="after")
    def _has_whole_heads(self) -> ModelConfig:
        has_odd_head = self.width % self.num_heads or (self.width // self.num_heads) % 2
        if self.head_size is None and has_odd_head:
            raise ValueError(
                "width / num_heads must be a whole even number "
                f"(got width {self.width}, num_heads {self.num_heads}); or set head_size"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                "num_heads must be a multiple of num_kv_heads "
                f"(got {self.num_heads} and {self.num_kv_heads})"
            )
        return self

    @model_validator(mode="after")
    def _has_a_table_of_positions(self) -> ModelConfig:
        if self.positions == "learned" and self.max_positions is None:
            raise ValueError("positions learned needs max_positions (got null)")
        return self

    @model_validator(mode="after")
    def _has_one_origin(self) -> ModelConfig:
        if self.factory is None:
            return self
        if not FACTORY.fullmatch(self.factory):
            raise ValueError(f"factory must be package.module:function (got {self.factory!r})")
        if self.source is not None or self.lora is not None:
            raise ValueError(
                "factory makes the whole Cell, so source and lora must be null "
                f"(got source {self.source}, lora {'set' if self.lora else 'null'})"
            )
        return self

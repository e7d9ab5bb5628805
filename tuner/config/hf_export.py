"""The model section -> config.json of a Hugging Face checkpoint, in the family that computes it.

Rotary fields are written as `rope_theta` and `rope_scaling`: every version of transformers reads
these, the newer spelling `rope_parameters` only 5 and later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.config.hf_config import ARCHITECTURES
from tuner.config.model_section import ModelConfig, RopeScalingConfig
from tuner.errors import BadInputError


def to_hf_config(
    model: ModelConfig, *, max_positions: int, like: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config.json that the family which fits a model needs.

    Args:
        model: The model section.
        max_positions: Written where the model has no limit of its own.
        like: The config.json that the model came from; what it says besides (ids of special
            tokens, for example) is kept. None: there is none, and the ids are null.

    Raises:
        BadInputError: no family computes this model.
    """
    family = family_of(model)
    if like is not None:
        return {**like, "architectures": [ARCHITECTURES[family]]}
    content: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "intermediate_size": model.ffn_width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.size_of_head,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_positions or max_positions,
        "initializer_range": model.init_std,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embedding,
        "rope_theta": model.rope_theta,
        "rope_scaling": _hf_scaling(model.rope_scaling),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family != "qwen2":
        content["attention_bias"] = model.attention_bias == "qkvo"
    if family == "llama":
        content["mlp_bias"] = False
    else:
        content["use_sliding_window"] = False
    return content


def family_of(model: ModelConfig) -> str:
    """The family whose code in transformers computes exactly this model.

    Raises:
        BadInputError: there is none; names the field.
    """
    if model.factory is not None:
        raise _inexpressible("factory", model.factory, "the Cell is the user's own")
    if model.positions != "rotary":
        raise _inexpressible("positions", model.positions, "all three have rotary positions")
    if model.qk_norm and model.attention_bias == "qkv":
        raise _inexpressible("attention_bias", "qkv", "with qk_norm Qwen3 has qkvo or none")
    if model.qk_norm:
        return "qwen3"
    if model.attention_bias == "qkv":
        return "qwen2"
    if model.width % model.num_heads:
        raise _inexpressible("width", model.width, "Llama wants a multiple of num_heads")
    return "llama"


def _hf_scaling(scaling: RopeScalingConfig | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }


def _inexpressible(field: str, value: object, reason: str) -> BadInputError:
    return BadInputError(
        f"model.{field} {value} cannot be written as a Llama, Qwen2 or Qwen3 checkpoint: {reason}",
        fix="keep using the checkpoints in train.out",
    )

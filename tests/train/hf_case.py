"""Tiny Hugging Face checkpoints written with NumPy and the safetensors package alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 24,
        },
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": False,
        "rope_theta": 1000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "tie_word_embeddings": False,
        "rope_theta": 1000.0,
        "head_dim": 6,
        "attention_bias": True,
    },
}


def hf_config(family: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny checkpoint of a family."""
    return {"model_type": family, **SIZES, **FAMILIES[family], **changes}


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Hugging Face's names and shapes, written out; norms near 1, biases not 0."""
    rng = np.random.default_rng(seed)
    width, ffn = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", width // config["num_attention_heads"])
    q_width = config["num_attention_heads"] * head
    kv_width = config["num_key_value_heads"] * head
    family = config["model_type"]
    has_output_bias = bool(config.get("attention_bias"))
    has_qkv_bias = family == "qwen2" or has_output_bias
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], width)
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (width,),
            f"{prefix}.self_attn.q_proj.weight": (q_width, width),
            f"{prefix}.self_attn.k_proj.weight": (kv_width, width),
            f"{prefix}.self_attn.v_proj.weight": (kv_width, width),
            f"{prefix}.self_attn.o_proj.weight": (width, q_width),
            f"{prefix}.post_attention_layernorm.weight": (width,),
            f"{prefix}.mlp.gate_proj.weight": (ffn, width),
            f"{prefix}.mlp.up_proj.weight": (ffn, width),
            f"{prefix}.mlp.down_proj.weight": (width, ffn),
        }
        if has_qkv_bias:
            shapes |= {
                f"{prefix}.self_attn.q_proj.bias": (q_width,),
                f"{prefix}.self_attn.k_proj.bias": (kv_width,),
                f"{prefix}.self_attn.v_proj.bias": (kv_width,),
            }
        if has_output_bias:
            shapes[f"{prefix}.self_attn.o_proj.bias"] = (width,)
        if family == "qwen3":
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (head,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (head,)
    shapes["model.norm.weight"] = (width,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    return {
        name: (rng.standard_normal(shape) * 0.3 + ("norm" in name)).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    weights: dict[str, NDArray[np.float32]],
    num_shards: int = 1,
) -> Path:
    """config.json with model.safetensors, or with so many shards and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder
    names = list(weights)
    file_of_name = {}
    for number in range(num_shards):
        file = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        shard = {name: weights[name] for name in names[number::num_shards]}
        save_file(shard, folder / file, {"format": "pt"})
        file_of_name.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": 1}, "weight_map": file_of_name}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_family(folder: Path, family: str, *, num_shards: int = 1, seed: int = 0) -> Path:
    """A whole tiny checkpoint of a family."""
    config = hf_config(family)
    return write_checkpoint(folder, config, random_weights(config, seed), num_shards)

"""config.json of a Hugging Face checkpoint -> the model section; Llama, Qwen2 and Qwen3 families.

- Both spellings of rotary fields are read: `rope_theta` with `rope_scaling`, and `rope_parameters`
  of transformers 5.
- What a file leaves out has the default of its family's class in transformers 5.24, which is not
  always that of the other families. Sizes have none here: a file without them is refused.
- What the decoder here would compute otherwise than the checkpoint's own is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.config.hf_fields import Fields, refuse
from tuner.config.model_section import ModelConfig, RopeScalingConfig
from tuner.errors import BadInputError

CONFIG_FILE = "config.json"

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Family -> the only architecture of it that is read."""

DEFAULT_THETA = 10_000.0
DEFAULT_KV_HEADS = {"qwen2": 32, "qwen3": 32}
DEFAULT_HEAD_SIZES = {"qwen3": 128}
DEFAULT_MAX_POSITIONS = {"llama": 2048, "qwen2": 32_768, "qwen3": 32_768}
DEFAULT_UNWINDOWED_LAYERS = 28


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """The JSON of a checkpoint's config.json.

    Raises:
        BadInputError: the file cannot be read, is not JSON, or is not an object.
    """
    path = Path(folder) / CONFIG_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInputError(
            f"model.source {folder} holds no {CONFIG_FILE}",
            fix="name the folder of a Hugging Face checkpoint",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise BadInputError(
            f"cannot read {path}: {reason}", fix="get the checkpoint again"
        ) from None
    if not isinstance(content, dict):
        raise BadInputError(f"{path} is not a JSON object", fix="get the checkpoint again")
    return content


def parse_hf_config(content: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """The fields of a model section that a config.json fixes, as plain data.

    Args:
        content: The JSON object.
        source: The file; starts every error line.

    Returns:
        Field of `ModelConfig` -> value; `head_size` is None where it is width / num_heads.

    Raises:
        BadInputError: another architecture, a field that is missing or of the wrong type, or one
            that the decoder here does not compute; names field and value.
    """
    fields = Fields(content, source)
    family = _family(fields)
    _check_computed(fields)
    num_heads = fields.whole("num_attention_heads")
    default_kv_heads = DEFAULT_KV_HEADS.get(family, num_heads)
    max_positions = fields.whole("max_position_embeddings", DEFAULT_MAX_POSITIONS[family])
    theta, scaling = _rope(fields, max_positions)
    return {
        "vocab_size": fields.whole("vocab_size"),
        "width": fields.whole("hidden_size"),
        "num_layers": fields.whole("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_heads
        if fields.is_null("num_key_value_heads")
        else fields.whole("num_key_value_heads", default_kv_heads),
        "head_size": _head_size(fields, family, num_heads),
        "ffn_width": fields.whole("intermediate_size"),
        "positions": "rotary",
        "max_positions": max_positions,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "qk_norm": family == "qwen3",
        "attention_bias": _attention_bias(fields, family),
        "tie_embedding": fields.flag("tie_word_embeddings", False),
        "init_std": fields.number("initializer_range", 0.02),
    }


def fill_model_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config's plain data with the sizes of `model: {source: FOLDER}` read from that folder.

    A model section with a vocab_size is taken to hold all sizes and stays as it is. Fields that
    stand in it win here; `check_against_source` refuses them later if they contradict.

    Raises:
        BadInputError: as `read_hf_config` and `parse_hf_config`.
    """
    model = config.get("model")
    if not isinstance(model, Mapping) or model.get("vocab_size") is not None:
        return config
    folder = model.get("source")
    if not isinstance(folder, str):
        return config
    given = {name: value for name, value in model.items() if name != "vocab_size"}
    return {**config, "model": {**_read_fields(folder), **given}}


def check_against_source(model: ModelConfig) -> None:
    """Compare a model section with the config.json of its source.

    Only initial weights and a lower limit of positions may differ from the checkpoint.

    Raises:
        BadInputError: a field says otherwise than the file; names both.
    """
    if model.source is None:
        return
    there = ModelConfig(**_with_scaling(_read_fields(model.source)))
    path = Path(model.source) / CONFIG_FILE
    mine, theirs = _comparable(model), _comparable(there)
    for name, value in theirs.items():
        if mine[name] != value:
            raise BadInputError(
                f"model.{name} is {mine[name]}, but {path} says {value}",
                fix="leave the sizes out of the model section: they are read from there",
            )
    limit = there.max_positions or 0
    if model.max_positions is None or model.max_positions > limit:
        raise BadInputError(
            f"model.max_positions is {model.max_positions}, but {path} says {limit}",
            fix=f"set it to at most {limit}",
        )


def _family(fields: Fields) -> str:
    family = fields.content.get("model_type")
    if family not in ARCHITECTURES:
        raise refuse(fields, "model_type", f"one of {', '.join(ARCHITECTURES)}")
    named = fields.content.get("architectures") or [ARCHITECTURES[family]]
    if named != [ARCHITECTURES[family]]:
        raise refuse(fields, "architectures", f"[{ARCHITECTURES[family]}]")
    return str(family)


def _check_computed(fields: Fields) -> None:
    """Refuse what would change the result and is not computed here."""
    if fields.content.get("hidden_act", "silu") not in ("silu", "swish"):
        raise refuse(fields, "hidden_act", "silu")
    if fields.flag("mlp_bias", False):
        raise refuse(fields, "mlp_bias", "false")
    if fields.content.get("attention_dropout") not in (None, 0):
        raise refuse(fields, "attention_dropout", "0")
    if fields.content.get("quantization_config") is not None:
        raise refuse(fields, "quantization_config", "absent: weights that are not quantised")
    if "AutoModelForCausalLM" in str(fields.content.get("auto_map")):
        raise refuse(fields, "auto_map", "absent: a model without code of its own")
    _check_windows(fields)


def _check_windows(fields: Fields) -> None:
    """Llama's class reads none of these fields, but a file that has them means them."""
    content = fields.content
    kinds = content.get("layer_types")
    if kinds is not None and any(kind != "full_attention" for kind in _listed(kinds)):
        raise refuse(fields, "layer_types", "full_attention for every layer")
    has_windows = fields.flag("use_sliding_window", False) and not fields.is_null("sliding_window")
    is_first_windowed = content.get("max_window_layers") == 0
    num_unwindowed = (
        0 if is_first_windowed else fields.whole("max_window_layers", DEFAULT_UNWINDOWED_LAYERS)
    )
    if kinds is None and has_windows and num_unwindowed < fields.whole("num_hidden_layers"):
        raise refuse(fields, "use_sliding_window", "false")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _head_size(fields: Fields, family: str, num_heads: int) -> int | None:
    """None where it is width / num_heads, so that a model has one spelling."""
    width = fields.whole("hidden_size")
    default = DEFAULT_HEAD_SIZES.get(family, width // num_heads)
    size = default if fields.is_null("head_dim") else fields.whole("head_dim", default)
    return None if size * num_heads == width and size % 2 == 0 else size


def _attention_bias(fields: Fields, family: str) -> str:
    # Qwen2's class has the bias built in and no field for it.
    if family == "qwen2":
        return "qkv"
    return "qkvo" if fields.flag("attention_bias", False) else "none"


def _rope(fields: Fields, max_positions: int) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling; of two spellings in one file the old one counts, as in transformers 5."""
    name = "rope_scaling" if fields.content.get("rope_scaling") else "rope_parameters"
    content = fields.content.get(name) or {}
    if not isinstance(content, Mapping) or any(isinstance(v, Mapping) for v in content.values()):
        raise refuse(fields, name, "one set of parameters for all layers")
    rope = Fields(content, f"{fields.source}: {name}")
    for part in (fields, rope):
        if part.content.get("partial_rotary_factor") not in (None, 1):
            raise refuse(part, "partial_rotary_factor", "1")
    theta = rope.number("rope_theta", fields.number("rope_theta", DEFAULT_THETA))
    kind = content.get("rope_type", content.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, {"kind": kind, "factor": rope.number("factor")}
    if kind != "llama3":
        field = "rope_type" if "rope_type" in content else "type"
        raise refuse(rope, field, "default, linear or llama3")
    pretrained = fields.whole("original_max_position_embeddings", max_positions)
    return theta, {
        "kind": kind,
        "factor": rope.number("factor"),
        "low_freq_factor": rope.number("low_freq_factor"),
        "high_freq_factor": rope.number("high_freq_factor"),
        "original_max_positions": rope.whole("original_max_position_embeddings", pretrained),
    }


def _read_fields(folder: str) -> dict[str, Any]:
    return parse_hf_config(read_hf_config(folder), source=str(Path(folder) / CONFIG_FILE))


def _with_scaling(fields: dict[str, Any]) -> dict[str, Any]:
    scaling = fields["rope_scaling"]
    return {**fields, "rope_scaling": RopeScalingConfig(**scaling) if scaling else None}


def _comparable(model: ModelConfig) -> dict[str, Any]:
    """What decides the shapes of weights and what is computed with them."""
    apart = {"source", "factory", "lora", "init_std", "max_positions", "head_size"}
    plain = {name: value for name, value in dict(model).items() if name not in apart}
    return {**plain, "head_size": model.size_of_head}

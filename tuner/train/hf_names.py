"""Names of the decoder's weights here <-> in Hugging Face checkpoints; the same three families."""

from __future__ import annotations

import re
from collections.abc import Iterable

WHOLE_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "logits_weight": "lm_head.weight",
    "final_norm.weight": "model.norm.weight",
}
PARTS = {
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "mlp": "mlp",
}
LAYER_NAME = re.compile(r"layers\.(\d+)\.(\w+)\.(.+)")
BUFFER_NAME = re.compile(r".*rotary_emb\.inv_freq")
TIED_LOGITS = WHOLE_NAMES["logits_weight"]


def hf_name(name: str) -> str:
    """What Hugging Face calls a weight.

    Args:
        name: Of a parameter of the decoder, adapters and learned positions excepted.

    Example:
        >>> hf_name("layers.3.mlp_norm.weight")
        'model.layers.3.post_attention_layernorm.weight'
    """
    if name in WHOLE_NAMES:
        return WHOLE_NAMES[name]
    match = LAYER_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name} has no counterpart")
    layer, part, rest = match.groups()
    return f"model.layers.{layer}.{PARTS[part]}.{rest}"


def names_by_hf_name(names: Iterable[str]) -> dict[str, str]:
    """The way back: Hugging Face's name -> ours, for the given ones of ours."""
    return {hf_name(name): name for name in names}


def is_known_extra(name: str, *, is_tied: bool) -> bool:
    """Whether a checkpoint may hold a tensor that the decoder has no weight for.

    Old ones hold the rotary frequencies, which follow from the config; some hold the tied logits
    weight a second time.
    """
    return BUFFER_NAME.fullmatch(name) is not None or (is_tied and name == TIED_LOGITS)

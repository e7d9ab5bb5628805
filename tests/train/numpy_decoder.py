"""The decoder once more, in float64 NumPy, written from the papers and not from the product."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tuner.config.schema import ModelConfig

Array = NDArray[np.float64]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def rotate(x: Array, theta: float) -> Array:
    """Complex rotation of the pairs (i, i + H/2) of [T, H] by position * theta^(-2i/H)."""
    length, size = x.shape
    half = size // 2
    pairs = x[:, :half] + 1j * x[:, half:]
    angle = np.arange(length)[:, None] * theta ** (-2.0 * np.arange(half) / size)[None, :]
    turned = pairs * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=1)


def attend(x: Array, weights: Mapping[str, Array], prefix: str, config: ModelConfig) -> Array:
    """[T, D] of one row, head by head."""
    length = len(x)
    size = config.width // config.num_heads
    group = config.num_heads // config.num_kv_heads
    q, k, v = (x @ weights[f"{prefix}.{name}_proj.weight"].T for name in "qkv")
    heads = []
    for head in range(config.num_heads):
        kv = head // group
        qh = rotate(q[:, head * size : (head + 1) * size], config.rope_theta)
        kh = rotate(k[:, kv * size : (kv + 1) * size], config.rope_theta)
        scores = qh @ kh.T / np.sqrt(size)
        scores[np.triu_indices(length, k=1)] = -np.inf
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        odds /= odds.sum(axis=1, keepdims=True)
        heads.append(odds @ v[:, kv * size : (kv + 1) * size])
    return np.concatenate(heads, axis=1) @ weights[f"{prefix}.o_proj.weight"].T


def swiglu(x: Array, weights: Mapping[str, Array], prefix: str) -> Array:
    gate = x @ weights[f"{prefix}.gate_proj.weight"].T
    up = x @ weights[f"{prefix}.up_proj.weight"].T
    return (gate / (1.0 + np.exp(-gate)) * up) @ weights[f"{prefix}.down_proj.weight"].T


def decoder_logits(
    input_ids: NDArray[np.int32], weights: Mapping[str, Array], config: ModelConfig
) -> Array:
    """[B, T] ids to [B, T, V] logits, row by row."""
    rows = []
    for ids in input_ids:
        x = weights["embedding"][ids]
        for layer in range(config.num_layers):
            name = f"layers.{layer}"
            normed = rms_norm(x, weights[f"{name}.input_norm.weight"], config.norm_eps)
            x = x + attend(normed, weights, f"{name}.attention", config)
            normed = rms_norm(x, weights[f"{name}.mlp_norm.weight"], config.norm_eps)
            x = x + swiglu(normed, weights, f"{name}.mlp")
        x = rms_norm(x, weights["final_norm.weight"], config.norm_eps)
        rows.append(x @ weights["embedding"].T)
    return np.stack(rows)


def summed_cross_entropy(logits: Array, targets: NDArray[np.int32]) -> float:
    """Sum of -log softmax over targets that are not -100."""
    logits = logits.astype(np.float64)
    top = logits.max(axis=-1, keepdims=True)
    log_odds = logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
    total = 0.0
    for row, targets_of_row in zip(log_odds, targets, strict=True):
        for position, target in enumerate(targets_of_row):
            if target != -100:
                total -= row[position, target]
    return total

"""The decoder once more, in float64 NumPy, written from the papers and not from the product.

Op groups may be rounded to fp16 after each of their ops, as a device that has fp16 rounds them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from tuner.config.schema import ModelConfig

Array = NDArray[np.float64]


def rounding(low: Collection[str]) -> Callable[[str, Array], Array]:
    """Rounds a value to fp16 if its op group is among the lowered ones."""

    def rounded(group: str, x: Array) -> Array:
        if group not in low:
            return x
        with np.errstate(over="ignore"):
            return np.asarray(x).astype(np.float16).astype(np.float64)

    return rounded


class NumpyDecoder:
    """One layer after the other, each op of a lowered group rounded to fp16 by itself."""

    def __init__(
        self, weights: Mapping[str, Array], config: ModelConfig, low: Collection[str] = ()
    ) -> None:
        self.weights = weights
        self.config = config
        self.rounded = rounding(low)

    def product(self, a: Array, b: Array, group: str = "products") -> Array:
        return self.rounded(group, self.rounded(group, a) @ self.rounded(group, b))

    def project(self, x: Array, name: str) -> Array:
        y = self.product(x, self.weights[f"{name}.weight"].T)
        if f"{name}.bias" in self.weights:
            y = self.rounded("products", y + self.weights[f"{name}.bias"])
        if f"{name}.adapter.lora_a" in self.weights:
            assert self.config.lora is not None
            a, b = (self.weights[f"{name}.adapter.lora_{part}"] for part in "ab")
            y = y + self.config.lora.alpha / self.config.lora.rank * (x @ a.T @ b.T)
        return y

    def frequency(self, pair: int, size: int) -> float:
        """Turn of one pair between two neighbouring tokens, in radians."""
        frequency = self.config.rope_theta ** (-2.0 * pair / size)
        scaling = self.config.rope_scaling
        if scaling is None:
            return frequency
        if scaling.kind == "linear":
            return frequency / scaling.factor
        # Llama 3.1: short waves stay, long ones are stretched, those between are blended.
        wavelength = 2.0 * np.pi / frequency
        if wavelength < scaling.original_max_positions / scaling.high_freq_factor:
            return frequency
        if wavelength > scaling.original_max_positions / scaling.low_freq_factor:
            return frequency / scaling.factor
        smooth = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        return (1.0 - smooth) * frequency / scaling.factor + smooth * frequency

    def rms_norm(self, x: Array, name: str) -> Array:
        def low(value: Array) -> Array:
            return self.rounded("norms", value)

        x = low(x)
        mean_square = low(low(low(x * x).mean(axis=-1, keepdims=True)) + self.config.norm_eps)
        return low(low(x * low(1.0 / np.sqrt(mean_square))) * low(self.weights[f"{name}.weight"]))

    def rotate(self, x: Array) -> Array:
        """Complex rotation of the pairs (i, i + H/2) of [T, H] by position * frequency."""

        def low(value: Array) -> Array:
            return self.rounded("rope", value)

        length, size = x.shape
        half = size // 2
        if self.config.positions == "learned":
            return low(x)
        frequencies = np.array([self.frequency(pair, size) for pair in range(half)])
        angle = np.arange(length)[:, None] * frequencies
        a, b = low(x[:, :half]), low(x[:, half:])
        cos, sin = low(np.cos(angle)), low(np.sin(angle))
        return np.concatenate(
            [low(low(a * cos) - low(b * sin)), low(low(b * cos) + low(a * sin))], axis=1
        )

    def softmax(self, scores: Array) -> Array:
        def low(value: Array) -> Array:
            return self.rounded("softmax", value)

        scores = low(scores)
        scores[np.triu_indices(len(scores), k=1)] = -np.inf
        odds = low(np.exp(low(scores - scores.max(axis=1, keepdims=True))))
        return low(odds / low(odds.sum(axis=1, keepdims=True)))

    def attend(self, x: Array, name: str) -> Array:
        """[T, D] of one row, head by head."""
        size = self.config.head_size or self.config.width // self.config.num_heads
        group = self.config.num_heads // self.config.num_kv_heads
        q, k, v = (self.project(x, f"{name}.{letter}_proj") for letter in "qkv")
        heads = []
        for head in range(self.config.num_heads):
            kv = head // group
            qh = q[:, head * size : (head + 1) * size]
            kh = k[:, kv * size : (kv + 1) * size]
            if self.config.qk_norm:
                qh, kh = self.rms_norm(qh, f"{name}.q_norm"), self.rms_norm(kh, f"{name}.k_norm")
            qh = self.rounded("rope", self.rotate(qh) / np.sqrt(size))
            kh = self.rotate(kh)
            odds = self.softmax(self.product(qh, kh.T))
            heads.append(self.product(odds, v[:, kv * size : (kv + 1) * size]))
        return self.project(np.concatenate(heads, axis=1), f"{name}.o_proj")

    def swiglu(self, x: Array, name: str) -> Array:
        def low(value: Array) -> Array:
            return self.rounded("activations", value)

        gate = low(self.project(x, f"{name}.gate_proj"))
        up = low(self.project(x, f"{name}.up_proj"))
        return self.project(
            low(low(gate / low(1.0 + low(np.exp(-gate)))) * up), f"{name}.down_proj"
        )

    def add(self, x: Array, branch: Array) -> Array:
        return self.rounded("residual", self.rounded("residual", x) + branch)

    def logits(self, input_ids: NDArray[np.int32]) -> Array:
        """[B, T] ids to [B, T, V], row by row."""
        rows = []
        for ids in input_ids:
            x = self.rounded("embedding", self.weights["embedding"][ids])
            if self.config.positions == "learned":
                places = self.weights["position_embedding"][: len(ids)]
                x = self.rounded("embedding", x + self.rounded("embedding", places))
            for layer in range(self.config.num_layers):
                name = f"layers.{layer}"
                normed = self.rms_norm(x, f"{name}.input_norm")
                x = self.add(x, self.attend(normed, f"{name}.attention"))
                normed = self.rms_norm(x, f"{name}.mlp_norm")
                x = self.add(x, self.swiglu(normed, f"{name}.mlp"))
            x = self.rms_norm(x, "final_norm")
            table = "embedding" if self.config.tie_embedding else "logits_weight"
            rows.append(self.product(x, self.weights[table].T, "logits"))
        return np.stack(rows)


def decoder_logits(
    input_ids: NDArray[np.int32], weights: Mapping[str, Array], config: ModelConfig
) -> Array:
    """[B, T] ids to [B, T, V] logits with nothing rounded."""
    return NumpyDecoder(weights, config).logits(input_ids)


def log_softmax(logits: Array) -> Array:
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def summed_cross_entropy(logits: Array, targets: NDArray[np.int32]) -> float:
    """Sum of -log softmax over targets that are not -100."""
    log_odds = log_softmax(logits.astype(np.float64))
    total = 0.0
    for row, targets_of_row in zip(log_odds, targets, strict=True):
        for position, target in enumerate(targets_of_row):
            if target != -100:
                total -= row[position, target]
    return total

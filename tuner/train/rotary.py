"""Rotary positions: angles, and how they are stretched for longer contexts.

Su et al., RoFormer, arXiv 2104.09864, in the half-split order that Llama uses.
"""

from __future__ import annotations

import math

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from tuner.config.schema import ModelConfig, RopeScalingConfig
from tuner.train.precision import Dtype


def rotary_tables(config: ModelConfig, max_length: int, dtype: Dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, [max_length, H] of a dtype each.

    The angle of position p and pair i is p times the pair's frequency; both halves of a head share
    them.
    """
    angles = np.outer(np.arange(max_length), rotary_frequencies(config))
    both_halves = np.concatenate([angles, angles], axis=1)
    return Tensor(np.cos(both_halves), dtype), Tensor(np.sin(both_halves), dtype)


def rotary_frequencies(config: ModelConfig) -> NDArray[np.float64]:
    """Angle in radians between neighbouring tokens, of every pair of a head, [H / 2].

    theta^(-2i / H) for pair i, then scaled as the config says.
    """
    size = config.size_of_head
    frequencies = config.rope_theta ** (-np.arange(0, size, 2) / size)
    if config.rope_scaling is None:
        return frequencies
    if config.rope_scaling.kind == "linear":
        return frequencies / config.rope_scaling.factor
    return _llama3_frequencies(frequencies, config.rope_scaling)


def _llama3_frequencies(
    frequencies: NDArray[np.float64], scaling: RopeScalingConfig
) -> NDArray[np.float64]:
    """Long wavelengths divided by the factor, short ones kept, a blend in frequency between.

    Source: `_compute_llama3_parameters` of transformers 5.24, after Meta's Llama 3.1 code.
    """
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    kept_share = (turns - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    kept_share = np.clip(kept_share, 0.0, 1.0)
    return frequencies * (kept_share + (1.0 - kept_share) / scaling.factor)

"""Low-rank adapters: y = W x + alpha / rank * B (A x), of which only A and B are trained.

Hu et al., LoRA, arXiv 2106.09685. B is 0 at first, so that a model with adapters computes exactly
what it computes without; A is drawn as PEFT draws it.

Shapes: M tokens of all rows, R rank.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from numpy.typing import NDArray

from tuner.config.schema import LoraConfig
from tuner.train.precision import Dtype

ADAPTER_A = ".adapter.lora_a"
ADAPTER_B = ".adapter.lora_b"
# Keeps the adapters' random numbers apart from those of the model's own weights.
STREAM = 1


class Adapter(nn.Cell):
    """The low-rank part of one projection; lora_a float32 [R, num_in], lora_b [num_out, R]."""

    def __init__(self, num_in: int, num_out: int, config: LoraConfig, dtype: Dtype) -> None:
        super().__init__()
        self.dtype = dtype
        shape_a, shape_b = (config.rank, num_in), (num_out, config.rank)
        self.lora_a = Parameter(Tensor(np.zeros(shape_a), ms.float32), name="lora_a")
        self.lora_b = Parameter(Tensor(np.zeros(shape_b), ms.float32), name="lora_b")
        self.scale = scale_of(config)
        self.product = ops.MatMul(transpose_b=True)

    def construct(self, flat: Tensor) -> Tensor:
        """[M, num_in] to [M, num_out] of its dtype."""
        low = self.product(flat, self.lora_a.astype(self.dtype))
        return self.product(low, self.lora_b.astype(self.dtype)) * self.scale


def scale_of(config: LoraConfig) -> float:
    """What the product of the adapters is multiplied with: alpha / rank."""
    return config.alpha / config.rank


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter."""
    return name.endswith((ADAPTER_A, ADAPTER_B))


def prepare_adapters(model: nn.Cell, seed: int) -> None:
    """Draw the adapters' initial weights and let nothing else be trained.

    A is uniform within 1 / sqrt(num_in), which is Kaiming's rule with a = sqrt(5); B is 0.
    """
    rng = np.random.default_rng((seed, STREAM))
    for name, parameter in model.parameters_and_names():
        parameter.requires_grad = is_adapter(name)
        if name.endswith(ADAPTER_A):
            bound = parameter.shape[1] ** -0.5
            drawn = rng.uniform(-bound, bound, parameter.shape)
            parameter.set_data(Tensor(drawn, ms.float32))


def merged_weights(model: nn.Cell, config: LoraConfig | None) -> dict[str, NDArray[np.float32]]:
    """The weights of a model in which adapters are added to their projections.

    Args:
        model: The decoder.
        config: Of its adapters; None: it has none.

    Returns:
        Parameter name -> float32 array, in the model's order, adapters left out.
    """
    weights = {name: parameter.asnumpy() for name, parameter in model.parameters_and_names()}
    if config is None:
        return weights
    for name in [name for name in weights if name.endswith(ADAPTER_A)]:
        projection = name.removesuffix(ADAPTER_A)
        lora_a = weights.pop(name)
        lora_b = weights.pop(projection + ADAPTER_B)
        added = (lora_b @ lora_a) * np.float32(scale_of(config))
        weights[f"{projection}.weight"] = weights[f"{projection}.weight"] + added
    return weights

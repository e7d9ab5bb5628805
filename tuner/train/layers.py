"""What decoder layers are made of: linear maps and norms.

Shapes: M tokens of all rows, D width. Rows stay flat, since in a dynamic graph every change of
shape and back is some ten kernels.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from tuner.config.schema import LoraConfig, ModelConfig
from tuner.train.device_ops import Spread, norm_of_device
from tuner.train.lora import Adapter
from tuner.train.precision import Dtype


class Dense(nn.Cell):
    """Linear map; weight float32 [num_out, num_in], bias float32 [num_out].

    Args:
        num_in: Width of what comes in.
        num_out: Width of what goes out.
        dtype: It computes in this and returns it.
        has_bias: Whether there is a bias.
        lora: Of its adapter; None: it has none.
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        dtype: Dtype,
        *,
        has_bias: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        # Filled by initial weights; zeros here so that building costs no random numbers.
        self.weight = Parameter(Tensor(np.zeros((num_out, num_in)), ms.float32), name="weight")
        self.has_bias = has_bias
        if has_bias:
            self.bias = Parameter(Tensor(np.zeros(num_out), ms.float32), name="bias")
        self.has_adapter = lora is not None
        if lora is not None:
            self.adapter = Adapter(num_in, num_out, lora, dtype)
        self.product = ops.MatMul(transpose_b=True)
        self.spread = Spread()
        self.num_out = num_out

    def construct(self, x: Tensor) -> Tensor:
        """[M, num_in] to [M, num_out] of its dtype."""
        x = x.astype(self.dtype)
        y = self.product(x, self.weight.astype(self.dtype))
        if self.has_bias:
            bias = self.bias.astype(self.dtype).reshape(1, self.num_out)
            y = y + self.spread(bias, (y.shape[0], 1))
        return y + self.adapter(x) if self.has_adapter else y


def projection(
    config: ModelConfig, name: str, sizes: tuple[int, int], dtype: Dtype, *, has_bias: bool = False
) -> Dense:
    """One of the projections of a layer, with an adapter if the config gives it one.

    Args:
        config: The model.
        name: Its name, as `LoraConfig.projections` has it.
        sizes: Width in and width out.
        dtype: Of matrix products.
        has_bias: Whether it has a bias.
    """
    lora = config.lora
    adapted = lora is not None and name in lora.projections
    return Dense(*sizes, dtype, has_bias=has_bias, lora=lora if adapted else None)


class RMSNorm(nn.Cell):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float, dtype: Dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.weight = Parameter(Tensor(np.ones(width), ms.float32), name="weight")
        self.norm = norm_of_device(eps, width, dtype)

    def construct(self, x_MD: Tensor) -> Tensor:
        """[M, D] to [M, D] of its dtype."""
        return self.norm(x_MD.astype(self.dtype), self.weight.astype(self.dtype))

"""In which dtype each part of the model computes.

Matrix products run in the compute dtype. Each op group (softmax, norms, rope, logits, loss,
embedding, activations, residual) runs in fp32 if the config lists it, else in the compute dtype.
A group casts what comes in and leaves what goes out as it is: the next part casts by itself, so a
value between two fp32 groups is never rounded. Weights stay float32 and are cast where they are
used, so their gradients come out as float32. A cast to the dtype that a value already has
vanishes when the graph is compiled; with compute dtype fp32 none is left.

MindSpore's own lists of ops (`amp.custom_mixed_precision`, 2.10) take classes of Cells only and
round their outputs, so they can keep neither a softmax nor the residual stream in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mindspore as ms

from tuner.config.schema import OP_GROUPS, PrecisionConfig

Dtype = Any
"""A MindSpore dtype; MindSpore carries no types."""

DTYPES: dict[str, Dtype] = {"fp32": ms.float32, "fp16": ms.float16, "bf16": ms.bfloat16}

# Added to the scores that a token must not see. Finite, so that a row with nothing to see gives
# numbers and not NaN; small enough to vanish. Of fp16 half the range: a score of ordinary size
# added to it is still finite.
MASKED_SCORES: dict[Dtype, float] = {ms.float32: -1e9, ms.bfloat16: -1e9, ms.float16: -3e4}


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """Of matrix products and of every op group.

    Attributes:
        products: Projections, and both products of attention.
        softmax: The mask's sum and the softmax of attention.
        norms: Every RMSNorm, its mean and its weight included.
        rope: Rotation of queries and keys, and the scale of queries.
        logits: The last product, against the embedding.
        loss: Log-softmax and gather; their sum over tokens is always fp32, which fp16 could not
            hold.
        embedding: Rows of the embedding, after they are gathered.
        activations: silu(gate) * up.
        residual: Sums of the residual stream.
    """

    products: Dtype
    softmax: Dtype
    norms: Dtype
    rope: Dtype
    logits: Dtype
    loss: Dtype
    embedding: Dtype
    activations: Dtype
    residual: Dtype


def dtypes_of(precision: PrecisionConfig) -> Dtypes:
    """What a precision section means for the graph."""
    compute = DTYPES[precision.compute_dtype]
    groups = {group: ms.float32 if group in precision.fp32_ops else compute for group in OP_GROUPS}
    return Dtypes(products=compute, **groups)


FP32 = dtypes_of(PrecisionConfig())

"""How much an op has to do at its shapes, as far as the profiler's table says.

A yardstick for comparing an op with itself at other shapes, so constant factors are left out.
"""

from __future__ import annotations

import math

_PRODUCTS = ("matmul",)
_LOOKUPS = ("gather", "embedding", "slice")
_NOT_BY_SIZE = ("attention", "hcom", "allreduce", "allgather", "alltoall", "reducescatter")

Shape = tuple[int, ...]


def parse_shapes(text: str) -> tuple[Shape, ...] | None:
    """Shapes as msprof writes them: inputs apart by `;`, dimensions by `,`, brackets or none.

    Returns:
        One tuple for each input, empty for a scalar; None if the text is empty or anything else.

    Example:
        >>> parse_shapes("8,512;512,64;")
        ((8, 512), (512, 64), ())
    """
    if not text.strip():
        return None
    try:
        return tuple(
            tuple(int(size) for size in part.strip(" []()").split(",") if size.strip())
            for part in text.split(";")
        )
    except ValueError:
        return None


def work_of(op_type: str, input_shapes: str, output_shapes: str) -> float | None:
    """Multiplications of a matrix product; else elements of the largest input or output.

    Lookups and slices read a part of their input only: elements of their outputs. Attention and
    communication are not measured, since their time does not follow from sizes alone.

    Returns:
        A number > 0, or None if it is not known.
    """
    name = op_type.lower()
    inputs, outputs = parse_shapes(input_shapes), parse_shapes(output_shapes)
    if inputs is None or any(word in name for word in _NOT_BY_SIZE):
        return None
    if any(word in name for word in _PRODUCTS):
        return _multiplications(inputs, outputs)
    if any(word in name for word in _LOOKUPS) and outputs is not None:
        inputs = ()
    return max(map(math.prod, (*inputs, *(outputs or ()))), default=0) or None


def _multiplications(inputs: tuple[Shape, ...], outputs: tuple[Shape, ...] | None) -> float | None:
    """M K N for each product of a batch: the root of MK, KN and MN multiplied, over the batch's.

    It needs to know neither what is transposed nor how a format splits the dimensions.
    """
    if len(inputs) < 2 or not outputs:
        return None
    left, right = inputs[:2]
    batch = math.prod(left[:-2]) if left[:-2] == right[:-2] else 1
    product = math.prod(left) * math.prod(right) * math.prod(outputs[0])
    return math.sqrt(product / batch) if product else None

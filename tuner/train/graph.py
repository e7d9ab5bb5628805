"""Graph mode: one static graph a shape or one dynamic graph, and the counting of compiles.

Private names of MindSpore are used here and in `device.py` only, and guarded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mindspore as ms
from mindspore import Symbol, Tensor, nn

from tuner.config.schema import GraphConfig


def prepare_step(
    cell: nn.Cell, graph: GraphConfig, num_inputs: int, *, num_scalars: int = 0
) -> None:
    """Make a Cell that takes scalars, then int32 [B, T] tensors compile as the config says.

    Args:
        cell: The top Cell of a step; not compiled yet.
        graph: static leaves MindSpore to compile for each shape; dynamic declares B and T as
            symbols, shared by all inputs, so that one graph serves all.
        num_inputs: Tensors that it takes.
        num_scalars: float32 scalar tensors that it takes before these.
    """
    set_level(cell, graph)
    cell.set_train()
    if graph.mode == "dynamic":
        rows, tokens = Symbol(min=1), Symbol(min=1)
        scalars = [Tensor(1.0, ms.float32) for _ in range(num_scalars)]
        inputs = [Tensor(shape=[rows, tokens], dtype=ms.int32) for _ in range(num_inputs)]
        cell.set_inputs(*scalars, *inputs)


def set_level(cell: nn.Cell, graph: GraphConfig) -> None:
    """Set the jit_level of one top Cell; a Cell takes it once."""
    cell.set_jit_config(ms.JitConfig(jit_level=graph.jit_level))


def run_op_by_op() -> None:
    """Run all Cells without graphs from now on, after the device was opened.

    The same kernels in another order: on CPU with 2.10 the fp32 loss had the same bits, gradients
    agreed to rounding. Steps are slower, and nothing is compiled, which pays for a few steps.
    """
    ms.set_context(mode=ms.PYNATIVE_MODE)


@contextlib.contextmanager
def op_by_op() -> Iterator[None]:
    """Run Cells without graphs inside the block, and then again as before."""
    before = ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    try:
        yield
    finally:
        ms.set_context(mode=before)


def num_compiled_graphs(cell: nn.Cell) -> int | None:
    """Graphs compiled for a top Cell so far; None where this MindSpore does not show it."""
    compiled = getattr(cell, "compile_cache", None)
    return len(compiled) if isinstance(compiled, (set, dict, list)) else None


def has_compiled_anything() -> bool | None:
    """Whether this process holds any compiled graph; None where MindSpore does not show it."""
    api = getattr(getattr(ms, "graph", None), "api", None) or getattr(ms.common, "api", None)
    functions: Any = getattr(api, "ms_compile_cache", None)
    cells: Any = getattr(api, "cells_compile_cache", None)
    if not isinstance(functions, (set, dict)) or not isinstance(cells, dict):
        return None
    return bool(functions) or any(cells.values())

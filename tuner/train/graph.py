"""Graph mode: one static graph a shape or one dynamic graph, and the counting of compiles.

Private names of MindSpore are used here and in `device.py` only, and guarded.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import mindspore as ms
from mindspore import Symbol, Tensor, nn

from tuner.config.schema import GraphConfig

O2_SINCE, O2_DEPRECATED, O2_LAST = (2, 7), (2, 9), (2, 10)
"""Versions (MAJOR, MINOR) of MindSpore whose JitConfig takes O2 as this package knows it."""


def level_refusal(level: str, mode: str, device_name: str, version: str) -> str | None:
    """Why a jit_level cannot be compiled with, in words; None if it can.

    From the documentation but for CPU, where O2 is accepted and does nothing.

    Args:
        level: `O0` to `O3`.
        mode: `static` or `dynamic`.
        device_name: `CPU` or `Ascend`.
        version: Of MindSpore, as `2.10.0` or `2.7.0rc1`.

    Source: JitConfig of MindSpore 2.1 (O3), 2.7.1 ("only Ascend static graph mode ... does not
    support dynamic shape"), 2.9 (deprecated) and 2.10 (accepted, not documented any more).
    """
    if level in ("O0", "O1"):
        return None
    if level != "O2":
        return f"graph.jit_level {level} is gone: MindSpore had O3 in 2.0 and 2.1 only"
    if device_name != "Ascend" or mode != "static":
        return (
            f"graph.jit_level O2 needs Ascend with graph.mode static (here: {device_name}, {mode})"
        )
    if not O2_SINCE <= _release(version) <= O2_LAST:
        return (
            f"graph.jit_level O2 needs MindSpore {_dotted(O2_SINCE)} to {_dotted(O2_LAST)} "
            f"(here: {version})"
        )
    return None


def level_warning(level: str, version: str) -> str | None:
    """What to know about a jit_level that can be compiled with; None if there is nothing.

    Args:
        level: As `level_refusal` takes it.
        version: As `level_refusal` takes it.
    """
    if level == "O2" and _release(version) >= O2_DEPRECATED:
        return (
            f"graph.jit_level O2 is deprecated since MindSpore {_dotted(O2_DEPRECATED)} and will "
            "be removed: compare it with O1, which stays"
        )
    return None


def _release(version: str) -> tuple[int, int]:
    """(MAJOR, MINOR); (0, 0) of what is no version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def prepare_step(
    cell: nn.Cell,
    graph: GraphConfig,
    num_inputs: int,
    *,
    num_scalars: int = 0,
    num_vectors: int = 0,
) -> None:
    """Make a Cell that takes scalars, int32 [B, T] tensors and vectors compile as the config says.

    Args:
        cell: The top Cell of a step; not compiled yet.
        graph: static leaves MindSpore to compile for each shape; dynamic declares B and T as
            symbols, shared by all inputs, so that one graph serves all.
        num_inputs: Tensors that it takes.
        num_scalars: float32 scalar tensors that it takes before these.
        num_vectors: int64 tensors of one axis that it takes after them.
    """
    set_level(cell, graph)
    cell.set_train()
    if graph.mode == "dynamic":
        rows, tokens = Symbol(min=1), Symbol(min=1)
        scalars = [Tensor(1.0, ms.float32) for _ in range(num_scalars)]
        inputs = [Tensor(shape=[rows, tokens], dtype=ms.int32) for _ in range(num_inputs)]
        vectors = [Tensor(shape=[None], dtype=ms.int64) for _ in range(num_vectors)]
        cell.set_inputs(*scalars, *inputs, *vectors)


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
    """Graphs compiled for a top Cell so far; None where this MindSpore does not show it.

    Who gets None has the times of calls to go by, as `recompiles` does.
    """
    compiled = getattr(cell, "compile_cache", None)
    return len(compiled) if isinstance(compiled, (set, dict, list)) else None


def compile_api(mindspore: Any = ms) -> Any | None:
    """The module in which MindSpore keeps its compiled graphs; None where it has moved.

    Args:
        mindspore: The package: up to 2.8 it is `common.api` there, from 2.9 on `graph.api`, with
            the old name as a deprecated alias.
    """
    for package in ("graph", "common"):
        api = getattr(getattr(mindspore, package, None), "api", None)
        if api is not None:
            return api
    return None


def has_compiled_anything(mindspore: Any = ms) -> bool | None:
    """Whether this process holds any compiled graph; None where MindSpore does not show it.

    Args:
        mindspore: The package.
    """
    api = compile_api(mindspore)
    functions: Any = getattr(api, "ms_compile_cache", None)
    cells: Any = getattr(api, "cells_compile_cache", None)
    if not isinstance(functions, (set, dict)) or not isinstance(cells, dict):
        return None
    return bool(functions) or any(cells.values())

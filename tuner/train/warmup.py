"""Compiling every planned shape before step 1, largest first.

Largest first, so that a shape that does not fit in memory shows at once and names itself, and so
that the device pool settles. A dynamic graph is compiled once, at the largest shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tuner.batching.grouping import Shape
from tuner.config.schema import GraphConfig
from tuner.train.device import memory_bytes
from tuner.train.engine import Engine


class StoppedError(Exception):
    """The user asked to stop before the first step."""


def warm_up(
    engine: Engine,
    shapes: Sequence[Shape],
    graph: GraphConfig,
    *,
    notice: Callable[[str], None],
    stop_requested: Callable[[], bool],
) -> float:
    """Compile the graphs of a run; changes no parameter. Call it before loading a checkpoint.

    Args:
        engine: Fresh: gradients and moments at 0.
        shapes: Planned (B, L), largest first.
        graph: static compiles each shape; dynamic the first only.
        notice: Told a line for every shape.
        stop_requested: Asked after every shape.

    Returns:
        Seconds in all.

    Raises:
        StoppedError: a stop was requested.
    """
    to_compile = shapes if graph.mode == "static" else shapes[:1]
    started = time.perf_counter()
    for number, shape in enumerate(to_compile, start=1):
        shape_started = time.perf_counter()
        engine.run_empty_step(shape)
        seconds = time.perf_counter() - shape_started
        memory = memory_bytes(engine.device) / 1e9
        notice(
            f"[warm-up {number}/{len(to_compile)}] B={shape[0]} L={shape[1]} "
            f"{seconds:.1f} s, memory {memory:.2f} GB ({engine.device.memory_kind})"
        )
        if stop_requested():
            raise StoppedError
    engine.run_empty_update()
    return time.perf_counter() - started

"""Compiling every planned shape before step 1, largest first.

Largest first, so that a shape that does not fit in memory shows at once and names itself, and so
that the device pool settles. A dynamic graph is compiled once, at the largest shape. With a
compile cache every graph gives known values on the way: they are written down when it is
compiled, and compared with fresh ones when it comes from the cache.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from tuner.batching.grouping import Shape
from tuner.config.schema import GraphConfig
from tuner.errors import OUT_OF_MEMORY_TEXT, BadInputError
from tuner.train.device import Device, memory_bytes
from tuner.train.engine import Engine


class StoppedError(Exception):
    """The user asked to stop before the first step."""


@dataclass(frozen=True, kw_only=True)
class WarmUpWatch:
    """How a warm-up talks to its caller.

    Attributes:
        notice: Told a line for every shape, and what happens to a compile cache.
        stop_requested: Asked after every shape.
        on_stuck: Called, from another thread, when a cached graph does not answer.
    """

    notice: Callable[[str], None]
    stop_requested: Callable[[], bool]
    on_stuck: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """How a graph came to be.

    Attributes:
        compile_s: Seconds of its compile, or of taking it from the cache, and its first run.
        verify_s: Seconds of its comparison with a fresh value; None for a graph compiled here.
    """

    compile_s: float
    verify_s: float | None = None

    def __str__(self) -> str:
        if self.verify_s is None:
            return f"{self.compile_s:.1f} s"
        return f"{self.compile_s:.1f} s (cached), verified in {self.verify_s:.1f} s"


class Compiler(Protocol):
    """A way to get the graphs of an engine; changes no parameter."""

    def compile_step(self, shape: Shape) -> Compiled:
        """Get the graph of a step at a shape."""

    def compile_update(self) -> Compiled:
        """Get the graph of the update; the last one."""


@dataclass(frozen=True, kw_only=True)
class PlainCompiler:
    """Compiles with a batch of fillers, which adds exactly nothing.

    Attributes:
        engine: Fresh: gradients and moments at 0.
    """

    engine: Engine

    def compile_step(self, shape: Shape) -> Compiled:
        """Compile a step at a shape."""
        started = time.perf_counter()
        self.engine.run_empty_step(shape)
        return Compiled(compile_s=time.perf_counter() - started)

    def compile_update(self) -> Compiled:
        """Compile the update."""
        started = time.perf_counter()
        self.engine.run_empty_update()
        return Compiled(compile_s=time.perf_counter() - started)


def shapes_in_order(
    planned: Sequence[Shape], recorded: Sequence[Shape], graph: GraphConfig
) -> tuple[Shape, ...]:
    """The shapes that a warm-up compiles, in its order: static each, dynamic the first only.

    Args:
        planned: (B, L) of the plan, largest first.
        recorded: Shape record of the checkpoint that is gone on from; () for a new run.
        graph: The mode.

    Raises:
        BadInputError: the record has other shapes than the plan.
    """
    if recorded and set(recorded) != set(planned):
        missing, more = set(planned) - set(recorded), set(recorded) - set(planned)
        raise BadInputError(
            f"the plan has other shapes than the checkpoint's record (new: {sorted(missing)}, "
            f"gone: {sorted(more)})",
            fix="give the config and data of the checkpoint, or another train.out to start over",
        )
    order = tuple(recorded or planned)
    return order if graph.mode == "static" else order[:1]


def compile_all(
    compiler: Compiler, device: Device, to_compile: Sequence[Shape], watch: WarmUpWatch
) -> None:
    """Get every graph of a run.

    Args:
        compiler: How.
        device: For the figures of memory.
        to_compile: (B, L) in the order of their compiles.
        watch: Told a line for every shape.

    Raises:
        StoppedError: a stop was requested.
        BadInputError: a shape does not fit in memory.
    """
    for number, shape in enumerate(to_compile, start=1):
        place = f"[warm-up {number}/{len(to_compile)}] B={shape[0]} L={shape[1]}"
        with named_if_too_large(place):
            compiled = compiler.compile_step(shape)
        memory = memory_bytes(device) / 1e9
        watch.notice(f"{place} {compiled}, memory {memory:.2f} GB ({device.memory_kind})")
        if watch.stop_requested():
            raise StoppedError
    with named_if_too_large("[warm-up] the update"):
        compiler.compile_update()


@contextmanager
def named_if_too_large(place: str) -> Iterator[None]:
    """Turn what allocators say when they fail into one line that names the shape."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
        if not re.search(OUT_OF_MEMORY_TEXT, text):
            raise
        first_line = next(line for line in text.splitlines() if line.strip())[:200]
        raise BadInputError(
            f"{place} does not fit in memory: {first_line}",
            fix="lower batching.tokens_per_batch, or take fewer buckets: every static graph "
            "keeps its own memory",
        ) from error

"""The warm-up with a compile cache: graphs are recorded, or taken from it and checked."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tuner.batching.grouping import Shape
from tuner.config.schema import TrainConfig
from tuner.errors import BadInputError
from tuner.train.cache_key import cache_key
from tuner.train.compile_cache import (
    STUCK_FACTOR,
    STUCK_LEAST_S,
    CompileCache,
    GraphRecord,
    UnsoundCacheError,
    open_cache,
    time_limit,
)
from tuner.train.engine import Engine
from tuner.train.graph import has_compiled_anything
from tuner.train.graph_check import (
    RECORDED_TOLERANCES,
    TOLERANCES,
    UPDATE_TOLERANCE,
    Array,
    checked_batch,
    fresh_step_outputs,
    fresh_update_outputs,
    known_weights,
    num_distinct_rows,
    require_equal,
    require_recorded,
    square_sums,
    step_outputs,
    update_outputs,
)
from tuner.train.warmup import (
    Compiled,
    Compiler,
    PlainCompiler,
    StoppedError,
    WarmUpWatch,
    compile_all,
)


def warm_up(
    engine: Engine,
    config: TrainConfig,
    to_compile: Sequence[Shape],
    root: Path,
    watch: WarmUpWatch,
) -> float:
    """Compile the graphs of a run; changes no parameter. Call it before loading a checkpoint.

    Args:
        engine: Fresh: gradients and moments at 0.
        config: The whole config; says whether there is a compile cache.
        to_compile: (B, L) in the order of their compiles.
        root: Folder of all compile caches of the run.
        watch: Told a line for every shape.

    Returns:
        Seconds in all.

    Raises:
        StoppedError: a stop was requested.
        BadInputError: a shape does not fit in memory.
        UnsoundCacheError: a cached graph is wrong; start over in a new process.
    """
    started = time.perf_counter()
    cache = _cache_of(engine, config, to_compile, root, watch.notice)
    with _compiler(engine, config, cache, watch) as compiler:
        compile_all(compiler, engine.device, to_compile, watch)
    return time.perf_counter() - started


def _cache_of(
    engine: Engine,
    config: TrainConfig,
    to_compile: Sequence[Shape],
    root: Path,
    notice: Callable[[str], None],
) -> CompileCache | None:
    if not config.graph.compile_cache:
        return None
    if has_compiled_anything() is not False:
        # The order of compiles is all that tells MindSpore which graph is which.
        notice("going on without a compile cache: something may be compiled already")
        return None
    key = cache_key(config, engine.device, to_compile, engine.num_lengths)
    return open_cache(root, key, notice)


@contextmanager
def _compiler(
    engine: Engine, config: TrainConfig, cache: CompileCache | None, watch: WarmUpWatch
) -> Iterator[Compiler]:
    """The way to get graphs that there is; what follows from it is done when the block ends."""
    if cache is None:
        yield PlainCompiler(engine=engine)
    elif cache.known is None:
        recorder = RecordingCompiler(engine=engine, config=config, cache=cache)
        with known_weights(engine):
            yield recorder
        _keep(cache, recorder.graphs, watch.notice)
    else:
        with _removed_if_unsound(cache, watch.notice), known_weights(engine):
            yield CheckingCompiler(
                engine=engine, config=config, cache=cache, on_stuck=_on_stuck(cache, watch)
            )


def _keep(
    cache: CompileCache, graphs: Sequence[GraphRecord], notice: Callable[[str], None]
) -> None:
    """Finish a folder; without room for it the run goes on without."""
    try:
        cache.finish(graphs)
    except (OSError, BadInputError) as error:
        notice(f"going on without a compile cache: {error}")
        with contextlib.suppress(OSError):
            cache.remove()


@contextmanager
def _removed_if_unsound(cache: CompileCache, notice: Callable[[str], None]) -> Iterator[None]:
    cache.mark_in_use()
    try:
        yield
    except UnsoundCacheError as error:
        notice(f"compile cache removed, starting over with fresh compiles: {error}")
        # Left in place it would still be marked as in use, and so not be read.
        with contextlib.suppress(OSError):
            cache.remove()
        raise
    except StoppedError:
        cache.clear_mark()
        raise
    cache.clear_mark()


def _on_stuck(cache: CompileCache, watch: WarmUpWatch) -> Callable[[str], None]:
    def start_over(reason: str) -> None:
        watch.notice(f"compile cache removed, starting over with fresh compiles: {reason}")
        with contextlib.suppress(OSError):
            cache.remove()
        watch.on_stuck()

    return start_over


@dataclass(kw_only=True)
class RecordingCompiler:
    """Compiles into an empty cache, and writes down what every graph gives.

    Attributes:
        engine: With known weights.
        config: The whole config.
        cache: The empty folder.
        graphs: What was compiled so far.
    """

    engine: Engine
    config: TrainConfig
    cache: CompileCache
    graphs: list[GraphRecord] = field(default_factory=list)

    def compile_step(self, shape: Shape) -> Compiled:
        """Compile a step at a shape, with the batch that it will be checked with."""
        batch = checked_batch(shape, self.config)
        return self._record(shape, lambda: step_outputs(self.engine, batch))

    def compile_update(self) -> Compiled:
        """Compile the update with known buffers."""
        return self._record(None, lambda: update_outputs(self.engine))

    def _record(self, shape: Shape | None, outputs: Callable[[], list[Array]]) -> Compiled:
        started = time.perf_counter()
        with self.cache.compiles():
            values = square_sums(outputs())
        compile_s = time.perf_counter() - started
        self.graphs.append(GraphRecord(shape=shape, compile_s=compile_s, values=values))
        return Compiled(compile_s=compile_s)


@dataclass(kw_only=True)
class CheckingCompiler:
    """Takes graphs from a cache and compares every one with a fresh value.

    Attributes:
        engine: With known weights.
        config: The whole config.
        cache: The whole folder.
        on_stuck: Called from another thread when a graph takes far longer than its compile did.
    """

    engine: Engine
    config: TrainConfig
    cache: CompileCache
    on_stuck: Callable[[str], None]
    num_checked: int = 0

    def compile_step(self, shape: Shape) -> Compiled:
        """Take a step at a shape from the cache."""
        batch = checked_batch(shape, self.config)
        return self._check(
            lambda: step_outputs(self.engine, batch),
            lambda: fresh_step_outputs(self.engine, batch, num_distinct_rows(shape, self.config)),
            TOLERANCES[self.config.precision.compute_dtype],
        )

    def compile_update(self) -> Compiled:
        """Take the update from the cache."""
        return self._check(
            lambda: update_outputs(self.engine),
            lambda: fresh_update_outputs(self.engine),
            UPDATE_TOLERANCE,
        )

    def _check(
        self,
        outputs: Callable[[], list[Array]],
        fresh_outputs: Callable[[], list[Array]],
        tolerance: float,
    ) -> Compiled:
        record = (self.cache.known or ())[self.num_checked]
        self.num_checked += 1
        name = "the update" if record.shape is None else "B={} L={}".format(*record.shape)
        limit_s = STUCK_LEAST_S + STUCK_FACTOR * record.compile_s
        started = time.perf_counter()
        try:
            with (
                time_limit(
                    limit_s, lambda: self.on_stuck(f"{name}: no answer in {limit_s:.0f} s")
                ),
                self.cache.compiles(),
            ):
                found = outputs()
            compiled = time.perf_counter()
            expected = fresh_outputs()
            require_equal(found, expected, tolerance)
            recorded_tolerance = RECORDED_TOLERANCES[self.config.precision.compute_dtype]
            require_recorded(square_sums(found), record.values, recorded_tolerance)
        except Exception as error:
            # Whatever a wrong graph may cause: a value that is off, or a crash in a kernel.
            reason = " ".join(str(error).split())[:300]
            raise UnsoundCacheError(f"{name}: {type(error).__name__}: {reason}") from error
        return Compiled(compile_s=compiled - started, verify_s=time.perf_counter() - compiled)

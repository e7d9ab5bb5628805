"""The order of a warm-up, and what it says about a shape that does not fit."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tuner.config.schema import GraphConfig
from tuner.errors import BadInputError
from tuner.train.warmup import (
    Compiled,
    StoppedError,
    WarmUpWatch,
    compile_all,
    shapes_in_order,
)

pytestmark = pytest.mark.mindspore

SHAPES = ((4, 64), (8, 32), (16, 16))


class FakeCompiler:
    """Compiles in no time, or fails at one shape as an allocator does."""

    def __init__(self, error=None, fails_at=None):
        self.order = []
        self._error, self._fails_at = error, fails_at

    def compile_step(self, shape):
        self.order.append(shape)
        if shape == self._fails_at:
            raise self._error
        return Compiled(compile_s=1.25)

    def compile_update(self):
        self.order.append("update")
        if self._fails_at == "update":
            raise self._error
        return Compiled(compile_s=0.5)


def watch_of(lines, stop_after=99):
    return WarmUpWatch(
        notice=lines.append,
        stop_requested=lambda: len(lines) >= stop_after,
        on_stuck=lambda: None,
    )


def test_shapes_come_in_the_order_of_the_plan_and_the_update_last(device):
    compiler, lines = FakeCompiler(), []
    compile_all(compiler, device, SHAPES, watch_of(lines))
    assert compiler.order == [*SHAPES, "update"]
    assert len(lines) == 3
    assert re.fullmatch(
        r"\[warm-up 2/3\] B=8 L=32 1\.2 s, memory \d+\.\d\d GB \(resident set of the process\)",
        lines[1],
    )


def test_a_graph_from_the_cache_says_so_with_the_seconds_of_its_check():
    assert str(Compiled(compile_s=0.91, verify_s=0.42)) == "0.9 s (cached), verified in 0.4 s"


def test_a_stop_is_heard_after_every_shape(device):
    compiler, lines = FakeCompiler(), []
    with pytest.raises(StoppedError):
        compile_all(compiler, device, SHAPES, watch_of(lines, stop_after=2))
    assert compiler.order == list(SHAPES[:2])


OUT_OF_MEMORY = [
    MemoryError(),
    RuntimeError("Allocate memory failed, size: 9"),
    RuntimeError("Memory not enough: alloc of 5 GB failed\n\n- C++ Call Stack: ..."),
    RuntimeError("std::bad_alloc"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_a_shape_that_does_not_fit_in_memory_is_named_in_one_line(device, error):
    compiler = FakeCompiler(error, (8, 32))
    with pytest.raises(BadInputError) as raised:
        compile_all(compiler, device, SHAPES, watch_of([]))
    line = str(raised.value)
    assert line.startswith("[warm-up 2/3] B=8 L=32 does not fit in memory: ")
    assert "lower batching.tokens_per_batch" in line
    assert "\n" not in line


def test_the_update_is_named_too_and_another_failure_is_left_as_it_is(device):
    with pytest.raises(BadInputError, match="the update does not fit in memory"):
        compile_all(FakeCompiler(MemoryError(), "update"), device, SHAPES, watch_of([]))
    with pytest.raises(RuntimeError, match="For 'Reshape'"):
        compile_all(
            FakeCompiler(RuntimeError("For 'Reshape', the size"), (4, 64)), device, SHAPES,
            watch_of([]),
        )  # fmt: skip


def test_the_recorded_order_counts_and_another_set_of_shapes_is_refused():
    static, dynamic = GraphConfig(), GraphConfig(mode="dynamic")
    recorded = SHAPES[::-1]
    assert shapes_in_order(SHAPES, (), static) == SHAPES
    assert shapes_in_order(SHAPES, recorded, static) == recorded
    assert shapes_in_order(SHAPES, recorded, dynamic) == recorded[:1]
    with pytest.raises(BadInputError, match=r"new: \[\(4, 64\)\], gone: \[\(4, 72\)\]"):
        shapes_in_order(SHAPES, ((4, 72), *SHAPES[1:]), static)


@pytest.mark.slow
def test_a_process_with_too_little_memory_names_the_shape():
    """A real allocation that fails: the address space ends within the first shape."""
    script = (
        "import resource, sys\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "from strategies import make_config\n"
        "from tuner.errors import BadInputError\n"
        "from tuner.train.device import open_device\n"
        "from tuner.train.engine import Engine\n"
        "from tuner.train.warmup import PlainCompiler, WarmUpWatch, compile_all\n"
        "config = make_config({'model.vocab_size': 2000})\n"
        "device = open_device(config)\n"
        "engine = Engine(config, device, 512)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 600_000_000,) * 2)\n"
        "watch = WarmUpWatch(notice=print, stop_requested=lambda: False, on_stuck=print)\n"
        "try:\n"
        "    compile_all(PlainCompiler(engine=engine), device, ((32, 512),), watch)\n"
        "except BadInputError as error:\n"
        "    print('ONE LINE', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "ONE LINE [warm-up 1/1] B=32 L=512 does not fit in memory" in done.stdout, done

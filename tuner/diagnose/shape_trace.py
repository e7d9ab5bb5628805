"""Which Cell takes and gives which shapes: a forward op by op, watched by hooks.

Every Cell of a model gets a hook before and a hook after its `construct`; op by op they run as
plain Python, at any shape, and nothing is compiled. A Cell that was entered and never left is
where a forward broke. What a hook cannot see: a Cell whose `construct` is called directly, one
that holds a backward of its own (MindSpore 2.10 gives it no hook after), and what lies between
two Cells, for which the line of the model's own source is named instead. What is marked with
`ms.jit` runs in Python as well. Calls of flash attention are looked at by `flash_calls`.

The number of hooks ever set is part of the key under which MindSpore keeps a compiled graph (2.10,
graph/api.py): after a trace every graph of the process may compile again. So models are traced
before a run, or after it failed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from numpy.typing import NDArray

from tuner.batching.grouping import Shape
from tuner.config.schema import TrainConfig
from tuner.diagnose.cell_calls import CellCall, Dims, ShapeTrace, format_trace
from tuner.diagnose.finding import Finding, finding_of_error
from tuner.diagnose.flash_calls import FlashWatch
from tuner.diagnose.source_lines import LineWatch
from tuner.diagnose.trace_faults import find_faults
from tuner.errors import BadInputError
from tuner.train.build import build_model
from tuner.train.device import open_device
from tuner.train.factory import make_cell
from tuner.train.graph import op_by_op
from tuner.train.loader import Batch
from tuner.train.run_inputs import open_inputs

JIT_VARIABLE = "MS_JIT"
"""At 0 functions marked with ms.jit run in Python; read at every call (2.7 to 2.10)."""


@dataclass(frozen=True, kw_only=True)
class TraceReport:
    """A model at some of its planned shapes.

    Attributes:
        traces: One a shape: the smallest, one more, the largest; empty if it cannot be built.
        findings: What is wrong; one of severity ok if nothing is.
    """

    traces: tuple[ShapeTrace, ...]
    findings: tuple[Finding, ...]

    def table(self) -> str:
        """Path, class and input shapes -> output shapes of every call, shape by shape."""
        return "\n\n".join(map(format_trace, self.traces))


def trace_shapes(model: nn.Cell, arrays: Sequence[NDArray[np.int32]]) -> list[CellCall]:
    """Run a forward op by op and write down who is called with which shapes.

    Args:
        model: Takes these arrays; its hooks are gone afterwards.
        arrays: int32 [B, T] each, for example `model_arrays` of a batch.

    Returns:
        In the order in which Cells were entered. If the forward raises, the last call without
        output shapes is the Cell where it broke.
    """
    return list(trace_forward(model, arrays).calls)


def trace_forward(model: nn.Cell, arrays: Sequence[NDArray[np.int32]]) -> ShapeTrace:
    """As `trace_shapes`, with what the forward raised, and at which line.

    A forward that raises runs twice: finding the line takes some milliseconds for each line.
    """
    # The first call in a process does nothing on CPU (2.10), and an earlier run may have left an
    # error behind.
    with contextlib.suppress(Exception):
        _wait()
    first = _run(model, arrays, contextlib.nullcontext())
    if first.error is None:
        return first
    lines = LineWatch(_wait)
    again = _run(model, arrays, lines.watching())
    if again.error is None:
        return first
    place, line = lines.line_of(again.error)
    return replace(again, place=place, line=line)


def _run(
    model: nn.Cell, arrays: Sequence[NDArray[np.int32]], watch: AbstractContextManager[None]
) -> ShapeTrace:
    recorder = _Recorder()
    flash = FlashWatch(recorder.name_of_innermost)
    error: Exception | None = None
    try:
        with op_by_op(), _without_jit(), recorder.watching(model), flash.watching(model), watch:
            model(*map(Tensor, arrays))
            _wait()
    except Exception as raised:
        error = raised
    size, length = arrays[0].shape
    return ShapeTrace(
        shape=(size, length),
        calls=tuple(recorder.calls),
        error=error,
        refused=tuple(flash.refused),
        num_stand_ins=flash.num_stand_ins,
    )


@contextmanager
def _without_jit() -> Iterator[None]:
    """What is marked with ms.jit would be a graph, with no hook and no stand-in inside."""
    before = os.environ.get(JIT_VARIABLE)
    os.environ[JIT_VARIABLE] = "0"
    try:
        yield
    finally:
        os.environ.pop(JIT_VARIABLE)
        if before is not None:
            os.environ[JIT_VARIABLE] = before


def model_arrays(batch: Batch) -> tuple[NDArray[np.int32], ...]:
    """What of a batch a model takes: ids, and with packing segment ids and positions."""
    ids, _, *packing = batch.arrays
    return (ids, *packing)


def trace_config(config: TrainConfig) -> TraceReport:
    """Build the model of a config and trace it at its smallest, its largest and one more shape.

    Shapes are those of the provenance, else of the plan, for which the rows are opened. Rows are
    full: every position up to the length occurs.

    Args:
        config: The whole of best.yaml.

    Raises:
        BadInputError: as `open_inputs`.
    """
    shapes = _planned_shapes(config)
    longest = max(length for _, length in shapes)
    open_device(config)
    try:
        # Without the small forward that a run begins with: the trace says more of what fails.
        model = (
            make_cell(config, longest)
            if config.model.factory is not None
            else build_model(config, longest, reads_source=False)
        )
    except BadInputError as error:
        refused = finding_of_error(error, name="model-not-built", why="no run starts with it")
        return TraceReport(traces=(), findings=(refused,))
    by_size = sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))
    chosen = dict.fromkeys([by_size[0], by_size[len(by_size) // 2], by_size[-1]])
    traces = [trace_forward(model, model_arrays(Batch.full(shape, config))) for shape in chosen]
    return TraceReport(
        traces=tuple(traces), findings=tuple(find_faults(traces, config.model.vocab_size))
    )


class _Recorder:
    """Takes down calls while hooks are on a model."""

    def __init__(self) -> None:
        self.calls: list[CellCall] = []
        self._open: list[tuple[str, int]] = []
        self._left = 0

    @contextmanager
    def watching(self, model: nn.Cell) -> Iterator[None]:
        handles: list[Any] = []
        try:
            for path, cell in model.cells_and_names():
                # With a backward of its own a Cell gets no hook after it, and would stay open.
                if not getattr(cell, "has_bprop", False):
                    before, after = self._hooks(path)
                    handles.append(cell.register_forward_pre_hook(before, with_kwargs=True))
                    handles.append(cell.register_forward_hook(after, with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def name_of_innermost(self) -> str:
        """Path and class of the Cell that is under way, as far as it has hooks."""
        return self.calls[self._open[-1][1]].name if self._open else "the model"

    def _hooks(self, path: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(cell: nn.Cell, args: Any, kwargs: Any) -> None:
            # So that what the Cell around it did wrong shows there and not here.
            _wait()
            self._open.append((path, len(self.calls)))
            self.calls.append(_call_of(path, cell, [*args, *kwargs.values()]))

        def after(cell: nn.Cell, args: Any, kwargs: Any, output: Any) -> None:
            _wait()
            self._leave(path, tuple(tuple(one.shape) for one in _tensors(output)))

        return before, after

    def _leave(self, path: str, shapes: tuple[Dims, ...]) -> None:
        # A model may catch what a Cell raised: those inside are then not left either.
        while self._open:
            opened, index = self._open.pop()
            if opened == path:
                self.calls[index] = replace(
                    self.calls[index], output_shapes=shapes, left_at=self._left
                )
                self._left += 1
                return


def _call_of(path: str, cell: nn.Cell, arguments: list[Any]) -> CellCall:
    tensors = list(_tensors(arguments))
    wholes = [one for one in tensors if one.dtype in (ms.int32, ms.int64) and one.size]
    is_lookup = len(wholes) == len(tensors) == 1
    return CellCall(
        path=path,
        class_name=type(cell).__name__,
        input_shapes=tuple(tuple(one.shape) for one in tensors),
        weights=tuple(
            (parameter.name.rpartition(".")[2], tuple(parameter.shape))
            for parameter in cell.get_parameters(expand=False)
        ),
        largest_index=int(wholes[0].asnumpy().max()) if is_lookup else None,
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def _wait() -> None:
    # Ops are only queued when they return: without this an index that is out of range is raised
    # by whatever comes later (2.10, CPU).
    ms.runtime.synchronize()


def _planned_shapes(config: TrainConfig) -> tuple[Shape, ...]:
    if config.provenance is not None and config.provenance.shapes:
        return tuple(config.provenance.shapes)
    return open_inputs(config, lambda tuned, lengths: None).plan.shapes

"""Compiles outside of warm-up: counted, timed, attributed, warned about once per cause.

MindSpore has no limit of recompiles and says nothing about them: a shape that nobody planned costs
seconds and memory at every new value. So every call of a compiled Cell goes through a watch, which
compares the number of its graphs with before and the call's signature with those seen.

Where MindSpore does not show its graphs, a call that takes many times the median of its shape is
counted, and called suspected.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tuner.train.graph import num_compiled_graphs

NEW_SHAPE = "new shape"
NEW_DTYPE = "new dtype"
NEW_INPUTS = "another number of inputs"
TRAIN_FLIP = "train/eval flip"
CONSTANT = "Python constant"
FIRST_CALL = "first call"
SUSPECTED = "suspected from its time"

WAYS_OUT = {
    NEW_SHAPE: "pad the batch to a planned shape, or compile this shape in the warm-up",
    NEW_DTYPE: "give the Cell inputs of one dtype",
    NEW_INPUTS: "give the Cell the same inputs in every call",
    TRAIN_FLIP: "call set_train once, before the warm-up; evaluate with a Cell of its own",
    CONSTANT: "a Python value is part of the graph: hand it over as a Tensor, or never change it",
    FIRST_CALL: "call this Cell once in the warm-up",
    SUSPECTED: "MindSpore shows no graphs here; if it comes again, look for a changing input",
}

# A call is suspected from this many times the median on. The first call of a shape in a dynamic
# graph, which takes memory but compiles nothing, was 2.5 to 3.6 times its steady one (CPU, 2.10).
SUSPECT_FACTOR = 5.0
SUSPECT_LEAST_S = 0.5
CALLS_FOR_A_MEDIAN = 3
CALLS_KEPT = 25


@dataclass(frozen=True, kw_only=True)
class Recompile:
    """One compile that no warm-up planned.

    Attributes:
        cell: Class of the Cell.
        cause: What differs from the calls before: one of the names above, or several with "and".
        shape: Of the first input that has two dimensions or more; () if none has.
        seconds: Of the call, less the median of its shape where that is known.
        step: Steps done when the call ended, its own included.
    """

    cell: str
    cause: str
    shape: tuple[int, ...]
    seconds: float
    step: int

    def __str__(self) -> str:
        place = " at " + "x".join(map(str, self.shape)) if self.shape else ""
        return f"step {self.step}: {self.cell}{place}, {self.cause}, {self.seconds:.1f} s"


class Signature(NamedTuple):
    """What decides which graph a call runs.

    Attributes:
        is_training: The Cell's flag.
        shapes: Of every Tensor.
        dtypes: Of every Tensor.
        constants: The other inputs, written out.
    """

    is_training: bool
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    constants: tuple[str, ...]


@dataclass
class _Calls:
    """The calls of one Cell so far: seconds by signature, those with a compile left out."""

    seconds: dict[Signature, deque[float]] = field(default_factory=dict)

    def median_s(self, signature: Signature) -> float | None:
        """Median seconds of a signature; None before there are enough calls."""
        seconds = self.seconds.get(signature, ())
        return statistics.median(seconds) if len(seconds) >= CALLS_FOR_A_MEDIAN else None

    def largest_median_s(self) -> float | None:
        """The largest of all signatures' medians."""
        medians = [self.median_s(signature) for signature in self.seconds]
        return max((median for median in medians if median is not None), default=None)

    def add(self, signature: Signature, seconds: float, *, has_compiled: bool) -> None:
        kept = self.seconds.setdefault(signature, deque(maxlen=CALLS_KEPT))
        if not has_compiled:
            kept.append(seconds)


class RecompileWatch:
    """Runs compiled Cells and knows which of their compiles were not planned.

    All compiles are planned until `arm`, and inside `planned`. A Cell of your own is watched when
    it is called through `run`:

        with watch.planned():
            watch.run(cell, *inputs_of_a_planned_shape)
        watch.run(cell, *inputs)

    Attributes:
        step: Set by the caller: the step that is being made, for the records.
    """

    def __init__(
        self,
        num_graphs: Callable[[Any], int | None] = num_compiled_graphs,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Watch nothing yet.

        Args:
            num_graphs: Graphs of a Cell so far; None where that is not known.
            clock: Seconds, rising.
        """
        self.step = 0
        self._num_graphs = num_graphs
        self._clock = clock
        self._calls: dict[int, _Calls] = {}
        self._found: list[Recompile] = []
        self._warned: set[str] = set()
        self._notice: Callable[[str], None] | None = None
        self._is_planned = False

    @property
    def found(self) -> tuple[Recompile, ...]:
        """All unplanned compiles so far, in their order."""
        return tuple(self._found)

    @property
    def seconds(self) -> float:
        """Seconds of all of them."""
        return sum(recompile.seconds for recompile in self._found)

    def arm(self, notice: Callable[[str], None]) -> None:
        """The warm-up is over: what compiles from now on was not planned.

        Args:
            notice: Told a line with a way out at the first compile of every Cell and cause.
        """
        self._notice = notice

    @contextmanager
    def planned(self) -> Iterator[None]:
        """A later warm-up, of an evaluation for instance: its compiles are not counted."""
        before, self._is_planned = self._is_planned, True
        try:
            yield
        finally:
            self._is_planned = before

    def run(self, cell: Any, *inputs: Any) -> Any:
        """Call a Cell and wait for its result.

        Args:
            cell: A top Cell.
            inputs: What it takes.

        Returns:
            What the Cell returns.
        """
        signature = signature_of(cell, inputs)
        before = self._num_graphs(cell)
        started = self._clock()
        output = cell(*inputs)
        _wait(output)
        seconds = self._clock() - started
        after = self._num_graphs(cell)
        calls = self._calls.setdefault(id(cell), _Calls())
        if before is None or after is None:
            has_compiled = self._is_suspect(calls, signature, seconds)
            cause = SUSPECTED
        else:
            has_compiled = after > before
            cause = cause_of(signature, tuple(calls.seconds)) if has_compiled else ""
        if has_compiled and self._notice is not None and not self._is_planned:
            excess_s = max(0.0, seconds - (calls.median_s(signature) or 0.0))
            self._add(type(cell).__name__, cause, signature, excess_s)
        calls.add(signature, seconds, has_compiled=has_compiled)
        return output

    def _is_suspect(self, calls: _Calls, signature: Signature, seconds: float) -> bool:
        usual_s = calls.median_s(signature)
        if usual_s is None and signature not in calls.seconds:
            usual_s = calls.largest_median_s()
        return usual_s is not None and (
            seconds > SUSPECT_FACTOR * usual_s and seconds - usual_s > SUSPECT_LEAST_S
        )

    def _add(self, cell: str, cause: str, signature: Signature, seconds: float) -> None:
        shape = next((shape for shape in signature.shapes if len(shape) >= 2), ())
        recompile = Recompile(cell=cell, cause=cause, shape=shape, seconds=seconds, step=self.step)
        self._found.append(recompile)
        warning = f"{cell} {cause}"
        if warning not in self._warned and self._notice is not None:
            self._warned.add(warning)
            ways_out = "; ".join(WAYS_OUT[name] for name in cause.split(" and "))
            self._notice(f"unplanned compile, {recompile}: {ways_out}")


def signature_of(cell: Any, inputs: Sequence[Any]) -> Signature:
    """The signature of a call, as far as Python sees it."""
    leaves = list(_leaves(inputs))
    tensors = [leaf for leaf in leaves if _is_tensor(leaf)]
    return Signature(
        is_training=bool(cell.training),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        dtypes=tuple(str(tensor.dtype) for tensor in tensors),
        constants=tuple(repr(leaf) for leaf in leaves if not _is_tensor(leaf)),
    )


def cause_of(new: Signature, seen: Sequence[Signature]) -> str:
    """Why a call compiled: its differences from the most similar call before.

    Args:
        new: Of the call.
        seen: Of all calls of the Cell before.
    """
    if not seen:
        return FIRST_CALL
    nearest = min((_differences(new, before) for before in seen), key=len)
    # The same inputs and yet a compile: a value that is not among them has changed.
    return " and ".join(nearest) or CONSTANT


def _differences(new: Signature, before: Signature) -> list[str]:
    if len(new.shapes) != len(before.shapes):
        return [NEW_INPUTS]
    pairs = (
        (NEW_SHAPE, new.shapes != before.shapes),
        (NEW_DTYPE, new.dtypes != before.dtypes),
        (TRAIN_FLIP, new.is_training != before.is_training),
        (CONSTANT, new.constants != before.constants),
    )
    return [name for name, differs in pairs if differs]


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _leaves(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _leaves(value)
        else:
            yield value


def _wait(output: Any) -> None:
    """Return when the device has made all of an output."""
    for leaf in _leaves((output,)):
        if hasattr(leaf, "asnumpy"):
            leaf.asnumpy()

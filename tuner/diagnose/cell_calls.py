"""Calls of Cells at one shape, and what they say about where a forward broke."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from tuner.batching.grouping import Shape
from tuner.errors import BadInputError

Dims = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CellCall:
    """One call of a Cell.

    Attributes:
        path: In the tree of the model, for example `layers.3.attention`; empty: the model.
        class_name: Of the Cell.
        input_shapes: Of the tensors among its arguments, in their order.
        output_shapes: Of the tensors that it returned; None: it was entered and never left.
        weights: Its own parameters, without those of Cells inside: name and shape.
        left_at: Its place in the order in which Cells were left, from 0; -1: never.
        largest_index: The highest value among its whole-number inputs; None: it has none.
    """

    path: str
    class_name: str
    input_shapes: tuple[Dims, ...]
    output_shapes: tuple[Dims, ...] | None = None
    weights: tuple[tuple[str, Dims], ...] = ()
    left_at: int = -1
    largest_index: int | None = None

    @property
    def name(self) -> str:
        """Path and class."""
        return f"{self.path or 'the model'} ({self.class_name})"

    @property
    def table_rows(self) -> int | None:
        """Rows of the table that its only input looks up; None: it is no such Cell."""
        is_lookup = self.largest_index is not None and len(self.input_shapes) == 1
        tables = [shape for _, shape in self.weights]
        return tables[0][0] if is_lookup and [len(table) for table in tables] == [2] else None

    @property
    def is_past_table(self) -> bool:
        """Whether it is asked for a row that its table does not have."""
        rows = self.table_rows
        return rows is not None and (self.largest_index or 0) >= rows


@dataclass(frozen=True, kw_only=True)
class RefusedCall:
    """A call of flash attention with arguments that are not as documented.

    Attributes:
        cell_name: Path and class of the Cell that made it.
        error: Argument, rule and value.
        is_replaced: Whether zeros stood for its result, since the device has no such op.
    """

    cell_name: str
    error: BadInputError
    is_replaced: bool = False


@dataclass(frozen=True, kw_only=True)
class ShapeTrace:
    """A forward at one shape.

    Attributes:
        shape: (B, T) of the inputs.
        calls: In the order in which Cells were entered.
        error: What the forward raised; None: it came through.
        place: File and line of the model's source at which it broke; empty: not known.
        line: The text of that line.
        refused: Calls of flash attention that are not as documented, in their order.
        num_stand_ins: Calls of flash attention computed by NumPy, since the device has no such op.
    """

    shape: Shape
    calls: tuple[CellCall, ...]
    error: Exception | None = None
    place: str = ""
    line: str = ""
    refused: tuple[RefusedCall, ...] = ()
    num_stand_ins: int = 0

    @property
    def broken(self) -> CellCall | None:
        """The innermost Cell that was not left; None: all were, or none was entered."""
        is_open = [call for call in self.calls if call.output_shapes is None]
        return is_open[-1] if is_open else None


def describe_break(trace: ShapeTrace) -> str:
    """Which output met which input where a forward broke, in one sentence."""
    broken = trace.broken
    if broken is None:
        return "the forward broke before any Cell was entered"
    index = trace.calls.index(broken)
    taken = ", ".join(str(list(shape)) for shape in broken.input_shapes) or "no tensor"
    weights = ", ".join(f"{name} {list(shape)}" for name, shape in broken.weights)
    inside = trace.calls[index + 1 :]
    if inside:
        last = max(inside, key=lambda call: call.left_at)
        return f"{broken.name} took {taken} and broke after {last.name} gave {given_shapes(last)}"
    giver = _giver(trace.calls[:index], broken)
    source = f", the output of {giver.name}" if giver else ""
    of_weights = f"; its own weights: {weights}" if weights and broken.path else ""
    return f"{broken.name} took {taken}{source}, and broke on it{of_weights}"


def first_line(error: BaseException) -> str:
    """What an error says, without the call stack below; at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def format_trace(trace: ShapeTrace) -> str:
    """A table of the calls of one trace."""
    lines = [
        (
            call.path or "(model)",
            call.class_name,
            join_shapes(call.input_shapes),
            given_shapes(call),
        )
        for call in trace.calls
    ]
    title = f"B={trace.shape[0]} L={trace.shape[1]}"
    return f"{title}\n{tabulate(lines, headers=['path', 'class', 'takes', 'gives'])}"


def _giver(before: Sequence[CellCall], taker: CellCall) -> CellCall | None:
    """The Cell left last whose output has the shape of one of the inputs."""
    given = [
        call
        for call in before
        if call.output_shapes and set(call.output_shapes) & set(taker.input_shapes)
    ]
    return max(given, key=lambda call: call.left_at, default=None)


def given_shapes(call: CellCall) -> str:
    """What a Cell returned, as text."""
    return "(broke)" if call.output_shapes is None else join_shapes(call.output_shapes)


def join_shapes(shapes: Sequence[Dims]) -> str:
    """Shapes in a row, as text."""
    return ", ".join(str(list(shape)) for shape in shapes) or "-"


def show_shape(shape: Shape) -> str:
    """The shape of a batch, as text."""
    return f"B={shape[0]} L={shape[1]}"


def find_stuck(traces: Sequence[ShapeTrace]) -> CellCall | None:
    """The first call that gets the same two leading axes whatever B and T are.

    Args:
        traces: Of one model; looked at are the first and another that differs in both axes.
    """
    first = traces[0]
    for other in traces[1:]:
        if first.shape[0] == other.shape[0] or first.shape[1] == other.shape[1]:
            continue
        for one, two in zip(first.calls, other.calls, strict=False):
            if one.path != two.path:
                break
            axes = [shape[:2] for shape in one.input_shapes]
            # Tables of all positions may come as [1, T, D], and single axes say nothing.
            is_large = bool(axes) and all(len(axis) == 2 and axis[0] > 1 for axis in axes)
            if is_large and axes == [shape[:2] for shape in two.input_shapes]:
                return one
    return None

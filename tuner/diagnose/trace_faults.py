"""What is wrong with a model, from forwards of it at a few shapes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tuner.batching.grouping import Shape
from tuner.diagnose.cell_calls import (
    RefusedCall,
    ShapeTrace,
    describe_break,
    find_stuck,
    first_line,
    given_shapes,
    join_shapes,
    show_shape,
)
from tuner.diagnose.finding import Finding, finding_of_error
from tuner.errors import OUT_OF_MEMORY_TEXT, BadInputError

FIXED_LENGTH_TEXT = re.compile(
    r"\b(reshape|view|broadcast_to|expand|tile|split|chunk|zeros|ones|tril|triu|arange)\w*\("
    r"[^#]*?(?<![\w.])([2-9]|\d{2,})\b"
)
"""A shape written into a line of source: one of these names with a number above 1."""


DTYPE_TEXT = re.compile(
    r"[Uu]nsupported (op|data|dtype)|(data ?|d)type .*not support|Select \w+ operator|InferType"
    r"|the (data ?|d)?type of .*(should|must) be"
)
"""What MindSpore says of dtypes; InferType stands in the call stack below its message."""

COLLECTIVE_TEXT = re.compile(
    r"\b(hccl|mccl|hcom)|\bE[IJ]\d{4}\b|\b(AllReduce|AllGather|ReduceScatter)-op", re.IGNORECASE
)
"""What MindSpore says where ranks do not come together: HCCL's codes are EI and EJ (from the
documentation, not run); an AllReduce of CPU whose other rank is gone fails to launch (2.10)."""

BROKEN = {
    "fixed-length": (
        "a size that belongs to one batch shape is written into the model",
        "take B and T from the input's shape: `B, T = x.shape[:2]`, or write -1",
    ),
    "layers-do-not-fit": (
        "what one layer gives is not what the next one takes, at any shape",
        "make the sizes of the two agree",
    ),
    "forward-raises": ("the forward raises, which is no matter of shapes", "mend that line"),
}
"""Name of a finding about a forward that broke -> why, fix."""


def find_faults(traces: Sequence[ShapeTrace], vocab_size: int) -> list[Finding]:
    """What is wrong with a model at some shapes.

    Args:
        traces: Of one model, at different shapes; at least one.
        vocab_size: V of the logits [B, T, V] that it must return.

    Returns:
        By name: `flash-arguments` (from the documentation), `index-past-table`, `fixed-length`
        (a length written into the source), `layers-do-not-fit` (at any shape), `forward-raises`
        (no matter of shapes), `output-shape`; one `shapes-follow`, ok, if nothing is wrong.
    """
    found = [*_flash_arguments(traces), *_past_tables(traces)]
    broken = [trace for trace in traces if trace.error is not None]
    if broken and not any(call.is_past_table for trace in broken for call in trace.calls):
        found.append(_broken(broken[0], traces))
    if not broken:
        found += _output_shape(traces, vocab_size)
    shapes = ", ".join(show_shape(trace.shape) for trace in traces)
    what = f"{len(traces[0].calls)} calls of Cells follow the shapes {shapes}"
    if any(trace.num_stand_ins for trace in traces):
        what += "; flash attention was computed by NumPy, since this device has no such op"
    return found or [Finding(name="shapes-follow", severity="ok", what=what)]


def is_no_shape_error(error: BaseException) -> bool:
    """Whether an error says itself that it is about something else.

    That is memory, dtypes, input, or other ranks that do not answer.
    """
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, (TypeError, AttributeError, NameError, KeyError, BadInputError)):
        return True
    others = (DTYPE_TEXT, COLLECTIVE_TEXT)
    return bool(re.search(OUT_OF_MEMORY_TEXT, text) or any(one.search(text) for one in others))


def _flash_arguments(traces: Sequence[ShapeTrace]) -> list[Finding]:
    """The first call of every Cell; Cells that say the same at the same shape are one finding."""
    first: dict[str, tuple[Shape, RefusedCall]] = {}
    for trace in traces:
        for call in trace.refused:
            first.setdefault(call.cell_name, (trace.shape, call))
    alike: dict[tuple[Shape, str], list[RefusedCall]] = {}
    for shape, call in first.values():
        alike.setdefault((shape, call.error.problem), []).append(call)
    return [_flash_finding(shape, calls) for (shape, _), calls in alike.items()]


def _flash_finding(shape: Shape, calls: Sequence[RefusedCall]) -> Finding:
    more = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
    why = "the op may take it without a word and compute something else, or NaN"
    if calls[0].is_replaced:
        why += "; here, without the op, the trace went on with zeros for the result"
    place = f"at {show_shape(shape)} {calls[0].cell_name}{more}"
    return finding_of_error(calls[0].error, name="flash-arguments", why=why, place=place)


def _past_tables(traces: Sequence[ShapeTrace]) -> list[Finding]:
    """Looked for in the values, since not every device raises for a row that is not there.

    CPU does (2.10). Ascend gives any number: from the documentation of ops.gather, not run.
    """
    past = {
        call.path: (trace, call)
        for trace in reversed(traces)
        for call in trace.calls
        if call.is_past_table
    }
    return [
        Finding(
            name="index-past-table",
            severity="error",
            what=f"at {show_shape(trace.shape)} {call.name} looks up row {call.largest_index} of "
            f"a table of {call.table_rows} rows (0 to {(call.table_rows or 0) - 1})",
            why="position ids, or ids, lie past the table that they look up",
            fix="size a table of positions by max_length, which the factory is given, lower "
            "data.max_length, or use rotary positions",
        )
        for trace, call in past.values()
    ]


def _broken(trace: ShapeTrace, traces: Sequence[ShapeTrace]) -> Finding:
    assert trace.error is not None
    sound = [one.shape for one in traces if one.error is None]
    stuck = find_stuck([trace, *(one for one in traces if one is not trace)])
    name = "layers-do-not-fit"
    if is_no_shape_error(trace.error):
        name = "forward-raises"
    elif sound or stuck or FIXED_LENGTH_TEXT.search(trace.line):
        name = "fixed-length"
    parts = [f"at {show_shape(trace.shape)} {describe_break(trace)}", first_line(trace.error)]
    if trace.place:
        parts.insert(1, f"{trace.place}: {trace.line}")
    if stuck is not None:
        taken = join_shapes(stuck.input_shapes)
        parts.append(f"{stuck.name} takes {taken} whatever the shape of the batch")
    if sound:
        parts.append(f"{', '.join(map(show_shape, sound))} came through")
    why, fix = BROKEN[name]
    return Finding(name=name, severity="error", what="; ".join(parts), why=why, fix=fix)


def _output_shape(traces: Sequence[ShapeTrace], vocab_size: int) -> list[Finding]:
    wrong = [
        trace
        for trace in traces
        if trace.calls and trace.calls[0].output_shapes != ((*trace.shape, vocab_size),)
    ]
    if not wrong:
        return []
    trace = wrong[0]
    index, where = _first_astray(traces), ""
    if index is not None:
        call = trace.calls[index]
        where = f"; the first that does not follow is {call.name}: "
        where += f"{join_shapes(call.input_shapes)} -> {given_shapes(call)}"
    return [
        Finding(
            name="output-shape",
            severity="error",
            what=f"at {show_shape(trace.shape)} the model gives {given_shapes(trace.calls[0])} in "
            f"place of {[*trace.shape, vocab_size]}{where}",
            why="the loss needs logits [B, T, vocab_size], row by row and token by token",
            fix="take B and T from the input's shape where a reshape or view names sizes",
        )
    ]


def _first_astray(traces: Sequence[ShapeTrace]) -> int | None:
    """Which call is left first among those whose output does not follow B and T."""
    of_first = traces[0].calls
    if any([c.path for c in trace.calls] != [c.path for c in of_first] for trace in traces):
        return None
    shapes = [trace.shape for trace in traces]
    for index in sorted(range(len(of_first)), key=lambda i: of_first[i].left_at):
        calls = [trace.calls[index] for trace in traces]
        outputs = [call.output_shapes or () for call in calls]
        takes_others = len({call.input_shapes for call in calls}) > 1
        if takes_others and len(set(outputs)) == 1:
            return index
        if not _follows([output[0][0] for output in outputs if output and output[0]], shapes):
            return index
    return None


def _follows(leading: Sequence[int], shapes: Sequence[Shape]) -> bool:
    """Whether a leading axis is 1, B, T or B T times one whole number at all shapes."""
    if len(leading) < len(shapes):
        return True
    units = [(1, size, length, size * length) for size, length in shapes]
    return any(
        len({divmod(axis, unit) for axis, unit in zip(leading, column, strict=True)}) == 1
        and leading[0] % column[0] == 0
        for column in zip(*units, strict=True)
    )

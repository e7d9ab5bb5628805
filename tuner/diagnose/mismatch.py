"""From what MindSpore raises about shapes to what broke, where, and what usually breaks so.

An error of a compiled graph names an op, and often not the one that is wrong. So the batch is
looked at, the forward runs again op by op with hooks at the same shape, and once more at half of
it; the three usual causes are then told with what speaks for each, the likeliest marked. It takes
a few seconds and compiles nothing. Graphs of the process compile again afterwards: call it only
where a run has failed.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mindspore import nn

from tuner.batching.grouping import Shape
from tuner.config.schema import TrainConfig
from tuner.diagnose.cell_calls import (
    ShapeTrace,
    describe_break,
    find_stuck,
    first_line,
    join_shapes,
    show_shape,
)
from tuner.diagnose.shape_trace import model_arrays, trace_forward
from tuner.diagnose.trace_faults import FIXED_LENGTH_TEXT, is_no_shape_error
from tuner.train.loader import Batch
from tuner.train.model import Decoder
from tuner.train.shape_check import TABLE, TOGETHER, Mismatch, check_batch

SHAPE_TEXT = re.compile(
    r"[Ss]hape|[Dd]imension|[Bb]roadcast|[Rr]eshape|\b[Rr]ange|out of bounds|\bsizes? of|\baxis"
)
RANGE_TEXT = re.compile(r"should be in the range|out of (range|bounds)|index\w* .*range")
MASK_TEXT = re.compile(r"mask|segment", re.IGNORECASE)
RESHAPE_TEXT = re.compile(r"reshape|\bview\b|proposed_shape", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One of the usual causes of a shape mismatch.

    Attributes:
        name: `mask-and-input`, `positions-past-table` or `fixed-length`.
        text: In plain words.
        fix: What to do if it is this one.
        evidence: What speaks for it; empty: nothing.
        weight: Of the evidence; 0: none, 4: seen in the values themselves.
    """

    name: str
    text: str
    fix: str
    evidence: str = ""
    weight: int = 0


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a step failed.

    Attributes:
        shape: (B, T) of the batch.
        error_line: What was raised, without its stack.
        where: Which output met which input, or that op by op nothing fails.
        place: Line of the model's source, with its text; empty: not known.
        causes: The three, in the order in which they are usual.
        likeliest: Name of one of them; empty: none has evidence.
        raw: All that was raised, stacks included, for a log.
    """

    shape: Shape
    error_line: str
    where: str
    place: str
    causes: tuple[Cause, ...]
    likeliest: str
    raw: str

    def lines(self, log: Path | None = None) -> list[str]:
        """At most ten lines without a stack.

        Args:
            log: Where `raw` is, or will be; None: it is not mentioned.
        """
        likely = next((cause for cause in self.causes if cause.name == self.likeliest), None)
        advice = (
            f"what to do: {likely.fix}"
            if likely
            else "nothing speaks for one of these: compare the two sizes named above"
        )
        return [
            f"shape mismatch at {show_shape(self.shape)}: {self.error_line}",
            f"where: {self.where}",
            *([f"line: {self.place}"] if self.place else []),
            "the usual causes, the likeliest marked:",
            *(self._line_of(number, cause) for number, cause in enumerate(self.causes, start=1)),
            advice,
            *([f"all that MindSpore said: {log}"] if log else []),
        ]

    def _line_of(self, number: int, cause: Cause) -> str:
        mark = ">" if cause.name == self.likeliest else " "
        return f"{mark} {number}. {cause.text}" + (f": {cause.evidence}" if cause.evidence else "")


def explain_failure(
    error: BaseException, model: nn.Cell, config: TrainConfig, batch: Batch
) -> Explanation | None:
    """Find out which shapes do not fit, after a step or a warm-up raised.

    Args:
        error: What it raised.
        model: That was run: the built-in decoder or the Cell of a factory.
        config: The whole config.
        batch: That it was run with.

    Returns:
        None if the error is about something else, as memory or dtypes.
    """
    if is_no_shape_error(error) or not isinstance(error, Exception):
        return None
    trace = trace_forward(model, model_arrays(batch))
    if trace.error is not None and is_no_shape_error(trace.error):
        return None
    checked = check_batch(batch, config, _table_rows(model, config))
    if not (checked or SHAPE_TEXT.search(str(error)) or trace.error is not None):
        return None
    half = _trace_half(model, batch) if trace.error is not None else None
    causes = _causes(error, trace, half, checked)
    likeliest = max(causes, key=lambda cause: cause.weight)
    return Explanation(
        shape=batch.shape,
        error_line=first_line(error),
        where=_where(trace, half),
        place=f"{trace.place}: {trace.line}" if trace.place else "",
        causes=causes,
        likeliest=likeliest.name if likeliest.weight else "",
        raw=_raw_text(error, trace),
    )


def _table_rows(model: nn.Cell, config: TrainConfig) -> int | None:
    """Positions that a model has, as it is built."""
    if not isinstance(model, Decoder):
        return config.model.max_positions
    table = model.position_embedding if model.has_learned_positions else model.cos
    return int(table.shape[0])


def _trace_half(model: nn.Cell, batch: Batch) -> ShapeTrace:
    size, length = (max(1, axis // 2) for axis in batch.shape)
    cut = [np.ascontiguousarray(array[:size, :length]) for array in model_arrays(batch)]
    return trace_forward(model, cut)


def _where(trace: ShapeTrace, half: ShapeTrace | None) -> str:
    if trace.error is None:
        return (
            "the same forward comes through op by op, so the sizes of the layers fit: what a "
            "graph infers differs from op by op, or its backward fails"
        )
    text = describe_break(trace)
    if half is None or half.shape == trace.shape:
        return text
    fails = "comes through" if half.error is None else "fails as well"
    return f"{text}; {show_shape(half.shape)} {fails}"


def _causes(
    error: BaseException, trace: ShapeTrace, half: ShapeTrace | None, checked: list[Mismatch]
) -> tuple[Cause, ...]:
    # What stands in the stack below are names of MindSpore's own functions.
    said = [str(one).split("- C++ Call Stack")[0] for one in (error, trace.error or "")]
    words = "\n".join(said)
    return (
        _mask_cause(words, trace.line, checked),
        _position_cause(words, trace, checked),
        _length_cause(words, trace, half),
    )


def _mask_cause(words: str, line: str, checked: list[Mismatch]) -> Cause:
    evidence, weight = "", 0
    seen = [one for one in checked if not _is_past(one)]
    if seen:
        evidence, weight = "; ".join(one.what for one in seen), 4
    elif MASK_TEXT.search(line):
        evidence, weight = "the line works on the mask", 2
    elif MASK_TEXT.search(words):
        evidence, weight = "the error speaks of a mask", 1
    return Cause(
        name="mask-and-input",
        text="mask or labels and the input were made apart",
        fix=TOGETHER,
        evidence=evidence,
        weight=weight,
    )


def _position_cause(words: str, trace: ShapeTrace, checked: list[Mismatch]) -> Cause:
    evidence, weight = "", 0
    seen = [one.what for one in checked if _is_past(one)]
    past = [
        f"{call.name} has a table of {call.table_rows} rows, asked for row {call.largest_index}"
        for call in trace.calls
        if call.is_past_table
    ]
    if seen or past:
        evidence, weight = "; ".join([*seen, *past]), 4
    elif RANGE_TEXT.search(words):
        evidence, weight = "the error speaks of an index out of its range", 3
    return Cause(
        name="positions-past-table",
        text="positions, or ids, lie past their table",
        fix=TABLE,
        evidence=evidence,
        weight=weight,
    )


def _is_past(mismatch: Mismatch) -> bool:
    return mismatch.name in ("positions-past-table", "positions-past-row", "outside-vocabulary")


def _length_cause(words: str, trace: ShapeTrace, half: ShapeTrace | None) -> Cause:
    evidence: list[str] = []
    weight = 0
    if FIXED_LENGTH_TEXT.search(trace.line):
        evidence.append("the line names a size")
        weight = 3
    elif RESHAPE_TEXT.search(words) or RESHAPE_TEXT.search(trace.line):
        evidence.append("it broke in a reshape")
        weight = 1
    stuck = find_stuck([trace, half]) if half is not None else None
    if half is not None and stuck is not None:
        taken = join_shapes(stuck.input_shapes)
        evidence.append(f"{stuck.name} takes {taken}, at {show_shape(half.shape)} too")
        weight = 3
    if half is not None and half.error is None:
        evidence.append(f"{show_shape(half.shape)} comes through")
        weight = max(weight, 2)
    return Cause(
        name="fixed-length",
        text="a length is fixed in a reshape, a view or a shape derived from one batch",
        fix="take B and T from the input's shape: `B, T = x.shape[:2]`, or write -1",
        evidence="; ".join(evidence),
        weight=weight,
    )


def _raw_text(error: BaseException, trace: ShapeTrace) -> str:
    parts = ["".join(traceback.format_exception(type(error), error, error.__traceback__))]
    if trace.error is not None:
        again = trace.error
        parts.append("The forward, op by op:\n")
        parts.append("".join(traceback.format_exception(type(again), again, again.__traceback__)))
    return "\n".join(parts)

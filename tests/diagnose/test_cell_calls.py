"""What calls of Cells say, of calls written by hand."""

from __future__ import annotations

import pytest

from tuner.diagnose.cell_calls import (
    CellCall,
    RefusedCall,
    ShapeTrace,
    describe_break,
    find_stuck,
    first_line,
    format_trace,
)
from tuner.diagnose.trace_faults import find_faults, is_no_shape_error
from tuner.errors import BadInputError


def call(path, takes, gives=None, left_at=-1, **more):
    return CellCall(
        path=path,
        class_name="Cell",
        input_shapes=tuple(takes),
        output_shapes=None if gives is None else (gives,),
        left_at=left_at,
        **more,
    )


def trace(shape, *calls, error=None):
    return ShapeTrace(shape=shape, calls=calls, error=error)


def test_the_innermost_open_cell_is_where_it_broke():
    broken = trace(
        (2, 8),
        call("", [(2, 8)]),
        call("a", [(2, 8)], (2, 8, 4), 0),
        call("b", [(2, 8, 4)]),
        call("b.c", [(2, 8, 4)], weights=(("weight", (6, 5)),)),
        error=ValueError("x"),
    )
    assert broken.broken is not None
    assert broken.broken.path == "b.c"
    assert describe_break(broken) == (
        "b.c (Cell) took [2, 8, 4], the output of a (Cell), and broke on it; its own weights: "
        "weight [6, 5]"
    )
    nothing = trace((2, 8), error=ValueError("x"))
    assert nothing.broken is None
    assert describe_break(nothing) == "the forward broke before any Cell was entered"


def test_a_table_is_a_single_matrix_that_whole_numbers_look_up():
    table = {"weights": (("table", (8, 16)),)}
    assert call("t", [(2, 8)], largest_index=8, **table).is_past_table
    assert not call("t", [(2, 8)], largest_index=7, **table).is_past_table
    assert not call("t", [(2, 8)], **table).is_past_table
    two = (("table", (8, 16)), ("bias", (16,)))
    assert call("t", [(2, 8)], largest_index=8, weights=two).table_rows is None


def with_inner(shape, inner):
    return trace(shape, call("", [shape]), call("inner", [inner]))


@pytest.mark.parametrize(
    ("first", "second", "is_stuck"),
    [
        (((2, 8), (2, 8, 16)), ((3, 12), (3, 12, 16)), False),
        (((4, 12), (2, 8, 16)), ((2, 6), (2, 8, 8)), True),
        # Of one B nothing is known.
        (((2, 8), (2, 16)), ((2, 12), (2, 16)), False),
        # A table of all positions.
        (((2, 8), (1, 64, 16)), ((3, 12), (1, 64, 16)), False),
    ],
)
def test_an_input_that_stays_as_it_is_is_stuck(first, second, is_stuck):
    found = find_stuck([with_inner(*first), with_inner(*second)])
    assert (found is not None and found.path == "inner") == is_stuck


def test_an_output_that_stays_as_it_is_is_named():
    """The mean over rows and tokens, once kept as a matrix for all shapes."""
    traces = [
        trace(shape, call("", [shape], (5, 5), 1), call("pool", [(*shape, 4)], (5, 5), 0))
        for shape in ((2, 8), (3, 12))
    ]
    [finding] = find_faults(traces, 23)
    assert finding.name == "output-shape"
    assert finding.what == (
        "at B=2 L=8 the model gives [5, 5] in place of [2, 8, 23]; the first that does not follow "
        "is pool (Cell): [2, 8, 4] -> [5, 5]"
    )


def test_tokens_that_are_shifted_are_named_at_the_end():
    """T - 1 is no multiple of anything, but whole rows of logits are B in number."""
    traces = [trace((b, t), call("", [(b, t)], (b, t - 1, 23), 0)) for b, t in ((2, 8), (3, 12))]
    [finding] = find_faults(traces, 23)
    assert finding.what == "at B=2 L=8 the model gives [2, 7, 23] in place of [2, 8, 23]"


def test_cells_that_say_the_same_of_flash_attention_are_one_finding():
    def refused(cell_name, problem, **more):
        error = BadInputError(problem, fix="mend it")
        return RefusedCall(cell_name=cell_name, error=error, **more)

    traces = [
        ShapeTrace(shape=(2, 8), calls=(), refused=tuple(
            refused(f"layers.{number}", "float mask") for number in range(3)
        )),
        ShapeTrace(shape=(3, 12), calls=(), refused=(
            refused("layers.1", "float mask"), refused("layers.7", "no mask", is_replaced=True),
        )),
    ]  # fmt: skip
    same, other = find_faults(traces, 23)
    assert {same.name, other.name} == {"flash-arguments"}
    assert (same.what, same.fix) == ("at B=2 L=8 layers.0 and 2 more: float mask", "mend it")
    assert other.what == "at B=3 L=12 layers.7: no mask"
    assert "zeros" in other.why and "zeros" not in same.why


def test_the_table_has_a_line_for_every_call():
    text = format_trace(trace((2, 8), call("", [(2, 8)]), call("a", [], (2, 8, 4), 0)))
    title, head, _, top, inner = text.splitlines()
    assert title == "B=2 L=8"
    assert head.split() == ["path", "class", "takes", "gives"]
    assert top.split() == ["(model)", "Cell", "[2,", "8]", "(broke)"]
    assert inner.split() == ["a", "Cell", "-", "[2,", "8,", "4]"]


def test_an_error_is_cut_to_what_it_says():
    assert first_line(ValueError("\n  For 'MatMul' \nstack")) == "ValueError: For 'MatMul'"
    assert first_line(ValueError()) == "ValueError: "
    assert len(first_line(ValueError("x" * 999))) == 300


@pytest.mark.parametrize(
    ("error", "is_other"),
    [
        (ValueError("For 'MatMul' the input dimensions must be equal, but got 24 and 16"), False),
        (RuntimeError("For 'Gather', the 'input_indices' should be in the range [0, 8)"), False),
        (ValueError("proposed_shape '[const vector]{2, 512, -1}' is invalid for input"), False),
        (MemoryError(), True),
        (RuntimeError("std::bad_alloc"), True),
        (TypeError("For 'MatMulExt', the type of 'x2' should be same as 'x1'"), True),
        (RuntimeError("Unsupported op [Softmax] on CPU"), True),
        (BadInputError("shape", fix=""), True),
        (RuntimeError("Launch kernel failed, name:Default/AllReduce-op0"), True),
        (RuntimeError("EI0002: Notify wait timeout; HCCL_EXEC_TIMEOUT"), True),
        (RuntimeError("For 'BroadcastTo', shape [3] is wrong: Default/BroadcastTo-op0"), False),
    ],
)
def test_memory_dtypes_and_lost_ranks_are_no_matter_of_shapes(error, is_other):
    assert is_no_shape_error(error) == is_other

"""Which shapes of a plan a trial measures: those that carry the run and are least known."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tuner.batching.grouping import Shape
from tuner.simulate.cost_book import KnownCosts

KNOWN_WELL = 0.02
"""Share of a run's seconds, as a 95 % half width, that its unmeasured shapes may leave open. Below
the error of a measurement between processes there is nothing to win by another one."""

FAR_BELOW = 2
"""Times the padded tokens of a plan's smallest shape that the next measured one may have. Random
batches from 8 x 160 up, foretold from shapes of 5,000 tokens and more: 84 % too much."""

NEAR = 1.5
"""Ratio of padded tokens, and of lengths, up to which two shapes tell of each other."""


def choose_shapes(
    counts: Mapping[Shape, float], epochs: int, costs: KnownCosts, max_shapes: int
) -> tuple[Shape, ...]:
    """The shapes to measure, largest first, so that one too large for memory shows at once.

    The uncertain seconds of a shape are its half width times its steps, and those of its compile.
    Shapes that were not measured are taken from the most uncertain seconds down, until what is
    left open is under KNOWN_WELL of the run, or under the error that all of its steps have in
    common, where the machine is less steady than that. The largest shape comes first of all where
    nothing as large was measured: it decides whether the plan fits in memory. The smallest comes
    next where nothing was measured, or is about to be, of at most FAR_BELOW times its padded
    tokens, and a place is left for others: a fit foretells between shapes that it knows, and what
    a step takes that does no work shows in the small ones.

    Args:
        counts: (B, L) -> steps of an epoch, not all 0.
        epochs: >= 1.
        costs: What is known.
        max_shapes: >= 1.

    Returns:
        At most max_shapes; empty where the plan is known well.
    """
    met = [shape for shape, count in counts.items() if count]
    run_s = costs.compile_s(met) + epochs * sum(
        counts[shape] * costs.step_s(shape) for shape in met
    )
    open_s = {
        shape: _open_s(shape, epochs * counts[shape], costs)
        for shape in met
        if shape not in costs.steps_s
    }
    well = max(KNOWN_WELL, costs.process_error)
    chosen: list[Shape] = []
    largest, smallest = max(met, key=_size), min(met, key=_size)
    if _size(largest) > max(map(_size, costs.steps_s), default=(0, 0)):
        chosen.append(largest)
    least_tokens = min(tokens for tokens, _ in map(_size, (*costs.steps_s, *chosen)))
    if FAR_BELOW * _size(smallest)[0] < least_tokens and len(chosen) + 1 < max_shapes:
        chosen.append(smallest)
    for shape in sorted(open_s, key=lambda shape: (-open_s[shape], shape)):
        left_s = sum(seconds for other, seconds in open_s.items() if other not in chosen)
        if left_s <= well * run_s or len(chosen) >= max_shapes:
            break
        if shape not in chosen:
            chosen.append(shape)
    return largest_first(chosen)


def far_shapes(wanted: Sequence[Shape], known: Collection[Shape]) -> tuple[Shape, ...]:
    """Those of the wanted shapes of which no known one tells, each far from the others, too.

    A plan whose batches all have as many rows says little of many short rows: overhead, tokens and
    attention grow together along its shapes, and fits of all three pass through them. On a dynamic
    graph one more shape costs a few steps.

    Args:
        wanted: Shapes that any plan may meet.
        known: Measured, or about to be.
    """
    chosen: list[Shape] = []
    for shape in wanted:
        if not any(_is_near(shape, other) for other in (*known, *chosen)):
            chosen.append(shape)
    return tuple(chosen)


def _is_near(shape: Shape, other: Shape) -> bool:
    pairs = zip(_size(shape), _size(other), strict=True)
    return all(max(pair) <= NEAR * min(pair) for pair in pairs)


def largest_first(shapes: Collection[Shape]) -> tuple[Shape, ...]:
    """Shapes by their padded tokens, most first: one too large for memory shows at once."""
    return tuple(sorted(shapes, key=_size, reverse=True))


def _open_s(shape: Shape, num_steps: float, costs: KnownCosts) -> float:
    compile_s = 0.0 if shape in costs.first_calls_s else costs.shape_s(shape)
    return num_steps * costs.half_width_s(shape) + costs.model.compile_error * compile_s


def _size(shape: Shape) -> tuple[int, int]:
    size, length = shape
    return size * length, length

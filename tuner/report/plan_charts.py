"""Figures of the plan: lengths, padding and run time against the number of shapes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tuner.report.chart_parts import (
    ESTIMATED,
    MEASURED,
    WIDE_PX,
    add_legend,
    number_ticks,
    open_axes,
)
from tuner.report.markup import count, seconds, time_unit
from tuner.report.points import LengthFigure, RunTimeFigure, RunTimePoint, WasteFigure
from tuner.report.svg import ACCENT, INK, MUTED, PAPER, SECOND, inline_svg

# Trials with far more shapes than the curve would leave it no room.
ROOM_FOR_MORE_SHAPES = 1.2
# Times the shortest run: what takes longer is told in words.
ROOM_FOR_LONGER_RUNS = 2.5


def draw_lengths(content: LengthFigure, name: str, width: int) -> str:
    """Rows by length, with the boundaries of the best config as lines."""
    edges, rows = content.bin_edges, content.num_rows
    widths = [after - before for before, after in itertools.pairwise(edges)]

    def draw(figure: Any) -> None:
        axes = open_axes(figure, "length of a row in tokens", "rows")
        axes.bar(
            edges[:-1], rows, widths, align="edge", color=ACCENT, alpha=0.5, edgecolor=PAPER,
            linewidth=0.6, label="rows of the data",
        )  # fmt: skip
        for place, end in enumerate(content.boundaries):
            label = "boundary of the best config" if place == 0 else None
            axes.axvline(end, color=SECOND, linewidth=1.3, linestyle=(0, (1, 1.5)), label=label)
        # Bins that grow were made for an axis on which they look equal.
        if edges[0] > 0 and max(widths) > 4 * min(widths):
            axes.set_xscale("log", base=2)
        else:
            axes.set_xlim(0, None)
        number_ticks(axes.xaxis, max_ticks=5 if width < WIDE_PX else 9)
        number_ticks(axes.yaxis)
        add_legend(figure, width)

    return inline_svg(name, width, 300, draw)


def draw_waste(content: WasteFigure, name: str, width: int) -> str:
    """Padding against the number of shapes."""

    def draw(figure: Any) -> None:
        from matplotlib.ticker import FuncFormatter

        axes = open_axes(figure, "shapes, each compiled once", "padding, share of all tokens")
        shapes = [point.num_shapes for point in content.points]
        padding = [point.padding_fraction for point in content.points]
        axes.plot(shapes, padding, "o-", color=ACCENT, markersize=5, label="counted on the plan")
        _mark(axes, content.chosen_num_shapes, "best config")
        axes.set_ylim(0, None)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
        _whole_numbers(axes.xaxis)
        add_legend(figure, width)

    return inline_svg(name, width, 290, draw)


def draw_run_time(content: RunTimeFigure, name: str, width: int) -> str:
    """Estimated run time against the number of shapes, compile time in it, and timed trials."""
    least_s = min(point.estimated_run_s for point in content.points)
    highest_s = max(point.high_s or point.estimated_run_s for point in content.points)
    top_s = min(highest_s, ROOM_FOR_LONGER_RUNS * least_s) * 1.08
    scale, unit = time_unit(top_s)

    def draw(figure: Any) -> None:
        axes = open_axes(figure, "shapes, each compiled once", f"run time in {unit}")
        _draw_model(axes, content.points, scale)
        reach = content.points[-1].num_shapes * ROOM_FOR_MORE_SHAPES
        timed = [r for r in content.timed_runs if r.num_shapes <= reach and r.run_s <= top_s]
        if timed:
            axes.plot(
                [run.num_shapes for run in timed],
                [run.run_s / scale for run in timed],
                color=SECOND,
                label="trials, from measured steps",
                **MEASURED,
            )
        _mark(axes, content.optimum_num_shapes, "estimated optimum")
        axes.set_ylim(0, top_s / scale)
        _tell_of_those_above(axes, [p for p in content.points if p.estimated_run_s > top_s])
        number_ticks(axes.yaxis)
        _whole_numbers(axes.xaxis)
        add_legend(figure, width)

    return inline_svg(name, width, 380, draw)


def _draw_model(axes: Any, points: Sequence[RunTimePoint], scale: float) -> None:
    shapes = [point.num_shapes for point in points]
    run = [point.estimated_run_s / scale for point in points]
    compiling = [point.compile_s / scale for point in points]
    known = [(p.num_shapes, p.low_s, p.high_s) for p in points]
    ends = [(k, low, high) for k, low, high in known if low is not None and high is not None]
    axes.plot(shapes, run, color=ACCENT, label="estimated by the cost model", **ESTIMATED)
    if ends:
        axes.fill_between(
            [k for k, _, _ in ends],
            [low / scale for _, low, _ in ends],
            [high / scale for _, _, high in ends],
            color=ACCENT, alpha=0.18, linewidth=0, label="its 95 % interval",
        )  # fmt: skip
    axes.plot(shapes, compiling, ":", color=MUTED, label="of it compiling, estimated")


def _tell_of_those_above(axes: Any, points: Sequence[RunTimePoint]) -> None:
    """Runs that are many times the shortest would press all others flat: they get words."""
    if points:
        told = [f"{count(p.num_shapes, 'shape')}: {seconds(p.estimated_run_s)}" for p in points]
        more = f" and {len(told) - 2} more" if len(told) > 2 else ""
        axes.annotate(
            f"above: {', '.join(told[:2])}{more}",
            (points[-1].num_shapes, axes.get_ylim()[1]),
            (14, -12),
            textcoords="offset points",
            color=INK,
            backgroundcolor=PAPER,
        )


def _mark(axes: Any, num_shapes: int | None, label: str) -> None:
    if num_shapes is not None:
        axes.axvline(num_shapes, color=INK, linewidth=1, label=f"{label}: {num_shapes} shapes")


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(8, integer=True))

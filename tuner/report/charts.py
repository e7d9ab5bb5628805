"""Figures of what was measured: the comparison, the predictions, the trials."""

from __future__ import annotations

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
from tuner.report.contents import ComparedConfig
from tuner.report.markup import clean, time_unit
from tuner.report.points import PredictionFigure, TrialPoint
from tuner.report.svg import ACCENT, BAD, INK, MUTED, SECOND, inline_svg

MAX_NAME_CHARACTERS = 38
MAX_DRAWN_SHAPES = 24
# Up to this spread of values a linear axis still tells the small ones apart.
LINEAR_SPREAD = 12


def draw_comparison(rows: Sequence[ComparedConfig], name: str, width: int) -> str:
    """Speed of every config that was measured, the winner's being 1, with its interval.

    Args:
        rows: From top to bottom; at least one.
        name: Begins the ids, unique in the page.
        width: Pixels.
    """

    def draw(figure: Any) -> None:
        axes = open_axes(figure, "real tokens a second, winner = 1", "", grid="x")
        axes.axvline(1.0, color=MUTED, linewidth=1)
        for place, row in enumerate(rows):
            _draw_speed(axes, row, place)
            label = f"{_shortened(row.name)}: {_told_speed(row, width)}"
            text = axes.annotate(label, (0, place), (0, 7), textcoords="offset points", color=INK)
            # Else the axis would shrink to make room for the longest name.
            text.set_in_layout(False)
        ratios = [row.ratio_to_winner for row in rows if row.ratio_to_winner]
        highest = max([1.0, *(ratio.high or ratio.value for ratio in ratios)])
        axes.set(xlim=(0, highest * 1.04), ylim=(len(rows) - 0.6, -0.75), yticks=[])

    return inline_svg(name, width, 70 + 46 * len(rows), draw)


def _draw_speed(axes: Any, row: ComparedConfig, place: int) -> None:
    ratio = row.ratio_to_winner
    value = ratio.value if ratio else 1.0 if row.is_winner else 0.0
    colour = ACCENT if row.is_winner else SECOND
    if value:
        axes.plot([0, value], [place, place], color=colour, linewidth=1.3)
        axes.plot([value], [place], color=colour, **MEASURED)
    if ratio and ratio.low is not None and ratio.high is not None:
        axes.plot([ratio.low, ratio.high], [place, place], color=colour, linewidth=4)


def _told_speed(row: ComparedConfig, width: int) -> str:
    ratio = row.ratio_to_winner
    if ratio is None:
        return "1" if row.is_winner else _shortened(row.status)
    if ratio.low is None or ratio.high is None or width < WIDE_PX:
        return f"{ratio.value:.2f}"
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def draw_prediction(content: PredictionFigure, name: str, width: int) -> str:
    """Predicted and measured step seconds, a line a shape, the longest rows below.

    Of more than MAX_DRAWN_SHAPES shapes those of the largest errors are drawn.
    """
    worst = sorted(content.shapes, key=lambda item: -abs(item.relative_error))[:MAX_DRAWN_SHAPES]
    shapes = sorted(worst, key=lambda item: (item.padded_length, item.batch_size))
    highest = max(max(s.predicted_step_s, s.high_s or 0, s.measured_step_s) for s in shapes)
    scale, unit = time_unit(highest)

    def draw(figure: Any) -> None:
        axes = open_axes(figure, f"time of a step in {unit}", "shape, rows x padded length", "x")
        for place, item in enumerate(shapes):
            if item.low_s is not None and item.high_s is not None:
                ends = [item.low_s / scale, item.high_s / scale]
                axes.plot(ends, [place, place], color=ACCENT, linewidth=1.3)
        places = range(len(shapes))
        predicted = [item.predicted_step_s / scale for item in shapes]
        measured = [item.measured_step_s / scale for item in shapes]
        hollow = {**ESTIMATED, "linestyle": "none", "markersize": 8}
        axes.plot(predicted, places, color=ACCENT, label="predicted, with its interval", **hollow)
        axes.plot(measured, places, color=SECOND, label="measured", **MEASURED)
        axes.set_yticks(places, [f"{s.batch_size} x {s.padded_length}" for s in shapes])
        axes.set_ylim(len(shapes) - 0.5, -0.5)
        _spread_axis(axes, [*predicted, *measured])
        add_legend(figure, width)

    return inline_svg(name, width, 110 + 24 * len(shapes), draw)


def draw_trials(points: Sequence[TrialPoint], name: str, width: int) -> str:
    """Trials over wall-clock minutes, failed ones at the foot, and the best so far."""
    ok = [point for point in points if point.real_tokens_per_s is not None]
    kinds = (
        ("trial", [p for p in ok if not p.is_baseline], "o", ACCENT),
        ("baseline", [p for p in ok if p.is_baseline], "s", SECOND),
        ("failed or stopped early", [p for p in points if p.real_tokens_per_s is None], "x", BAD),
    )

    def draw(figure: Any) -> None:
        axes = open_axes(figure, "minutes since the start", "real tokens a second of the run")
        best = [p for p in points if p.best_so_far is not None]
        if best:
            axes.step(
                [p.minutes for p in best],
                [p.best_so_far for p in best],
                where="post",
                color=INK,
                linewidth=1.3,
                label="best so far",
            )
        for label, some, marker, colour in kinds:
            if some:
                heights = [p.real_tokens_per_s or 0.0 for p in some]
                minutes = [p.minutes for p in some]
                style = {**MEASURED, "marker": marker, "clip_on": False}
                axes.plot(minutes, heights, color=colour, label=label, **style)
        axes.set_ylim(0, max([p.real_tokens_per_s or 0.0 for p in ok], default=1.0) * 1.08)
        axes.set_xlim(0, None)
        number_ticks(axes.yaxis)
        add_legend(figure, width)

    return inline_svg(name, width, 330, draw)


def _spread_axis(axes: Any, values: Sequence[float]) -> None:
    """From zero; on a logarithmic axis where the largest would hide the small ones."""
    if min(values) > 0 and max(values) > LINEAR_SPREAD * min(values):
        from matplotlib.ticker import LogLocator, NullFormatter

        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(0, None)
    number_ticks(axes.xaxis)


def _shortened(name: str) -> str:
    name = " ".join(clean(name).split())
    return name if len(name) <= MAX_NAME_CHARACTERS else name[: MAX_NAME_CHARACTERS - 1] + "…"

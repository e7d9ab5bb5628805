"""What the figures of the report page have in common: widths, signs, axes.

Everywhere the same signs: filled marks and solid lines are measured or counted, hollow marks and
dashed lines are estimated. Text is drawn by the browser in its own font, narrower than the one
that places are kept for.
"""

from __future__ import annotations

from typing import Any

from tuner.report.svg import PAPER, RULE

WIDE_PX, NARROW_PX = 860, 360
"""Each figure is drawn for a wide and for a narrow page: scaled down, text could not be read."""

MEASURED: dict[str, Any] = {"marker": "o", "markersize": 6, "linestyle": "none"}
ESTIMATED: dict[str, Any] = {
    "marker": "o",
    "markersize": 6,
    "linestyle": "--",
    "linewidth": 1.3,
    "markerfacecolor": PAPER,
}


def open_axes(figure: Any, x_label: str, title: str, grid: str = "y") -> Any:
    """Axes whose vertical one is named by a title above it; grid is x or y."""
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    # Above the axis instead of along it: it is read without turning the head.
    axes.set_title(title)
    axes.grid(axis=grid, color=RULE)
    return axes


def add_legend(figure: Any, width: int) -> None:
    """Names of the signs above the axes, in as many columns as the width has room for."""
    labels = figure.axes[0].get_legend_handles_labels()[1]
    # Pixels: a letter and a sign with its gaps, generously.
    needed = sum(8 * len(label) + 55 for label in labels)
    columns = len(labels) if needed < width else 3 if width >= WIDE_PX else 1
    figure.legend(
        loc="outside upper left", ncols=columns, handlelength=1.8, columnspacing=1.6, borderpad=0.6
    )


def number_ticks(axis: Any, max_ticks: int = 6) -> None:
    """Round numbers with separated thousands."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if axis.get_scale() == "linear":
        axis.set_major_locator(MaxNLocator(max_ticks, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))

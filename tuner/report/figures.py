"""Pictures, written beside their place and then moved, so that none is ever half there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tuner.errors import BadInputError
from tuner.report.advice import describe_epochs
from tuner.simulate.suggest import Suggestion

PADDING_COLOUR, TIME_COLOUR, MARK_COLOUR = "#1f5fa8", "#b5541c", "#444444"


def draw_waste(suggestion: Suggestion, path: Path) -> None:
    """Padding and estimated run time against the number of shapes, as a PNG.

    Args:
        suggestion: From `suggest_buckets`.
        path: File to write; its folder is made if it is not there.

    Raises:
        BadInputError: it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    figure, (padding_axes, time_axes) = pyplot.subplots(
        2, 1, figsize=(8, 7), sharex=True, layout="constrained"
    )
    shapes = [choice.num_shapes for choice in suggestion.curve]
    padding = [choice.plan.padding_fraction for choice in suggestion.curve]
    seconds = [choice.estimate.estimated_run_s for choice in suggestion.curve]
    fixed_s = suggestion.fixed.estimate.estimated_run_s
    padding_axes.plot(
        shapes, padding, "o-", color=PADDING_COLOUR, markersize=4, label="buckets of least padding"
    )
    padding_axes.plot(
        [1], [suggestion.packed.plan.padding_fraction], "s", color=TIME_COLOUR, label="packed"
    )
    padding_axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    padding_axes.set(ylabel="padding, share of all tokens", ylim=(0, None))
    padding_axes.legend()
    padding_axes.set_title(
        f"aligned to {suggestion.best.align}, batches of at most "
        f"{suggestion.setting.tokens_per_batch:,} tokens"
    )
    time_axes.plot(shapes, [s / fixed_s for s in seconds], "o-", color=TIME_COLOUR, markersize=4)
    time_axes.set(
        xlabel="shapes (each is compiled once)",
        ylabel="estimated run time, pad-to-longest = 1",
        ylim=(0, None),
    )
    time_axes.set_title(
        f"{describe_epochs(suggestion)}, compile time included; costs: "
        f"{suggestion.setting.cost.source}"
    )
    for axes in (padding_axes, time_axes):
        axes.axvline(suggestion.best.num_shapes, color=MARK_COLOUR, linestyle=":", linewidth=1)
        axes.grid(alpha=0.3)
    padding_axes.annotate(
        f"suggested: {len(suggestion.best.boundaries)}",
        (suggestion.best.num_shapes, padding_axes.get_ylim()[1] * 0.6),
        xytext=(6, 0),
        textcoords="offset points",
        color=MARK_COLOUR,
    )
    _save(figure, path)
    pyplot.close(figure)


def _save(figure: object, path: Path) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(unfinished, dpi=120, format="png")  # type: ignore[attr-defined]
        unfinished.replace(path)
    except OSError as error:
        raise BadInputError(
            f"cannot write {path}: {error.strerror or error}", fix="name another folder"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()

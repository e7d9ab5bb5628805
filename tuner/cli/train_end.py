"""What varseq-train prints at the end: predicted against observed, and three checks."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from tuner.config.schema import PredictionRecord
from tuner.train.run_summary import MOST_DATA_WAIT, Check, RunSummary, ShapeFigures

Line = tuple[str, str, str]

MOST_SHAPES = 16
"""Lines of the table of shapes."""


def format_end(
    summary: RunSummary, predicted: PredictionRecord | None, *, planned_steps: int, done_steps: int
) -> str:
    """The tables and checks of a run that has ended, for the steps of this process.

    Args:
        summary: Its figures.
        predicted: For the whole run, by the study; None if it is not of this data.
        planned_steps: Of the whole run.
        done_steps: Of the whole run so far.
    """
    steps = ("steps of the run", f"{planned_steps:,}", f"{done_steps:,}")
    whole = tabulate(
        [steps, *_run_lines(summary, predicted), *_loss_lines(summary)],
        headers=["", "predicted", "observed"],
        disable_numparse=True,
        colalign=("left", "right", "right"),
    )
    parts = [whole, _shape_table(summary.shapes), *map(_check_line, summary.checks)]
    if summary.data_wait_fraction > MOST_DATA_WAIT:
        parts.append(
            f"[look] the device waits for data {summary.data_wait_fraction:.0%} of the time: "
            "is the file on a slow disk, or is the machine busy?"
        )
    return "\n\n".join(parts[:2]) + "\n\n" + "\n".join(parts[2:])


def _run_lines(summary: RunSummary, predicted: PredictionRecord | None) -> list[Line]:
    return [
        ("steps of this process", "", f"{summary.num_steps:,}"),
        ("optimizer updates of these", "", f"{summary.num_updates:,}"),
        (
            "effective token fraction",
            f"{predicted.effective_token_fraction:.3f}" if predicted else "",
            f"{summary.effective_token_fraction:.3f}",
        ),
        (
            "real tokens/s, steps and waiting",
            f"{predicted.estimated_steady_real_tokens_per_s:,.0f}" if predicted else "",
            f"{summary.real_tokens_per_s:,.0f}",
        ),
        (
            "seconds of these steps, without updates",
            _seconds(summary.predicted_step_s),
            _seconds(summary.observed_step_s),
        ),
        ("seconds of the run after warm-up", "", _seconds(summary.run_s)),
        (
            "warm-up seconds",
            f"{predicted.estimated_compile_s:.1f}" if predicted else "",
            _seconds(summary.warm_up_s),
        ),
        ("recompiles after warm-up", "0", f"{summary.recompiles}"),
        ("waiting for data, share of step time", "", f"{summary.data_wait_fraction:.1%}"),
        ("slow steps", "", _slow(summary)),
        (
            f"peak memory GB ({summary.memory_kind})",
            f"{predicted.peak_bytes / 1e9:.2f}" if predicted else "",
            f"{summary.peak_bytes / 1e9:.2f}",
        ),
    ]


def _loss_lines(summary: RunSummary) -> list[Line]:
    lines = [
        ("loss, mean of the first steps", "", _number(summary.first_loss)),
        ("loss, mean of the last steps", "", _number(summary.last_loss)),
    ]
    evaluation = summary.evaluation
    if evaluation is not None:
        lines += [
            ("evaluation loss, per label", "", _number(evaluation.loss)),
            ("evaluation perplexity", "", _number(evaluation.perplexity)),
            ("seconds of all evaluations", "", _seconds(summary.evaluation_s)),
        ]
    return lines


def _shape_table(shapes: Sequence[ShapeFigures]) -> str:
    """The shapes that took most of the time; a plan of random batches has hundreds."""
    by_time = sorted(shapes, key=lambda shape: -shape.num_steps * shape.median_step_s)
    shown = [shape for shape in shapes if shape in by_time[:MOST_SHAPES]]
    rows = [
        (
            f"{shape.batch_size} x {shape.padded_length}",
            f"{shape.num_steps:,}",
            _step_seconds(shape.predicted_step_s),
            _step_seconds(shape.median_step_s),
            _step_seconds(shape.p95_step_s),
            "" if shape.ratio is None else f"{shape.ratio:.2f}",
            _flatness(shape),
        )
        for shape in shown
    ]
    headers = ["rows x tokens", "steps", "predicted s", "median s", "p95 s", "ratio", "curve"]
    table = tabulate(
        rows,
        headers=headers,
        disable_numparse=True,
        colalign=("right", "right", "right", "right", "right", "right", "left"),
    )
    num_others = len(shapes) - len(shown)
    others = f"\n{num_others} other shapes took less time: summary.json has all"
    return table + others if num_others else table


def _flatness(shape: ShapeFigures) -> str:
    if shape.is_flat is None or shape.trend is None:
        return "too few steps"
    return "flat" if shape.is_flat else f"not flat (trend {shape.trend:+.0%})"


def _check_line(check: Check) -> str:
    mark = {True: "[ok]  ", False: "[look]", None: "[?]   "}[check.is_passed]
    advice = f"; {check.advice}" if check.advice else ""
    return f"{mark} {check.name}: {check.found}{advice}"


def _slow(summary: RunSummary) -> str:
    if not summary.num_slow:
        return "0"
    return f"{summary.num_slow} ({summary.slow_excess_s:.1f} s too long)"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _step_seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}"

"""The sections of the report page that hold a figure: drawing, caption, and its numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tuner.report.chart_parts import NARROW_PX, WIDE_PX
from tuner.report.charts import (
    MAX_DRAWN_SHAPES,
    draw_comparison,
    draw_prediction,
    draw_trials,
)
from tuner.report.contents import ComparedConfig, Comparison, SpeedRatio
from tuner.report.markup import (
    Markup,
    basis_tag,
    count,
    element,
    folded,
    join,
    long_text,
    percent,
    seconds,
    table,
)
from tuner.report.plan_charts import draw_lengths, draw_run_time, draw_waste
from tuner.report.points import (
    LengthFigure,
    PredictionFigure,
    RunTimeFigure,
    RunTimePoint,
    TrialPoint,
    WasteFigure,
)

HOLLOW_AND_FILLED = "Hollow marks and dashed lines are estimated, filled marks are measured."


def show_comparison(content: Comparison) -> Markup:
    """The winner against the baselines: verdict, figure, table."""
    rows = content.rows
    parts = [element("p", content.verdict)]
    if rows:
        parts.append(
            _figure(
                "comparison",
                "Speed of every compared config as a share of the winner's.",
                "Dots are the speed of the whole run, thick bars its 95 % interval. A bar that "
                "reaches the line at 1 is not slower than the winner beyond noise.",
                lambda name, width: draw_comparison(rows, name, width),
            )
        )
    longest_s = max([row.run_s or 0.0 for row in rows], default=0.0)
    headers = ["config", "run", "real tokens a second", "speed, winner = 1", "95 % interval",
               "beyond noise", "rounds"]  # fmt: skip
    told = {
        "measured": "Runs were measured as a whole.",
        "estimated": "Run times follow from measured compiles and measured steps.",
        "exact": "",
    }[content.basis]
    parts += [
        table("The compared configs", headers, [_compared(row, longest_s) for row in rows]),
        element("p", join([basis_tag(content.basis), told], " "), class_="small"),
    ]
    return join(parts)


def _compared(row: ComparedConfig, longest_s: float) -> list[str]:
    ratio = row.ratio_to_winner
    name = element("strong", row.name) if row.is_winner else row.name
    described = [name, element("small", row.config)]
    if row.status != "ok":
        failure = element("strong", row.status, class_="bad")
        described.append(element("div", join([failure, ": ", long_text(row.reason)], "")))
    beyond = {True: "yes", False: "no", None: "-"}[row.is_significant]
    return [
        join(described, ""),
        seconds(row.run_s, longest_s),
        "-" if row.real_tokens_per_s is None else f"{row.real_tokens_per_s:,.0f}",
        f"{ratio.value:.3f}" if ratio else "1" if row.is_winner else "-",
        _ratio_interval(ratio),
        beyond,
        str(row.num_rounds),
    ]


def _ratio_interval(ratio: SpeedRatio | None) -> str:
    if ratio is None:
        return "-"
    if ratio.low is None or ratio.high is None:
        return "not known"
    return f"{ratio.low:.3f} to {ratio.high:.3f}"


def show_prediction(content: PredictionFigure) -> Markup:
    """Predicted against measured step seconds."""
    rows = [
        [
            f"{item.batch_size} x {item.padded_length}",
            seconds(item.predicted_step_s),
            _interval(item.low_s, item.high_s),
            seconds(item.measured_step_s),
            f"{100 * item.relative_error:+.1f} %",
        ]
        for item in sorted(content.shapes, key=lambda item: (item.padded_length, item.batch_size))
    ]
    which = (
        f" Drawn are the {MAX_DRAWN_SHAPES} shapes of the largest errors."
        if len(rows) > MAX_DRAWN_SHAPES
        else ""
    )
    figure = _figure(
        "prediction",
        "Predicted and measured seconds of a step for every shape.",
        f"{HOLLOW_AND_FILLED} Predicted by {content.source}.{which}",
        lambda name, width: draw_prediction(content, name, width),
        table(
            "Predicted and measured seconds of a step",
            ["shape (B x L)", "predicted step", "95 % interval", "measured step", "error"],
            rows,
        ),
    )
    summary = (
        f"The steps of {count(len(rows), 'shape')} were predicted without their own measurements "
        f"and held against them: the prediction is off by "
        f"{percent(content.median_relative_error)} in the median and by "
        f"{percent(content.max_relative_error)} at most."
    )
    return join([element("p", summary), figure])


def show_trials(points: Sequence[TrialPoint]) -> Markup:
    """The search over time."""
    num_failed = sum(point.real_tokens_per_s is None for point in points)
    rows = [
        [
            f"{point.number}{' (baseline)' if point.is_baseline else ''}",
            point.status,
            f"{point.minutes:,.1f}",
            _speed(point.real_tokens_per_s),
            _speed(point.best_so_far),
        ]
        for point in points
    ]
    failed = f", {num_failed} of them without a figure" if num_failed else ""
    figure = _figure(
        "trials",
        "Real tokens a second of every trial over the minutes of the search.",
        "Speeds are those of the planned run, compile time included, from the compiles and steps "
        "that the trial measured. Baselines were run for comparison; the search did not propose "
        "them."
        + (
            " Crosses at the foot failed, or were stopped since they could not win."
            if num_failed
            else ""
        ),
        lambda name, width: draw_trials(points, name, width),
        table(
            "Trials",
            ["trial", "status", "minutes", "real tokens a second", "best so far"],
            rows,
            text_columns=2,
        ),
    )
    summary = f"{count(len(points), 'trial')} in {points[-1].minutes:,.0f} minutes{failed}."
    return join([element("p", summary), figure])


def show_lengths(content: LengthFigure) -> Markup:
    """The lengths of the rows and the boundaries of the best config."""
    edges = content.bin_edges
    rows = [
        [f"{edges[i]:,} to {edges[i + 1]:,}", f"{number:,}"]
        for i, number in enumerate(content.num_rows)
    ]
    boundaries = ", ".join(f"{end:,}" for end in content.boundaries)
    caption = (
        f"Every row is padded to the first boundary that is not shorter: {boundaries} tokens."
        if boundaries
        else "The best config has no boundaries."
    )
    return _figure(
        "lengths",
        "Histogram of the lengths of the rows, with the boundaries of the best config.",
        caption,
        lambda name, width: draw_lengths(content, name, width),
        table("Rows by length", ["tokens", "rows"], rows),
    )


def show_waste(content: WasteFigure) -> Markup:
    """Padding against the number of shapes."""
    rows = [[str(p.num_shapes), percent(p.padding_fraction)] for p in content.points]
    return _figure(
        "waste",
        "Share of padding tokens against the number of shapes.",
        "Exact: counted on the plan of each number of buckets with boundaries of least padding. "
        "Each shape is compiled once, so less padding is paid for with compile time.",
        lambda name, width: draw_waste(content, name, width),
        table("Padding against the number of shapes", ["shapes", "padding"], rows),
    )


def show_run_time(content: RunTimeFigure) -> Markup:
    """Run time against the number of shapes."""
    points = content.points
    timed = [
        [f"trial {run.trial}", str(run.num_shapes), seconds(run.run_s)]
        for run in content.timed_runs
    ]
    numbers = table(
        "Estimated run time against the number of shapes",
        ["shapes", "estimated run", "95 % interval", "of it compiling"],
        [_run_time_row(point) for point in points],
    )
    if timed:
        headers = ["trial", "shapes", "run, from measured steps"]
        numbers = join([numbers, table("Runs of trials", headers, timed)])
    return join(
        [
            element("p", f"{_optimum(content)} {_break_even(content)}"),
            _figure(
                "run-time",
                "Estimated run time against the number of shapes, with the runs of trials.",
                f"{HOLLOW_AND_FILLED} {count(content.epochs, 'epoch')}, compile time included; "
                f"cost model: {content.cost_source}. Trials with far more shapes than the curve "
                "are in the table only.",
                lambda name, width: draw_run_time(content, name, width),
                numbers,
            ),
        ]
    )


def _run_time_row(point: RunTimePoint) -> list[str]:
    return [
        str(point.num_shapes),
        seconds(point.estimated_run_s),
        _interval(point.low_s, point.high_s),
        seconds(point.compile_s),
    ]


def _optimum(content: RunTimeFigure) -> str:
    least = [p for p in content.points if p.num_shapes == content.optimum_num_shapes]
    run = f": {seconds(least[0].estimated_run_s)}" if least else ""
    return (
        f"The cost model expects the shortest run from "
        f"{count(content.optimum_num_shapes, 'shape')}{run}."
    )


def _break_even(content: RunTimeFigure) -> str:
    steps = content.break_even_steps
    if steps is None and content.optimum_num_shapes == 1:
        return "More shapes pad less, but their compiles are not earned back in a run so short."
    if steps is None:
        return "It is never ahead of padding to the longest: its compiles are not earned back."
    if steps == 0:
        return "It is ahead of padding to the longest from the first step."
    return (
        f"From step {steps:,} on it is ahead of padding to the longest, its compiles earned back."
    )


def _figure(
    name: str,
    label: str,
    caption: str,
    draw: Callable[[str, int], str],
    numbers: Markup | None = None,
) -> Markup:
    """A drawing for wide and one for narrow pages, of which the style sheet shows one."""
    drawings = [
        element("div", Markup(draw(f"{name}-{size}", width)), class_=size)
        for size, width in (("wide", WIDE_PX), ("narrow", NARROW_PX))
    ]
    parts = [
        element("div", join(drawings, ""), role="img", aria_label=label),
        element("figcaption", caption),
    ]
    figure = element("figure", join(parts))
    return figure if numbers is None else join([figure, folded("The numbers", numbers)])


def _interval(low_s: float | None, high_s: float | None) -> str:
    if low_s is None or high_s is None:
        return "not known"
    return f"{seconds(low_s)} to {seconds(high_s)}"


def _speed(real_tokens_per_s: float | None) -> str:
    return "-" if real_tokens_per_s is None else f"{real_tokens_per_s:,.0f}"

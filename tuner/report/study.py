"""A study's outcomes as tables and pages; pure: outcomes in, text out.

Seconds and tokens per second of a trial are estimates for the planned run, from measured compiles
and steps; the texts say so. Memory figures are measured.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from tuner.config.schema import BatchingConfig, TrainConfig
from tuner.study.choose import choose_best, pad_to_longest
from tuner.study.outcome import NumberedOutcome, Outcome

CSV_COLUMNS = (
    "trial", "status", "reason", "strategy", "num_buckets", "boundaries", "align",
    "tokens_per_batch", "graph_mode", "jit_level", "num_shapes", "num_measured_shapes",
    "num_steps_per_epoch", "effective_token_fraction", "length_autocorrelation",
    "estimated_real_tokens_per_s",
    "estimated_steady_real_tokens_per_s", "estimated_run_s", "estimated_compile_s",
    "measured_time_fraction", "max_fit_error", "peak_bytes", "memory_kind", "trial_wall_s",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StudyContext:
    """What the pages say besides the outcomes.

    Attributes:
        data_path: As in the config.
        num_samples: Rows.
        longest: Tokens of the longest row after truncation.
        device: That the trials ran on.
        versions: Installed there.
        notes: Assumptions and things left out, one sentence each.
        command: The command line that goes on with the study.
        best_config_path: Where best.yaml is, or would be.
    """

    data_path: str
    num_samples: int
    longest: int
    device: str
    versions: dict[str, str]
    notes: tuple[str, ...]
    command: str
    best_config_path: str


def describe_config(config: TrainConfig) -> str:
    """The tuned part of a config in a few words."""
    batching, graph = config.batching, config.graph
    buckets = f" {len(batching.boundaries)}" if batching.strategy == "bucketed" else ""
    return (
        f"{batching.strategy}{buckets}, align {describe_align(batching)}, "
        f"{batching.tokens_per_batch} tokens a batch, {graph.mode} graph, {graph.jit_level}"
    )


def describe_align(batching: BatchingConfig) -> str:
    """An alignment rule in a few characters: `32`, or `8<=128 32<=512 64`."""
    if isinstance(batching.align, int):
        return str(batching.align)
    return " ".join(
        f"{rule.multiple}<={rule.up_to}" if rule.up_to else str(rule.multiple)
        for rule in batching.align
    )


def trials_csv(outcomes: Sequence[NumberedOutcome]) -> str:
    """One line a trial, by number; empty cells where there is no figure."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for item in outcomes:
        writer.writerow(_csv_row(item))
    return text.getvalue()


def summary_text(outcomes: Sequence[NumberedOutcome], context: StudyContext) -> str:
    """The result in one page: best, table of trials, failures, next command."""
    parts = [_headline(outcomes, context), _trials_table(outcomes, "simple")]
    failures = _failures(outcomes)
    if failures:
        parts.append("failed trials\n" + tabulate(failures, tablefmt="plain"))
    parts.append(_next_steps(outcomes, context))
    return "\n\n".join(parts) + "\n"


def report_markdown(outcomes: Sequence[NumberedOutcome], context: StudyContext) -> str:
    """The result with its reasons, as Markdown."""
    best = choose_best(outcomes)
    parts = ["# varseq-tune report", _headline(outcomes, context)]
    if best is not None:
        parts += ["## The best config", _best_section(best.outcome)]
    parts += ["## Trials", _trials_table(outcomes, "github")]
    failures = _failures(outcomes)
    if failures:
        header = ["trial", "config", "status", "reason"]
        # A reason may hold the character that parts the columns.
        rows = [[str(cell).replace("|", "\\|") for cell in row] for row in failures]
        parts += ["## Failed trials", tabulate(rows, headers=header, tablefmt="github")]
    parts += ["## How the figures come about", _method(context)]
    parts += ["## Going on", "```\n" + _next_steps(outcomes, context) + "\n```"]
    return "\n\n".join(parts) + "\n"


def failure_lines(outcomes: Sequence[NumberedOutcome]) -> str:
    """Why each failed trial failed, one line each."""
    return "\n".join(
        f"trial {number}: {status}: {reason}" for number, _, status, reason in _failures(outcomes)
    )


def _headline(outcomes: Sequence[NumberedOutcome], context: StudyContext) -> str:
    best = choose_best(outcomes)
    data = (
        f"{context.data_path}: {context.num_samples} rows, longest {context.longest} tokens; "
        f"{context.device}, MindSpore {context.versions.get('mindspore', 'unknown')}"
    )
    if best is None or best.outcome.estimate is None:
        return f"{data}\n\nNo trial of {len(outcomes)} could be measured."
    estimate = best.outcome.estimate
    return (
        f"{data}\n\nBest of {len(outcomes)} trials: trial {best.number}, "
        f"{describe_config(best.outcome.config)}: "
        f"{estimate.estimated_real_tokens_per_s:,.0f} real tokens/s over a run of "
        f"{best.outcome.config.train.epochs} epochs, compile time included"
        f"{_gain(best, outcomes)}."
    )


def _gain(best: NumberedOutcome, outcomes: Sequence[NumberedOutcome]) -> str:
    fixed = pad_to_longest(outcomes)
    if fixed is None:
        return "; padding to the longest was not measured"
    if best.number == fixed.number:
        return (
            ": padding everything to the longest is the fastest here. Compile time weighs less in "
            "a longer run (--set train.epochs=N)"
        )
    ratio = (best.outcome.real_tokens_per_s or 0.0) / (fixed.outcome.real_tokens_per_s or 1.0)
    return f", {ratio:.2f} times the best that pads to the longest (trial {fixed.number})"


def _trials_table(outcomes: Sequence[NumberedOutcome], style: str) -> str:
    """Measured trials, the fastest first."""
    fixed = pad_to_longest(outcomes)
    base = fixed.outcome.real_tokens_per_s if fixed else None
    measured = [item for item in outcomes if item.outcome.estimate is not None]
    measured.sort(key=lambda item: -(item.outcome.real_tokens_per_s or 0.0))
    headers = [
        "trial", "config", "shapes", "effective", "compile s", "run s", "real tokens/s",
        "x pad-to-longest", "peak GB",
    ]  # fmt: skip
    rows = [_table_row(item, base) for item in measured]
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)


def _table_row(item: NumberedOutcome, base: float | None) -> list[str]:
    outcome = item.outcome
    estimate = outcome.estimate
    if estimate is None:
        raise ValueError(f"trial {item.number} was not measured")
    speed = estimate.estimated_real_tokens_per_s
    return [
        str(item.number),
        describe_config(outcome.config),
        str(outcome.num_shapes),
        f"{outcome.effective_token_fraction:.3f}",
        f"{estimate.estimated_compile_s:.1f}",
        f"{estimate.estimated_run_s:,.0f}",
        f"{speed:,.0f}",
        f"{speed / base:.2f}" if base else "",
        f"{outcome.peak_bytes / 1e9:.2f}",
    ]


def _failures(outcomes: Sequence[NumberedOutcome]) -> list[tuple[int, str, str, str]]:
    return [
        (item.number, describe_config(item.outcome.config), item.outcome.status,
         item.outcome.reason)
        for item in outcomes
        if item.outcome.estimate is None
    ]  # fmt: skip


def _best_section(outcome: Outcome) -> str:
    batching = outcome.config.batching
    estimate = outcome.estimate
    if estimate is None:
        raise ValueError("the best outcome was not measured")
    shapes = ", ".join(f"{size} x {length}" for size, length in outcome.shapes)
    rows = [
        ("strategy", batching.strategy),
        ("boundaries (tokens)", ", ".join(map(str, batching.boundaries)) or "none"),
        ("alignment", describe_align(batching)),
        ("token budget of a batch", str(batching.tokens_per_batch)),
        ("real tokens of an update, on average", str(outcome.config.train.tokens_per_update)),
        ("graph", f"{outcome.config.graph.mode}, jit_level {outcome.config.graph.jit_level}"),
        ("shapes (B x L)", shapes),
        ("effective token fraction, exact", f"{outcome.effective_token_fraction:.4f}"),
        ("steps an epoch", str(outcome.num_steps)),
        ("length autocorrelation of neighbouring steps", f"{outcome.length_autocorrelation:.3f}"),
        ("estimated compile seconds", f"{estimate.estimated_compile_s:.1f}"),
        ("estimated run seconds", f"{estimate.estimated_run_s:,.1f}"),
        ("share of step time from measured shapes", f"{estimate.measured_time_fraction:.2f}"),
        (f"peak memory GB, measured ({outcome.memory_kind})", f"{outcome.peak_bytes / 1e9:.2f}"),
    ]
    return tabulate(rows, headers=["", ""], tablefmt="github", disable_numparse=True)


def _method(context: StudyContext) -> str:
    sentences = [
        "Every trial runs in a process of its own: it compiles the shapes of its plan, takes real "
        "steps at each and times them. Run seconds are the measured compile seconds of every "
        "shape plus the median steady step of each shape times its exact number of steps, plus "
        "the updates, over the planned epochs: an estimate from measurements, not a whole run.",
        "Every candidate gathers the same number of real tokens for an optimizer update.",
        *context.notes,
        "Versions: " + ", ".join(f"{name} {value}" for name, value in context.versions.items()),
    ]
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _next_steps(outcomes: Sequence[NumberedOutcome], context: StudyContext) -> str:
    lines = []
    if choose_best(outcomes) is not None:
        lines.append(f"train it:      varseq-train --config {context.best_config_path}")
    lines.append(f"search longer: {context.command}")
    return "\n".join(lines)


def _csv_row(item: NumberedOutcome) -> dict[str, object]:
    outcome = item.outcome
    batching, graph = outcome.config.batching, outcome.config.graph
    row: dict[str, object] = {
        "trial": item.number,
        "status": outcome.status,
        "reason": outcome.reason,
        "strategy": batching.strategy,
        "num_buckets": len(batching.boundaries) or "",
        "boundaries": " ".join(map(str, batching.boundaries)),
        "align": describe_align(batching),
        "tokens_per_batch": batching.tokens_per_batch,
        "graph_mode": graph.mode,
        "jit_level": graph.jit_level,
        "num_shapes": outcome.num_shapes,
        "num_measured_shapes": outcome.num_measured_shapes,
        "num_steps_per_epoch": outcome.num_steps,
        "effective_token_fraction": round(outcome.effective_token_fraction, 6),
        "length_autocorrelation": round(outcome.length_autocorrelation, 6),
        "peak_bytes": outcome.peak_bytes,
        "memory_kind": outcome.memory_kind,
        "trial_wall_s": round(outcome.wall_s, 2),
    }
    if outcome.estimate is not None:
        estimates = vars(outcome.estimate)
        row |= {name: round(value, 6) for name, value in estimates.items()}
    return row

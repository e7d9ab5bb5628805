"""A study's result as text and as a table; pure: values in, text out.

Seconds and tokens per second of a trial are estimates for the planned run, from measured compiles
and steps; the texts say so. Memory of a trial is measured.
"""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from tuner.config.schema import BatchingConfig, TrainConfig
from tuner.report.contents import Absent, SeveralDevices
from tuner.report.device_table import DEVICE_HEADERS, device_rows
from tuner.report.markup import NO_BREAK
from tuner.report.speed_up import describe_ranking, describe_verdict
from tuner.simulate.measurement import describe_precision
from tuner.study.choose import is_feasible
from tuner.study.confirm import Confirmation
from tuner.study.optuna_storage import DRIVERS, JOURNAL, describe_storage
from tuner.study.outcome import NumberedOutcome, Outcome
from tuner.study.result import StudyResult
from tuner.trial.folder import StudyFolder

NUM_SHOWN = 10
"""Trials in the table of the summary, baselines aside; all are in trials.csv."""

READ_REPORT = "read the report"

NOT_SIMULATED = Absent()

CSV_COLUMNS = (
    "trial", "baseline", "status", "reason", "strategy", "num_buckets", "boundaries", "align",
    "tokens_per_batch", "graph_mode", "jit_level", "compute_dtype", "fp32_ops", "num_shapes",
    "num_new_measured_shapes", "num_steps_per_epoch", "effective_token_fraction",
    "length_autocorrelation", "estimated_real_tokens_per_s",
    "estimated_steady_real_tokens_per_s", "estimated_run_s", "estimated_run_error_s",
    "estimated_compile_s", "measured_time_fraction", "max_fit_error", "estimated_peak_bytes",
    "peak_bytes", "memory_kind", "loss_deviation", "gradient_deviation", "num_nonfinite",
    "precision_violation", "trial_wall_s", "other_cores", "finished_at_s",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StudyContext:
    """What the pages say besides the result.

    Attributes:
        data_path: As in the config.
        num_samples: Rows.
        longest: Tokens of the longest row after truncation.
        device: That the trials ran on.
        versions: Installed there.
        notes: Assumptions and things left out, one sentence each.
        command: The command line that goes on with the study.
        best_config_path: Where best.yaml is, or would be; the study's other files are beside it.
        storage: Optuna's storage as it was given; None: the folder's own file.
        num_cores: Processor cores that trials may use; None: not known.
    """

    data_path: str
    num_samples: int
    longest: int
    device: str
    versions: dict[str, str]
    notes: tuple[str, ...]
    command: str
    best_config_path: str
    storage: str | None = None
    num_cores: int | None = None

    @property
    def folder(self) -> StudyFolder:
        """Where the study's files are."""
        return StudyFolder(Path(self.best_config_path).parent)


def describe_config(config: TrainConfig) -> str:
    """The tuned part of a config in a few words; fp32 goes without saying."""
    batching, graph = config.batching, config.graph
    is_named = batching.strategy == "bucketed" or len(batching.boundaries) > 1
    buckets = f" {len(batching.boundaries)}" if is_named else ""
    rows = " ".join(map(str, batching.batch_sizes)) or batching.samples_per_batch
    size = f"{batching.tokens_per_batch} tokens" if batching.tokens_per_batch else f"{rows} rows"
    precision = describe_precision(config.precision)
    return (
        f"{batching.strategy}{buckets}, align {describe_align(batching)}, {size} a batch, "
        f"{graph.mode} graph, {graph.jit_level}{'' if precision == 'fp32' else f', {precision}'}"
    )


def describe_align(batching: BatchingConfig) -> str:
    """An alignment rule in a few characters: `32`, or `8<=128 32<=512 64`."""
    if isinstance(batching.align, int):
        return str(batching.align)
    return " ".join(
        f"{rule.multiple}<={rule.up_to}" if rule.up_to else str(rule.multiple)
        for rule in batching.align
    )


def describe_inexact(outcome: Outcome) -> str:
    """How far a precision is from fp32, in words; empty where that was not checked."""
    check = outcome.precision
    if check is None:
        return ""
    figures = [
        f"{name} off by {'no number' if value is None else f'{100 * value:.2f} %'}"
        for name, value in (("loss", check.loss_deviation), ("gradient", check.gradient_deviation))
    ]
    return (
        f"over its tolerance against fp32 on the same batches: {', '.join(figures)}, "
        f"{check.num_nonfinite} values not finite"
    )


def trials_csv(outcomes: Sequence[NumberedOutcome]) -> str:
    """One line a trial, by number; empty cells where there is no figure."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for item in outcomes:
        writer.writerow(_csv_row(item))
    return text.getvalue()


def summary_text(
    result: StudyResult, context: StudyContext, devices: SeveralDevices | Absent = NOT_SIMULATED
) -> str:
    """The result in one page: verdict, confirmation, best trials, devices, failures, commands.

    Args:
        result: All that is known.
        context: What the page says besides.
        devices: The best config on several devices; left out where it is absent.
    """
    parts = [_headline(result, context)]
    if result.confirmation is not None and result.confirmation.verdict is not None:
        parts.append(_confirmed(result.confirmation, describe_ranking(result)))
    parts.append(_trials_table(result))
    if isinstance(devices, SeveralDevices):
        parts.append(_several_devices(devices))
    failures = _failures(result.outcomes)
    if failures:
        parts.append("trials that failed or were stopped\n" + tabulate(failures, tablefmt="plain"))
    commands = next_commands(result, context)
    parts.append(tabulate([(f"{name}:", line) for name, line in commands], tablefmt="plain"))
    return "\n\n".join(parts) + "\n"


def failure_lines(outcomes: Sequence[NumberedOutcome]) -> str:
    """Why each failed trial failed, one line each."""
    return "\n".join(
        f"trial {number}: {status}: {reason}" for number, _, status, reason in _failures(outcomes)
    )


def next_commands(result: StudyResult, context: StudyContext) -> list[tuple[str, str]]:
    """What can be done with the result: what for, and the command line or file.

    A password of the storage is masked.
    """
    folder = context.folder
    lines = []
    if result.best is not None:
        lines.append(
            ("train it", f"varseq-train --config {shlex.quote(context.best_config_path)}")
        )
    lines += [
        ("search longer", context.command),
        (READ_REPORT, str(folder.report)),
        (
            "look at the trials in a browser",
            f"optuna-dashboard {shlex.quote(_storage_url(context))}",
        ),
    ]
    if result.book.keys:
        costs = shlex.quote(str(folder.costs))
        dry_run = f"{context.command} --cost-model {costs} --dry-run"
        lines.append(("rank the space without a device", dry_run))
    return lines


def _storage_url(context: StudyContext) -> str:
    """As optuna-dashboard takes it."""
    told = describe_storage(context.storage or context.folder.storage)
    if told.startswith(JOURNAL):
        return told.removeprefix(JOURNAL)
    if "://" not in told:
        return f"sqlite:///{told}"
    # Left to itself SQLAlchemy takes drivers that need not be installed.
    scheme, place = told.split("://", 1)
    return f"{DRIVERS.get(scheme, scheme)}://{place}"


def _headline(result: StudyResult, context: StudyContext) -> str:
    _, verdict = describe_verdict(result)
    best = result.best
    lines = [
        f"{context.data_path}: {context.num_samples} rows, longest {context.longest} tokens; "
        f"{context.device}, MindSpore {context.versions.get('mindspore', 'unknown')}",
        verdict,
    ]
    if best is not None and best.outcome.estimate is not None:
        lines.append(
            f"Best of {len(result.outcomes)} trials: {_named(best)}, "
            f"{describe_config(best.outcome.config)}: "
            f"{best.outcome.estimate.estimated_real_tokens_per_s:,.0f} real tokens/s over a run "
            f"of {best.outcome.config.train.epochs} epochs, compile time included."
        )
    return "\n\n".join(lines)


def _named(item: NumberedOutcome) -> str:
    baseline = item.outcome.baseline
    return f"trial {item.number}" + (f" ({baseline})" if baseline else "")


def _confirmed(confirmation: Confirmation, ranking: str) -> str:
    """The confirmed candidates, the fastest first, with their speed against it."""
    verdict = confirmation.verdict
    assert verdict is not None
    rows = []
    for item in verdict.compared:
        is_fastest = item.name == verdict.fastest
        interval = f"{item.low:.3f} to {item.high:.3f}"
        is_known = verdict.num_rounds > 1
        rows.append(
            [
                item.name,
                describe_config(confirmation.candidates[item.name].outcome.config),
                f"{item.run_s:,.1f}",
                f"{item.speed_ratio:.3f}",
                "" if is_fastest else interval if is_known else "not known",
                "<- taken" if item.name == verdict.winner else "",
            ]
        )
    failed = {item.candidate: item for item in confirmation.rounds if item.status != "ok"}
    rows += [
        [name, describe_config(confirmation.candidates[name].outcome.config), item.status, "", "",
         item.reason]
        for name, item in failed.items()
        if name in confirmation.candidates
    ]  # fmt: skip
    headers = ["confirmed", "config", "run s", "speed, fastest = 1", "95 % interval", ""]
    rounds = f"{verdict.num_rounds} round{'s' if verdict.num_rounds > 1 else ''}"
    told = tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True)
    return f"Measured again in {rounds}. {ranking}\n{told}"


def _trials_table(result: StudyResult) -> str:
    """The best trials and all baselines that were measured, the fastest first."""
    measured = [item for item in result.outcomes if is_feasible(item.outcome)]
    measured.sort(key=lambda item: -(item.outcome.real_tokens_per_s or 0.0))
    best = [item for item in measured if item.outcome.baseline is None][:NUM_SHOWN]
    shown = [item for item in measured if item in best or item.outcome.baseline is not None]
    headers = [
        "trial", "config", "shapes", "not padding", "compile s", "run s", "+-",
        "real tokens/s", "peak GB",
    ]  # fmt: skip
    rows = [_table_row(item) for item in shown]
    left_out = len(measured) - len(shown)
    more = f"; {left_out} slower ones are in trials.csv" if left_out else ""
    title = f"trials, by estimates from the measurements of trials alone{more}\n"
    return title + tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True)


def _table_row(item: NumberedOutcome) -> list[str]:
    outcome, estimate = item.outcome, item.outcome.estimate
    assert estimate is not None
    baseline = f"{outcome.baseline}: " if outcome.baseline else ""
    return [
        str(item.number),
        baseline + describe_config(outcome.config),
        str(outcome.num_shapes),
        f"{100 * outcome.effective_token_fraction:.1f} %",
        f"{estimate.estimated_compile_s:.1f}",
        f"{estimate.estimated_run_s:,.0f}",
        f"{estimate.estimated_run_error_s:,.0f}",
        f"{estimate.estimated_real_tokens_per_s:,.0f}",
        f"{outcome.expected_peak_bytes / 1e9:.2f}",
    ]


def _several_devices(devices: SeveralDevices) -> str:
    table = tabulate(
        device_rows(devices.lines),
        headers=DEVICE_HEADERS,
        tablefmt="simple",
        disable_numparse=True,
    ).replace(NO_BREAK, " ")
    told = [text.replace(NO_BREAK, " ") for text in (devices.verdict, devices.note)]
    return f"Several devices. {told[0]}\n{table}\n{told[1]}"


def _failures(outcomes: Sequence[NumberedOutcome]) -> list[tuple[int, str, str, str]]:
    failed = [
        (item, item.outcome.status, item.outcome.reason)
        if item.outcome.estimate is None
        else (item, "inexact", describe_inexact(item.outcome))
        for item in outcomes
        if not is_feasible(item.outcome)
    ]
    return [
        (item.number, describe_config(item.outcome.config), status, reason)
        for item, status, reason in failed
    ]


def _csv_row(item: NumberedOutcome) -> dict[str, object]:
    outcome = item.outcome
    batching, graph = outcome.config.batching, outcome.config.graph
    row: dict[str, object] = {
        "trial": item.number,
        "baseline": outcome.baseline or "",
        "status": outcome.status,
        "reason": outcome.reason,
        "strategy": batching.strategy,
        "num_buckets": len(batching.boundaries) or "",
        "boundaries": " ".join(map(str, batching.boundaries)),
        "align": describe_align(batching),
        "tokens_per_batch": batching.tokens_per_batch,
        "graph_mode": graph.mode,
        "jit_level": graph.jit_level,
        "compute_dtype": outcome.config.precision.compute_dtype,
        "fp32_ops": " ".join(outcome.config.precision.fp32_ops),
        "num_shapes": outcome.num_shapes,
        "num_new_measured_shapes": len(outcome.measured),
        "num_steps_per_epoch": outcome.num_steps,
        "effective_token_fraction": round(outcome.effective_token_fraction, 6),
        "length_autocorrelation": round(outcome.length_autocorrelation, 6),
        "peak_bytes": outcome.peak_bytes,
        "memory_kind": outcome.memory_kind,
        "trial_wall_s": round(outcome.wall_s, 2),
        "other_cores": round(outcome.other_cores, 2),
        "finished_at_s": round(outcome.finished_at_s, 1),
    }
    if outcome.precision is not None:
        check = vars(outcome.precision)
        row |= {name: check[name] for name in ("loss_deviation", "gradient_deviation")}
        row |= {"num_nonfinite": check["num_nonfinite"], "precision_violation": check["violation"]}
    if outcome.estimate is not None:
        estimates = vars(outcome.estimate)
        row |= {
            name: "" if value is None else round(value, 6) for name, value in estimates.items()
        }
    return row

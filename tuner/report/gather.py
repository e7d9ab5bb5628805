"""Everything that the report page shows, from a study's result; pure."""

from __future__ import annotations

from tuner.config.codec import format_config
from tuner.config.schema import BatchingConfig, TrainConfig
from tuner.report.contents import (
    Absent,
    BestConfig,
    FailedTrial,
    NamedValue,
    ReportContents,
    RunFacts,
    SeveralDevices,
)
from tuner.report.gather_comparison import gather_comparison
from tuner.report.gather_devices import gather_devices
from tuner.report.gather_figures import (
    gather_lengths,
    gather_prediction,
    gather_run_time,
    gather_trials,
    gather_waste,
)
from tuner.report.gather_headline import gather_headline
from tuner.report.gather_notes import SPELLED, gather_environment, gather_notes
from tuner.report.gather_precision import gather_sensitivity
from tuner.report.markup import percent
from tuner.report.study import (
    READ_REPORT,
    StudyContext,
    describe_config,
    describe_inexact,
    next_commands,
)
from tuner.simulate.measurement import CostKey, describe_precision
from tuner.study.choose import is_feasible, with_provenance
from tuner.study.outcome import NumberedOutcome, Outcome
from tuner.study.result import StudyResult
from tuner.study.setup import StudySetup

VERSIONS_AT_THE_HEAD = ("varseq-tuner", "mindspore")


def gather_contents(
    result: StudyResult,
    setup: StudySetup,
    context: StudyContext,
    devices: SeveralDevices | Absent | None = None,
) -> ReportContents:
    """The whole page.

    Args:
        result: All that is known, of an unfinished study too.
        setup: What the study is about.
        context: What the page says besides.
        devices: Of `gather_devices` for this result; None: it is called here.
    """
    best = result.best
    prediction = gather_prediction(result, setup)
    return ReportContents(
        facts=_facts(result, context),
        headline=gather_headline(result, setup, prediction),
        comparison=gather_comparison(result, setup),
        prediction=prediction,
        trials=gather_trials(result.outcomes),
        lengths=Absent() if best is None else gather_lengths(best.outcome, setup),
        waste=Absent() if best is None else gather_waste(best.outcome, setup),
        run_time=gather_run_time(result, setup),
        devices=gather_devices(result, setup) if devices is None else devices,
        sensitivity=gather_sensitivity(result, setup),
        failures=tuple(_failed(item) for item in result.outcomes if not is_feasible(item.outcome)),
        best=Absent() if best is None else _best(best, result, setup, context),
        environment=gather_environment(setup, context),
        notes=gather_notes(result, setup, context),
    )


def best_config(result: StudyResult, setup: StudySetup) -> TrainConfig | None:
    """What best.yaml holds: the best config with where it comes from; None if there is none."""
    return None if result.best is None else _with_provenance(result.best, result, setup)


def _with_provenance(best: NumberedOutcome, result: StudyResult, setup: StudySetup) -> TrainConfig:
    device = setup.installation.device
    return with_provenance(
        best,
        data=setup.data,
        costs=result.book.known(CostKey.of(best.outcome.config, device)),
        study_name=setup.study_name,
        installation=setup.installation,
    )


def _facts(result: StudyResult, context: StudyContext) -> RunFacts:
    return RunFacts(
        data_path=context.data_path,
        num_rows=context.num_samples,
        longest_tokens=context.longest,
        device=context.device,
        versions=tuple(
            NamedValue(name=SPELLED.get(name, name), value=context.versions[name])
            for name in VERSIONS_AT_THE_HEAD
            if name in context.versions
        ),
        commands=tuple(
            NamedValue(name=name, value=command)
            for name, command in next_commands(result, context)
            if name != READ_REPORT
        ),
    )


def _failed(item: NumberedOutcome) -> FailedTrial:
    outcome = item.outcome
    is_inexact = outcome.status == "ok"
    return FailedTrial(
        number=item.number,
        config=describe_config(outcome.config),
        status="inexact" if is_inexact else outcome.status,
        reason=describe_inexact(outcome) if is_inexact else outcome.reason,
    )


def _best(
    best: NumberedOutcome, result: StudyResult, setup: StudySetup, context: StudyContext
) -> BestConfig:
    return BestConfig(
        path=context.best_config_path,
        trial=best.number,
        settings=tuple(
            NamedValue(name=name, value=value) for name, value in _settings(best.outcome)
        ),
        yaml_text=format_config(_with_provenance(best, result, setup)),
    )


def _settings(outcome: Outcome) -> list[tuple[str, str]]:
    config, estimate = outcome.config, outcome.estimate
    assert estimate is not None
    batching, graph = config.batching, config.graph
    memory = estimate.estimated_peak_bytes
    lines = [
        ("strategy", batching.strategy),
        ("boundaries (tokens)", ", ".join(map(str, batching.boundaries)) or "none"),
        ("padded lengths are multiples of (tokens)", _alignment(batching)),
        ("padded tokens of a batch, at most", _whole(batching.tokens_per_batch)),
        ("real tokens of an update, on average", _whole(config.train.tokens_per_update)),
        ("graph", f"{graph.mode}, jit_level {graph.jit_level}"),
        ("precision", describe_precision(config.precision)),
        ("shapes (rows x tokens)", _shapes(outcome)),
        ("tokens that are not padding, exact", percent(outcome.effective_token_fraction)),
        ("steps an epoch, exact", f"{outcome.num_steps:,}"),
        ("length autocorrelation of neighbouring steps", f"{outcome.length_autocorrelation:.3f}"),
        ("compile seconds, estimated", f"{estimate.estimated_compile_s:,.1f}"),
        (
            f"run seconds of {config.train.epochs} epochs, estimated",
            f"{estimate.estimated_run_s:,.1f} +- {estimate.estimated_run_error_s:,.1f}",
        ),
        (
            "step time that is of shapes timed in the search",
            percent(estimate.measured_time_fraction),
        ),
        ("peak memory of a run, estimated", _gigabytes(memory)),
    ]
    if outcome.peak_bytes:
        lines.append(
            (f"peak memory of its trial ({outcome.memory_kind})", _gigabytes(outcome.peak_bytes))
        )
    return lines


def _alignment(batching: BatchingConfig) -> str:
    if isinstance(batching.align, int):
        return str(batching.align)
    return ", ".join(
        f"{rule.multiple} up to {rule.up_to}" if rule.up_to else f"{rule.multiple} beyond"
        for rule in batching.align
    )


def _shapes(outcome: Outcome) -> str:
    by_length = sorted(outcome.shapes, key=lambda shape: shape[1])
    return ", ".join(f"{size} x {length}" for size, length in by_length)


def _whole(number: int | None) -> str:
    return "not set" if number is None else f"{number:,}"


def _gigabytes(num_bytes: float | None) -> str:
    return "not known" if num_bytes is None else f"{num_bytes / 1e9:.2f} GB"

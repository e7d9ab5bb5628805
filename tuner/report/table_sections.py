"""The parts of the report page that hold words and tables: head, best config, failures, notes."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.report.contents import (
    BestConfig,
    FailedTrial,
    Headline,
    KeyFigure,
    NamedValue,
    PrecisionTry,
    RunFacts,
    Sensitivity,
    SeveralDevices,
)
from tuner.report.device_table import DEVICE_HEADERS, device_rows
from tuner.report.markup import (
    BASIS_MEANING,
    Markup,
    basis_tag,
    definitions,
    element,
    folded,
    join,
    long_text,
    percent,
    table,
)


def show_head(headline: Headline, facts: RunFacts) -> Markup:
    """The two answers, the figures behind them, what was tuned, and what to do next."""
    versions = [f"{item.name} {item.value}" for item in facts.versions]
    about = [
        f"{facts.num_rows:,} rows",
        f"longest {facts.longest_tokens:,} tokens",
        facts.device,
        *versions,
    ]
    parts = [
        element("h1", join(["varseq-tune report: ", element("code", facts.data_path)], "")),
        element("p", " · ".join(about), class_="facts"),
        element("p", headline.verdict, class_=f"verdict {headline.answer}"),
        element("p", headline.trust),
    ]
    if headline.key_figures:
        meanings = [f"{basis}: {meaning}" for basis, meaning in BASIS_MEANING.items()]
        boxes = join([_key_figure(item) for item in headline.key_figures])
        parts.append(element("dl", boxes, class_="figures"))
        parts.append(element("p", "; ".join(meanings) + ".", class_="small"))
    if facts.commands:
        commands = [(item.name, element("pre", item.value)) for item in facts.commands]
        parts.append(definitions(commands, kind="commands"))
    return join(parts)


def _key_figure(item: KeyFigure) -> Markup:
    parts = [
        element("dt", item.label),
        element("dd", item.value, class_="value"),
        element("dd", basis_tag(item.basis)),
    ]
    if item.detail:
        parts.append(element("dd", item.detail, class_="detail"))
    return element("div", join(parts))


def show_best(content: BestConfig) -> Markup:
    """Where it is, what it sets, and its text."""
    place = join(["Trial ", str(content.trial), ", in ", element("code", content.path), "."], "")
    return join(
        [
            element("p", place),
            show_pairs(content.settings),
            folded("The whole file", element("pre", content.yaml_text, tabindex="0")),
        ]
    )


def show_failures(failures: Sequence[FailedTrial]) -> Markup:
    """Every failed trial with its reason."""
    rows = [
        [
            str(item.number),
            item.status,
            long_text(item.reason),
            element("div", item.config, class_="config"),
        ]
        for item in failures
    ]
    headers = ["trial", "status", "reason", "config"]
    return table("Trials that failed or were stopped", headers, rows, text_columns=4)


def show_sensitivity(content: Sensitivity) -> Markup:
    """Op groups in lower precision against fp32."""
    headers = ["dtype", "op group", "needs fp32", "loss deviation", "gradient deviation",
               "values not finite"]  # fmt: skip
    rows = [_precision_row(item) for item in content.tries]
    parts = [element("p", content.note)] if content.note else []
    return join([*parts, table("Deviation from fp32", headers, rows, text_columns=3)])


def _precision_row(item: PrecisionTry) -> list[str]:
    kind, word = ("bad", "yes") if item.is_sensitive else ("good", "no")
    return [
        item.dtype,
        item.group,
        element("strong", word, class_=kind),
        percent(item.loss_deviation),
        percent(item.gradient_deviation),
        f"{item.num_non_finite:,}",
    ]


def show_devices(content: SeveralDevices) -> Markup:
    """What is lost to waiting, and what equal shapes cost, by number of ranks."""
    return join(
        [
            element("p", content.verdict),
            table("Several devices, simulated", DEVICE_HEADERS, device_rows(content.lines)),
            element("p", content.note, class_="small"),
        ]
    )


def show_notes(notes: Sequence[str]) -> Markup:
    """One sentence each."""
    return element("ul", join([element("li", note) for note in notes]))


def show_pairs(pairs: Sequence[NamedValue]) -> Markup:
    """Names with their values."""
    return definitions([(item.name, item.value) for item in pairs], kind="settings")

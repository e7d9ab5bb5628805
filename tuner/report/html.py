"""The report as one page that needs nothing else: values in, HTML out.

No script runs and nothing is loaded: style and figures are in the page, and a policy in its head
forbids the browser all else. The same contents give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tuner.report.contents import Absent, ReportContents
from tuner.report.figure_sections import (
    show_comparison,
    show_lengths,
    show_prediction,
    show_run_time,
    show_trials,
    show_waste,
)
from tuner.report.markup import Markup, element, join
from tuner.report.page_style import STYLE
from tuner.report.table_sections import (
    show_best,
    show_devices,
    show_failures,
    show_head,
    show_notes,
    show_pairs,
    show_sensitivity,
)

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_Content = TypeVar("_Content")


@dataclass(frozen=True, kw_only=True)
class _Section:
    """A part of the page; short is its title in the table of contents."""

    anchor: str
    title: str
    short: str
    body: Markup


def format_html(contents: ReportContents) -> str:
    """The page.

    Args:
        contents: Everything that it says; any text in it may hold any characters.

    Returns:
        A whole HTML document, to be written as UTF-8.
    """
    sections = [*_answers(contents), *_search(contents), *_background(contents)]
    body = join(
        [
            element("header", show_head(contents.headline, contents.facts)),
            _table_of_contents(sections),
            element("main", join([_section(section) for section in sections])),
            element(
                "footer", "Written by varseq-tune. This file loads nothing and sends nothing."
            ),
        ]
    )
    title = f"varseq-tune report: {contents.facts.data_path}"
    return f"<!DOCTYPE html>\n{_document(title, body)}\n"


def _document(title: str, body: Markup) -> Markup:
    head = [
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        # Without it a page that is served asks for /favicon.ico.
        Markup('<link rel="icon" href="data:,">'),
        element("title", title),
        element("style", Markup(STYLE)),
    ]
    return element("html", join([element("head", join(head)), element("body", body)]), lang="en")


def _table_of_contents(sections: Sequence[_Section]) -> Markup:
    links = [element("a", section.short, href=f"#{section.anchor}") for section in sections]
    entries = join([element("li", link) for link in links])
    return element("nav", element("ul", entries), aria_label="Contents")


def _section(section: _Section) -> Markup:
    heading = element("h2", section.title, id=f"{section.anchor}-title")
    return element(
        "section",
        join([heading, section.body]),
        id=section.anchor,
        aria_labelledby=f"{section.anchor}-title",
    )


def _answers(contents: ReportContents) -> list[_Section]:
    return [
        _Section(
            anchor="comparison",
            title="Is it really faster?",
            short="Comparison",
            body=_show(
                contents.comparison,
                show_comparison,
                "The winner was not measured again against the baselines.",
            ),
        ),
        _Section(
            anchor="prediction",
            title="Can the estimates be believed?",
            short="Predicted and measured",
            body=_show(
                contents.prediction,
                show_prediction,
                "No shape was both predicted and measured.",
            ),
        ),
        _Section(
            anchor="best",
            title="The best config",
            short="Best config",
            body=_show(
                contents.best, show_best, "No config was found: no trial could be measured."
            ),
        ),
    ]


def _search(contents: ReportContents) -> list[_Section]:
    return [
        _Section(
            anchor="trials",
            title="How the search went",
            short="Trials",
            body=_show(contents.trials or Absent(), show_trials, "No trial has ended."),
        ),
        _Section(
            anchor="failures",
            title="Trials that failed or were stopped",
            short="Failures",
            body=_show(contents.failures or Absent(), show_failures, "No trial failed."),
        ),
        _Section(
            anchor="lengths",
            title="The rows and the boundaries",
            short="Lengths",
            body=_show(contents.lengths, show_lengths, "The lengths were not counted."),
        ),
        _Section(
            anchor="waste",
            title="Padding and the number of shapes",
            short="Padding",
            body=_show(contents.waste, show_waste, "Padding was not computed."),
        ),
        _Section(
            anchor="run-time",
            title="Run time and the number of shapes",
            short="Run time",
            body=_show(
                contents.run_time,
                show_run_time,
                "Run times were not estimated: too little was measured.",
            ),
        ),
        _Section(
            anchor="devices",
            title="Several devices",
            short="Several devices",
            body=_show(contents.devices, show_devices, "Several devices were not simulated."),
        ),
    ]


def _background(contents: ReportContents) -> list[_Section]:
    return [
        _Section(
            anchor="precision",
            title="What needs fp32",
            short="Precision",
            body=_show(contents.sensitivity, show_sensitivity, "Precision was not examined."),
        ),
        _Section(
            anchor="notes",
            title="Assumptions and what was left out",
            short="Assumptions",
            body=_show(contents.notes or Absent(), show_notes, "None are recorded."),
        ),
        _Section(
            anchor="environment",
            title="Environment",
            short="Environment",
            body=_show(
                contents.environment or Absent(), show_pairs, "The environment was not recorded."
            ),
        ),
    ]


def _show(content: _Content | Absent, show: Callable[[_Content], Markup], default: str) -> Markup:
    """The section, or the sentence that says why it is not there."""
    if isinstance(content, Absent):
        return element("p", content.reason or default, class_="absent")
    return show(content)

"""The report page as text: whole, self-contained, escaped, the same for the same contents."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest
import report_case

from tuner.report.contents import Absent, FailedTrial, NamedValue
from tuner.report.html import format_html
from tuner.report.markup import element, escape, long_text, percent, seconds
from tuner.report.points import RunTimePoint

VOID = {"meta", "link", "br", "img", "input"}
FIGURES = ("comparison", "prediction", "trials", "lengths", "waste", "run-time")


class Page(HTMLParser):
    """Elements, ids and text; every end tag must close what was opened last."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.text_of: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names))
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if self.open:
            self.text_of[self.open[-1]] = self.text_of.get(self.open[-1], "") + data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def full_text():
    return format_html(report_case.full_contents())


@pytest.fixture(scope="module")
def full_page(full_text):
    return Page(full_text)


@pytest.fixture(scope="module")
def empty_text():
    return format_html(report_case.empty_contents())


def test_the_page_is_whole(full_text, full_page):
    assert full_text.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert full_page.text_of["title"] == "varseq-tune report: data/chat.mindrecord"
    assert ("name", "viewport") in full_page.attributes
    assert ("charset", "utf-8") in full_page.attributes
    full_text.encode("utf-8")


def test_every_id_is_there_once_and_every_reference_has_its_id(full_text, full_page):
    assert len(full_page.ids) == len(set(full_page.ids))
    wanted = {
        value[1:] for name, value in full_page.attributes if name == "href" and value[:1] == "#"
    }
    wanted |= set(re.findall(r"url\(#([^)]*)\)", full_text))
    wanted |= {value for name, value in full_page.attributes if name == "aria-labelledby"}
    assert len(wanted) > 20
    assert wanted <= set(full_page.ids)


@pytest.mark.parametrize("kind", ["full", "empty"])
def test_the_page_points_nowhere_and_runs_nothing(kind, request):
    text = request.getfixturevalue(f"{kind}_text")
    page = Page(text)
    assert not re.search(r"https?://|//[a-z]+\.|@import|@font-face", text)
    for name, value in page.attributes:
        assert not name.startswith("on")
        if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
            assert value == "data:," or value.startswith("#")
    assert not {"script", "iframe", "object", "embed", "img", "form"} & set(page.tags)
    assert set(re.findall(r"url\((.)", text)) <= {"#"}


def test_the_same_contents_give_the_same_bytes(full_text):
    assert format_html(report_case.full_contents()) == full_text


def test_a_hostile_reason_is_only_text(full_text, full_page):
    assert "<script" not in full_text
    assert full_page.text.count("<script>alert('x')</script> \"quoted\" & 'single'") >= 2
    assert "ошибка памяти" in full_page.text
    assert "\x00" not in full_text and "\x1b" not in full_text and "\ud800" not in full_text
    assert full_page.text.count("RuntimeError: out of memory") > 200


def test_every_text_is_escaped(full_page):
    """Each text of the contents in turn, names in figures and attributes included."""

    def spoil(value):
        if isinstance(value, str):
            return value + report_case.HOSTILE
        if isinstance(value, tuple):
            return tuple(map(spoil, value))
        if dataclasses.is_dataclass(value):
            # These are words of the page itself, not of the data.
            kept = {"answer", "basis"}
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return dataclasses.replace(
                value, **{name: spoil(it) for name, it in fields.items() if name not in kept}
            )
        return value

    text = format_html(spoil(report_case.full_contents()))
    page = Page(text)
    assert "<script" not in text
    assert page.text.count("<script>alert('x')") > 100
    assert set(page.tags) == set(full_page.tags)


def test_every_figure_has_words_for_those_who_do_not_see_it(full_text, full_page):
    assert full_page.tags.count("figure") == full_page.tags.count("figcaption") == len(FIGURES)
    assert full_page.attributes.count(("role", "img")) == len(FIGURES)
    assert full_page.tags.count("svg") == 2 * len(FIGURES)
    assert full_page.text.count("The numbers") == len(FIGURES) - 1
    assert "Hollow marks and dashed lines are estimated, filled marks are measured" in full_text


def test_colours_of_figures_follow_the_theme(full_text):
    for svg in re.findall(r"<svg.*?</svg>", full_text, flags=re.S):
        assert not re.search(r"#[0-9a-f]{6}\b", svg)
        assert "var(--" in svg and "<style" not in svg and "font-family" not in svg


def test_the_figures_of_the_contents_stand_in_the_page(full_page):
    text = full_page.text.replace("\N{NO-BREAK SPACE}", " ")
    for told in (
        "2.31 x",
        "0.424 to 0.441",
        "oom : 9.10 GB, over the limit of 8.00 GB (--memory-limit)",
        "varseq-train --config results/best.yaml",
        "From step 312 on it is ahead of padding to the longest",
        "The cost model expects the shortest run from 11 shapes",
        "30 trials in 48 minutes, 4 of them without a figure.",
        "that does not carry over to an NPU",
        "On 512 devices that take other shapes, 61.2 %",
        "25.3 min",
        "tokens_per_update: 16384",
        "jit_level O2 was not tried",
        "a made-up CPU, 2 cores",
    ):
        assert told in text


@pytest.mark.parametrize(
    ("steps", "told"),
    [(None, "never ahead of padding"), (0, "ahead of padding to the longest from the first step")],
)
def test_break_even_in_words(steps, told):
    run_time = dataclasses.replace(report_case.run_time_figure(), break_even_steps=steps)
    assert told in only(run_time=run_time)


def only(**sections) -> str:
    """The text of a page with these sections only."""
    return Page(format_html(dataclasses.replace(report_case.empty_contents(), **sections))).text


def test_absent_sections_say_why(empty_text):
    page = Page(empty_text)
    assert page.tags.count("section") == page.tags.count("h2") == 12
    assert page.tags.count("svg") == page.tags.count("table") == 0
    assert page.attributes.count(("class", "absent")) == 12
    assert "No confirmation was run: --confirm 0." in page.text
    assert "No trial failed." in page.text
    assert "Too few rows." in only(lengths=Absent(reason="Too few rows."))


def test_sections_with_the_least_that_they_can_hold():
    point = RunTimePoint(num_shapes=1, estimated_run_s=0.5, compile_s=0.0)
    run_time = dataclasses.replace(
        report_case.run_time_figure(), points=(point,), timed_runs=(), optimum_num_shapes=1
    )
    prediction = report_case.prediction_figure()
    shape = dataclasses.replace(prediction.shapes[0], low_s=None, high_s=None)
    failed = [point for point in report_case.trial_points() if point.status == "oom"]
    comparison = report_case.comparison()
    text = only(
        run_time=run_time,
        prediction=dataclasses.replace(prediction, shapes=(shape,)),
        lengths=dataclasses.replace(
            report_case.lengths_figure(), bin_edges=(5, 6), num_rows=(9,), boundaries=()
        ),
        waste=dataclasses.replace(
            report_case.waste_figure(),
            points=report_case.waste_figure().points[:1],
            chosen_num_shapes=None,
        ),
        trials=(dataclasses.replace(failed[0], best_so_far=None),),
        comparison=dataclasses.replace(comparison, rows=comparison.rows[-1:]),
    )
    assert "not known" in text
    assert "The best config has no boundaries." in text
    assert "1 trial in" in text


def test_bins_that_grow_and_spread_step_times_are_drawn():
    lengths = dataclasses.replace(
        report_case.lengths_figure(), bin_edges=(1, 8, 64, 512, 4096), num_rows=(1, 2, 3, 4)
    )
    prediction = report_case.prediction_figure()
    fast = dataclasses.replace(prediction.shapes[0], predicted_step_s=0.01, measured_step_s=0.012)
    spread = dataclasses.replace(prediction, shapes=(fast, *prediction.shapes))
    assert "512 to 4,096" in only(lengths=lengths, prediction=spread)


def test_of_very_many_shapes_the_worst_predicted_are_drawn_and_all_are_told():
    prediction = report_case.prediction_figure()
    many = [
        dataclasses.replace(prediction.shapes[0], padded_length=8 * i, relative_error=i / 1000)
        for i in range(1, 41)
    ]
    page = format_html(
        dataclasses.replace(
            report_case.empty_contents(),
            prediction=dataclasses.replace(prediction, shapes=tuple(many)),
        )
    )
    drawn = re.findall(r">(256 x \d+)</text>", page)
    assert len(drawn) == 2 * 24 and "256 x 320" in drawn and "256 x 8" not in drawn
    assert "Drawn are the 24 shapes of the largest errors." in page
    assert page.count('<td class="words">256 x ') == 40


def test_a_long_reason_is_folded_and_kept_whole():
    short, long = "x" * 280, "y " * 2500
    assert "details" not in long_text(short)
    assert Page(long_text(long)).tags.count("details") == 1
    assert long in long_text(long)
    failed = FailedTrial(number=3, config="fixed", status="crashed", reason=long)
    assert long.strip() in only(failures=(failed,))


def test_numbers_as_they_are_read():
    assert [percent(x).replace("\xa0", " ") for x in (0, 0.0512, 0.00021, float("nan"))] == [
        "0.0 %", "5.1 %", "0.021 %", "not finite",
    ]  # fmt: skip
    told = [seconds(s).replace("\xa0", " ") for s in (0.0123, 45.25, 5552.0, 36000.0)]
    assert told == ["12.3 ms", "45.2 s", "92.5 min", "10 h"]
    assert seconds(5400.0, longest_s=36000.0).replace("\xa0", " ") == "1.5 h"
    assert seconds(None) == "-"


def test_markup_is_escaped_once():
    assert element("p", "a < b", class_='"') == '<p class="&quot;">a &lt; b</p>'
    assert element("p", element("b", "&")) == "<p><b>&amp;</b></p>"
    assert escape(escape("<")) == "&lt;"


def test_a_name_of_a_setting_may_hold_anything():
    pair = NamedValue(name="<b>", value="]]>-->")
    assert "<b>" in only(environment=(pair,)) and "]]>-->" in only(environment=(pair,))

"""The report page in Chromium: wide and narrow, light and dark, whole and empty."""

from __future__ import annotations

import os
import shutil
from types import SimpleNamespace

import pytest
import report_case

from tuner.report.html import format_html

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("chromium is not installed", allow_module_level=True)

LEAST_CONTRAST = 4.5
VARIANTS = [
    (kind, width, theme)
    for kind in ("full", "empty")
    for width in (1280, 400)
    for theme in ("light", "dark")
]

# [text, contrast] of every visible piece of text; SVG text has its colour in fill.
CONTRASTS = """() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = rgb => rgb.slice(0, 3).map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = node => {
    for (let at = node; at; at = at.parentElement) {
      const rgba = parse(getComputedStyle(at).backgroundColor);
      if (rgba.length === 3 || rgba[3] === 1) return rgba;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.body.querySelectorAll('*')) {
    const own = [...node.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !node.checkVisibility()) continue;
    const style = getComputedStyle(node);
    const ink = parse(node instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [light(ink), light(ground(node))].sort((x, y) => y - x);
    found.push([node.textContent.trim().slice(0, 40), (a + 0.05) / (b + 0.05)]);
  }
  return found;
}"""

# Pairs of texts in one drawing of which one lies on the other by more than a pixel.
OVERLAPS = """() => [...document.querySelectorAll('svg')].flatMap(svg => {
  const boxes = [...svg.querySelectorAll('text')].filter(t => t.checkVisibility())
    .map(t => [t.textContent, t.getBoundingClientRect()]);
  return boxes.flatMap(([one, a], i) => boxes.slice(i + 1)
    .filter(([_, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1 + 0.25 * a.height)
    .map(([other, _]) => [one, other]));
})"""

# Texts that reach out of their drawing.
CUT_OFF = """() => [...document.querySelectorAll('svg text')].filter(t => t.checkVisibility())
  .filter(t => {
    const [a, b] = [t.getBoundingClientRect(), t.closest('svg').getBoundingClientRect()];
    return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1
      || a.bottom > b.bottom + 1;
  }).map(t => t.textContent)"""


@pytest.fixture(scope="module")
def browser():
    # Chromium has no sandbox for root, as which containers run.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        try:
            started = driver.chromium.launch(executable_path=CHROMIUM, args=options)
        except playwright.Error as error:
            pytest.skip(f"chromium does not start: {str(error).splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    written = {
        "full": folder / "full report.html",
        "empty": folder / "empty report.html",
    }
    written["full"].write_text(format_html(report_case.full_contents()), encoding="utf-8")
    written["empty"].write_text(format_html(report_case.empty_contents()), encoding="utf-8")
    return written


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: "-".join(map(str, variant)))
def shown(request, browser, files):
    kind, width, theme = request.param
    messages: list[str] = []
    requests: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    page.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: messages.append(f"error: {error}"))

    def watch(route):
        requests.append(route.request.url)
        if route.request.url == files[kind].as_uri():
            route.continue_()
        else:
            route.abort()

    page.route("**/*", watch)
    page.goto(files[kind].as_uri())
    yield SimpleNamespace(
        page=page, kind=kind, width=width, theme=theme, messages=messages, requests=requests,
        address=files[kind].as_uri(),
    )  # fmt: skip
    page.close()


def test_nothing_is_complained_of_and_nothing_else_is_asked_for(shown):
    assert shown.messages == []
    assert shown.requests == [shown.address]


def test_the_page_is_never_wider_than_the_window(shown):
    folds = shown.page.locator("details")
    for is_open in (False, True):
        folds.evaluate_all("(all, open) => all.forEach(one => one.open = open)", is_open)
        assert shown.page.evaluate("document.documentElement.scrollWidth") <= shown.width


def test_every_figure_shows_one_drawing_of_its_width(shown):
    figures = shown.page.locator("figure")
    assert figures.count() == (6 if shown.kind == "full" else 0)
    for figure in figures.all():
        drawings = [svg for svg in figure.locator("svg").all() if svg.is_visible()]
        assert len(drawings) == 1
        box = drawings[0].bounding_box()
        assert box["width"] > min(shown.width, 900) * 0.8
        assert box["height"] > 150
        assert box["x"] >= 0 and box["x"] + box["width"] <= shown.width


def test_text_in_figures_is_large_enough_and_lies_on_no_other(shown):
    heights = shown.page.evaluate(
        "[...document.querySelectorAll('svg text')].filter(t => t.checkVisibility())"
        ".map(t => t.getBoundingClientRect().height)"
    )
    assert all(height >= 11 for height in heights)
    assert bool(heights) == (shown.kind == "full")
    assert shown.page.evaluate(OVERLAPS) == []
    assert shown.page.evaluate(CUT_OFF) == []


def test_text_stands_out_from_its_ground(shown):
    contrasts = shown.page.evaluate(CONTRASTS)
    assert len(contrasts) > (150 if shown.kind == "full" else 20)
    assert [pair for pair in contrasts if pair[1] < LEAST_CONTRAST] == []


def test_the_theme_is_the_readers(shown):
    ground = shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(255, 255, 255)" if shown.theme == "light" else "rgb(21, 25, 30)")


def test_every_link_of_the_contents_leads_to_a_heading_in_sight(shown):
    links = shown.page.locator("nav a").all()
    assert len(links) == 12
    links[-4].click()
    target = links[-4].get_attribute("href")
    top = shown.page.locator(f"{target} h2").bounding_box()["y"]
    assert -1 <= top < 900


def test_tables_scroll_in_their_own_box(shown):
    boxes = shown.page.locator(".scroll").all()
    assert bool(boxes) == (shown.kind == "full")
    for box in boxes:
        if box.is_visible():
            assert box.bounding_box()["width"] <= shown.width


def test_on_paper_it_is_light_and_shows_all_of_a_table(browser, files):
    page = browser.new_page(viewport={"width": 700, "height": 900}, color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    page.goto(files["full"].as_uri())
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(255, 255, 255)"
    assert page.locator("nav").is_hidden()
    assert page.pdf()[:5] == b"%PDF-"
    page.close()

"""A matplotlib drawing as SVG text that can stand inside a page.

What matplotlib writes is a file of its own. Inside a page its colours have to follow the page's
theme, its ids must not meet those of another drawing, its style sheet must not reach the page, and
nothing may point outside. The same drawing always gives the same text.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from typing import Any

# Colours that no drawing has by accident: each stands for a variable of the page's style.
INK, MUTED, RULE, PAPER = "#010203", "#010204", "#010205", "#010206"
ACCENT, SECOND, BAD = "#010207", "#010208", "#010209"
_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    RULE: "var(--rule)",
    PAPER: "var(--paper)",
    ACCENT: "var(--accent)",
    SECOND: "var(--second)",
    BAD: "var(--bad)",
}

_SETTINGS = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 12,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.titlecolor": MUTED,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "figure.facecolor": "none",
    "grid.color": RULE,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "ytick.major.size": 0,
    "hatch.color": RULE,
}
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def inline_svg(name: str, width: int, height: int, draw: Callable[[Any], None]) -> str:
    """Draw.

    Args:
        name: Unique in the page, letters, digits and hyphens: begins the ids.
        width: Pixels at which text has its nominal size.
        height: Pixels.
        draw: Fills a matplotlib figure, with the colours of this module only.

    Returns:
        An <svg> element without a role or label of its own.
    """
    import matplotlib
    from matplotlib.figure import Figure

    text = io.StringIO()
    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": name}), warnings.catch_warnings():
        # The browser has its own fonts: a glyph that matplotlib's lacks is no matter.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*missing from")
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        draw(figure)
        figure.savefig(text, format="svg", metadata=_NO_METADATA)
    return _fit_into_page(text.getvalue(), name, f'viewBox="0 0 {width} {height}"')


def _fit_into_page(svg: str, name: str, view_box: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r"<svg[^>]*>", f'<svg {view_box} aria-hidden="true">', svg, count=1)
    # Groups are never referred to.
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'xlink:href="#', f'href="#{name}-', svg)
    svg = re.sub(r" font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", svg)
    svg = re.sub(r"(\.\d\d)\d+", r"\1", svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    for sentinel, variable in _VARIABLES.items():
        svg = svg.replace(sentinel, variable)
    return svg.strip()

"""Text to HTML: escaping, tables, sections, and numbers as they are read."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence

from tuner.report.points import Basis

LONG_TEXT_CHARACTERS = 280
"""Beyond this a reason is folded: its beginning is shown and the whole opens on a click."""

NO_BREAK = "\N{NO-BREAK SPACE}"

BASIS_MEANING: dict[Basis, str] = {
    "measured": "timed on the device",
    "estimated": "follows from measurements or a cost model",
    "exact": "counted on the data and the plan",
}


class Markup(str):
    """Text that is HTML already and is not escaped again."""

    __slots__ = ()


def escape(text: str) -> Markup:
    """Text as HTML; characters that no page may hold become U+FFFD.

    Args:
        text: Anything; `Markup` stays as it is.
    """
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(clean(text), quote=True))


def clean(text: str) -> str:
    """Text without control characters and lone surrogates, which no UTF-8 page can hold."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", text)


def element(tag: str, content: str, **attributes: str) -> Markup:
    """An element with escaped content and attributes; `class_` is written `class`."""
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for name, value in attributes.items()
    )
    return Markup(f"<{tag}{written}>{escape(content)}</{tag}>")


def join(parts: Sequence[str], separator: str = "\n") -> Markup:
    """Parts, each escaped."""
    return Markup(separator.join(escape(part) for part in parts))


def basis_tag(basis: Basis) -> Markup:
    """The word that says how a figure is known; its meaning shows on hover."""
    return element("span", basis, class_=f"basis {basis}", title=BASIS_MEANING[basis])


def table(
    label: str, headers: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1
) -> Markup:
    """A table that scrolls inside its own box where it is too wide.

    Args:
        label: What it is, for those who do not see it.
        headers: One for each column.
        rows: Cells; each row is as long as headers.
        text_columns: So many columns from the left hold words; the others are numbers.
    """

    def cells(tag: str, row: Sequence[str]) -> Markup:
        kinds = ["words" if i < text_columns else "number" for i in range(len(row))]
        scope = {"scope": "col"} if tag == "th" else {}
        return join(
            [
                element(tag, cell, class_=kind, **scope)
                for cell, kind in zip(row, kinds, strict=True)
            ],
            "",
        )

    head = element("thead", element("tr", cells("th", headers)))
    body = element("tbody", join([element("tr", cells("td", row)) for row in rows]))
    return element(
        "div",
        element("table", join([element("caption", label, class_="unseen"), head, body])),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=label,
    )


def definitions(pairs: Sequence[tuple[str, str]], kind: str) -> Markup:
    """Names with their values.

    Args:
        pairs: In the order to show.
        kind: Class of the list in the style sheet.
    """
    lines = [
        element("div", join([element("dt", name), element("dd", value)])) for name, value in pairs
    ]
    return element("dl", join(lines), class_=kind)


def folded(summary: str, content: str) -> Markup:
    """What opens on a click."""
    return element("details", join([element("summary", summary), content]))


def long_text(text: str) -> Markup:
    """Text of any length; a long one is folded behind its beginning."""
    if len(text) <= LONG_TEXT_CHARACTERS:
        return element("span", text, class_="reason")
    beginning = text[:LONG_TEXT_CHARACTERS].rstrip() + " …"
    return folded(beginning, element("div", text, class_="reason"))


def percent(fraction: float) -> str:
    """0.0512 -> `5.1 %`; below a tenth of a percent with two significant digits."""
    if not math.isfinite(fraction):
        return "not finite"
    value = 100 * fraction
    told = f"{value:.1f}" if value == 0 or abs(value) >= 0.1 else f"{value:.2g}"
    return f"{told}{NO_BREAK}%"


def seconds(value: float | None, longest_s: float | None = None) -> str:
    """Seconds in the unit in which they are read.

    Args:
        value: Seconds; None becomes a dash.
        longest_s: The longest of those that it stands among, which have one unit; None: it stands
            alone.
    """
    if value is None:
        return "-"
    scale, unit = time_unit(value if longest_s is None else longest_s)
    amount = value / scale
    return f"{amount:,.3g}{NO_BREAK}{unit}" if amount < 100 else f"{amount:,.0f}{NO_BREAK}{unit}"


def time_unit(longest_s: float) -> tuple[float, str]:
    """The unit for seconds up to so many: (seconds of one, its name)."""
    if longest_s < 1:
        return 1e-3, "ms"
    if longest_s < 180:
        return 1.0, "s"
    return (60.0, "min") if longest_s < 5 * 3600 else (3600.0, "h")


def count(number: int, noun: str) -> str:
    """`1 trial`, `1,200 trials`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

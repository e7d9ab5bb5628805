"""The style sheet of the report page: system fonts, one column, light and dark, any width."""

from __future__ import annotations

# Every pair of text and ground has a contrast of 4.5 at least, in both themes.
_LIGHT = """
color-scheme: light;
--paper: #ffffff; --panel: #f5f7f9; --ink: #1d2329; --muted: #56606b; --rule: #d9dfe5;
--accent: #1f5fa8; --second: #a4480e; --good: #1b6b3d; --bad: #a52222;
"""
_DARK = """
color-scheme: dark;
--paper: #15191e; --panel: #1d232a; --ink: #e5e9ed; --muted: #a6b0ba; --rule: #343c45;
--accent: #7fb4f2; --second: #f1a36b; --good: #80d0a0; --bad: #f29393;
"""

_PAGE = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
header, nav, main, footer { max-width: 912px; margin: 0 auto; padding: 0 16px; }
header { padding-top: 40px; }
footer { padding-top: 24px; padding-bottom: 48px; color: var(--muted); font-size: 14px; }
h1, h2 { line-height: 1.25; text-wrap: balance; }
h1 { margin: 0 0 4px; font-size: 16px; font-weight: 600; color: var(--muted); }
h2 { margin: 0 0 12px; padding-top: 20px; font-size: 22px; }
section { margin-top: 40px; border-top: 1px solid var(--rule); }
p { margin: 0 0 12px; max-width: 70ch; }
a { color: var(--accent); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
p, dd, li, h1, h2, summary, small, .config, .reason { overflow-wrap: anywhere; }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
code { font-size: 14px; }
pre {
  margin: 8px 0 0; padding: 12px; overflow: auto; max-height: 36em;
  background: var(--panel); border-radius: 6px; font-size: 13px; line-height: 1.5;
}
ul { margin: 0; padding-left: 20px; max-width: 70ch; }
li { margin-bottom: 6px; }
.absent, .small { color: var(--muted); } .small { font-size: 14px; }
.unseen {
  position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%);
  white-space: nowrap;
}
"""

_HEAD = """
.verdict {
  margin: 0 0 12px; padding-left: 14px; border-left: 4px solid var(--muted);
  max-width: none; font-size: 26px; line-height: 1.3; font-weight: 600; text-wrap: pretty;
}
.verdict.faster { border-color: var(--good); }
.verdict.no_difference { border-color: var(--second); }
.facts { color: var(--muted); font-size: 14px; margin-bottom: 20px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; }
.figures { margin: 20px 0; }
.figures > div { padding: 12px 14px; background: var(--panel); border-radius: 8px; }
.figures dt { font-size: 14px; color: var(--muted); line-height: 1.4; }
.figures dd { margin: 0; }
.figures .value { font-size: 28px; font-weight: 600; line-height: 1.3; }
.figures .detail { font-size: 13px; line-height: 1.4; color: var(--muted); margin-top: 4px; }
.basis {
  display: inline-block; padding: 0 7px; border: 1px solid var(--muted); border-radius: 10px;
  font-size: 12px; line-height: 18px; color: var(--ink); background: var(--paper);
}
.basis.measured, .basis.exact { border-style: solid; }
.basis.estimated { border-style: dashed; }
.commands dd { margin: 0 0 8px; }
.commands pre { margin: 2px 0 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.commands dt { font-size: 14px; color: var(--muted); }
nav { margin-top: 24px; font-size: 15px; }
nav ul { list-style: none; padding: 0; max-width: none; display: flex; flex-wrap: wrap; }
nav ul { gap: 2px 18px; }
nav li { margin: 0; }
nav a { display: inline-block; padding: 3px 0; }
"""

_CONTENT = """
figure { margin: 16px 0 8px; }
figcaption { margin-top: 8px; max-width: 70ch; font-size: 14px; color: var(--muted); }
svg { display: block; width: 100%; height: auto; stroke-linejoin: round; stroke-linecap: butt; }
svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
.narrow { display: none; max-width: 480px; }
.wide { max-width: 880px; }
@media (max-width: 640px) { .narrow { display: block; } .wide { display: none; } }
.scroll { overflow-x: auto; margin: 12px 0; border: 1px solid var(--rule); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; line-height: 1.45; }
th, td { padding: 7px 12px; text-align: left; vertical-align: top; }
th { background: var(--panel); font-weight: 600; vertical-align: bottom; }
td { border-top: 1px solid var(--rule); }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
th.number { white-space: normal; min-width: 6em; }
td .config { min-width: 15em; }
td.words:has(.reason) { min-width: 20em; }
td small { display: block; min-width: 18em; font-size: 13px; color: var(--muted); }
.reason { white-space: pre-wrap; }
.good { color: var(--good); } .bad { color: var(--bad); }
details { margin: 10px 0; }
td details { margin: 0; }
summary { cursor: pointer; color: var(--accent); }
td summary { color: var(--ink); }
.settings { margin: 0; display: grid; gap: 0; }
.settings > div {
  display: grid; grid-template-columns: minmax(10em, 1fr) 2fr; gap: 4px 16px; padding: 6px 0;
  border-bottom: 1px solid var(--rule); font-size: 15px;
}
.settings dt { color: var(--muted); }
.settings dd { margin: 0; }
@media (max-width: 480px) {
  header { padding-top: 24px; }
  .verdict { font-size: 21px; }
  .figures { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .figures .value { font-size: 22px; }
  .settings > div { grid-template-columns: 1fr; }
}
"""

_PRINT = """
body { font-size: 11pt; }
nav { display: none; }
header, main, footer { max-width: none; padding: 0; }
.wide { display: block; } .narrow { display: none; }
figure, tr, .figures > div { break-inside: avoid; }
h2 { break-after: avoid; }
.scroll { overflow: visible; border: 0; }
pre { max-height: none; white-space: pre-wrap; }
"""

STYLE = (
    f":root {{{_LIGHT}}}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{{_DARK}}} }}\n"
    f"{_PAGE}{_HEAD}{_CONTENT}"
    f"@media print {{ :root {{{_LIGHT}}} {_PRINT} }}\n"
)
"""CSS of the page."""

"""The report as a page: its style sheet and the parts it is made of.

Everything that comes from outside, such as a completion, passes `escape`.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import html

_STYLE = """
:root { --ink: #222; --soft: #666; --line: #ddd; --right: #00704f;
  --wrong: #b34700; }
* { box-sizing: border-box; }
body { font: 15px/1.5 "Helvetica Neue", Helvetica, Arial, "Liberation Sans",
  sans-serif; color: var(--ink); background: #fff; margin: 0; }
main { max-width: 1060px; margin: 0 auto; padding: 36px 28px 60px; }
h1 { font-size: 25px; line-height: 1.25; margin: 0 0 2px; }
h2 { font-size: 18px; margin: 40px 0 10px; padding-bottom: 4px;
  border-bottom: 1px solid var(--line); }
p.lead { color: var(--soft); margin: 0 0 20px; }
p.none { color: var(--soft); }
.tiles { display: grid; gap: 10px;
  grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
.tile { border: 1px solid var(--line); border-radius: 4px;
  padding: 9px 13px; }
.tile b { display: block; font-size: 20px; font-weight: 600;
  font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-size: 14px;
  border-top: 1.5px solid var(--ink); border-bottom: 1.5px solid var(--ink); }
th { text-align: left; font-weight: 600;
  border-bottom: 1px solid var(--ink); }
th, td { padding: 4px 10px 4px 0; vertical-align: top; }
tbody tr + tr td { border-top: 1px solid #eee; }
.numbers td + td, .numbers th + th { text-align: right;
  font-variant-numeric: tabular-nums; }
.numbers :is(td, th):last-child { padding-right: 0; }
.columns { display: grid; gap: 0 40px; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(380px, 1fr)); }
figure { margin: 14px 0 26px; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: "Helvetica Neue", Helvetica, Arial,
  "Liberation Sans", sans-serif !important; }
figcaption { color: #444; font-size: 13.5px; margin-top: 6px;
  max-width: 960px; }
figcaption b { color: var(--ink); }
.samples { table-layout: fixed; }
.samples th:nth-child(2) { width: 13%; }
.samples td { overflow-wrap: anywhere; }
.samples pre { margin: 0; white-space: pre-wrap; max-height: 220px;
  overflow: auto; font: 13px/1.45 ui-monospace, Menlo, Consolas,
  "DejaVu Sans Mono", monospace; }
.answer { display: flex; gap: 8px; }
.answer span { flex: none; }
.right { color: var(--right); font-weight: 600; }
.wrong { color: var(--wrong); font-weight: 600; }
.settings { columns: 3 270px; column-gap: 26px; font-size: 12.5px; }
.settings section { break-inside: avoid-column; margin: 0 0 12px; }
.settings h3 { font-size: 13px; margin: 0 0 2px; }
.settings div { display: flex; justify-content: space-between; gap: 10px;
  border-top: 1px solid #eee; }
.settings div span:last-child { text-align: right; overflow-wrap: anywhere;
  font-variant-numeric: tabular-nums; }
.settings div span:first-child { color: var(--soft); }
@media print { main { max-width: none; padding: 0; }
  figure, table { break-inside: avoid; } }
"""


def escape(text: object) -> str:
  """Returns text that HTML shows as it is, in elements and attributes."""
  return html.escape(str(text), quote=True)


def page(title: str, body: Iterable[str]) -> str:
  """Returns a whole document.

  Args:
    title: as plain text.
    body: HTML of its sections, in order.
  """
  content = '\n'.join(body)
  # Nothing may be loaded or run: a completion that slips through is inert.
  policy = "default-src 'none'; style-src 'unsafe-inline'"
  return (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    '<meta name="viewport" content="width=device-width">\n'
    f'<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n'
    f'<body>\n<main>\n{content}\n</main>\n</body>\n</html>\n'
  )


def section(name: str, title: str, *parts: str) -> str:
  """Returns a headed section.

  Args:
    name: its id, for links.
    title: as plain text.
    *parts: HTML, in order.
  """
  content = '\n'.join(parts)
  return (
    f'<section id="{escape(name)}">\n<h2>{escape(title)}</h2>\n{content}\n'
    '</section>'
  )


def figure(svg: str, number: int, title: str, caption: str) -> str:
  """Returns a figure with its caption.

  Args:
    svg: the picture.
    number: of the figure.
    title: first words of the caption, in bold; plain text.
    caption: the rest, plain text.
  """
  return (
    f'<figure>\n{svg}\n<figcaption><b>Figure {number}. {escape(title)}</b> '
    f'{escape(caption)}</figcaption>\n</figure>'
  )


def table(
  header: Sequence[str], rows: Iterable[Sequence[str]], kind: str
) -> str:
  """Returns a table.

  Args:
    header: of the columns, plain text.
    rows: of HTML cells.
    kind: class that lays it out, 'numbers' or 'samples'.
  """
  head = ''.join(f'<th>{escape(cell)}</th>' for cell in header)
  body = '\n'.join(
    '<tr>' + ''.join(f'<td>{cell}</td>' for cell in row) + '</tr>'
    for row in rows
  )
  return (
    f'<table class="{kind}">\n<thead><tr>{head}</tr></thead>\n'
    f'<tbody>\n{body}\n</tbody>\n</table>'
  )


def tiles(facts: Iterable[tuple[str, str]]) -> str:
  """Returns the few numbers to be seen first: (value, what), plain text."""
  cells = ''.join(
    f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
    for value, what in facts
  )
  return f'<div class="tiles">{cells}</div>'


def settings(groups: Iterable[tuple[str, Sequence[tuple[str, str]]]]) -> str:
  """Returns groups of settings: (group, (name, value)...), plain text."""
  parts = []
  for group, items in groups:
    lines = ''.join(
      f'<div><span>{escape(name)}</span><span>{escape(value)}</span></div>'
      for name, value in items
    )
    parts.append(f'<section><h3>{escape(group)}</h3>{lines}</section>')
  return f'<div class="settings">{"".join(parts)}</div>'

"""Report pages: one HTML file that needs no network, in light and in dark, by mouse, keyboard, finger or screen reader.

A page is a list of fragments, made here or in `charts`. Whatever a fragment is given is escaped, and the page's content
security policy names the hashes of its one style and its one script: the browser refuses any other, and every load.
"""

import base64
import hashlib
import html
import math
import re
from collections.abc import Mapping, Sequence
from numbers import Integral, Real

from weft.errors import DataError

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --panel: #f1f4f8; --ink: #1b212b; --quiet: #5b6675; --rule: #dde3ea;
  --heat: #0b4a86; --focus: #1b74c5; --s0: #1b74c5; --s1: #d9620b; --s2: #0a5f50; --s3: #d85f9f; --s4: #4b2a7b; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171c; --panel: #1e232b; --ink: #e8ecf1; --quiet: #9aa6b5;
  --rule: #303741; --heat: #8fcbff; --focus: #6db6ff; --s0: #4c9fee; --s1: #ff9142; --s2: #a5f0d6; --s3: #e0559c;
  --s4: #dccfff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Helvetica Neue", Arial, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: clamp(1.5rem, 5vw, 4rem) clamp(1rem, 4vw, 2rem) 5rem; }
h1 { margin: 0; font-size: clamp(1.6rem, 5vw, 2.1rem); line-height: 1.2; letter-spacing: -.015em; font-weight: 650; }
h2 { margin: 3.25rem 0 .75rem; font-size: 1.25rem; line-height: 1.3; font-weight: 620; }
h1, h2, p, dd { overflow-wrap: anywhere; }
p { margin: .75rem 0; max-width: 42rem; }
.subtitle { margin: .5rem 0 0; color: var(--quiet); font-size: 1.05rem; }
:focus-visible { outline: 2px solid var(--focus); outline-offset: 3px; border-radius: 4px; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
.scroll { position: relative; overflow-x: auto; margin: 1rem 0; }
.sheet { border-collapse: collapse; width: 100%; font-size: .95rem; }
.sheet th, .sheet td { padding: .6rem 1.5rem .6rem 0; text-align: start; vertical-align: top; min-width: 4rem; }
.sheet tr > :last-child { padding-right: .25rem; }
.sheet thead th { color: var(--quiet); font-size: .85rem; font-weight: 500; border-bottom: 1px solid var(--quiet); }
.sheet tbody tr + tr > * { border-top: 1px solid var(--rule); }
.sheet tbody th { font-weight: 500; }
.sheet .number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.sheet strong { font-weight: 680; box-shadow: 0 .12em var(--focus); }
.cards { display: flex; flex-wrap: wrap; gap: 1.25rem 3.5rem; margin: 1.75rem 0 2rem; }
.cards dt { color: var(--quiet); font-size: .85rem; }
.cards dd { margin: 0; font-size: 1.5rem; line-height: 1.3; font-weight: 600; font-variant-numeric: tabular-nums; }
details { margin: 1.25rem 0; border-top: 1px solid var(--rule); padding-top: .75rem; }
summary { cursor: pointer; font-weight: 550; }
figure { position: relative; margin: 1.5rem 0 2rem; }
figcaption { display: flex; flex-wrap: wrap; gap: .15rem 1.5rem; align-items: baseline; margin-bottom: .75rem; }
figcaption b { font-weight: 600; }
.key { display: flex; flex-wrap: wrap; gap: .15rem 1.1rem; color: var(--quiet); font-size: .875rem; }
.key svg { width: 1.4em; height: .6em; margin-right: .4em; overflow: visible; }
.ramp { display: inline-block; width: 6rem; height: .6rem; margin: 0 .5rem; border-radius: 2px;
  background: linear-gradient(to right, var(--panel), var(--heat)); }
.plot { touch-action: pan-x pan-y; } .plot svg { display: block; }
.plot text { fill: var(--ink); font-size: 12px; }
.plot .quiet { fill: var(--quiet); font-variant-numeric: tabular-nums; }
.lines svg { width: 100%; height: auto; overflow: visible; }
.s0 { --hue: var(--s0); } .s1 { --hue: var(--s1); } .s2 { --hue: var(--s2); }
.s3 { --hue: var(--s3); } .s4 { --hue: var(--s4); }
.rule { stroke: var(--rule); } .axis, .cursor { stroke: var(--quiet); }
.line { fill: none; stroke: var(--hue); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.lead { fill: none; stroke: var(--hue); opacity: .75; }
.dot { fill: var(--hue); stroke: var(--paper); stroke-width: 1.5; }
.map { overflow: auto; width: fit-content; max-width: 100%; }
.ground { fill: var(--panel); } .heat { fill: var(--heat); } .band { fill: none; stroke: var(--s1); opacity: .8; }
.spot { fill: none; stroke: var(--s1); stroke-width: 2.5; }
.plot text.on { font-weight: 700; }
.tip { position: absolute; z-index: 1; left: 0; top: 0; max-width: 100%; padding: .4rem .7rem; border-radius: 6px;
  pointer-events: none; background: var(--paper); border: 1px solid var(--rule); overflow-wrap: anywhere;
  box-shadow: 0 2px 10px rgb(0 0 0 / .18); font-size: .85rem; line-height: 1.5; font-variant-numeric: tabular-nums; }
.tip [class]::before { content: ""; display: inline-block; width: .6em; height: .6em; border-radius: 50%;
  margin-right: .5em; background: var(--hue); }
.tip:empty { display: none; }
@media (min-width: 48rem) { .labelled .lines { padding-right: 9.5rem; } .labelled .drawn { display: none; } }
@media (max-width: 47.99rem) { .lines .end { display: none; } .lines text { font-size: 15px; } }
@media (max-width: 30rem) { .lines text { font-size: 21px; } .lines .line { stroke-width: 3.5; } }
"""

SCRIPT = """
"use strict";
for (const plot of document.querySelectorAll(".plot")) {
  const figure = plot.closest("figure"), svg = plot.querySelector("svg"), tip = figure.querySelector(".tip");
  const data = JSON.parse(figure.querySelector("script").textContent);
  const marks = [...svg.querySelectorAll("[data-mark]")], labels = [...svg.querySelectorAll("[data-label]")];
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
  let at = null;
  const hide = () => {
    tip.textContent = "";
    for (const mark of marks) mark.setAttribute("visibility", "hidden");
    for (const label of labels) label.classList.remove("on");
  };
  const put = (mark, x, y) => {
    mark.setAttribute("transform", `translate(${x} ${y})`); mark.setAttribute("visibility", "visible");
  };
  const tell = (x, y, rows) => {  // beside the point, inside the figure
    for (const [text, hue] of rows) {
      const row = document.createElement("div");
      row.textContent = text; row.dir = "auto"; if (hue) row.className = hue;
      tip.append(row);
    }
    const box = svg.getBoundingClientRect(), home = figure.getBoundingClientRect(), scale = box.width / data.width;
    const left = box.left - home.left + x * scale, top = box.top - home.top + y * scale;
    const side = left + 14 + tip.offsetWidth > home.width ? left - 14 - tip.offsetWidth : left + 14;
    tip.style.left = clamp(side, 0, Math.max(0, home.width - tip.offsetWidth)) + "px";
    tip.style.top = Math.max(0, top - tip.offsetHeight - 10) + "px";
  };
  const lines = {
    start: () => [data.stops.length - 1, 0],
    near: (x) => {
      const away = (i) => Math.abs(data.stops[i][0] - x);
      return [data.stops.reduce((best, _, i) => away(i) < away(best) ? i : best, 0), 0];
    },
    show: ([i]) => {
      const [x, label] = data.stops[i], rows = [[label]];
      put(marks[0], x, 0);
      data.series.forEach(({ name, hue, points }, k) => {
        const point = points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
        if (Math.abs(point[0] - x) > 8) return;
        put(marks[k + 1], point[0], point[1]); rows.push([`${name} ${point[2]}`, hue]);
      });
      tell(x, data.top, rows);
    },
    end: () => [data.stops.length - 1, 0],
  };
  const map = {
    start: () => [0, 0],
    near: (x, y) => [Math.floor((x - data.left) / data.cell), Math.floor((y - data.top) / data.cell)],
    show: ([column, row]) => {
      const x = data.left + column * data.cell, y = data.top + row * data.cell, weight = data.weights[row][column];
      put(marks[0], data.left, y); put(marks[1], x, data.top); put(marks[2], x, y);
      labels[column].classList.add("on"); labels[data.source.length + row].classList.add("on");
      if (document.activeElement === plot) marks[2].scrollIntoView({ block: "nearest", inline: "nearest" });
      const value = weight === null ? "\\u2013" : weight.toFixed(2);
      tell(x + data.cell, y, [[`${data.target[row]} \\u2190 ${data.source[column]} ${value}`]]);
    },
    end: () => [data.source.length - 1, data.target.length - 1],
  };
  const kind = data.weights ? map : lines;
  const show = (where) => {
    const end = kind.end(), inside = where.map((value, i) => clamp(value, 0, end[i]));
    hide(); at = inside; kind.show(inside);
  };
  const point = (event) => {
    const box = svg.getBoundingClientRect(), scale = data.width / box.width;
    show(kind.near((event.clientX - box.left) * scale, (event.clientY - box.top) * scale));
  };
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1],
    Home: [-1e9, 0], End: [1e9, 0] };
  svg.style.pointerEvents = "none";  // or the drawing's own <title> would cover our tip
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("focus", () => { if (plot.matches(":focus-visible")) show(at || kind.start()); });
  plot.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    const move = moves[event.key];
    if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault(); const from = at || kind.start(); show([from[0] + move[0], from[1] + move[1]]);
  });
}
"""

# What HTML forbids even escaped, and what UTF-8 cannot write.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_QUANTITY = re.compile(r"[-+−±<≈]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?\s?(%|×|[a-zA-Zµ]{1,3}(/s)?)?", re.ASCII)


def escaped(text: str) -> str:
    """Make `text` safe inside an element or a quoted attribute, and writable as UTF-8."""
    return html.escape(_UNPRINTABLE.sub("\ufffd", text))


def page(title: str, parts: Sequence[str], subtitle: str = "") -> str:
    """Make a whole document of fragments made by the functions here and in `charts`."""
    under = f'<p class="subtitle" dir="auto">{escaped(subtitle)}</p>' if subtitle else ""
    allowed = f"style-src {_digest(STYLE)}; script-src {_digest(SCRIPT)}"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escaped(title) or 'weft'}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>",
            f'<header><h1 dir="auto">{escaped(title)}</h1>{under}</header>',
            *parts,
            f"</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n",
        ]
    )


def heading(text: str) -> str:
    """Head a section."""
    return f'<h2 dir="auto">{escaped(text)}</h2>'


def paragraph(text: str) -> str:
    """Set a paragraph of plain text."""
    return f'<p dir="auto">{escaped(text)}</p>'


def cards(facts: Mapping[str, object]) -> str:
    """Show a few figures large, each under its name."""
    items = (
        f'<div><dt dir="auto">{escaped(name)}</dt><dd dir="auto">{escaped(_shown(value))}</dd></div>'
        for name, value in facts.items()
    )
    return f'<dl class="cards">{"".join(items)}</dl>'


def details(summary: str, parts: Sequence[str]) -> str:
    """Fold fragments away under a line that opens them."""
    return f'<details><summary dir="auto">{escaped(summary)}</summary>\n{"".join(parts)}\n</details>'


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], best: Mapping[int, int] | None = None) -> str:
    """Set a table whose first column names the rows; `best` maps a column to the row to emphasise in it."""
    for at, row in enumerate(rows):
        if len(row) != len(headers):
            raise DataError(f"table row {at} must have {len(headers)} cells, one a header: got {len(row)}")
    best = best or {}
    columns = [[row[column] for row in rows] for column in range(len(headers))]
    numeric = [_numeric(values) for values in columns]
    shown = [_written(values) for values in columns]
    head = "".join(f'<th scope="col"{_side(numeric[i])}>{escaped(name)}</th>' for i, name in enumerate(headers))
    body = ""
    for at in range(len(rows)):
        cells = (_cell(column[at], i, numeric[i], best.get(i) == at) for i, column in enumerate(shown))
        body += f"<tr>{''.join(cells)}</tr>\n"
    label = escaped(", ".join(headers))
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="Table: {label}"><table class="sheet">\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>"
    )


def _cell(text: str, column: int, numeric: bool, best: bool) -> str:
    inner = escaped(text)
    if best:
        inner = f'<strong>{inner}<span class="hidden"> (best)</span></strong>'
    return f'<th scope="row"{_side(numeric)}>{inner}</th>' if column == 0 else f"<td{_side(numeric)}>{inner}</td>"


def _side(numeric: bool) -> str:
    return ' class="number"' if numeric else ' dir="auto"'


def _numeric(values: Sequence[object]) -> bool:
    known = [value for value in values if value is not None]
    return bool(known) and all(
        _QUANTITY.fullmatch(value)
        if isinstance(value, str)
        else isinstance(value, Real) and not isinstance(value, bool)
        for value in known
    )


def _written(values: Sequence[object]) -> list[str]:
    """Write a column; fractions in it get as many decimals as the one that needs most, so that the digits line up."""
    texts = [_shown(value) for value in values]
    fractions = {at: value for at, value in enumerate(values) if isinstance(value, float) and math.isfinite(value)}
    if not any("e" in texts[at] for at in fractions):
        places = min(4, max((len(texts[at].partition(".")[2]) for at in fractions), default=0))
        texts = [f"{fractions[at]:,.{places}f}" if at in fractions else text for at, text in enumerate(texts)]
    return texts


def _shown(value: object) -> str:
    """Write a number as a reader wants it; what is missing or not a number is a dash."""
    if value is None or (isinstance(value, Real) and value != value):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Integral):
        return f"{int(value):,}"
    return number(float(value)) if isinstance(value, Real) else str(value)


def number(value: float) -> str:
    """Write a number with four significant digits, the thousands set apart."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:,.4g}"


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

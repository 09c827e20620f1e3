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
from pathlib import Path

from weft.errors import DataError

STYLE, SCRIPT = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))

# What HTML forbids even escaped, and what UTF-8 cannot write.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_QUANTITY = re.compile(r"[-+−±<≈]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?\s?(%|×|[a-zA-Zµ]{1,3}(/s)?)?", re.ASCII)


def escaped(text: str) -> str:
    """Make `text` safe inside an element or a quoted attribute, and writable as UTF-8."""
    return html.escape(_UNPRINTABLE.sub("\ufffd", text))


def page(title: str, parts: Sequence[str], subtitle: str = "", compact: bool = False) -> str:
    """Make a whole document of fragments made by the functions here, in `charts` and in `maps`."""
    under = f'<p class="subtitle" dir="auto">{escaped(subtitle)}</p>' if subtitle else ""
    allowed = f"style-src {_digest(STYLE)}; script-src {_digest(SCRIPT)}"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escaped(title) or 'weft'}</title>\n<style>{STYLE}</style>\n</head>",
            f'<body class="{"compact" if compact else ""}">\n<main>',
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


def reply(text: str) -> str:
    """Set what a model answered."""
    return f'<p class="said" dir="auto">{escaped(text)}</p>'


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

"""HTML report pages: one file without network access, light and dark, for mouse, keyboard, touch and screen reader.

A page is a list of HTML fragments, made here or in `charts` and `heatmaps`. All text is escaped, and the page's content
security policy has the hashes of its one style and its one script: the browser refuses any other, and every load.
"""

import base64
import hashlib
import html
import math
import re
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Literal

from weft.errors import DataError

ASSETS = Path(__file__).with_name("assets")
STYLE, SCRIPT = ((ASSETS / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))

# Characters that HTML forbids even escaped, and that UTF-8 cannot encode.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_QUANTITY = re.compile(r"[-+−±<≈]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?\s?(%|×|[a-zA-Zµ]{1,3}(/s)?)?( ± [\d.,]+)?", re.ASCII)


def escaped(text: str) -> str:
    """Return `text` escaped for an element or a quoted attribute, and valid in UTF-8."""
    return html.escape(_UNPRINTABLE.sub("\ufffd", text))


def page(title: str, parts: Sequence[str], subtitle: str = "", compact: bool = False) -> str:
    """Return a whole document of fragments."""
    subheading = f'<p class="subtitle" dir="auto">{escaped(subtitle)}</p>' if subtitle else ""
    sources = f"style-src {_csp_hash(STYLE)}; script-src {_csp_hash(SCRIPT)}"
    policy = f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escaped(title) or 'weft'}</title>\n<style>{STYLE}</style>\n</head>",
            f'<body class="{"compact" if compact else ""}">\n<main>',
            f'<header><h1 dir="auto">{escaped(title)}</h1>{subheading}</header>',
            *parts,
            f'</main>\n<script type="module">{SCRIPT}</script>\n</body>\n</html>\n',
        ]
    )


def heading(text: str) -> str:
    """Return the heading of a section."""
    return f'<h2 dir="auto">{escaped(text)}</h2>'


def subheading(text: str) -> str:
    """Return the heading of a part of a section."""
    return f'<h3 dir="auto">{escaped(text)}</h3>'


def caption(text: str, kind: Literal["figure", "table"]) -> str:
    """Return what stands under a figure or above a table; the page's style numbers both."""
    return f'<p class="caption of-{kind}" dir="auto">{escaped(text)}</p>'


def panels(name: str, legend: str, parts: Mapping[str, str]) -> str:
    """Return fragments of which the reader chooses one by its label; in print there are all.

    `name` must differ from that of the page's other panels.
    """
    if len(parts) < 2:
        return "".join(parts.values())
    choices = "".join(
        f'<input type="radio" name="{escaped(name)}" id="{escaped(name)}-{place}"{"" if place else " checked"}>'
        f'<label for="{escaped(name)}-{place}">{escaped(label)}</label>'
        for place, label in enumerate(parts)
    )
    content = "\n".join(f'<div class="panel">{part}</div>' for part in parts.values())
    return f'<fieldset class="panels"><legend class="hidden">{escaped(legend)}</legend>{choices}\n{content}</fieldset>'


def paragraph(text: str) -> str:
    """Return a paragraph of plain text."""
    return f'<p dir="auto">{escaped(text)}</p>'


def answer_html(text: str) -> str:
    """Return a paragraph with a model's answer."""
    return f'<p class="answer" dir="auto">{escaped(text)}</p>'


def cards(facts: Mapping[str, object]) -> str:
    """Return a few values in large print, each under its name."""
    items = (
        f'<div><dt dir="auto">{escaped(name)}</dt><dd dir="auto">{escaped(_format(value))}</dd></div>'
        for name, value in facts.items()
    )
    return f'<dl class="cards">{"".join(items)}</dl>'


def details(summary: str, parts: Sequence[str]) -> str:
    """Return collapsed fragments under a summary line that opens them."""
    return f'<details><summary dir="auto">{escaped(summary)}</summary>\n{"".join(parts)}\n</details>'


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], best: Collection[tuple[int, int]] = ()) -> str:
    """Return a table whose first column names the rows; `best` are the cells to emphasise, by row and column."""
    for index, row in enumerate(rows):
        if len(row) != len(headers):
            raise DataError(f"table row {index} must have {len(headers)} cells, one a header: got {len(row)}")
    columns = [[row[column] for row in rows] for column in range(len(headers))]
    numeric = [_is_numeric(values) for values in columns]
    texts = [_format_column(values) for values in columns]
    head = "".join(f'<th scope="col"{_alignment(numeric[i])}>{escaped(name)}</th>' for i, name in enumerate(headers))
    body = ""
    for index in range(len(rows)):
        cells = (_cell(column[index], i, numeric[i], (index, i) in best) for i, column in enumerate(texts))
        body += f"<tr>{''.join(cells)}</tr>\n"
    label = escaped(", ".join(headers))
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="Table: {label}"><table class="sheet">\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>"
    )


def _cell(text: str, column: int, numeric: bool, best: bool) -> str:
    content = escaped(text)
    if best:
        content = f'<strong>{content}<span class="hidden"> (best)</span></strong>'
    return (
        f'<th scope="row"{_alignment(numeric)}>{content}</th>'
        if column == 0
        else f"<td{_alignment(numeric)}>{content}</td>"
    )


def _alignment(numeric: bool) -> str:
    return ' class="number"' if numeric else ' dir="auto"'


def _is_numeric(values: Sequence[object]) -> bool:
    """Return whether all values of a column that are not None are numbers or quantities with a unit."""
    present = [value for value in values if value is not None]
    return bool(present) and all(
        _QUANTITY.fullmatch(value)
        if isinstance(value, str)
        else isinstance(value, Real) and not isinstance(value, bool)
        for value in present
    )


def _format_column(values: Sequence[object]) -> list[str]:
    """Return a column as text; floats have as many decimals as the one that needs most, so that digits align."""
    texts = [_format(value) for value in values]
    fractions = {
        index: value for index, value in enumerate(values) if isinstance(value, float) and math.isfinite(value)
    }
    if not any("e" in texts[index] for index in fractions):
        decimals = min(4, max((len(texts[index].partition(".")[2]) for index in fractions), default=0))
        texts = [f"{fractions[i]:,.{decimals}f}" if i in fractions else text for i, text in enumerate(texts)]
    return texts


def _format(value: object) -> str:
    """Return a value as text; None and NaN are a dash."""
    if value is None or (isinstance(value, Real) and value != value):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Integral):
        return f"{int(value):,}"
    return number(float(value)) if isinstance(value, Real) else str(value)


def number(value: float) -> str:
    """Return a number with four significant digits and thousands separators."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:,.4g}"


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

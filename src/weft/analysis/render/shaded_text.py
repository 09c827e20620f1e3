"""Texts in pieces, shaded by a value of each, such as the bits that it costs a language model."""

import math
from collections.abc import Sequence

from weft.analysis.render.page import escaped
from weft.analysis.render.svg import figure

SHADES = 9  # classes .b1 to .b9 of the page's style; without one, there is no shade
_END = "∎"  # in the place of a piece without characters, such as the end of a text


def shaded_text(pieces: Sequence[tuple[str, float]], title: str, note: str, top: float, unit: str = "bits") -> str:
    """Return a text whose pieces `(characters, value)` are shaded by value per character, darkest from `top` on.

    So the ink in all is the sum of the values, however the text is cut. The pointer and the arrow keys show values.
    """
    spans = []
    for text, value in pieces:
        shade = _shade(value, len(text), top)
        kind = f' class="b{shade}"' if shade else ""
        spans.append(f'<span{kind} data-value="{escaped(_written(value, unit))}">{escaped(text) or _END}</span>')
    label = f'aria-label="{escaped(title)}: arrow keys move from piece to piece"'
    text = f'<div class="shaded" tabindex="0" role="group" {label} dir="auto">{"".join(spans)}</div>'
    return figure(title, f'{text}\n<div class="tip" role="status"></div>\n', escaped(note), "reading")


def scale(top: float, unit: str = "bits") -> str:
    """Return a key to the shades, from 0 to `top` per character."""
    steps = "".join(f'<span class="b{shade}"> </span>' for shade in range(1, SHADES + 1))
    return f'<p class="key"><span>0<span class="shades">{steps}</span>{top:.2g} {escaped(unit)} or more</span></p>'


def _shade(value: float, length: int, top: float) -> int:
    """Return 0 to `SHADES`, in proportion to the value per character."""
    if math.isnan(value) or value <= 0:
        return 0
    return max(0, min(SHADES, round(SHADES * min(1.0, value / max(length, 1) / top))))


def _written(value: float, unit: str) -> str:
    return f"{value:.2f} {unit}" if abs(value) < 1e6 else f"{'∞' if math.isinf(value) else f'{value:.3g}'} {unit}"

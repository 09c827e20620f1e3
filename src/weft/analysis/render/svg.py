"""What charts and maps are drawn with: figures of inline SVG, and the words in them.

Sizes are in the drawing's own units. Colours come from the page's style, so that one drawing serves light and dark.
What the pointer and the arrow keys show travels beside the drawing, as JSON.
"""

import json
import unicodedata
from collections.abc import Mapping

from weft.analysis.render.page import escaped

_DRAWN = 18  # characters of a token or a name that are drawn; the rest is one hover away
_MARKS = {" ": "␣", "\n": "⏎", "\t": "⇥"}
_JOINERS = "\u200c\u200d"  # they have no shape, but Persian, Hindi and emoji are wrong without them


def figure(title: str, plot: str, key: str, style: str = "") -> str:
    """Put a plot under its title and its key."""
    head = f'<b dir="auto">{escaped(title)}</b>' if title else ""
    return f'<figure class="{style}"><figcaption>{head}<span class="key">{key}</span></figcaption>\n{plot}</figure>'


def svg(width: int, height: int, title: str, told: str, drawing: str, style: str | None = None) -> str:
    """Frame a drawing, told in words for those who hear it; with a `style` it keeps its size, else it fits the page."""
    size = "" if style is None else f' class="{style}" width="{width}" height="{height}"'
    name = escaped(title)
    start = f'<svg viewBox="0 0 {width} {height}"{size} role="img" aria-label="{name}"><title>{name}</title>'
    return f"{start}<desc>{escaped(told)}</desc>\n{drawing}</svg>"


def plot(kind: str, title: str, drawing: str, data: Mapping[str, object]) -> str:
    """Let the pointer and the arrow keys read `data` off a drawing."""
    label = f'aria-label="{escaped(title)}: arrow keys move from value to value"'
    return (
        f'<div class="plot {kind}" tabindex="0" role="group" {label}>{drawing}</div>\n'
        f'<div class="tip" role="status"></div>\n<script type="application/json">{encode_data(data)}</script>\n'
    )


def words(x: float, y: float, text: str, attributes: str = "") -> str:
    """Write `text` with its middle at height `y`."""
    return f'<text x="{x:g}" y="{y:g}" dy=".35em" {attributes}>{escaped(text)}</text>'


def clip(text: str) -> str:
    """Shorten a long token or name."""
    return text if len(text) <= _DRAWN else text[: _DRAWN - 1] + "…"


def extent(text: str) -> float:
    """Estimate the width of `text` at 12 units: without the font, a guess on the wide side."""
    shaped = (char for char in text if unicodedata.category(char) not in ("Mn", "Me", "Cf"))
    return sum(12.5 if unicodedata.east_asian_width(c) in "WF" else 9.0 if c.isupper() else 7.0 for c in shaped)


def encode_data(value: object) -> str:
    """Write JSON in ASCII that can neither end nor open anything when it stands in a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def visible(token: str) -> str:
    """Give spaces, line ends and whatever else has no shape a visible mark."""

    def mark(char: str) -> str:
        kind = unicodedata.category(char)
        if char in _MARKS or kind[0] == "Z":
            return _MARKS.get(char, "␣")
        return f"‹{ord(char):04X}›" if kind in ("Cc", "Cf", "Cs") and char not in _JOINERS else char

    return "".join(map(mark, token)) or "∅"

"""SVG building blocks of charts and heat maps: figures, text elements, embedded data.

Sizes are in the drawing's own units. Colours come from the page's style, so that one drawing serves light and dark.
The values that the pointer and the arrow keys show are beside the drawing, as JSON.
"""

import json
import unicodedata
from collections.abc import Iterable, Mapping

from weft.analysis.render.page import escaped

_MAX_LENGTH = 18  # characters of a token or a name that are drawn; the rest shows on hover
_SYMBOLS = {" ": "␣", "\n": "⏎", "\t": "⇥"}
_JOINERS = "\u200c\u200d"  # invisible, but Persian, Hindi and emoji are wrong without them


def figure(title: str, plot: str, key: str, style: str = "") -> str:
    """Return a plot with title and key."""
    head = f'<b dir="auto">{escaped(title)}</b>' if title else ""
    return f'<figure class="{style}"><figcaption>{head}<span class="key">{key}</span></figcaption>\n{plot}</figure>'


def svg(width: int, height: int, title: str, description: str, drawing: str, style: str | None = None) -> str:
    """Return an SVG element, described for screen readers; with a `style` it keeps its size, else it fits the page."""
    size = "" if style is None else f' class="{style}" width="{width}" height="{height}"'
    name = escaped(title)
    start = f'<svg viewBox="0 0 {width} {height}"{size} role="img" aria-label="{name}"><title>{name}</title>'
    return f"{start}<desc>{escaped(description)}</desc>\n{drawing}</svg>"


def plot(kind: str, title: str, drawing: str, data: Mapping[str, object]) -> str:
    """Return a drawing whose `data` the pointer and the arrow keys show."""
    label = f'aria-label="{escaped(title)}: arrow keys move from value to value"'
    return (
        f'<div class="plot {kind}" tabindex="0" role="group" {label}>{drawing}</div>\n'
        f'<div class="tip" role="status"></div>\n<script type="application/json">{encode_data(data)}</script>\n'
    )


def text_element(x: float, y: float, text: str, attributes: str = "") -> str:
    """Return a text element, vertically centred at `y`."""
    return f'<text x="{x:g}" y="{y:g}" dy=".35em" {attributes}>{escaped(text)}</text>'


def shorten_label(text: str) -> str:
    """Shorten a long token or name."""
    return text if len(text) <= _MAX_LENGTH else text[: _MAX_LENGTH - 1] + "…"


def text_width(text: str) -> float:
    """Estimate the width of `text` at font size 12, without the font and rather too wide than too narrow."""
    visible_chars = (char for char in text if unicodedata.category(char) not in ("Mn", "Me", "Cf"))
    return sum(12.5 if unicodedata.east_asian_width(c) in "WF" else 9.0 if c.isupper() else 7.0 for c in visible_chars)


def encode_data(value: object) -> str:
    """Return JSON in ASCII that can neither close nor open an element inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def symbols_note(tokens: Iterable[str]) -> str:
    """Return a sentence on the symbols that stand for invisible characters in `tokens`; empty if there are none."""
    meanings = {"␣": "a space", "⏎": "the end of a line", "⇥": "a tab", "∅": "an empty token"}
    shown = "".join(visible(token) for token in tokens)
    parts = [f"{symbol} is {meaning}" for symbol, meaning in meanings.items() if symbol in shown]
    return f" In the tokens, {', '.join(parts)}." if parts else ""


def visible(token: str) -> str:
    """Return a token with visible symbols for spaces, line ends and other invisible characters."""

    def symbol(char: str) -> str:
        category = unicodedata.category(char)
        if char in _SYMBOLS or category[0] == "Z":
            return _SYMBOLS.get(char, "␣")
        return f"‹{ord(char):04X}›" if category in ("Cc", "Cf", "Cs") and char not in _JOINERS else char

    return "".join(map(symbol, token)) or "∅"

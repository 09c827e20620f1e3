"""The answers of all entries, as parts of the report: examples side by side, F1 by class, surprise, attention."""

import math
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import groupby

from weft.analysis.attention import legend
from weft.analysis.render.page import caption, details, escaped, paragraph, subheading, table
from weft.analysis.render.shaded_text import scale, shaded_text
from weft.analysis.render.svg import visible
from weft.comparison.quantities import is_finite, listed, plural
from weft.comparison.ranking import ranked
from weft.comparison.results import AnswerCell, ComparedExample, ComparisonResults, SurprisingText
from weft.errors import DataError

_EXAMPLES = 8  # that are seen at once; the others open
_CLASSES = 30  # rows that are seen at once
_MOST_SURPRISING = 3
_MARKS = {True: ("right", "✓"), False: ("wrong", "✗"), None: ("", "·")}


def example_parts(results: ComparisonResults) -> list[str]:
    """Return the same examples with every entry's answer; those on which entries disagree come first."""
    if not results.examples:
        return []
    order = {entry.name: place for place, entry in enumerate(ranked(results))}
    disagree = [example for example in results.examples if len(distinct_answers(example, order)) > 1]
    agree = [example for example in results.examples if len(distinct_answers(example, order)) == 1]
    shown = [_example(example, order) for example in (*disagree, *agree)]
    count = f"{plural(len(shown), f'{results.split_name} example')}; the entries disagree on "
    intro = paragraph(
        count + (f"{len(disagree):,} of them, shown first" if agree else "all of them") + ". ✓ is right, ✗ is wrong. "
        "Entries that gave the same answer stand together."
    )
    rest = [details(f"{plural(len(shown) - _EXAMPLES, 'more example')}", shown[_EXAMPLES:])]
    return [intro, *shown[:_EXAMPLES], *(rest if len(shown) > _EXAMPLES else [])]


def distinct_answers(example: ComparedExample, order: dict[str, int]) -> list[tuple[AnswerCell, list[str]]]:
    """Return each answer with the entries that gave it, right ones first, then by the place of the best entry."""
    groups: dict[tuple[str, bool | None], list[str]] = {}
    for name in sorted(example.answers, key=lambda name: order.get(name, len(order))):
        answer = example.answers[name]
        groups.setdefault((answer.text, answer.correct), []).append(name)
    cells = [(AnswerCell(text=text, correct=correct), names) for (text, correct), names in groups.items()]
    return sorted(cells, key=lambda cell: cell[0].correct is not True)


def _example(example: ComparedExample, order: dict[str, int]) -> str:
    items = "".join(_answer(cell, names) for cell, names in distinct_answers(example, order))
    wanted = (
        f'<p class="wanted" dir="auto">expected: <b>{escaped(example.expected)}</b></p>' if example.expected else ""
    )
    text = f'<p class="input" dir="auto">{escaped(example.text)}</p>'
    return f'<div class="example">{text}{wanted}<ul class="answers">{items}</ul></div>\n'


def _answer(cell: AnswerCell, names: Sequence[str]) -> str:
    kind, symbol = _MARKS[cell.correct]
    mark = f'<span class="{kind}" aria-hidden="true">{symbol}</span>'
    spoken = f'<span class="hidden">{kind}: </span>' if kind else ""
    text = f'<span dir="auto">{spoken}{escaped(cell.text) or "(nothing)"}</span>'
    return f'<li>{mark}{text}<span class="by" dir="auto">{escaped(", ".join(names))}</span></li>'


def class_parts(results: ComparisonResults) -> list[str]:
    """Return a table of F1 by class, the most frequent first, with the best entry of each class marked."""
    entries = [entry for entry in ranked(results) if entry.classes]
    supports: dict[str, int] = {}
    for entry in entries:
        for name, (_, support) in entry.classes.items():
            supports[name] = max(support, supports.get(name, 0))
    if not supports:
        return []
    names = sorted(supports, key=lambda name: -supports[name])
    rows, best = [], set()
    for place, name in enumerate(names):
        scores = [entry.classes.get(name, (0.0, 0))[0] for entry in entries]
        top = max((score for score in scores if is_finite(score)), default=math.nan)
        rows.append([name, supports[name], *(f"{score:.1%}" if abs(score) < 100 else None for score in scores)])
        best |= {(place, column + 2) for column, score in enumerate(scores) if score == top > 0 and len(entries) > 1}
    headers = [results.class_unit, "support", *(entry.name for entry in entries)]
    text = (
        f"F1 by {results.class_unit}{', of the first seed' * (len(results.seeds) > 1)}; the best of each row is "
        f"underlined. Support is how many of them the {results.split_name} data has."
    )
    first = {cell for cell in best if cell[0] < _CLASSES}
    parts = [caption(text, "table"), table(headers, rows[:_CLASSES], first)]
    if len(rows) > _CLASSES:
        rest = {(row - _CLASSES, column) for row, column in best - first}
        parts.append(details(f"{len(rows) - _CLASSES:,} more", [table(headers, rows[_CLASSES:], rest)]))
    return parts


def surprise_parts(results: ComparisonResults) -> list[str]:
    """Return texts shaded by the bits that each character costs each entry."""
    parts: list[str] = []
    for number, text in enumerate(results.surprising, 1):
        order = [entry.name for entry in ranked(results) if entry.name in text.pieces]
        top = _darkest(text)
        parts += [subheading(f"Text {number}")] if len(results.surprising) > 1 else []
        parts += [scale(top, "bits per character")]
        parts += [_surprise(name, text.pieces[name], top) for name in order]
    if not parts:
        return []
    intro = paragraph(
        "The darker a piece of the text, the more it surprised the model. A piece costs −log₂ p bits, where p is the "
        "probability that the model gave it; the shade is its bits per character, so that models that cut the text "
        "into other pieces can be compared. The less shade in all, the better the model: the sum of the bits is the "
        "size to which the model could compress the text. Point at a piece, or move with the arrow keys, to read its "
        "bits. ∎ is the end of the text."
    )
    return [intro, *parts]


def _darkest(text: SurprisingText) -> float:
    """Return the bits per character of the darkest shade: 98 of 100 characters, over all entries, are below it."""
    densities: list[tuple[float, int]] = []
    for pieces in text.pieces.values():
        densities += [(bits / max(len(piece), 1), max(len(piece), 1)) for piece, bits in pieces if is_finite(bits)]
    densities.sort()
    room = 0.98 * sum(length for _, length in densities)
    for density, length in densities:
        room -= length
        if room <= 0:
            return max(density, 0.5)
    return 1.0


def _surprise(name: str, pieces: Sequence[tuple[str, float]], top: float) -> str:
    total, characters = sum(bits for _, bits in pieces), sum(len(piece) for piece, _ in pieces)
    note = f"{total:,.0f} bits, {total / max(characters, 1):.2f} per character" if is_finite(total) else "not finite"
    ordered = sorted((piece for piece in pieces if is_finite(piece[1])), key=lambda piece: -piece[1])
    worst = [
        f"“{visible(piece.strip() or piece)}” {bits:.1f}" for piece, bits in ordered[:_MOST_SURPRISING] if bits < 1e6
    ]
    return shaded_text(pieces, name, note + (f"; most for {listed(worst)}" if worst else ""), top)


def attention_parts(results: ComparisonResults) -> list[str]:
    """Return where each entry looked, example by example; `DataError` if a figure is none of weft's."""
    parts: list[str] = []
    order = {entry.name: place for place, entry in enumerate(ranked(results))}
    for text, group in groupby(sorted(results.attention, key=lambda item: item.text), key=lambda item: item.text):
        parts.append(subheading(text))
        maps = ""
        for item in sorted(group, key=lambda item: order.get(item.entry, len(order))):
            for figure in item.figures:
                _check_figure(figure, item.entry)
            maps += f'<div class="places">{"".join(item.figures)}</div>\n'
        parts.append(f'<div class="beside">{maps}</div>')
    return [legend(), *parts] if parts else []


_TAGS = " b caption desc div figcaption figure g li path rect script span svg table td text th title tr ul "
_ATTRIBUTES = (
    " aria-label class d data-label data-mark data-stick data-tiles dir dy fill-opacity height role scope tabindex "
    "text-anchor transform type viewbox visibility width x y "
)


class _FigureTags(HTMLParser):
    """Parser that collects the tags and attributes of an HTML fragment that no figure of weft has."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.strange: list[str] = []
        self.feed(fragment)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element or an attribute that is not of a figure, and a script that is not data."""
        self.strange += [tag] * (f" {tag} " not in _TAGS)
        self.strange += [name for name, _ in attrs if f" {name} " not in _ATTRIBUTES]
        self.strange += [tag] * (tag == "script" and ("type", "application/json") not in attrs)


def _check_figure(fragment: str, entry: str) -> None:
    """Raise an error unless a fragment is a figure: it comes from a file, and goes into the page as it is."""
    if strange := _FigureTags(fragment).strange:
        raise DataError(
            f"comparison.json: the attention figures of {entry!r} must be those that weft draws, but have "
            f"{strange[0]!r}; remove them, or compare again"
        )

"""Count a stream of text in bounded memory, and give it back to a trainer as if it had been kept.

A text is cut into units: a stretch without spaces, with the spaces before it. Every kind of pre-tokenizer cuts there as
well, so a vocabulary learnt from the units is the one learnt from the text, but for stretches of over 128 characters.

Counts are exact until the table holds `cap` different units. Then the rarer half is forgotten, in the manner of lossy
counting (Manku and Motwani, 2002, "Approximate frequency counts over data streams"): a count may fall short from there
on, never exceed the truth, and what is frequent stays.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import repeat

from weft.errors import DataError

CAP = 1 << 20  # different units; with their lengths bounded below, so is the memory of the trainers
_UNIT = re.compile(r" {0,128}[^ ]{1,128}| {1,128}")  # no longer, however few spaces a line has
_STRETCH = 1 << 20  # characters cut at a time: a line of a gigabyte is no list of all its units
_TIMES = 256  # copies of a unit in one string


def count_units(texts: Iterable[str], cap: int = CAP) -> Counter[str]:
    """Count the units of a stream that is read once and never kept."""
    counts: Counter[str] = Counter()
    for text in texts:
        for start in range(0, len(text), _STRETCH):
            counts.update(_UNIT.findall(text, start, start + _STRETCH))
            if len(counts) > cap:
                counts = Counter(dict(counts.most_common()[: cap // 2]))
    if all(unit.isspace() for unit in counts):
        raise no_text()
    for unit in counts:
        check_text(unit)
    return counts


def no_text() -> DataError:
    """Return the error for a stream that is empty or blank."""
    return DataError(
        "tokenizer: there is no text to learn a vocabulary from; "
        "check that data.train is not empty and that data.columns names the column with the text"
    )


def repeat_units(counts: Counter[str]) -> Iterator[str]:
    """Yield text in which every unit stands as often as it was counted."""
    for unit, count in counts.items():
        if unit.startswith(" ") and not unit.isspace():  # copies end to end are cut apart again at their spaces
            many, few = divmod(count, _TIMES)
            yield from repeat(unit * _TIMES, many)
            if few:
                yield unit * few
        else:
            yield from repeat(unit, count)


def check_text(text: str) -> None:
    """Refuse a lone surrogate: half of a UTF-16 pair, which is no character and has no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 20) : error.start + 20]
        raise DataError(
            f"character {error.start}, in {near!a}, is a lone surrogate, which is no text; "
            "read its file as UTF-8, or replace it: text.encode('utf-8', 'replace').decode()"
        ) from None

"""Word counts of a text stream in bounded memory, replayed as training text for a tokenizer.

A text is split into units: a run without spaces, with the spaces before it. Every pre-tokenizer splits there as well,
so a vocabulary learnt from the units equals the one learnt from the text, except for runs of over 128 characters.

Counts are exact until the table holds `cap` distinct units. Then the rarer half is dropped, as in lossy counting
(Manku and Motwani, 2002, "Approximate frequency counts over data streams"): from then on a count may be too low, but
never too high, and frequent units stay.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import repeat

from weft.errors import DataError

CAP = 1 << 20  # distinct units; their lengths are bounded below, and so is the memory of the trainers
_UNIT = re.compile(r" {0,128}[^ ]{1,128}| {1,128}")  # at most 128 + 128 characters, even in a line without spaces
_CHUNK = 1 << 20  # characters split at a time: a line of a gigabyte never becomes one list of units
_COPIES = 256  # copies of a unit in one string


def count_units(texts: Iterable[str], cap: int = CAP) -> Counter[str]:
    """Return the counts of the units of a stream, which is read once and not stored."""
    counts: Counter[str] = Counter()
    for text in texts:
        for start in range(0, len(text), _CHUNK):
            counts.update(_UNIT.findall(text, start, start + _CHUNK))
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
    """Yield text in which every unit occurs as often as it was counted."""
    for unit, count in counts.items():
        if unit.startswith(" ") and not unit.isspace():  # concatenated copies are split again at their spaces
            full, rest = divmod(count, _COPIES)
            yield from repeat(unit * _COPIES, full)
            if rest:
                yield unit * rest
        else:
            yield from repeat(unit, count)


def check_text(text: str) -> None:
    """Raise for a lone surrogate: half of a UTF-16 pair, which cannot be encoded as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        context = text[max(0, error.start - 20) : error.start + 20]
        raise DataError(
            f"character {error.start}, in {context!a}, is a lone surrogate, which is no text; "
            "read its file as UTF-8, or replace it: text.encode('utf-8', 'replace').decode()"
        ) from None

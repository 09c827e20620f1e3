"""The data sets that ship with weft, made on the fly: no files, no network.

| name | task | from | what a row is split by |
|---|---|---|---|
| `dates` | translate | Babel's CLDR tables | the calendar days it speaks of |
| `langid` | classify | Babel's CLDR tables | its text, whatever the case of its letters |
| `dateparts` | tag | Babel's CLDR tables | its words |
| `pydoc` | lm | CPython's `pydoc_data.topics` | the manual's topic |

A stable hash of that content, never an index or a seed, says whether a row is for train, valid or test: nothing that a
model is tested on was seen in training. The rows are the same on every machine with the same Babel and Python.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from functools import cache
from hashlib import blake2b
from random import Random
from typing import Any

from weft.data.samples.cldr import AT, TYPED, Part, Voice
from weft.errors import DataError, did_you_mean

Row = dict[str, Any]

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Sample:
    """A data set that ships with weft."""

    name: str
    about: str
    task: str
    fields: tuple[str, ...]
    make: Callable[[], Iterator[tuple[str, Row]]]  # (split, row)

    def rows(self) -> Iterator[Row]:
        """Give all rows, in a fixed shuffled order, none twice."""
        return (row for _, row in self.make())


def read_sample(name: str, split: str) -> Iterator[tuple[str, Row]]:
    """Give the rows of one split, each with its place, such as `dates:train:17`."""
    if name not in SAMPLES:
        raise DataError(f"data.sample: no data set {name!r} ships with weft; {did_you_mean(name, SAMPLES)}")
    if split not in SPLITS:
        raise DataError(f"data.sample: {name} has no split {split!r}; {did_you_mean(split, SPLITS)}")
    rows = (row for where, row in _made(name) if where == split)
    return ((f"{name}:{split}:{number}", _copied(row)) for number, row in enumerate(rows, 1))


@cache  # train, valid and test are read one after another
def _made(name: str) -> list[tuple[str, Row]]:
    return list(SAMPLES[name].make())


def _copied(row: Row) -> Row:
    """Copy a row and its lists, so that a reader who changes them changes nobody else's."""
    return {field: copy(value) for field, value in row.items()}


def _point(content: str, use: str) -> float:
    """Hash to [0, 1), alike on every machine; another `use` gives an unrelated point."""
    digest = blake2b(content.encode(), digest_size=8, person=use.encode()).digest()
    return int.from_bytes(digest, "big") / 2**64


def _split(content: str, held_out: float) -> str:
    """Assign content to a split: the share `held_out` to test and as much to valid."""
    point = _point(content, "split")
    return "test" if point < held_out else "valid" if point < 2 * held_out else "train"


def _draw_moment(draw: Random) -> datetime:
    """Draw a moment of the years 1900 to 2099."""
    first, last = date(1900, 1, 1).toordinal(), date(2099, 12, 31).toordinal()
    day = date.fromordinal(draw.randrange(first, last + 1))
    return datetime.combine(day, time(draw.randrange(24), draw.randrange(60), draw.randrange(60)))


# (date, time, from-to): how often. Long ones are many: they are what a single vector cannot hold.
_DATE_FORMS: dict[tuple[str | None, str | None, bool], int] = {
    ("full", None, False): 16,
    ("full", "short", False): 20,
    ("full", "medium", False): 14,
    ("full", None, True): 6,
    ("full", "short", True): 6,
    ("long", None, False): 8,
    ("long", "short", False): 8,
    ("medium", None, False): 4,
    ("medium", "short", False): 4,
    ("yMMMEd", None, False): 3,
    ("yMd", None, False): 4,
    ("yMMMM", None, False): 2,
    ("MMMMd", None, False): 1,
    ("MMMEd", None, False): 2,
    ("yQQQQ", None, False): 1,
    (None, "short", False): 1,
}
_NO_WHOLE_DATE = ("yMMMM", "MMMMd", "MMMEd", "yQQQQ", None)
_DATES_TRAIN, _DATES_HELD_OUT = 50_000, 1_000


def _dates() -> Iterator[tuple[str, Row]]:
    """Draw forms and moments until every split is full; a text comes once, so its target is a function of it."""
    english, french = Voice("en"), Voice("fr")
    draw = Random("weft dates")
    forms, weights = list(_DATE_FORMS), list(_DATE_FORMS.values())
    room = {"train": _DATES_TRAIN, "valid": _DATES_HELD_OUT, "test": _DATES_HELD_OUT}
    seen = set()
    while any(room.values()):
        day, clock, span = draw.choices(forms, weights)[0]
        when = _draw_moment(draw)
        moments = sorted((when, _draw_partner(when, draw))) if span else [when]
        text = " - ".join(_join(english.say(day, clock, moment)) for moment in moments)
        split = _dates_split(text if day in _NO_WHOLE_DATE else when.date().isoformat())
        if room[split] and text not in seen:
            seen.add(text)
            room[split] -= 1
            target = " - ".join(_join(french.say(day, clock, moment)) for moment in moments)
            yield split, {"text": text, "target": target}


def _dates_split(content: str) -> str:
    return _split(content, _DATES_HELD_OUT / (_DATES_TRAIN + 2 * _DATES_HELD_OUT))


def _draw_partner(when: datetime, draw: Random) -> datetime:
    """Draw another day of the same split: a test day is in no training row, not even at one end of a span."""
    split = _dates_split(when.date().isoformat())
    while True:
        other = _draw_moment(draw)
        if other.date() != when.date() and _dates_split(other.date().isoformat()) == split:
            return other


def _join(parts: list[Part]) -> str:
    return "".join([text for _, text in parts])


# fmt: off
LANGUAGES = (
    "ar", "bg", "cs", "da", "de", "el", "en", "es", "fa", "fi", "fr", "hi",
    "hu", "it", "ja", "ko", "nl", "pl", "pt", "ru", "sv", "tr", "uk", "zh",
)
# fmt: on


def _langid() -> Iterator[tuple[str, Row]]:
    """Take the names that only one language has, so that every row has an answer."""
    spoken: dict[str, dict[str, str]] = defaultdict(dict)  # a name without case -> language -> the name
    for language in LANGUAGES:
        for name in sorted(_names(language)):
            spoken[name.casefold()].setdefault(language, name)
    for folded in sorted(spoken, key=lambda folded: _point(folded, "order")):
        if len(spoken[folded]) == 1:
            ((language, name),) = spoken[folded].items()
            yield _split(folded, 0.05), {"text": name, "label": language}


def _names(language: str) -> set[str]:
    """Collect what a language calls languages, countries, scripts, currencies, units, months and weekdays."""
    from babel import Locale

    locale = Locale.parse(language)
    tables = (locale.languages, locale.territories, locale.scripts, locale.currencies)
    names = {name for table in tables for code, name in table.items() if name.casefold() != code.casefold()}
    names |= {lengths["long"] for lengths in locale.unit_display_names.values() if "long" in lengths}
    for table in (locale.months, locale.days):
        names |= {name for forms in table.values() for name in forms.get("wide", {}).values()}
    return {name for name in (_collapse(name.translate(TYPED)) for name in names) if re.search(r"[^\W\d_]{2}", name)}


def _collapse(text: str) -> str:
    return " ".join(text.split())


_MOMENTS = [
    *((day, clock) for day in ("full", "long", "yMMMEd") for clock in (None, "short")),
    *((day, None) for day in ("yMEd", "MMMMd", "MMMEd", "yMMMM", "yQQQQ")),
    (None, "short"),
]
_UNITS = ("length-kilometer", "length-mile", "mass-kilogram", "volume-liter", "speed-meter-per-second")
_SPANS = ("year", "month", "week", "day", "hour", "minute")
_DATEPARTS = 22_300
_WORD = re.compile(r"\w+|[^\w\s]")


def _dateparts() -> Iterator[tuple[str, Row]]:
    """List one to three things, a date or time at least among them, as CLDR lists them in English, French or German."""
    voices = {language: Voice(language) for language in AT}
    draw = Random("weft dateparts")
    seen: set[str] = set()
    while len(seen) < _DATEPARTS:
        voice = voices[draw.choice(("en", "en", "fr", "de"))]
        items = [draw.choice(_TEMPORAL)(voice, draw)]
        items += [draw.choice(_TEMPORAL + _OTHER)(voice, draw) for _ in range(draw.randrange(3))]
        draw.shuffle(items)
        row = _tagged(_listed(voice, items, draw.choice(("standard", "or"))))
        content = " ".join(row["words"])
        if content not in seen:
            seen.add(content)
            yield _split(content, 0.05), row


def _tagged(parts: list[Part]) -> Row:
    """Cut parts into words; a word is letters and digits, or one mark."""
    words, tags = [], []
    for entity, text in parts:
        for index, word in enumerate(_WORD.findall(text.translate(TYPED))):
            words.append(word)
            tags.append(f"{'I' if index else 'B'}-{entity}" if entity else "O")
    return {"words": words, "tags": tags}


def _listed(voice: Voice, items: list[list[Part]], style: str) -> list[Part]:
    from babel.lists import format_list

    marks = [chr(0xE000 + index) for index in range(len(items))]  # private-use characters: in no text of CLDR's
    pieces = re.split("([\ue000-\ue0ff])", format_list(marks, style=style, locale=voice.locale))
    return [part for piece in pieces for part in (items[marks.index(piece)] if piece in marks else [("", piece)])]


def _moment(voice: Voice, draw: Random) -> list[Part]:
    day, clock = draw.choice(_MOMENTS)
    return voice.say(day, clock, _draw_moment(draw))


def _range(voice: Voice, draw: Random) -> list[Part]:
    """Say a range of days in CLDR's short way, which leaves out what both ends share: `Jan 12 - 15, 2023`."""
    start = _draw_moment(draw)
    end = start + timedelta(days=draw.randrange(1, 60))
    patterns = voice.locale.interval_formats[draw.choice(("yMMMd", "yMMMEd"))]
    differs = "y" if start.year != end.year else "M" if start.month != end.month else "d"
    first, second = patterns[differs]
    return voice.fill(first, start) + voice.fill(second, end)


def _hours(voice: Voice, draw: Random) -> list[Part]:
    start, end = _draw_moment(draw), _draw_moment(draw)
    return [*voice.say(None, "short", start), ("", " - "), *voice.say(None, "short", end)]


def _delta(voice: Voice, draw: Random) -> list[Part]:
    """Say how long, or how long ago or ahead: `3 days`, `3 days ago`."""
    from babel.dates import TIMEDELTA_UNITS, format_timedelta

    entity, unit = draw.choice(("DURATION", "RELATIVE")), draw.choice(_SPANS)
    seconds = draw.choice((-1, 1)) * draw.randrange(1, 60) * dict(TIMEDELTA_UNITS)[unit]
    directed, threshold = entity == "RELATIVE", float("inf")  # the threshold keeps 36 hours from becoming 2 days
    return [(entity, format_timedelta(seconds, unit, threshold, directed, locale=voice.locale))]


def _quantity(voice: Voice, draw: Random) -> list[Part]:
    """Say a number that looks like a day or a year, and is neither."""
    from babel.units import format_unit

    number = draw.choice((draw.randrange(1, 32), draw.randrange(1900, 2100)))
    return [("", format_unit(number, draw.choice(_UNITS), format="0", locale=voice.locale))]


def _country(voice: Voice, draw: Random) -> list[Part]:
    return [("", draw.choice(voice.countries))]


_TEMPORAL = (_moment, _moment, _moment, _range, _hours, _delta, _delta)
_OTHER = (_quantity, _quantity, _quantity, _country)


def _pydoc() -> Iterator[tuple[str, Row]]:
    """Give the manual's paragraphs, topic by topic; one that several topics share belongs to the first of them."""
    from pydoc_data.topics import topics

    first: dict[str, str] = {}
    for topic in sorted(topics):
        for paragraph in _prose(topics[topic]):
            first.setdefault(paragraph, topic)
    order = {topic: _point(topic, "order") for topic in topics}
    for paragraph in sorted(first, key=lambda paragraph: order[first[paragraph]]):  # stable: a topic reads on
        yield _split(first[paragraph], 0.075), {"text": paragraph}


def _prose(topic: str) -> Iterator[str]:
    """Pick the paragraphs of English out of headings, code, grammar and tables, without their markup."""
    for block in re.split(r"\n\s*\n", topic):
        text = re.sub(r"(?<=\w-)\n\s*(?=\w)", "", block)  # a word broken at its hyphen
        text = _collapse(re.sub(r"^\s*(\* |\d+\. |\[\d+\] )|(?<=\S) \[\d+\]", "", text))  # bullets, footnotes
        text = re.sub(r'(?<!\w)(\*\*?)(\w[^*"]*)\1(?!\w)', r"\2", text)  # emphasis
        if _is_prose(text):
            yield text


def _is_prose(text: str) -> bool:
    words = text.split()
    plain = [word for word in words if re.fullmatch(r"[(\"“]?[A-Za-z][a-z’'-]*[.,;:)\"”]*", word)]
    ends = re.search(r"[.:!?][)\"”]*$", text)
    return bool(ends) and len(words) >= 6 and len(plain) >= 0.6 * len(words) and not re.search(r">>>|::=|\+--", text)


SAMPLES = {
    sample.name: sample
    for sample in (
        Sample("dates", "English dates and times to French", "translate", ("text", "target"), _dates),
        Sample("langid", "which of 24 languages a name is in", "classify", ("text", "label"), _langid),
        Sample("dateparts", "BIO tags for dates, times and durations", "tag", ("words", "tags"), _dateparts),
        Sample("pydoc", "English prose from the manual of Python", "lm", ("text",), _pydoc),
    )
}

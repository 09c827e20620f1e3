"""Sample data sets that ship with weft, with no network: generated on the fly, or written for it (`reviews.tsv`).

| name | task | source | key of the split |
|---|---|---|---|
| `dates` | translate | Babel's CLDR tables | the calendar days in it |
| `langid` | classify | Babel's CLDR tables | its text, case-folded |
| `dateparts` | tag | Babel's CLDR tables | its words |
| `pydoc` | lm | CPython's `pydoc_data.topics` | the manual's topic |
| `reviews` | classify | written for weft, under weft's own licence | none: the file says it |

A stable hash of the key, never an index or a seed, assigns a row to train, valid or test: no test content occurs in
training. The rows are the same on every machine with the same Babel and Python.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from functools import cache
from hashlib import blake2b
from pathlib import Path
from random import Random

from weft.data.readers.column_mapping import Row
from weft.data.samples.cldr import AT, TYPED, DateFormatter, LabelledText
from weft.errors import DataError, did_you_mean

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
        """Return all rows, in a fixed shuffled order, without duplicates."""
        return (row for _, row in self.make())


def read_sample(name: str, split: str) -> Iterator[tuple[str, Row]]:
    """Return the rows of one split, each with its location, such as `dates:train:17`."""
    if name not in SAMPLES:
        raise DataError(f"data.sample: no data set {name!r} ships with weft; {did_you_mean(name, SAMPLES)}")
    if split not in SPLITS:
        raise DataError(f"data.sample: {name} has no split {split!r}; {did_you_mean(split, SPLITS)}")
    rows = (row for row_split, row in _cached_rows(name) if row_split == split)
    return ((f"{name}:{split}:{number}", _copy_row(row)) for number, row in enumerate(rows, 1))


@cache  # train, valid and test are read one after another
def _cached_rows(name: str) -> list[tuple[str, Row]]:
    """Return all rows of a sample with their splits."""
    return list(SAMPLES[name].make())


def _copy_row(row: Row) -> Row:
    """Return a copy of a row and its lists, so that changes do not affect the cache."""
    return {field: copy(value) for field, value in row.items()}


def _hash_to_unit(content: str, use: str) -> float:
    """Return a hash in [0, 1), equal on every machine; hashes with different `use` are independent."""
    digest = blake2b(content.encode(), digest_size=8, person=use.encode()).digest()
    return int.from_bytes(digest, "big") / 2**64


def _assign_split(content: str, held_out: float) -> str:
    """Return the split of a key: a share `held_out` goes to test and as much to valid."""
    point = _hash_to_unit(content, "split")
    return "test" if point < held_out else "valid" if point < 2 * held_out else "train"


def _draw_moment(rng: Random) -> datetime:
    """Return a random moment in the years 1900 to 2099."""
    first, last = date(1900, 1, 1).toordinal(), date(2099, 12, 31).toordinal()
    day = date.fromordinal(rng.randrange(first, last + 1))
    return datetime.combine(day, time(rng.randrange(24), rng.randrange(60), rng.randrange(60)))


# (date, time, range): weight. Long ones are frequent: a single vector cannot encode them.
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
    """Yield random formats and moments until every split is full; texts are unique, so each has one target."""
    english, french = DateFormatter("en"), DateFormatter("fr")
    rng = Random("weft dates")
    forms, weights = list(_DATE_FORMS), list(_DATE_FORMS.values())
    room = {"train": _DATES_TRAIN, "valid": _DATES_HELD_OUT, "test": _DATES_HELD_OUT}
    texts = set()
    while any(room.values()):
        day, clock, span = rng.choices(forms, weights)[0]
        when = _draw_moment(rng)
        moments = sorted((when, _draw_partner(when, rng))) if span else [when]
        text = " - ".join(_join(english.format(day, clock, moment)) for moment in moments)
        split = _dates_split(text if day in _NO_WHOLE_DATE else when.date().isoformat())
        if room[split] and text not in texts:
            texts.add(text)
            room[split] -= 1
            target = " - ".join(_join(french.format(day, clock, moment)) for moment in moments)
            yield split, {"text": text, "target": target}


def _dates_split(content: str) -> str:
    return _assign_split(content, _DATES_HELD_OUT / (_DATES_TRAIN + 2 * _DATES_HELD_OUT))


def _draw_partner(when: datetime, rng: Random) -> datetime:
    """Return another random day of the same split: no test day is in a training row, not even as one end of a range."""
    split = _dates_split(when.date().isoformat())
    while True:
        other = _draw_moment(rng)
        if other.date() != when.date() and _dates_split(other.date().isoformat()) == split:
            return other


def _join(parts: list[LabelledText]) -> str:
    return "".join([text for _, text in parts])


# fmt: off
LANGUAGES = (
    "ar", "bg", "cs", "da", "de", "el", "en", "es", "fa", "fi", "fr", "hi",
    "hu", "it", "ja", "ko", "nl", "pl", "pt", "ru", "sv", "tr", "uk", "zh",
)
# fmt: on


def _langid() -> Iterator[tuple[str, Row]]:
    """Yield names that only one language has, so that every row has a unique label."""
    names: dict[str, dict[str, str]] = defaultdict(dict)  # a name without case -> language -> the name
    for language in LANGUAGES:
        for name in sorted(_names(language)):
            names[name.casefold()].setdefault(language, name)
    for folded in sorted(names, key=lambda folded: _hash_to_unit(folded, "order")):
        if len(names[folded]) == 1:
            ((language, name),) = names[folded].items()
            yield _assign_split(folded, 0.05), {"text": name, "label": language}


def _names(language: str) -> set[str]:
    """Return a language's names of languages, countries, scripts, currencies, units, months and weekdays."""
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
    """Yield CLDR-formatted lists of one to three items, at least one a date or time, in English, French or German."""
    formatters = {language: DateFormatter(language) for language in AT}
    rng = Random("weft dateparts")
    contents: set[str] = set()
    while len(contents) < _DATEPARTS:
        formatter = formatters[rng.choice(("en", "en", "fr", "de"))]
        items = [rng.choice(_TEMPORAL)(formatter, rng)]
        items += [rng.choice(_TEMPORAL + _OTHER)(formatter, rng) for _ in range(rng.randrange(3))]
        rng.shuffle(items)
        row = _bio_tag(_format_list(formatter, items, rng.choice(("standard", "or"))))
        content = " ".join(row["words"])
        if content not in contents:
            contents.add(content)
            yield _assign_split(content, 0.05), row


def _bio_tag(parts: list[LabelledText]) -> Row:
    """Return the words of labelled parts with BIO tags; a word is letters and digits, or one punctuation character."""
    words, tags = [], []
    for entity, text in parts:
        for index, word in enumerate(_WORD.findall(text.translate(TYPED))):
            words.append(word)
            tags.append(f"{'I' if index else 'B'}-{entity}" if entity else "O")
    return {"words": words, "tags": tags}


def _format_list(formatter: DateFormatter, items: list[list[LabelledText]], style: str) -> list[LabelledText]:
    from babel.lists import format_list

    keys = [chr(0xE000 + index) for index in range(len(items))]  # private-use characters: in no text of CLDR's
    pieces = re.split("([\ue000-\ue0ff])", format_list(keys, style=style, locale=formatter.locale))
    return [part for piece in pieces for part in (items[keys.index(piece)] if piece in keys else [("", piece)])]


def _moment(formatter: DateFormatter, rng: Random) -> list[LabelledText]:
    day, clock = rng.choice(_MOMENTS)
    return formatter.format(day, clock, _draw_moment(rng))


def _range(formatter: DateFormatter, rng: Random) -> list[LabelledText]:
    """Return a range of days in CLDR's short format, which omits what both ends share: `Jan 12 - 15, 2023`."""
    start = _draw_moment(rng)
    end = start + timedelta(days=rng.randrange(1, 60))
    patterns = formatter.locale.interval_formats[rng.choice(("yMMMd", "yMMMEd"))]
    differs = "y" if start.year != end.year else "M" if start.month != end.month else "d"
    first, second = patterns[differs]
    return formatter.fill_pattern(first, start) + formatter.fill_pattern(second, end)


def _hours(formatter: DateFormatter, rng: Random) -> list[LabelledText]:
    start, end = _draw_moment(rng), _draw_moment(rng)
    return [*formatter.format(None, "short", start), ("", " - "), *formatter.format(None, "short", end)]


def _delta(formatter: DateFormatter, rng: Random) -> list[LabelledText]:
    """Return a duration, or a time relative to now: `3 days`, `3 days ago`."""
    from babel.dates import TIMEDELTA_UNITS, format_timedelta

    entity, unit = rng.choice(("DURATION", "RELATIVE")), rng.choice(_SPANS)
    seconds = rng.choice((-1, 1)) * rng.randrange(1, 60) * dict(TIMEDELTA_UNITS)[unit]
    directed, threshold = entity == "RELATIVE", float("inf")  # the threshold keeps 36 hours from becoming 2 days
    return [(entity, format_timedelta(seconds, unit, threshold, directed, locale=formatter.locale))]


def _quantity(formatter: DateFormatter, rng: Random) -> list[LabelledText]:
    """Return a quantity whose number could be a day or a year, as a distractor."""
    from babel.units import format_unit

    number = rng.choice((rng.randrange(1, 32), rng.randrange(1900, 2100)))
    return [("", format_unit(number, rng.choice(_UNITS), format="0", locale=formatter.locale))]


def _country(formatter: DateFormatter, rng: Random) -> list[LabelledText]:
    return [("", rng.choice(formatter.countries))]


_TEMPORAL = (_moment, _moment, _moment, _range, _hours, _delta, _delta)
_OTHER = (_quantity, _quantity, _quantity, _country)


def _pydoc() -> Iterator[tuple[str, Row]]:
    """Yield the manual's paragraphs, topic by topic; one that several topics share belongs to the first of them."""
    from pydoc_data.topics import topics

    topic_of: dict[str, str] = {}
    for topic in sorted(topics):
        for paragraph in _prose(topics[topic]):
            topic_of.setdefault(paragraph, topic)
    order = {topic: _hash_to_unit(topic, "order") for topic in topics}
    for paragraph in sorted(topic_of, key=lambda paragraph: order[topic_of[paragraph]]):  # stable within a topic
        yield _assign_split(topic_of[paragraph], 0.075), {"text": paragraph}


def _prose(topic: str) -> Iterator[str]:
    """Yield the paragraphs of English prose, without markup, headings, code, grammar and tables."""
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


def _reviews() -> Iterator[tuple[str, Row]]:
    """Yield the rows of the file, which has the split, the label and the text of each."""
    for line in Path(__file__).with_name("reviews.tsv").read_text(encoding="utf-8").splitlines():
        split, label, text = line.split("\t")
        yield split, {"text": text, "label": label}


SAMPLES = {
    sample.name: sample
    for sample in (
        Sample("dates", "English dates and times to French", "translate", ("text", "target"), _dates),
        Sample("langid", "which of 24 languages a name is in", "classify", ("text", "label"), _langid),
        Sample("dateparts", "BIO tags for dates, times and durations", "tag", ("words", "tags"), _dateparts),
        Sample("pydoc", "English prose from the manual of Python", "lm", ("text",), _pydoc),
        Sample("reviews", "short film reviews, for and against", "classify", ("text", "label"), _reviews),
    )
}

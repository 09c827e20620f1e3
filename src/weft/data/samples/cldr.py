"""Dates and times formatted with CLDR's patterns, each field labelled with its type."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

LabelledText = tuple[str, str]  # type of a field ("" for literal text), and its text

# Normalizes CLDR's narrow, thin and no-break spaces, dashes and direction marks to what people type.
TYPED = str.maketrans(dict.fromkeys("\u00a0\u2009\u202f", " ") | {"–": "-"} | dict.fromkeys("\u061c\u200e\u200f"))
# CLDR's join of a long date and a time; only some versions of Babel have it.
AT = {"en": " at ", "fr": " à ", "de": " um "}


class DateFormatter:
    """Formats dates and times in one language, as `babel.dates` does, with labelled and cached fields."""

    def __init__(self, language: str) -> None:
        from babel import Locale
        from babel.dates import DateTimeFormat, tokenize_pattern

        self.locale = Locale.parse(language)
        self.countries = sorted(name for code, name in self.locale.territories.items() if code.isalpha())
        self._at = AT[language]
        self._format, self._tokenize = DateTimeFormat, tokenize_pattern
        self._patterns: dict[tuple[str, str], str] = {}
        self._tokens: dict[str, list[tuple[str, Any]]] = {}
        self._texts: dict[tuple[tuple[str, int], int], str] = {}

    def format(self, day: str | None, clock: str | None, when: datetime) -> list[LabelledText]:
        """Return the fields of a date, a time or both; `day` and `clock` are CLDR's lengths or skeletons."""
        parts = self.fill_pattern(self._pattern("date_formats", day), when) if day else []
        if day and clock:
            parts.append(("", self._at if day in ("full", "long") else ", "))
        if clock:
            fields = self.fill_pattern(self._pattern("time_formats", clock), when)
            parts.append(("TIME", "".join([text for _, text in fields])))
        return parts

    def fill_pattern(self, pattern: str, when: datetime) -> list[LabelledText]:
        """Return the fields of one of CLDR's patterns, such as `EEEE, MMMM d, y`, for a moment."""
        if pattern not in self._tokens:
            self._tokens[pattern] = self._tokenize(pattern.translate(TYPED))
        tokens = self._tokens[pattern]
        return [("", value) if kind == "chars" else self._field(value, when) for kind, value in tokens]

    def _pattern(self, table: str, form: str) -> str:
        if (table, form) not in self._patterns:
            lengths = getattr(self.locale, table)
            pattern = lengths[form] if form in lengths else self.locale.datetime_skeletons[form]
            self._patterns[table, form] = pattern.pattern
        return self._patterns[table, form]

    def _field(self, field: tuple[str, int], when: datetime) -> LabelledText:
        letter, count = field
        name, read = FIELDS[letter]
        key = field, read(when)
        if key not in self._texts:
            self._texts[key] = self._format(when, self.locale)[letter * count].translate(TYPED)
        return name, self._texts[key]


# The letters of CLDR's patterns: the type of each, and the part of a moment that determines its text.
FIELDS: dict[str, tuple[str, Callable[[datetime], int]]] = {
    "E": ("WEEKDAY", lambda when: when.weekday()),
    "y": ("YEAR", lambda when: when.year),
    "Q": ("QUARTER", lambda when: when.month),
    "d": ("DAY", lambda when: when.day),
    **dict.fromkeys("ML", ("MONTH", lambda when: when.month)),
    **dict.fromkeys("hHa", ("TIME", lambda when: when.hour)),
    "m": ("TIME", lambda when: when.minute),
    "s": ("TIME", lambda when: when.second),
}

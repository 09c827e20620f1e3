"""The profile of a data file: layout, columns with types, lengths and labels, and what is odd.

A file is streamed once. What is held of it: the first rows, for each column a histogram of lengths and up to
`MAX_DISTINCT` values, and for each row the 8 bytes by which duplicates are found.
"""

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, islice
from typing import Any

import numpy as np

from weft.config.sections import Data
from weft.data.layout import ColumnName, Layout, detect_layout
from weft.data.readers.column_mapping import Columns, NumberedRows
from weft.data.readers.documents import read_documents
from weft.data.readers.examples import Skipped, expand_glob
from weft.data.readers.formats import FORMAT_READERS, read_parallel
from weft.data.readers.lines import BadRow, Oddities, plural
from weft.data.samples.datasets import read_sample
from weft.errors import DataError

MAX_DISTINCT = 2000  # values of a column that are counted
MAX_COUNTED_LABELS = 200  # of a column of labels
MAX_DIGESTS = 20_000_000  # rows that are compared
FIRST_ROWS = 1000  # by which the columns of text are found
NUM_EXAMPLES_SHOWN = 2
WORDS_LOOKED_AT = 50  # of each of the first rows, for the language
ENGLISH = frozenset(
    re.findall(r"\w+", "a an and are as at be but by for from has have he her his i in is it not of on or")
)
ENGLISH |= frozenset(re.findall(r"\w+", "she that the they this to was we were with you"))
ENGLISH_SHARE = 0.15  # of words that are in ENGLISH; a quarter in prose, a twentieth at most in other languages
_LONG_TEXT = 20_000  # characters
_FEW_ROWS = 5  # too few for labels to be repeated
# Tags of HTML and its entities; not the special tokens of a corpus, such as <unk>.
_MARKUP = re.compile(
    r"</?(?!(?:unk|s|pad|eos|bos|mask|sep|cls)>)[a-zA-Z][a-zA-Z0-9]{0,10}(?:\s[^<>]*)?/?>|&(?:amp|lt|gt|quot|nbsp|#\d{2,5});"
)
# UTF-8 that was read as Latin-1 or Windows-1252: é, ’, a no-break space; and the replacement character.
_MOJIBAKE = re.compile("Ã[\u0080-\u00bf\u0152-\u2122]|â€[\u0080-\u00bf\u0152-\u2122]|Â[\u00a0-\u00bf]|ï»¿|\ufffd")


@dataclass(frozen=True)
class TextLengths:
    """Quantiles of lengths."""

    median: int
    p95: int
    max: int

    @classmethod
    def of(cls, histogram: Counter[int]) -> "TextLengths":
        """Return the quantiles of a histogram, length -> how many."""
        return cls(_quantile(histogram, 0.5), _quantile(histogram, 0.95), max(histogram, default=0))


def _quantile(histogram: Counter[int], share: float) -> int:
    total, seen = sum(histogram.values()), 0
    for length in sorted(histogram):
        seen += histogram[length]
        if seen >= share * total:
            return length
    return 0


@dataclass
class ColumnProfile:
    """A column: its type, examples, lengths, and where they are few its values."""

    name: ColumnName
    kind: str = "empty"  # text, label, number, id, words, tags, list, object
    rows: int = 0
    empty: int = 0
    examples: list[str] = field(default_factory=list)
    values: Counter[str] | None = field(default_factory=Counter)  # None: more than MAX_DISTINCT
    word_lengths: Counter[int] = field(default_factory=Counter)
    char_lengths: Counter[int] = field(default_factory=Counter)
    words_seen: int = 0  # of the first rows
    english_words: int = 0  # of them
    numbers: int = 0
    integers: int = 0
    lists: int = 0
    string_lists: int = 0

    @property
    def words(self) -> TextLengths:
        """The number of words of a value; of a list, of its items."""
        return TextLengths.of(self.word_lengths)

    @property
    def characters(self) -> TextLengths:
        """The number of characters of a value."""
        return TextLengths.of(self.char_lengths)

    @property
    def is_english(self) -> bool:
        """Whether the first rows have as many of the commonest English words as English has."""
        return self.words_seen > 0 and self.english_words >= ENGLISH_SHARE * self.words_seen

    @property
    def labels(self) -> Counter[str]:
        """The values and their counts where the column is of labels or tags."""
        return self.values if self.kind in ("label", "tags") and self.values is not None else Counter()

    def add(self, value: Any) -> None:
        """Count one value."""
        if value is None or value in ("", []):
            self.empty += 1
            return
        self.rows += 1
        if isinstance(value, list):
            self._add_list(value)
        else:
            self._add_scalar(value)

    def _add_list(self, items: list[Any]) -> None:
        self.lists += 1
        self.string_lists += all(isinstance(item, str) for item in items)
        self.word_lengths[len(items)] += 1
        for item in items if self.values is not None else ():
            self._count(str(item))
        self._look_at(" ".join(map(str, items[:WORDS_LOOKED_AT])))
        self._show(" ".join(map(str, items[:12])))

    def _add_scalar(self, value: Any) -> None:
        text = value if isinstance(value, str) else str(value)
        self.word_lengths[len(text.split())] += 1
        self.char_lengths[len(text)] += 1
        if len(text) < 30 and (number := _number(text)) is not None:
            self.numbers += 1
            self.integers += number.is_integer() and "." not in text
        self._count(text)
        self._look_at(text)
        self._show(text)

    def _look_at(self, text: str) -> None:
        if self.rows <= FIRST_ROWS:
            words = text.split(maxsplit=WORDS_LOOKED_AT)[:WORDS_LOOKED_AT]
            self.words_seen += len(words)
            self.english_words += sum(word.lower() in ENGLISH for word in words)

    def _count(self, text: str) -> None:
        if self.values is not None:
            self.values[text[:200]] += 1
            if len(self.values) > MAX_DISTINCT:
                self.values = None

    def _show(self, text: str) -> None:
        if len(self.examples) < NUM_EXAMPLES_SHOWN and text[:60] not in self.examples:
            self.examples.append(text[:60])

    def finish(self) -> None:
        """Set the type, once all rows are counted."""
        if self.rows:
            self.kind = self._list_kind() if self.lists > self.rows / 2 else self._scalar_kind()

    def _list_kind(self) -> str:
        if self.string_lists < self.lists:
            return "list"
        items = sum(length * times for length, times in self.word_lengths.items())
        few = self.values is not None and len(self.values) <= min(MAX_COUNTED_LABELS, max(2, items // 5))
        return "tags" if few else "words"

    def _scalar_kind(self) -> str:
        distinct = self.rows if self.values is None else len(self.values)
        few_rows = self.rows <= _FEW_ROWS and self.words.max <= 1
        repeated = distinct <= min(MAX_COUNTED_LABELS, max(2, self.rows // 3)) and self.words.max <= 6
        repeated = repeated and (distinct < self.rows or few_rows)
        if self.numbers == self.rows:
            few = self.integers == self.rows and repeated and distinct <= 20
            unique = self.integers == self.rows and distinct > 0.9 * self.rows and self.rows > 20
            return "label" if few else "id" if unique else "number"
        if repeated and self.characters.max <= 60:
            return "label"
        one_word = self.words.p95 <= 1 and self.characters.max <= 60 and self.numbers > 0.3 * self.rows
        return "id" if one_word else "text"


@dataclass
class FileProfile:
    """The contents of a source of data: its layout and columns, bad and odd rows, digests to find duplicates."""

    source: str
    layout: Layout
    columns: list[ColumnProfile]
    rows: int = 0
    skipped: Skipped = field(default_factory=Skipped)
    oddities: Oddities = field(default_factory=Oddities)
    texts: Sequence[ColumnName] = ()  # the columns by which rows are compared
    digests: "array[int]" = field(default_factory=lambda: array("Q"))

    @property
    def duplicates(self) -> int:
        """The number of rows whose text occurred before."""
        return len(self.digests) - len(np.unique(np.frombuffer(self.digests, np.uint64))) if self.digests else 0

    def shared_rows(self, other: "FileProfile") -> int:
        """Return the number of rows of `other` whose text is in this source, too."""
        ours, theirs = (np.frombuffer(side.digests or array("Q", [0]), np.uint64) for side in (self, other))
        return int(np.isin(theirs, ours).sum()) if self.digests and other.digests else 0

    def column(self, name: ColumnName) -> ColumnProfile:
        """Return a column by its name or number."""
        return next(column for column in self.columns if column.name == name)

    def of_kind(self, *kinds: str) -> list[ColumnProfile]:
        """Return the columns of these types."""
        return [column for column in self.columns if column.kind in kinds]

    def warnings(self) -> list[str]:
        """Return what is odd, a sentence each."""
        warnings = [str(self.skipped)] if str(self.skipped) else []
        warnings += [
            f"{plural(count, 'row')} {kind}, the first: {self.oddities.first[kind]}"
            for kind, count in self.oddities.counts.items()
        ]
        if self.duplicates:
            warnings.append(f"{plural(self.duplicates, 'row')} whose text occurred before")
        return warnings + [warning for column in self.columns for warning in _column_warnings(column)]

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as JSON has it."""
        columns = [
            {
                "name": column.name,
                "type": column.kind,
                "rows": column.rows,
                "empty": column.empty,
                "distinct": None if column.values is None else len(column.values),
                "words": vars(column.words),
                "characters": vars(column.characters),
                "labels": dict(column.labels.most_common()),
                "examples": column.examples,
            }
            for column in self.columns
        ]
        layout = {"format": self.layout.format, "delimiter": self.layout.delimiter, "header": self.layout.header}
        return {
            "source": self.source,
            **layout,
            "rows": self.rows,
            "bad_rows": self.skipped.count,
            "duplicates": self.duplicates,
            "columns": columns,
            "odd": self.warnings(),
        }


def _column_warnings(column: ColumnProfile) -> Iterator[str]:
    if column.empty and column.rows:
        yield f"{column.name}: {plural(column.empty, 'empty cell')}"
    if column.kind == "text" and column.characters.max > max(2000, 20 * column.characters.median):
        lengths = column.characters
        yield f"{column.name}: very long values, up to {lengths.max:,} characters; the median is {lengths.median:,}"
    folded = Counter(label.strip().casefold() for label in column.labels)
    alike = [label for label in column.labels if folded[label.strip().casefold()] > 1]
    if alike:
        yield f"{column.name}: labels that differ by case or spaces alone: {', '.join(map(repr, alike[:6]))}"
    if column.kind == "label" and (rare := [label for label, count in column.labels.items() if count == 1]):
        yield f"{column.name}: {plural(len(rare), 'label')} with one row only, such as {rare[0]!r}"


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < 1e18 else None


def profile_source(source: str | list[str], data: Data, like: FileProfile | None = None) -> FileProfile:
    """Return the profile of a path, a pattern or parallel files; bad rows are counted, not raised.

    Rows are compared by the text columns of `like`, another split, where the source has them.
    """
    layout = detect_layout(source, data)
    skipped = Skipped()
    rows = _read_all(source, layout, data, skipped)
    return _profile_rows(str(source), layout, rows, skipped, like)


def profile_sample(name: str, split: str, like: FileProfile | None = None) -> FileProfile:
    """Return the profile of a split of a sample that ships with weft."""
    located = read_sample(name, split)
    place, first = next(located)
    layout = Layout("sample", None, False, tuple(first))
    return _profile_rows(f"{name}:{split}", layout, chain([(place, first)], located), Skipped(), like)


def _read_all(
    source: str | list[str], layout: Layout, data: Data, skipped: Skipped
) -> Iterator[tuple[str, dict[ColumnName, Any]]]:
    """Yield the rows of all files, with all columns."""
    names = {str(name): name for name in layout.names}
    by_name = layout.format in ("jsonl", "squad", "parquet")
    given: dict[str, int | str] = {key: str(name) if by_name else i for i, (key, name) in enumerate(names.items())}
    header = layout.header if layout.delimiter else None
    columns = Columns(list(names), frozenset(), given, header, {}, layout.delimiter, skipped.oddities)
    for path in [source[0]] if isinstance(source, list) else expand_glob(source):
        for line, row in _open(source if isinstance(source, list) else path, layout, columns, data):
            if isinstance(row, BadRow):
                skipped.add(row)
            else:
                yield f"{path}:{line}", {names[key]: value for key, value in row.items()}


def _open(source: str | list[str], layout: Layout, columns: Columns, data: Data) -> NumberedRows:
    if isinstance(source, list):
        return read_parallel(source, columns, data.max_line_bytes)
    if layout.format == "txt" and data.documents != "lines":
        return read_documents(source, columns, data)
    return FORMAT_READERS[layout.format](source, columns, data.max_line_bytes)


def _profile_rows(
    source: str,
    layout: Layout,
    rows: Iterable[tuple[str, Mapping[Any, Any]]],
    skipped: Skipped,
    like: FileProfile | None,
) -> FileProfile:
    profile = FileProfile(source, layout, [ColumnProfile(name) for name in layout.names], skipped=skipped)
    stream = iter(rows)
    first = list(islice(stream, FIRST_ROWS))
    if not first:
        reason = f": {skipped.reasons[0]}" if skipped.reasons else "; is it the right file?"
        raise DataError(f"{source}: no good rows in it{reason}")
    alike = like is not None and set(like.texts) <= set(layout.names)
    profile.texts = like.texts if like is not None and alike else _text_columns(first, layout.names)
    for place, row in chain(first, stream):
        profile.rows += 1
        for column in profile.columns:
            column.add(row.get(column.name))
        contents = [row.get(name) for name in profile.texts]
        if len(profile.digests) < MAX_DIGESTS:
            profile.digests.append(_digest(contents))
        _look_for_oddities(contents, place, profile.oddities)
    for column in profile.columns:
        column.finish()
    if len(profile.columns) == 1 and profile.columns[0].kind == "label":
        profile.columns[0].kind = "text"  # lines that are repeated
    return profile


def _text_columns(rows: Sequence[tuple[str, Any]], names: Sequence[ColumnName]) -> list[ColumnName]:
    """Return the columns that hold text, by the first rows: those whose values are longest and differ."""
    lengths = {name: sum(len(str(row.get(name) or "")) for _, row in rows) for name in names}
    distinct = {name: len({str(row.get(name)) for _, row in rows}) for name in names}
    varied = [name for name in names if distinct[name] > 0.3 * len(rows)] or list(names)
    longest = max(lengths[name] for name in varied)
    return [name for name in varied if lengths[name] >= 0.25 * longest]


def _digest(contents: Sequence[Any]) -> int:
    digest = blake2b(digest_size=8)
    for value in contents:
        digest.update(str(value).encode(errors="replace") + b"\0")
    return int.from_bytes(digest.digest(), "big")


def _look_for_oddities(contents: Sequence[Any], place: str, oddities: Oddities) -> None:
    for value in contents:
        if not isinstance(value, str):
            continue
        if ("<" in value or "&" in value) and (match := _MARKUP.search(value)):
            oddities.add("with markup such as <br />", f"{place} ({match[0][:20]})")
        if not value.isascii() and (match := _MOJIBAKE.search(value)):
            oddities.add("with mojibake such as Ã©", f"{place} ({match[0]})")
        if len(value) > _LONG_TEXT:
            oddities.add(f"of more than {_LONG_TEXT:,} characters", place)

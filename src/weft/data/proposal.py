"""Proposal of a task for a data file, from its profile: the task, the columns of its fields, the `data` section."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.data.layout import ColumnName
from weft.data.profile import ColumnProfile, FileProfile
from weft.errors import DataError, did_you_mean

ColumnMap = dict[str, Any]  # field -> column, or a list of them
_TEXT_NAMES = ("text", "sentence", "review", "content", "body", "document", "comment", "tweet", "message")
# Names of labels, the surest first.
_LABEL_NAMES = (
    r"(gold_?)?labels?",
    r"class|category|sentiment|intent|target|y",
    r".*(label|class|judg|sentiment|categor|intent|polarity).*",
    r".*(score|rating|similar|related|stars|quality|grade).*",
)
_TAG_NAMES = r"(ner_?|pos_?|chunk_?)?tags?|labels?"
_CONLLU_WIDTH = 10
_COMMENT_COLUMN = 40  # lines that are longer do not shift the comments of the others
# Columns of one choice each, such as ending0, choice_a, sol2; and lists of them.
_ONE_CHOICE = r"(ending|choice|option|sol|solution|answer|alternative)[ _-]?([a-h]|\d)"
_CHOICE_LIST = r"choices|options|endings"
_QUESTION_NAMES = (r"text|context|ctx|startphrase|stem", r"question|prompt|premise|goal|sentence|.*question.*")
_CHOICE_LABELS = (r"label|gold|target", r"answer|correct.*")
_FIRST_LABELS = (0, 1, "A", "a")
_MIN_UNNAMED_CHOICES = 3  # of columns without names: fewer may be something else


@dataclass(frozen=True)
class Proposal:
    """A task for a file, and the columns of its fields."""

    task: str
    columns: ColumnMap
    options: Mapping[str, Any] = field(default_factory=dict)  # of the task

    def data_section(self, profile: FileProfile, splits: Mapping[str, Any]) -> dict[str, Any]:
        """Return the recipe's `data` section; `splits` maps train, valid and test to their sources."""
        source = splits["train"]
        section: dict[str, Any] = dict(splits)
        if isinstance(source, str):
            section |= profile.layout.keys(source)
        if {"mlm": profile.layout.sentences, "lm": profile.layout.paragraphs}.get(self.task):
            section["documents"] = "blank"
        numbered = all(isinstance(column, int) for column in column_fields(self.columns))
        if profile.layout.header and numbered and self.columns:
            section["header"] = True
        default = profile.layout.format in ("txt", "squad", "parallel files") or (
            all(field == column for field, column in self.columns.items()) and profile.layout.format != "tsv"
        )
        return section if default or not self.columns else {**section, "columns": self.columns}


def propose(profile: FileProfile, task: str | None = None) -> Proposal:
    """Return what a file is for; raise a `DataError` if it has no columns for the task."""
    if task is not None and task not in _CHOOSERS:
        raise DataError(f"--task: nothing can be proposed for {task!r}; {did_you_mean(task, _CHOOSERS)}")
    return _CHOOSERS[task or _guess_task(profile)](profile)


def _guess_task(profile: FileProfile) -> str:
    names = {str(column.name).lower() for column in profile.columns}
    texts, labels = _texts(profile), _labels(profile)
    if _choice_columns(profile):
        return "choice"
    if profile.layout.format == "squad" or ("question" in names and names & {"passage", "context"}):
        return "span"
    if profile.layout.format == "conll" or (profile.of_kind("words") and profile.of_kind("tags")):
        return "tag"
    if names >= {"text", "target"} or (len(texts) == 2 and not labels):
        return "translate"
    if labels and texts:
        return "classify"
    return "mlm" if profile.layout.sentences else "lm"


def _texts(profile: FileProfile) -> list[ColumnProfile]:
    """Return the columns of text, without names and identifiers where there are longer texts."""
    texts = profile.of_kind("text")
    longest = max((column.characters.median for column in texts), default=0)
    return [column for column in texts if column.words.p95 > 1 or column.characters.median >= 0.5 * longest]


def _labels(profile: FileProfile) -> list[ColumnProfile]:
    """Return the columns that can be labels, of at least two values; complete ones where there are any."""
    candidates = [
        column
        for column in profile.of_kind("label", "number")
        if (column.values is None or len(column.values) > 1) and not str(column.name).lower().endswith("id")
    ]
    return [column for column in candidates if not column.empty] or candidates


def _named(columns: Sequence[ColumnProfile], *patterns: str) -> ColumnProfile | None:
    for pattern in patterns:
        for column in columns:
            if re.fullmatch(pattern, str(column.name).strip().lower()):
                return column
    return None


def _classify(profile: FileProfile) -> Proposal:
    texts, labels = _texts(profile), _labels(profile)
    if not texts or not labels:
        raise _no_columns(profile, "classify", "a column of text and one of labels or numbers")
    label = _named(labels, *_LABEL_NAMES) or _unnamed_label(labels, pairs=len(texts) == 2)
    first = _named(texts, *_TEXT_NAMES) or max(texts, key=lambda column: column.characters.median)
    columns: ColumnMap = {"text": first.name, "label": label.name}
    if len(texts) == 2:
        columns = {"text": texts[0].name, "pair": texts[1].name, "label": label.name}
    return Proposal("classify", columns, {"regression": True} if label.kind == "number" else {})


def _unnamed_label(labels: Sequence[ColumnProfile], pairs: bool) -> ColumnProfile:
    """Return the likeliest label: of pairs a number with decimals, the similarity; else that of the fewest values."""
    decimal = [column for column in labels if column.kind == "number" and column.integers < column.rows / 2]
    if pairs and decimal:
        return decimal[-1]
    return min(labels, key=lambda column: (column.kind == "number", len(column.values or range(10_000))))


def _tag(profile: FileProfile) -> Proposal:
    if profile.layout.format == "conll" and len(profile.columns) == _CONLLU_WIDTH:
        return Proposal("tag", {"words": 1, "tags": 3})
    lists = profile.of_kind("words", "tags")
    words = _named(lists, "words|tokens") or next(iter(profile.of_kind("words") or lists), None)
    others = [column for column in lists if column is not words]
    tags = _named(others, _TAG_NAMES) or next(reversed([c for c in others if c.kind == "tags"] or others), None)
    if words is None or tags is None:
        raise _no_columns(profile, "tag", "a list of words and a list of tags, both of text")
    return Proposal("tag", {"words": words.name, "tags": tags.name})


def _translate(profile: FileProfile) -> Proposal:
    texts = _texts(profile) if len(_texts(profile)) > 1 else profile.of_kind("text", "label", "id", "number")
    if len(texts) < 2:
        raise _no_columns(profile, "translate", "two columns of text")
    source = _named(texts, "text|source|src|input") or texts[0]
    others = [column for column in texts if column is not source]
    target = _named(others, "target|tgt|output|translation") or others[0]
    return Proposal("translate", {"text": source.name, "target": target.name})


def _lm(profile: FileProfile) -> Proposal:
    texts = _texts(profile) or profile.of_kind("text", "label")
    if not texts:
        raise _no_columns(profile, "lm", "a column of text")
    chosen = _named(texts, *_TEXT_NAMES) or max(texts, key=lambda column: column.characters.median)
    return Proposal("lm", {"text": chosen.name})


def _span(profile: FileProfile) -> Proposal:
    names = {"question": "question", "passage": "passage|context", "answers": "answers?", "starts": "starts"}
    columns = {field: _named(profile.columns, pattern) for field, pattern in names.items()}
    if not all(columns[field] for field in ("question", "passage", "answers")):
        raise _no_columns(profile, "span", "question, passage (or context) and answers")
    return Proposal("span", {field: column.name for field, column in columns.items() if column is not None})


def _mlm(profile: FileProfile) -> Proposal:
    return Proposal("mlm", _lm(profile).columns)


def _choice(profile: FileProfile) -> Proposal:
    columns = _choice_columns(profile)
    if columns is None:
        needed = "a text, choices (a list, or a column each such as choice1) and the number or letter of the right one"
        raise _no_columns(profile, "choice", needed)
    first = _first_label(profile.column(columns["label"]), _choices(profile)[1])
    return Proposal("choice", columns, {"first": first} if first else {})


def _choice_columns(profile: FileProfile) -> ColumnMap | None:
    """Return the columns of a text, its choices and the right one; None if the file has none."""
    choices, number = _choices(profile)
    labels = [column for column in profile.of_kind("label", "number") if _first_label(column, number) is not None]
    if not choices or not labels:
        return None
    names = column_fields({"choices": choices})
    texts = [column for column in profile.of_kind("text", "label") if column.name not in names]
    label = _named(labels, *_CHOICE_LABELS) or labels[-1]
    text = _named(texts, *_QUESTION_NAMES) or next((column for column in texts if column.kind == "text"), None)
    return {"text": text.name, "choices": choices, "label": label.name} if text is not None else None


def _choices(profile: FileProfile) -> tuple[Any, int]:
    """Return the column or the columns of choices, and how many choices there are; "" and 0 where there are none."""
    if (column := _named(profile.of_kind("words", "tags"), _CHOICE_LIST)) is not None:
        return column.name, column.words.max
    texts = _texts(profile)
    named = [column.name for column in texts if re.fullmatch(_ONE_CHOICE, str(column.name).strip().lower())]
    if not named and not profile.layout.header and len(texts) > _MIN_UNNAMED_CHOICES:
        named = [column.name for column in texts[1:]]
    return (named, len(named)) if len(named) > 1 else ("", 0)


def _first_label(column: ColumnProfile, number: int) -> int | str | None:
    """Return what a column calls the first choice, 0, 1, A or a; None unless its values name all choices so."""
    values = {str(value) for value in column.values or ()}
    for first in _FIRST_LABELS:
        names = [chr(ord(first) + index) if isinstance(first, str) else str(first + index) for index in range(number)]
        if values == set(names):
            return first
    return None


_CHOOSERS: dict[str, Callable[[FileProfile], Proposal]] = {
    "classify": _classify,
    "tag": _tag,
    "translate": _translate,
    "lm": _lm,
    "span": _span,
    "mlm": _mlm,
    "choice": _choice,
}


def _no_columns(profile: FileProfile, task: str, needed: str) -> DataError:
    there = ", ".join(f"{column.name} ({column.kind})" for column in profile.columns)
    return DataError(
        f"{profile.source}: {task} needs {needed}, but the columns are: {there}; give another --task, or data.format, "
        "data.delimiter or data.header where the file was misread"
    )


def write_section(name: str, section: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """Return a section of a recipe as YAML, a key a line, each with its comment; columns stay on one line."""
    lines = {key: f"  {key}: {flow_yaml(value)}" for key, value in section.items()}
    column = max((len(line) for line in lines.values() if len(line) <= _COMMENT_COLUMN), default=0)
    for key, comment in (comments or {}).items():
        if key in lines and comment:
            lines[key] = f"{lines[key]:{column}}  # {comment}"
    return "\n".join([f"{name}:", *lines.values()])


def flow_yaml(value: Any) -> str:
    """Return a value as YAML on one line; strings are quoted where they must be."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {flow_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow_yaml, value)) + "]"
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z_./][\w./ *-]*", value) and not value.endswith(" ")
    if plain and value.lower() not in ("true", "false", "null", "yes", "no", "on", "off"):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def column_fields(columns: Mapping[str, Any]) -> dict[ColumnName, str]:
    """Return the field of each column."""
    return {
        column: field for field, given in columns.items() for column in (given if isinstance(given, list) else [given])
    }

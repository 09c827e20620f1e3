"""SQuAD's JSON (Rajpurkar et al. 2016, 2018): articles with paragraphs with questions, to one row a question.

    {"data": [{"title": …, "paragraphs": [{"context": …, "qas": [
        {"id": …, "question": …, "answers": [{"text": …, "answer_start": …}]}]}]}]}

A row has `question`, `passage`, `answers` (texts), `starts` (where each begins in the passage, in characters from 0),
`id` and `title`. A question without an answer (2.0) has empty lists; one whose answers are not told has neither. The
file is one JSON value, so it is held whole; a row's line is the number of its question, from 1.
"""

import json
import zlib
from collections.abc import Iterator
from typing import Any

from weft.data.readers.columns import Columns, Row, Rows
from weft.data.readers.lines import BadRow, open_bytes, unreadable
from weft.errors import DataError

_LAYOUT = 'SQuAD\'s layout is {"data": [{"paragraphs": [{"context": …, "qas": [{"question": …, "answers": […]}]}]}]}'


def read_squad(path: str, columns: Columns, limit: int) -> Rows:
    """Read one row a question."""
    picks = columns.named(path)
    for number, found in enumerate(_questions(path, _parsed(path)), 1):
        if isinstance(found, BadRow):
            yield number, BadRow(f"{path}:{number}: {found}")
            continue
        row = {field: found[name] for field, name in picks if name in found}
        yield number, columns.missing(row, found, picks, f"{path}:{number}") or row


def _parsed(path: str) -> Any:
    try:
        with open_bytes(path) as file:
            text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8: byte {error.start:,}; convert it with iconv") from None
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _no_squad(path, f"broken JSON in line {error.lineno}, column {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise _no_squad(path, f"broken JSON: {error}") from None


def _no_squad(path: str, what: str) -> DataError:
    return DataError(f"{path}: {what}; {_LAYOUT}; for an object a line, end the name with .jsonl or set data.format")


def _questions(path: str, value: Any) -> Iterator[Row | BadRow]:
    for article in _listed(path, value, "data"):
        for paragraph in _listed(path, article, "paragraphs"):
            for question in _listed(path, paragraph, "qas"):
                yield _row(article, paragraph, question)


def _listed(path: str, value: Any, key: str) -> list[Any]:
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, list):
        raise _no_squad(path, f"there is no list {key!r} in {repr(value)[:60]}")
    return found


def _row(article: Row, paragraph: Row, question: Any) -> Row | BadRow:
    """Lay out one question; what is in the fields, the task's own schema checks."""
    if not isinstance(question, dict):
        return BadRow(f"must be a question, but is {repr(question)[:60]} instead; {_LAYOUT}")
    row = {"passage": paragraph.get("context"), "title": article.get("title")}
    row |= {key: question[key] for key in ("question", "id") if key in question}
    if question.get("is_impossible"):  # 2.0 has answers that only seem right under another name
        return {**row, "answers": [], "starts": []}
    answers = question.get("answers")
    if answers is None:
        return row
    try:
        return {**row, "answers": [one["text"] for one in answers], "starts": [one["answer_start"] for one in answers]}
    except (TypeError, KeyError):
        return BadRow(f"answers: must be a list of {{text, answer_start}}, but is {repr(answers)[:60]} instead")

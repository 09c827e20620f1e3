"""Reader of SQuAD's JSON (Rajpurkar et al. 2016, 2018): articles, paragraphs and questions to one row per question.

    {"data": [{"title": …, "paragraphs": [{"context": …, "qas": [
        {"id": …, "question": …, "answers": [{"text": …, "answer_start": …}]}]}]}]}

A row has `question`, `passage`, `answers` (texts), `starts` (character offsets in the passage), `id` and `title`.
An unanswerable question (2.0) has empty lists; an unlabelled one has neither. The file is one JSON value, so it is held
in memory; a row's line is the number of its question, from 1.
"""

import json
import zlib
from collections.abc import Iterator
from typing import Any

from weft.data.readers.column_mapping import Columns, NumberedRows, Row
from weft.data.readers.lines import BadRow, open_bytes, unreadable
from weft.errors import DataError

MAX_BYTES = 1 << 30  # of a file, unpacked
_LAYOUT = 'SQuAD\'s layout is {"data": [{"paragraphs": [{"context": …, "qas": [{"question": …, "answers": […]}]}]}]}'


def read_squad(path: str, columns: Columns, limit: int) -> NumberedRows:
    """Yield one row per question."""
    picks = columns.by_name(path)
    for number, record in enumerate(_read_questions(path, _load_json(path)), 1):
        if isinstance(record, BadRow):
            yield number, BadRow(f"{path}:{number}: {record}")
        else:
            yield number, columns.from_object(record, picks, f"{path}:{number}")


def _load_json(path: str) -> Any:
    try:
        with open_bytes(path) as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise _format_error(path, f"has more than {MAX_BYTES:,} bytes, and is read as a whole")
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8: byte {error.start:,}; convert it with iconv") from None
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _format_error(path, f"broken JSON in line {error.lineno}, column {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise _format_error(path, f"broken JSON: {error}") from None


def _format_error(path: str, message: str) -> DataError:
    return DataError(f"{path}: {message}; {_LAYOUT}; for an object a line, end the name with .jsonl or set data.format")


def _read_questions(path: str, value: Any) -> Iterator[Row | BadRow]:
    for article in _get_list(path, value, "data"):
        for paragraph in _get_list(path, article, "paragraphs"):
            for question in _get_list(path, paragraph, "qas"):
                yield _question_row(article, paragraph, question)


def _get_list(path: str, value: Any, key: str) -> list[Any]:
    items = value.get(key) if isinstance(value, dict) else None
    if not isinstance(items, list):
        raise _format_error(path, f"there is no list {key!r} in {repr(value)[:60]}")
    return items


def _question_row(article: Row, paragraph: Row, question: Any) -> Row | BadRow:
    """Return the row of one question; the task's schema validates its values."""
    if not isinstance(question, dict):
        return BadRow(f"must be a question, but is {repr(question)[:60]} instead; {_LAYOUT}")
    row = {"passage": paragraph.get("context"), "title": article.get("title")}
    row |= {key: question[key] for key in ("question", "id") if key in question}
    if question.get("is_impossible"):  # 2.0 has plausible but wrong answers under another key
        return {**row, "answers": [], "starts": []}
    answers = question.get("answers")
    if answers is None:
        return row
    try:
        return {
            **row,
            "answers": [answer["text"] for answer in answers],
            "starts": [answer["answer_start"] for answer in answers],
        }
    except (TypeError, KeyError):
        return BadRow(f"answers: must be a list of {{text, answer_start}}, but is {repr(answers)[:60]} instead")

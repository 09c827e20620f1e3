"""What `weft predict` does with rows: an answer for each, printed or written, and a count of what went wrong."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from weft.cli.console import tell
from weft.cli.inputs import read_chunks, read_file
from weft.data.readers.column_mapping import ColumnSpec
from weft.data.readers.lines import plural
from weft.data.readers.records import Record
from weft.data.truncation import TruncationPolicy
from weft.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weft.pipeline import Pipeline
    from weft.tasks.base import Answer

WriteAnswer = Callable[[Record, "Answer"], object]


def question_records(file: Path, pipeline: "Pipeline", columns: ColumnSpec | None) -> "Iterator[Record]":
    """Yield the rows of a file as questions of the model's task: labels, if there are any, are left out."""
    task, fields = pipeline.task, pipeline.task.Example.model_fields
    required = [name for name, info in fields.items() if info.is_required()]
    for record in read_file(
        file, pipeline.run.data, list(fields), [*required, *task.required_optional_fields], columns
    ):
        is_row = isinstance(record.request, dict)
        yield record._replace(request=task.question_fields(record.request)) if is_row else record  # type: ignore[arg-type]


def answer_records(
    pipeline: "Pipeline",
    records: Iterable[Record],
    options: Mapping[str, Any],
    limit: TruncationPolicy,
    write: WriteAnswer,
    strict: bool,
    advance: Callable[[int], object],
) -> None:
    """Write an answer for each row, and tell what was cut; the answer to a bad row is its error, if not `strict`."""
    rows, errors, first = 0, 0, ""
    for chunk in read_chunks(records):
        answers = pipeline.answers([record.request for record in chunk], options, rows, "return", limit)
        for record, answer in zip(chunk, answers, strict=True):
            rows += 1
            if answer.keys() == {"error"}:
                answer = {"error": _locate(answer["error"], rows, record.place)}
                if strict:
                    raise DataError(answer["error"])
                errors, first = errors + 1, first or answer["error"]
            write(record, answer)
        sys.stdout.flush()
        advance(len(chunk))
    if str(limit):
        tell(str(limit))
    if errors:
        _tell_errors(errors, rows, first)


def _locate(message: str, number: int, place: str) -> str:
    """Return an error with the place of its row in a file, in place of its number."""
    example = f"example {number}: "
    return f"{place}: {message.removeprefix(example)}" if message.startswith(example) else message


def _tell_errors(errors: int, rows: int, first: str) -> None:
    if errors == rows:
        raise DataError(f"not one of {plural(rows, 'row')} could be answered; the first: {first}")
    tell(f"{plural(errors, 'row')} of {rows:,} could not be answered; the first: {first}")


def print_answers(pipeline: "Pipeline", as_json: bool, alternatives: bool = False) -> WriteAnswer:
    """Return what prints an answer: as JSON, or as text, where an error is an empty line and a message on stderr.

    With `alternatives`, text has the other candidates too.
    """
    format_answer = pipeline.task.format_alternatives if alternatives else pipeline.task.format_answer

    def write(record: Record, answer: "Answer") -> None:
        if as_json:
            typer.echo(json.dumps(answer, ensure_ascii=False))
        elif answer.keys() == {"error"}:
            typer.echo()
            tell(answer["error"])
        else:
            typer.echo(format_answer(answer))

    return write

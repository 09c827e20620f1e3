"""Answers of `weft predict` to rows: one for each row, printed or written; rows with errors are counted."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from weft.cli.console import tell
from weft.cli.inputs import read_chunks, read_file
from weft.config.json import write_json
from weft.config.sections import Data
from weft.data.readers.column_mapping import ColumnSpec
from weft.data.readers.lines import plural
from weft.data.readers.records import Record
from weft.data.truncation import TruncationPolicy
from weft.errors import DataError

if TYPE_CHECKING:
    from weft.pipeline import Pipeline
    from weft.tasks.base import Answer, Task

WriteAnswer = Callable[[Record, "Answer"], object]
Answered = tuple[Sequence[Record], Iterable["Answer"]]  # rows and their answers


class RowErrors:
    """The number of rows, of those with an error, and the first error; if `strict`, it is raised.

    With `printed`, each error has been printed already, and the summary does not repeat the first.
    """

    def __init__(self, strict: bool, printed: bool = False) -> None:
        self.rows = self.errors = 0
        self._first, self._strict, self._printed = "", strict, printed

    def count(self, error: str | None) -> None:
        """Count a row."""
        self.rows += 1
        if error is not None:
            if self._strict:
                raise DataError(error)
            self.errors, self._first = self.errors + 1, self._first or error

    def summarize(self, action: str) -> None:
        """Print how many rows could not, for instance, `be answered`; raise an error if none could."""
        first = "" if self._printed else f"; the first: {self._first}"
        if self.errors and self.errors == self.rows:
            raise DataError(f"not one of {plural(self.rows, 'row')} could {action}{first}")
        if self.errors:
            tell(f"{plural(self.errors, 'row')} of {self.rows:,} could not {action}{first}")


def question_records(file: str, task: "Task", data: Data, columns: ColumnSpec | None) -> Iterator[Record]:
    """Yield the rows of a file as questions of the model's task: labels, if there are any, are left out."""
    fields = task.Example.model_fields
    required = [name for name, info in fields.items() if info.is_required()]
    for record in read_file(file, data, list(fields), [*required, *task.required_optional_fields], columns):
        is_row = isinstance(record.request, dict)
        yield record._replace(request=task.question_fields(record.request)) if is_row else record  # type: ignore[arg-type]


def answer_chunks(
    pipeline: "Pipeline", records: Iterable[Record], options: Mapping[str, Any], limit: TruncationPolicy
) -> Iterator[Answered]:
    """Yield the rows that have been read so far, with their answers; `limit` counts what was cut."""
    start = 0
    for chunk in read_chunks(records):
        yield chunk, pipeline.answers([record.request for record in chunk], options, start, "return", limit)
        start += len(chunk)


def write_answers(
    answered: Iterable[Answered],
    limit: TruncationPolicy,
    write: WriteAnswer,
    errors: RowErrors,
    advance: Callable[[int], object] = lambda rows: None,
) -> None:
    """Write an answer for each row, and print what was cut; the answer to a bad row is its error."""
    for chunk, answers in answered:
        for record, answer in zip(chunk, answers, strict=True):
            if answer.keys() == {"error"}:
                answer = {"error": _locate(answer["error"], errors.rows + 1, record.place)}
                errors.count(answer["error"])
            else:
                errors.count(None)
            write(record, answer)
        sys.stdout.flush()
        advance(len(chunk))
    if str(limit):
        tell(str(limit))
    errors.summarize("be answered")


def _locate(message: str, number: int, place: str) -> str:
    """Return an error with the place of its row in a file, in place of its number."""
    example = f"example {number}: "
    return f"{place}: {message.removeprefix(example)}" if message.startswith(example) else message


def print_answers(pipeline: "Pipeline", as_json: bool, alternatives: bool = False) -> WriteAnswer:
    """Return what prints an answer: as JSON, or as text, where an error is an empty line and a message on stderr.

    With `alternatives`, text has the other candidates too.
    """
    format_answer = pipeline.task.format_alternatives if alternatives else pipeline.task.format_answer

    def write(record: Record, answer: "Answer") -> None:
        if as_json:
            typer.echo(write_json(answer))
        elif answer.keys() == {"error"}:
            typer.echo()
            tell(answer["error"])
        else:
            typer.echo(format_answer(answer))

    return write

"""Examples in a pandas DataFrame: its columns are fields. pandas is never imported here: who has a DataFrame has it."""

import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from weft.errors import DataError
from weft.tasks.base import Answer, Task


def is_dataframe(data: object) -> bool:
    """Return whether `data` is a pandas DataFrame."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(data, pandas.DataFrame)


def frame_examples(task: Task, frame: Any, with_labels: bool = False) -> list[dict[str, Any]]:
    """Return one mapping a row, of the columns that are fields of the task's example; other columns are left out.

    An empty cell (None, NaN, NA) is a field that is not given. A column that resembles a field is an error.
    """
    fields = task.Example.model_fields if with_labels else task.input_fields
    present = [name for name in fields if name in frame.columns]
    _check_columns(list(frame.columns), list(task.Example.model_fields))
    if not present:
        raise DataError(
            f"DataFrame: its columns are {', '.join(map(repr, frame.columns)) or 'none'}, but an example has the "
            f"fields {', '.join(fields)}; rename them: df.rename(columns={{...: {task.text_field!r}}})"
        )
    columns = [_cells(frame[name]) for name in present]
    return [
        {name: value for name, value in zip(present, row, strict=True) if value is not None}
        for row in zip(*columns, strict=True)
    ]


def _check_columns(columns: Sequence[Any], fields: Sequence[str]) -> None:
    """Raise an error if a column is the misspelt name of a field that is missing."""
    missing = [name for name in fields if name not in columns]
    for column in columns:
        if column not in fields and (near := get_close_matches(str(column), missing, n=1, cutoff=0.75)):
            raise DataError(f"DataFrame: the column {column!r} is no field; did you mean {near[0]!r}?")


def _cells(series: Any) -> list[Any]:
    """Return the values of a column as Python's own types; None where a cell is empty."""
    empty = series.isna().tolist()
    return [None if is_empty else value for value, is_empty in zip(series.tolist(), empty, strict=True)]


def answers_frame(frame: Any, answers: Iterable[Answer]) -> Any:
    """Return a DataFrame of answers: a column for each of their fields, and the index of the examples."""
    return sys.modules["pandas"].DataFrame(list(answers), index=frame.index)

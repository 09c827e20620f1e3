"""What a caller asks of a task, checked: an example, given as a text or by its fields, and the options of a call."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from weft.config.schema import Section, read_section
from weft.errors import ConfigError, DataError
from weft.tasks.base import Task

Asked = str | Mapping[str, Any] | BaseModel  # what may stand for an example
SHOWN = 200  # letters of what was given that an error repeats


def read_asked(task: Task, asked: Asked, number: int) -> Any:
    """Check one example: a plain text fills the task's first field, or is JSON where one field is not enough."""
    raw = task.read(asked, f"example {number}") if isinstance(asked, str) else asked
    try:
        return task.Example.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "example"
        message = first["msg"].removeprefix("Value error, ")
        shown = repr(first["input"])
        shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"
        raise DataError(
            f"example {number}: {where}: {message}, but is {shown} instead; "
            f"an example has the fields {', '.join(task.Example.model_fields)}"
        ) from None


def read_options(task: Task, options: Mapping[str, Any] | None) -> Section:
    """Check the options of a call; what is not given is as the recipe says."""
    default = task.options()
    if options and not type(default).model_fields:
        raise ConfigError(
            f"options.{next(iter(options))}: the task {task.config.name!r}, as configured, has no options; leave it out"
        )
    return read_section(type(default), {**default.model_dump(), **options}, "options") if options else default

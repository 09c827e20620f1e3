"""Validation of requests: an example, given as a text or by its fields, and the options of a call."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from weft.config.schema import Section, read_section
from weft.errors import ConfigError, DataError
from weft.tasks.base import Task

Request = str | Mapping[str, Any] | BaseModel  # the forms of an example in a request
SHOWN = 200  # characters of the input that an error message repeats


def parse_example(task: Task, request: Request, number: int) -> Any:
    """Return a validated example: a plain text is the task's first field, or JSON if it needs several fields."""
    raw = task.parse_text(request, f"example {number}") if isinstance(request, str) else request
    try:
        return task.Example.model_validate(raw)
    except ValidationError as error:
        details = error.errors()[0]
        field = ".".join(str(part) for part in details["loc"]) or "example"
        message = details["msg"].removeprefix("Value error, ")
        given = repr(details["input"])
        given = given if len(given) <= SHOWN else f"{given[:SHOWN]}…"
        raise DataError(
            f"example {number}: {field}: {message}, but is {given} instead; "
            f"an example has the fields {', '.join(task.Example.model_fields)}"
        ) from None


def read_options(task: Task, options: Mapping[str, Any] | None) -> Section:
    """Return the validated options of a call, with the recipe's values as defaults."""
    default = task.options()
    if options and not type(default).model_fields:
        raise ConfigError(
            f"options.{next(iter(options))}: the task {task.config.name!r}, as configured, has no options; leave it out"
        )
    return read_section(type(default), {**default.model_dump(), **options}, "options") if options else default

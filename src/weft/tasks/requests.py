"""Validation of requests: an example, given as a text or by its fields, and the options of a call."""

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from weft.config.overrides import Overrides, apply_overrides
from weft.config.schema import Section, read_section
from weft.decoding.config import DecodingConfig
from weft.errors import ConfigError, DataError, abbreviate
from weft.tasks.base import Task

# The forms of an example in a request: a text, its fields by name or, in a tuple or list, in their order.
Request = str | Mapping[str, Any] | BaseModel | tuple[Any, ...] | list[Any]


def parse_example(task: Task, request: Request, number: int) -> Any:
    """Return a validated example: a plain text is the task's first field, or JSON if it needs several fields.

    A tuple or list has the values of several fields, such as a pair of texts; for `tag` it is the words of a sentence.
    """
    raw: Any = request
    if isinstance(request, str):
        raw = task.parse_text(request, f"example {number}")
    elif isinstance(request, tuple | list):
        raw = task.parse_sequence(request, f"example {number}")
    try:
        example = task.Example.model_validate(raw)
    except ValidationError as error:
        details = error.errors()[0]
        field = ".".join(str(part) for part in details["loc"]) or "example"
        message = details["msg"].removeprefix("Value error, ")
        raise DataError(
            f"example {number}: {field}: {message}, but is {abbreviate(details['input'])} instead; "
            f"an example has the fields {', '.join(task.Example.model_fields)}"
        ) from None
    if reason := task.unavailable_answer(example):
        raise DataError(f"example {number}: {reason}")
    return example


def is_single(task: Task, request: object, pairs: bool) -> bool:
    """Return whether a request is one example rather than several.

    A tuple of texts is one example if the task needs several fields or, with `pairs`, if it is a pair of texts.
    """
    if not isinstance(request, tuple):
        return isinstance(request, str | Mapping | BaseModel)
    is_pair = len(request) == 2 and all(isinstance(value, str) for value in request)
    needs_fields = bool(task.json_example) and bool(request) and isinstance(request[0], str)
    return (is_pair and pairs) or (needs_fields and not request[0].lstrip().startswith("{"))


def read_options(task: Task, options: Mapping[str, Any] | None) -> Section:
    """Return the validated options of a call, with the recipe's values as defaults."""
    default = task.options()
    if options and not type(default).model_fields:
        raise ConfigError(
            f"options.{next(iter(options))}: the task {task.config.name!r}, as configured, has no options; leave it out"
        )
    if not options:
        return default
    merged = read_section(type(default), {**default.model_dump(), **options}, "options")
    check_effective(merged, "options", options)
    return merged


def check_effective(options: Section, section: str, given: Collection[str] | None = None) -> None:
    """Raise an error for a decoding option that has no effect; `given` are the keys to check, None: all."""
    if isinstance(options, DecodingConfig):
        options.check_effective(section, given)


def check_overrides(task: Task, overrides: Overrides) -> None:
    """Raise an error for overrides of `task.decode` that have no effect."""
    raw: dict[str, Any] = {}
    apply_overrides(raw, overrides)
    section = raw.get("task")
    decode = section.get("decode") if isinstance(section, Mapping) else None
    if isinstance(decode, Mapping):
        check_effective(task.options(), "task.decode", decode)

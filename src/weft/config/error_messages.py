"""Validation errors of pydantic as messages: the key as the user wrote it, the value, and what is allowed."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from weft.errors import abbreviate, did_you_mean

RENAMED = {  # keys of recipes before 0.1 -> their new names, of which a section has one
    "longest": ("max_length", "max_positions"),
    "hidden": ("ffn_width",),
    "heads_off": ("pruned_heads",),
    "length_bias": ("length_penalty",),
    "candidates": ("num_return_sequences",),
    "stopping": ("early_stopping",),
    "rescale": ("renormalize_logits",),
    "longest_question": ("max_question_length",),
    "longest_answer": ("max_answer_length",),
    "summary": ("pooler",),
    "too_long": ("truncation",),
    "smoothing": ("label_smoothing",),
    "share": ("mask_probability",),
    "shorter": ("short_sequence_probability",),
    "reads": ("sequences",),
    "gap": ("num_separators",),
}


Schemas = Mapping[str, type[BaseModel]]  # of the sections of a recipe, by name


def describe_errors(
    errors: Iterable[Any], schema: type[BaseModel], raw: object, section: str, schemas: Schemas | None = None
) -> Iterator[str]:
    """Yield one message per wrong key of a section; of the members of a union, the errors of the deepest key.

    `schemas` are those of all sections, among which the place of a key that is in the wrong one is looked up.
    """
    errors_by_key: dict[tuple[str, ...], list[Any]] = {}
    for error in errors:
        errors_by_key.setdefault(_key_path(error, raw), []).append(error)
    for keys, own_errors in errors_by_key.items():
        if not any(other[: len(keys)] == keys != other for other in errors_by_key):
            yield f"{'.'.join([section, *keys])}: {_describe(own_errors, schema, schemas or {})}"


def _key_path(error: Any, raw: Any) -> tuple[str, ...]:
    """Return the keys in `raw` that lead to an error; pydantic's `loc` also has types that it tried, such as int."""
    keys: list[str] = []
    for part in map(str, error["loc"]):
        inside = {str(key): value for key, value in (raw.items() if isinstance(raw, Mapping) else _numbered(raw))}
        if part in inside or (error["type"] == "missing" and part == str(error["loc"][-1])):
            keys.append(part)
            raw = inside.get(part)
    return tuple(keys)


def _numbered(raw: object) -> Iterable[tuple[int, Any]]:
    return enumerate(raw) if isinstance(raw, list | tuple) else ()


def _describe(errors: Sequence[Any], schema: type[BaseModel], schemas: Schemas) -> str:
    first = errors[0]
    if first["type"] == "extra_forbidden":
        key, fields = str(first["loc"][-1]), _fields_at(schema, first["loc"][:-1])
        renamed = next((new for new in RENAMED.get(key, ()) if new in fields), None)
        if renamed:
            return f"was renamed to {renamed!r}"
        places = [place for name, other in schemas.items() for place in _places_of(key, other, name)]
        return f"unknown key; {'it is ' + ' or '.join(places) if places else did_you_mean(key, fields)}"
    if first["type"] == "missing":
        return "required, but not given"
    message = " or ".join(
        [_message(first), *(re.sub("^(should|must) be ", "", _message(error)) for error in errors[1:])]
    )
    if first["type"] == "value_error" and not first["loc"]:
        return message
    choices = re.findall(r"'([^']*)'", first["ctx"]["expected"]) if first["type"] == "literal_error" else []
    hint = f"; {did_you_mean(str(first['input']), choices)}" if choices and len(errors) == 1 else ""
    return f"{message}, but is {abbreviate(first['input'])} instead{hint}"


def _places_of(key: str, schema: type[BaseModel], prefix: str) -> Iterator[str]:
    """Yield the dotted names under which a schema, or one inside it, has a key."""
    for name, field in schema.model_fields.items():
        inner = field.annotation
        if name == key:
            yield f"{prefix}.{name}"
        elif isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _places_of(key, inner, f"{prefix}.{name}")


def _message(error: Any) -> str:
    if error["type"] in ("tuple_type", "list_type"):
        return "must be a list, such as [a, b]"
    return str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")


def _fields_at(schema: type[BaseModel], loc: tuple[int | str, ...]) -> Iterable[str]:
    for part in loc:
        field = schema.model_fields.get(str(part))
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        schema = inner
    return schema.model_fields

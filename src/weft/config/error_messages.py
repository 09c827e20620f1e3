"""What is wrong with a section, in words: the place as its user wrote it, what was got, and what may stand there."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from weft.errors import did_you_mean

RENAMED = {  # keys of recipes before 0.1 -> what they are called now, by section
    "longest": ("max_length", "max_positions"),
    "hidden": ("ffn_width",),
    "heads_off": ("pruned_heads",),
    "length_bias": ("length_penalty",),
    "candidates": ("num_return_sequences",),
    "stopping": ("early_stopping",),
    "rescale": ("renormalize_logits",),
    "longest_question": ("max_question_length",),
    "longest_answer": ("max_answer_length",),
}


def describe_errors(items: Iterable[Any], schema: type[BaseModel], raw: object, place: str) -> Iterator[str]:
    """Yield one line for each place that is wrong; of several types that were tried, that which went furthest."""
    placed: dict[tuple[str, ...], list[Any]] = {}
    for item in items:
        placed.setdefault(_keys(item, raw), []).append(item)
    for keys, own in placed.items():
        if not any(other[: len(keys)] == keys != other for other in placed):
            yield f"{'.'.join([place, *keys])}: {_explain(own, schema)}"


def _keys(item: Any, raw: Any) -> tuple[str, ...]:
    """Find the place in what was given: pydantic names what it tried, too, such as int, which is no key."""
    keys: list[str] = []
    for part in map(str, item["loc"]):
        inside = {str(key): value for key, value in (raw.items() if isinstance(raw, Mapping) else _numbered(raw))}
        if part in inside or (item["type"] == "missing" and part == str(item["loc"][-1])):
            keys.append(part)
            raw = inside.get(part)
    return tuple(keys)


def _numbered(raw: object) -> Iterable[tuple[int, Any]]:
    return enumerate(raw) if isinstance(raw, list | tuple) else ()


def _explain(items: Sequence[Any], schema: type[BaseModel]) -> str:
    first = items[0]
    if first["type"] == "extra_forbidden":
        key, fields = str(first["loc"][-1]), _fields_at(schema, first["loc"][:-1])
        renamed = next((new for new in RENAMED.get(key, ()) if new in fields), None)
        return f"was renamed; it is {renamed!r} now" if renamed else f"unknown key; {did_you_mean(key, fields)}"
    if first["type"] == "missing":
        return "required, but not given"
    message = " or ".join([_message(first), *(re.sub("^(should|must) be ", "", _message(item)) for item in items[1:])])
    if first["type"] == "value_error" and not first["loc"]:
        return message
    known = re.findall(r"'([^']*)'", first["ctx"]["expected"]) if first["type"] == "literal_error" else []
    hint = f"; {did_you_mean(str(first['input']), known)}" if known and len(items) == 1 else ""
    return f"{message}, but is {first['input']!r} instead{hint}"


def _message(item: Any) -> str:
    if item["type"] in ("tuple_type", "list_type"):
        return "must be a list, such as [a, b]"
    return str(item["msg"]).removeprefix("Value error, ").removeprefix("Input ")


def _fields_at(schema: type[BaseModel], loc: tuple[int | str, ...]) -> Iterable[str]:
    for part in loc:
        field = schema.model_fields.get(str(part))
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        schema = inner
    return schema.model_fields

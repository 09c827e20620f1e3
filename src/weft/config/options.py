"""The options of a section of a recipe: key, default, allowed values and meaning, from its schema.

The meaning of a key is its `Field(description=...)` or else the comment beside its field, or above it, in the source.
"""

import ast
import inspect
import io
import json
import re
import textwrap
import tokenize
import types
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
_TYPES = {bool: "true or false", int: "integer", float: "number", str: "text", dict: "mapping", tuple: "list"}


class Option(NamedTuple):
    """A key of a section; a key inside another is dotted, such as `decode.beam`."""

    key: str
    default: str
    values: str
    meaning: str


def options_of(schema: type[BaseModel], prefix: str = "") -> list[Option]:
    """Return the options of a schema in their order, those of the sections inside it included; `name` is left out."""
    meanings = read_comments(schema)
    options: list[Option] = []
    for key, field in schema.model_fields.items():
        inner = _section_in(field.annotation)
        if inner is not None:
            options += options_of(inner, f"{prefix}{key}.")
        elif key != "name":
            meaning = _as_yaml(field.description or meanings.get(key, ""))
            options.append(Option(prefix + key, _format_default(field), _describe_values(field), meaning))
    return options


def _section_in(kind: Any) -> type[BaseModel] | None:
    """Return the schema of a section, or of one that may be left out; None of any other key."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    schemas = [part for part in kinds if isinstance(part, type) and issubclass(part, BaseModel)]
    return schemas[0] if len(schemas) == 1 else None


def _as_yaml(meaning: str) -> str:
    """Return a comment with the values that a recipe has: null for None."""
    values = {"None": "null", "True": "true", "False": "false"}
    return re.sub(r"\b(None|True|False)\b", lambda match: values[match[0]], meaning)


def read_comments(schema: type[BaseModel]) -> dict[str, str]:
    """Return the comments of the fields of a schema and its bases, by key; {} where the source is not at hand."""
    comments: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            comments |= _comments_in(base)
    return comments


@cache
def _comments_in(schema: type[BaseModel]) -> dict[str, str]:
    """Return the comments of a schema's own fields; to find its source, Python parses the whole file."""
    try:
        source = textwrap.dedent(inspect.getsource(schema))
    except (OSError, TypeError):  # a class made in an interpreter, or shipped without its source
        return {}
    lines = source.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    by_field: dict[str, str] = {}
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own = [comments[line] for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in comments]
            if comment := " ".join(own) or _comment_above(lines, comments, node.lineno):
                by_field[node.target.id] = comment
    return by_field


def _comment_above(lines: list[str], comments: Mapping[int, str], line: int) -> str:
    """Return the comment that ends just above a line and has its own lines."""
    above: list[str] = []
    while (line := line - 1) in comments and lines[line - 1].lstrip().startswith("#"):
        above.insert(0, comments[line])
    return " ".join(above)


def _format_default(field: FieldInfo) -> str:
    """Return a default as YAML has it, in a line."""
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return default if isinstance(default, str) else json.dumps(default, ensure_ascii=False)


def _describe_values(field: FieldInfo) -> str:
    """Return what a field allows: its choices, or its type and bounds."""
    return _describe_type(field.annotation) + _describe_bounds(field.metadata)


def _describe_bounds(metadata: list[Any]) -> str:
    bounds = ((sign, getattr(part, name, None)) for part in metadata for name, sign in _BOUNDS.items())
    shown = ", ".join(f"{sign} {bound:,}" for sign, bound in bounds if bound is not None)
    return f" {shown}" if shown else ""


def _describe_type(kind: Any) -> str:
    """Return a type in words: `a, b or c` for choices, `integer ≥ 1` for a bounded number; null is left out."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        bounds = [part for outer in args[1:] for part in (outer.metadata if isinstance(outer, FieldInfo) else [outer])]
        return _describe_type(args[0]) + _describe_bounds(bounds)
    if origin is Literal:
        return ", ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_describe_type(arg) for arg in args if arg is not type(None)))
    if origin is tuple and args and args[-1] is not Ellipsis:
        return f"{len(args)} × {_describe_type(args[0])}"
    if origin in (tuple, list):
        return f"list of {_describe_type(args[0])}"
    return _TYPES.get(origin or kind, getattr(kind, "__name__", str(kind)))

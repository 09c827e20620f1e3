"""The base classes of a recipe's sections: `Section`, a strict pydantic model, and the types of its values.

A user's own class for `task`, `tokenizer` or `model` has a `Config` that derives from `Named`, and is checked as
strictly as weft's.
"""

from collections.abc import Callable
from typing import Annotated, Any, SupportsIndex, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from weft.config.error_messages import Schemas, describe_errors
from weft.errors import ConfigError


def _with_strict_numbers(schema: Any, owner: type) -> Any:
    """Return a core schema in which `"2"` and `true` are no numbers and `1` is no truth value; `1e3` is a whole number.

    A section inside another one has a schema of its own, which is strict already.
    """
    if isinstance(schema, list | tuple):
        return type(schema)(_with_strict_numbers(part, owner) for part in schema)
    if not isinstance(schema, dict) or (schema.get("type") == "model" and schema.get("cls") is not owner):
        return schema
    schema = {key: _with_strict_numbers(part, owner) for key, part in schema.items()}
    if schema.get("type") in ("int", "float", "bool"):
        schema["strict"] = True
    if schema.get("type") == "int":
        return core_schema.no_info_before_validator_function(_whole_number, schema)
    return schema


def _whole_number(value: object) -> object:
    """Return `1e3` or an integer of numpy as an int; anything else as it is."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    return value.__index__() if isinstance(value, SupportsIndex) and not isinstance(value, int) else value


class Section(BaseModel):
    """A section of a recipe: frozen; unknown keys are errors, and so is text or a truth value in place of a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema with strict numbers; pydantic's own strict mode would refuse a list in place of a tuple."""
        schema: CoreSchema = _with_strict_numbers(handler(source), cls)
        return schema


class Named(Section):
    """A section whose schema is the `Config` of the class that `name` stands for."""

    name: str


class Pretrained(Named):
    """The section of a model that may start from pretrained weights: a directory, or a name on the hub."""

    weights: str | None = None  # the model to start from: a directory, or a name on the hub

    @property
    def position_limit(self) -> int | None:
        """The number of tokens in a sequence that the weights have positions for; None: there is no limit."""
        return None


def position_remedy(model: Named) -> str:
    """Return the remedy of too few positions, to end an error with: none where pretrained weights fix them."""
    return "" if getattr(model, "weights", None) else ", or raise model.max_positions"


_S = TypeVar("_S", bound=BaseModel)
Share = Annotated[float, Field(ge=0, lt=1)]
# Bounds on what a model's section may ask for, well above any model: a typo or a hostile file ends in an error.
MAX_SIZE, MAX_POSITIONS = 1 << 22, 1 << 24
Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]  # a width, or another dimension of a weight
Layers = Annotated[int, Field(ge=1, le=1000)]  # modules that are made one by one
Positions = Annotated[int, Field(ge=1, le=MAX_POSITIONS)]


def read_section(schema: type[_S], raw: object, section: str, schemas: Callable[[], Schemas] = dict) -> _S:
    """Validate `raw` by `schema`; an error names the key in `section`, the value and the remedy.

    `schemas` returns those of a whole recipe, among which an error looks up where an unknown key belongs.
    """
    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(describe_errors(error.errors(), schema, raw, section, schemas()))) from None

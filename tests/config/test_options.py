"""The options of a section: key, default, allowed values and meaning, read from its schema and its comments."""

import json
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from weft.config.options import Option, options_of
from weft.config.schema import Named, Section
from weft.config.sections import Data, Train
from weft.registry import TABLE, resolve


class Inner(Section):
    beam: int = Field(1, ge=1)  # of the search


class Own(Named):
    """An own schema, with every way to say what a key means."""

    size: int = Field(3, ge=1, lt=9)  # how many
    # Several lines
    # above a key.
    kind: Literal["a", "b"] | None = None
    rate: float = Field(..., description="a description")
    flags: tuple[Annotated[int, Field(gt=0)], ...] = (1, 2)  # None: none; True: all

    pair: tuple[float, float] = (
        0.5,  # in the middle
        1.0,
    )
    bare: dict[str, int] = Field({})
    decode: Inner = Inner()


class Child(Own):
    size: int = 5  # other


def test_every_way_to_say_what_a_key_means():
    assert options_of(Own) == [
        Option("size", "3", "integer ≥ 1, < 9", "how many"),
        Option("kind", "null", "a, b", "Several lines above a key."),
        Option("rate", "required", "number", "a description"),
        Option("flags", "[1, 2]", "list of integer > 0", "null: none; true: all"),
        Option("pair", "[0.5, 1.0]", "2 × number", "in the middle"),
        Option("bare", "{}", "mapping", ""),
        Option("decode.beam", "1", "integer ≥ 1", "of the search"),
    ]


def test_a_subclass_has_its_bases_meanings_and_its_own():
    meanings = {option.key: option.meaning for option in options_of(Child)}
    assert (meanings["size"], meanings["kind"]) == ("other", "Several lines above a key.")


def test_without_a_source_there_are_no_meanings():
    namespace = {"BaseModel": BaseModel}
    exec("class Made(BaseModel):\n    size: int = 3  # lost\n", namespace)
    assert options_of(namespace["Made"]) == [Option("size", "3", "integer", "")]


SCHEMAS = {"data": Data, "train": Train} | {
    f"{kind}.{name}": resolve(kind, name).Config for kind, table in TABLE.items() for name in table
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_key_of_wefts_own_has_a_meaning(name):
    for option in options_of(SCHEMAS[name]):
        assert option.meaning, f"{name}: {option.key} needs a comment beside it, which weft models shows"
        if option.default[0] in "[{0123456789":
            json.loads(option.default)

"""The sections `data` and `train`: times, sources, and errors that name the key as it was given."""

import pytest

from weft.config.schema import read_section
from weft.config.sections import Data, Train
from weft.errors import ConfigError


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("15m", 900), ("1.5h", 5400)])
def test_times_are_read(text, seconds):
    assert read_section(Train, {"time": text}, "train").time == seconds


def test_data_needs_a_source():
    with pytest.raises(ConfigError, match="must say where the examples come from"):
        read_section(Data, {}, "data")


def test_what_was_tried_of_a_union_is_no_part_of_the_key():
    with pytest.raises(ConfigError, match=r"^train.freeze: should be 'body' or a valid integer, but is 'b' instead$"):
        read_section(Train, {"freeze": "b", "steps": 1}, "train")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train": 5}, r"data.train: should be a valid string or a list, such as \[a, b\], but is 5 instead"),
        ({"train": ["a", 3]}, "data.train.1: should be a valid string, but is 3 instead"),
        (
            {"train": "a", "columns": {"int": True}},
            r"data.columns.int: should be .* or a list, .*, but is True instead",
        ),
        ({"train": "a", "columns": {"int": [True]}}, "data.columns.int.0: should be .*, but is True instead"),
        ({"train": "a", "columns": {3: "a"}}, "data.columns.3: should be a valid string, but is 3 instead"),
    ],
)
def test_a_key_that_may_be_several_things_is_named_once_and_as_it_was_given(given, message):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        read_section(Data, given, "data")

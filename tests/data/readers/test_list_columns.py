"""List fields made of several columns, in every format, and their errors."""

import json

import pytest
from pydantic import BaseModel

from weft.config.schema import read_section
from weft.config.sections import Data
from weft.data.readers.examples import Skipped, read_examples, read_rows
from weft.errors import ConfigError, DataError


class Request(BaseModel):
    text: str
    choices: list[str]
    label: str | None = None


def rows(path, columns, **keys):
    data = read_section(Data, {"train": "unused", "columns": columns, **keys}, "data")
    return [example.model_dump(exclude_none=True) for _, example in read_examples(str(path), data, Request, Skipped())]


@pytest.fixture
def table(tmp_path):
    (tmp_path / "a.tsv").write_text("o\tone\tA\tB\tC\t2\no\ttwo\tD\tE\tF\t0\n")
    (tmp_path / "a.csv").write_text("text,x,y\none,A,B\n")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one", "x": "A", "y": "B"}) + "\n")
    return tmp_path


def test_columns_make_a_list_in_the_order_in_which_they_are_named(table):
    columns = {"text": 1, "choices": [2, 4, 3], "label": 5}
    assert rows(table / "a.tsv", columns) == [
        {"text": "one", "choices": ["A", "C", "B"], "label": "2"},
        {"text": "two", "choices": ["D", "F", "E"], "label": "0"},
    ]
    for name in ("a.csv", "a.jsonl"):
        assert rows(table / name, {"text": "text", "choices": ["y", "x"]}) == [{"text": "one", "choices": ["B", "A"]}]
    assert rows(table / "a.csv", {"text": 0, "choices": [1]}, header=True) == [{"text": "one", "choices": ["A"]}]


def test_one_that_is_missing_is_named_with_its_place_in_the_list(table):
    message = r"a.tsv:1: 6 columns, but data.columns.choices.1 is 9; the first column is 0"
    with pytest.raises(DataError, match=message):
        rows(table / "a.tsv", {"text": 1, "choices": [2, 9]})
    with pytest.raises(DataError, match=r"a.csv:1: no column 'z'; .* with data.columns.choices.1"):
        rows(table / "a.csv", {"text": "text", "choices": ["x", "z"]})
    with pytest.raises(DataError, match=r"a.jsonl:1: no 'z'; .* is 'choices.1' with data.columns.choices.1"):
        rows(table / "a.jsonl", {"text": "text", "choices": ["x", "z"]})
    with pytest.raises(ConfigError, match=r"data.columns.choices.0: must be 0 or more, but is -1 instead"):
        rows(table / "a.tsv", {"text": 1, "choices": [-1]})
    with pytest.raises(ConfigError, match=r"data.columns.*choices.*at least 1 item"):
        rows(table / "a.tsv", {"text": 1, "choices": []})
    with pytest.raises(ConfigError, match=r"data.columns: the task needs 'choices' too"):
        rows(table / "a.tsv", {"text": 1})


def test_an_object_may_lack_some_of_a_list_that_it_need_not_have(table):
    class Loose(Request):
        choices: list[str] = []

    data = Data(train="unused", columns={"text": "text", "choices": ["x", "z", "y"]})
    ((_, example),) = read_examples(str(table / "a.jsonl"), data, Loose, Skipped())
    assert example.choices == ["A", "B"]


def test_a_column_of_its_own_is_no_list(table):
    ((_, row),) = read_rows(str(table / "a.csv"), Data(train="unused", columns={"text": "x"}), ["text"])
    assert row == {"text": "A"}

"""A file is read as the recipe's own data: by its ending, its columns and its header; each row whole, bad ones kept."""

import csv
import json

import pytest

from weft.config.sections import Data
from weft.data.readers.records import read_as_recipe, read_records
from weft.errors import ConfigError, DataError

FIELDS = ["text", "label", "pair"]
REVIEWS = {"columns": {"text": "review", "label": "stars"}}


def rows_of(path, content, given=None, **keys):
    path.write_text(content)
    return list(read_records(str(path), Data(**{"train": "train.csv", **keys}), FIELDS, ["text"], given))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("in.csv", "id,review,stars\n7,good,5\n"),
        ("in.csv", "id,review\n7,good\n"),  # without the label
        ("in.tsv", "review\tid\ngood\t7\n"),
        ("in.jsonl", '{"id": "7", "review": "good"}\n'),
        ("in.dat", "id,review\n7,good\n"),  # an ending that names no format: as the recipe's
        ("in", "id,review\n7,good\n"),
    ],
)
def test_the_recipes_columns_are_those_of_every_format_that_has_names(tmp_path, name, content):
    (record,) = rows_of(tmp_path / name, content, **REVIEWS)
    assert record.request["text"] == "good"
    assert (record.columns["id"], record.columns["review"]) == ("7", "good")


def test_plain_text_is_a_text_a_line_whatever_the_recipes_columns(tmp_path):
    records = rows_of(tmp_path / "in.txt", "id,review\n\n7,good\n", **REVIEWS)
    assert [record.request for record in records] == ["id,review", "", "7,good"]
    assert records[2].place == f"{tmp_path / 'in.txt'}:3"
    with pytest.raises(ConfigError, match=r"in.txt is plain text"):
        rows_of(tmp_path / "in.txt", "a\n", {"text": 0})


def test_the_recipes_format_is_that_of_files_with_the_ending_of_its_own(tmp_path):
    keys = {"train": "train.txt", "format": "csv"}
    (record,) = rows_of(tmp_path / "in.txt", "text,n\ngood,1\n", **keys)
    assert record.request == {"text": "good"}
    (record,) = rows_of(tmp_path / "in.jsonl", '{"text": "good"}\n', **keys)
    assert record.request == {"text": "good"}


def test_numbers_of_columns_are_of_the_recipes_own_format(tmp_path):
    keys = {"train": "train.tsv", "columns": {"text": 1, "label": 0}, "header": True}
    (record,) = rows_of(tmp_path / "in.tsv", "label\tsentence\n1\tgood\n", **keys)
    assert (record.request, record.columns) == ({"text": "good", "label": "1"}, {"label": "1", "sentence": "good"})
    (record,) = rows_of(tmp_path / "in.jsonl", '{"text": "good"}\n', **keys)
    assert record.request == {"text": "good"}
    (record,) = rows_of(tmp_path / "in.csv", "text,n\ngood,1\n", **keys)
    assert record.request == {"text": "good"}


@pytest.mark.parametrize(
    ("name", "content", "columns"),
    [
        ("in.csv", "id,body,label\n7,good,5\n", {"text": "body"}),
        ("in.csv", "id,body,label\n7,good,5\n", {"text": 1}),
        ("in.tsv", "id\tbody\tlabel\n7\tgood\t5\n", {"text": "body"}),
        ("in.jsonl", '{"body": "good", "label": "5"}\n', {"text": "body"}),
    ],
)
@pytest.mark.parametrize("keys", [{}, {"columns": {"text": "review", "label": "label"}}], ids=["none", "the recipe's"])
def test_columns_that_are_given_override_the_recipes_field_by_field(tmp_path, name, content, columns, keys):
    (record,) = rows_of(tmp_path / name, content, columns, **keys)
    assert record.request == {"text": "good", "label": "5"}


def test_a_bad_row_stands_in_its_place(tmp_path):
    records = rows_of(tmp_path / "in.csv", 'text,n\na,1\nb\n"c,3\nd,4\n')
    assert [record.request if isinstance(record.request, dict) else None for record in records] == [
        {"text": "a"},
        None,
        None,
        {"text": "d"},
    ]
    assert "in.csv:3: got 1 column, expected 2" in str(records[1].request)
    records = rows_of(tmp_path / "in.jsonl", '{"text": "a"}\n{"id": 7}\n')
    assert isinstance(records[1].request, DataError)
    assert records[1].columns == {"id": 7}


def test_a_required_column_that_no_row_has_is_an_error_of_the_file(tmp_path):
    with pytest.raises(DataError, match=r"in.csv:1: no column 'text'"):
        rows_of(tmp_path / "in.csv", "review\ngood\n")
    with pytest.raises(ConfigError, match=r"data.columns.txt: the task has no such field; did you mean 'text'"):
        rows_of(tmp_path / "in.csv", "review\ngood\n", {"txt": "review"})


def test_lists_of_columns_are_joined(tmp_path):
    path = tmp_path / "in.csv"
    path.write_text("a,b,n\nx,y,1\n")
    (record,) = read_records(str(path), Data(train="t.csv"), ["text", "choices"], [], {"choices": ["a", "b"]})
    assert record.request == {"choices": ["x", "y"]}


def test_parquet_and_conll_are_read_whole(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"review": ["good"], "n": [1]}), tmp_path / "in.parquet")
    (record,) = read_records(str(tmp_path / "in.parquet"), Data(train="t.csv", **REVIEWS), FIELDS, ["text"])
    assert (record.request, record.columns) == ({"text": "good"}, {"review": "good", "n": 1})
    (tmp_path / "in.conll").write_text("a X\nb Y\n\n")
    (record,) = read_records(str(tmp_path / "in.conll"), Data(train="t.conll"), ["words", "tags", "text"], [])
    assert record.request == {"words": ["a", "b"], "tags": ["X", "Y"]}


def test_a_file_is_streamed(tmp_path):
    path = tmp_path / "in.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([str(number)] for number in range(50_000))])
    records = read_records(str(path), Data(train="t.csv"), FIELDS, ["text"])
    assert next(records).request == {"text": "0"}
    with path.open("w") as file:  # what lies beyond the reader's buffer is gone
        file.write("text\n")
    assert len(list(records)) < 49_000


@pytest.mark.parametrize(
    ("own", "source", "format"),
    [
        ({"sample": "dates"}, "in.csv", "csv"),
        ({"sample": "dates"}, "in.dat", "txt"),
        ({"train": ["a.en", "a.fr"]}, "in.en", "txt"),
        ({"train": "part-*.jsonl.gz"}, "in", "jsonl"),
        ({"train": "a.conllu"}, "in.dat", "conll"),
    ],
)
def test_which_format_a_file_has(own, source, format):
    assert read_as_recipe(Data(**own), source).format == format


def test_documents_are_of_plain_text_alone():
    data = Data(train="a.txt", documents="blank")
    assert read_as_recipe(data, "b.txt").documents == "blank"
    assert read_as_recipe(data, "b.jsonl").documents == "lines"
    assert json.loads(read_as_recipe(data, "b.txt").model_dump_json())["format"] == "txt"

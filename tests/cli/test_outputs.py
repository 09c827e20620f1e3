"""A file of answers: every ending, columns that come late, names that meet, and nothing left of what fails."""

import csv
import json
from io import StringIO
from pathlib import Path

import pytest

from weft.cli import outputs
from weft.cli.outputs import AnswerFile
from weft.data.readers.records import Record
from weft.errors import ConfigError

ROWS = [
    ({"id": 1, "label": "old", "text": 'a "b",\nc\td'}, {"label": "x", "scores": {"x": 0.5}}),
    ({}, {"error": "in.csv:3: bad"}),
    ({"id": 3, "late": None, "text": ""}, {"label": "y", "scores": {"y": 1.0}}),
]


def write(out, rows=ROWS):
    with AnswerFile(out) as file:
        for columns, answer in rows:
            file.write(Record("place", columns, ""), answer)


def test_a_table_has_the_columns_of_all_rows_and_what_is_nested_as_json(tmp_path):
    write(tmp_path / "deep" / "out.csv")
    table = list(csv.reader(StringIO((tmp_path / "deep" / "out.csv").read_text())))
    assert table == [
        ["id", "label", "text", "late", "predicted_label", "scores", "error"],
        ["1", "old", 'a "b",\nc\td', "", "x", '{"x": 0.5}', ""],
        ["", "", "", "", "", "", "in.csv:3: bad"],
        ["3", "", "", "", "y", '{"y": 1.0}', ""],
    ]
    write(tmp_path / "out.tsv")
    lines = (tmp_path / "out.tsv").read_text().split("\n")
    assert [len(line.split("\t")) for line in lines] == [7, 7, 7, 7, 1]
    assert lines[1].split("\t")[2] == 'a "b", c d'


def test_jsonl_keeps_types(tmp_path):
    write(tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows[0] == {**ROWS[0][0], "predicted_label": "x", "scores": {"x": 0.5}}
    assert rows[1] == {"error": "in.csv:3: bad"}


def test_parquet_has_types_and_takes_mixed_values_as_json(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(outputs, "_ROW_GROUP", 1)
    mixed = [({"n": 1, "m": 1}, {"score": 1}), ({"n": 2, "m": "two"}, {"score": 0.5})]
    write(tmp_path / "out.parquet", ROWS + mixed)
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert rows[0]["scores"] == {"x": 0.5, "y": None}
    assert [row["score"] for row in rows] == [None, None, None, 1.0, 0.5]
    assert [row["m"] for row in rows] == [None, None, None, "1", "two"]
    assert [row["n"] for row in rows] == [None, None, None, 1, 2]


def test_what_fails_leaves_the_old_file(tmp_path):
    out = tmp_path / "out.csv"
    out.write_text("old")

    def fail():
        yield ROWS[0]
        raise KeyError

    with pytest.raises(KeyError):
        write(out, fail())
    assert out.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]
    write(out)
    assert out.read_text() != "old"


def test_what_cannot_be_written_is_named(tmp_path):
    with pytest.raises(
        ConfigError, match=r"--out: 'out.cvs' must end in .csv, .tsv, .jsonl, .parquet; did you mean '.csv"
    ):
        AnswerFile(Path("out.cvs"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--out: .*out.csv cannot be written: Not a directory|File exists"):
        write(tmp_path / "file" / "out.csv")

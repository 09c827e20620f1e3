import codecs
import csv
import gzip
import io
import json
import os
import sys
import tracemalloc
from contextlib import suppress

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from weft.config.schema import read_section
from weft.config.sections import Data
from weft.data.readers.examples import Place, Skipped, own_format, read_examples, read_rows, resolve_files
from weft.data.readers.lines import read_lines
from weft.data.readers.records import read_as_recipe
from weft.errors import ConfigError, DataError, WeftError

HARD = settings(
    max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


class Labelled(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    text: str
    label: str
    pair: str | None = None


class Numbered(BaseModel):
    text: str
    size: int = 0


def settings_of(**keys):
    return Data(train="unused", **keys)


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def rows(source, fields=("text",), **keys):
    return [row for _, row in read_rows(source, settings_of(**keys), list(fields))]


def lines_of(source, fields=("text",), **keys):
    return [place.line for place, _ in read_rows(source, settings_of(**keys), list(fields))]


def fails(source, fields=("text",), error=DataError, **keys):
    with pytest.raises(error) as caught:
        rows(source, fields, **keys)
    return str(caught.value)


def skips(source, fields=("text",), **keys):
    """Return the rows read with on_bad_rows: skip, and the skipped ones."""
    skipped = Skipped()
    data = settings_of(on_bad_rows="skip", **keys)
    return [row for _, row in read_rows(source, data, list(fields), skipped)], skipped


# What each format gives


def test_txt_is_one_field_a_line_and_blank_lines_are_no_rows(write):
    path = write("a.txt", "one\n\n  \n two \nthree")
    assert rows(path) == [{"text": "one"}, {"text": " two "}, {"text": "three"}]
    assert lines_of(path) == [1, 4, 5]


def test_only_a_newline_ends_a_line(write):
    sentence = "a\u2028b\x85c\x0bd\x0ce\rf"
    assert rows(write("a.txt", sentence + "\n")) == [{"text": sentence}]
    assert len(sentence.splitlines()) > 1  # what a reader by str.splitlines would make of it


def test_tsv_goes_by_position_and_has_no_quoting(write):
    path = write("a.tsv", 'one\tA\n\n"two\t"B"\n\t\n')
    assert rows(path, ["text", "label"]) == [
        {"text": "one", "label": "A"},
        {"text": '"two', "label": '"B"'},
        {"text": "", "label": ""},
    ]
    assert lines_of(path, ["text", "label"]) == [1, 3, 4]


def test_tsv_by_number_reads_only_what_is_mapped(write):
    path = write("a.tsv", "7\tone\tA\n8\ttwo\tB\n")
    assert rows(path, ["text", "label"], columns={"label": 2, "text": 1})[1] == {"text": "two", "label": "B"}


def test_tsv_by_name_has_a_header(write):
    path = write("a.tsv", "id\tsentence\tgold\n7\tone\tA\n")
    assert rows(path, ["text", "label"], columns={"text": "sentence", "label": 2}) == [{"text": "one", "label": "A"}]


def test_header_true_passes_over_it_where_columns_go_by_number(write):
    path = write("a.tsv", "x\ty\none\tA\n")
    assert rows(path, ["text", "label"], header=True) == [{"text": "one", "label": "A"}]
    assert rows(path, ["text"], header=True, columns={"text": 1}) == [{"text": "A"}]
    assert len(rows(path, ["text", "label"])) == 2


def test_csv_goes_by_the_names_of_the_fields(write):
    path = write("a.csv", 'label,id,text\r\nA,7,"one, ""1"""\r\n\r\nB,8,"two\r\nlines"\r\nC,9,three\r\n')
    assert rows(path, ["text", "label"]) == [
        {"text": 'one, "1"', "label": "A"},
        {"text": "two\r\nlines", "label": "B"},
        {"text": "three", "label": "C"},
    ]
    assert lines_of(path, ["text", "label"]) == [2, 4, 6]


def test_csv_without_a_header_goes_by_position_or_number(write):
    path = write("a.csv", "one,A\ntwo,B\n")
    assert rows(path, ["text", "label"], header=False)[0] == {"text": "one", "label": "A"}
    assert rows(path, ["text"], columns={"text": 1}) == [{"text": "A"}, {"text": "B"}]


def test_csv_takes_values_longer_than_the_csv_module_does_by_itself(write):
    long = "x" * 200_000
    assert rows(write("a.csv", f'text\n"{long}"\n')) == [{"text": long}]


def test_jsonl_keeps_types_and_the_last_of_a_key_given_twice(write):
    path = write("a.jsonl", ' {"text": "a", "text": "b", "n": 1}\n\n{"n": [1, {"x": null}], "text": 2.5}\n')
    assert rows(path, ["text", "n"]) == [{"text": "b", "n": 1}, {"text": 2.5, "n": [1, {"x": None}]}]
    assert rows(path, ["text"], columns={"text": "n"})[0] == {"text": 1}


def test_jsonl_keeps_whole_surrogate_pairs(write):
    assert rows(write("a.jsonl", '{"text": "\\ud83d\\ude00 \\u00e9"}\n')) == [{"text": "😀 é"}]


def test_a_label_may_stand_before_its_text(write):
    path = write("a.all", "1 a fine film \n\n__label__not-so a film\n12 x\n")
    assert rows(path, ["text", "label"], format="labelled") == [
        {"text": "a fine film", "label": "1"},
        {"text": "a film", "label": "not-so"},
        {"text": "x", "label": "12"},
    ]


@pytest.mark.parametrize("line", ["a film", "1", "__label__", "__label__a __label__b a film", "-1 x"])
def test_a_line_without_one_label_before_its_text_is_refused(write, line):
    path = write("a.all", f"1 good\n{line}\n")
    assert "a.all:2: must be a number or __label__NAME, a space and a text" in fails(path, format="labelled")


def test_conll_gives_lists_a_sentence(write):
    text = "-DOCSTART- -X-\n\nThe DT\n# NN\n\n\nEnd  NN \na\u00a0b\tX Y\n"
    path = write("a.conll", text)
    assert rows(path, ["words", "tags"]) == [
        {"words": ["The", "#"], "tags": ["DT", "NN"]},
        {"words": ["End", "a\u00a0b"], "tags": ["NN", "X Y"]},
    ]
    assert lines_of(path, ["words", "tags"]) == [3, 7]


def test_conllu_passes_over_comments_ranges_and_empty_nodes(write):
    tail = "\t_" * 7
    text = f"# text = vámonos\n1-2\tvámonos\t_{tail}\n1\tvamos\tV{tail}\n2\tnos\tP{tail}\n2.1\tno\tN{tail}\n"
    path = write("a.conllu", text)
    columns = {"words": 1, "tags": 2}
    assert rows(path, ["words", "tags"], columns=columns) == [{"words": ["vamos", "nos"], "tags": ["V", "P"]}]
    assert lines_of(path, ["words", "tags"], columns=columns) == [3]
    assert rows(path, ["words", "tags"], columns=columns, format="conll")[0]["words"] == ["vamos", "nos"]


def test_parallel_files_are_read_in_step(write):
    paths = [write("a.en", "one\n\ntwo\n"), write("a.fr", "un\r\n \ndeux")]
    assert rows(paths, ["text", "target"]) == [{"text": "one", "target": "un"}, {"text": "two", "target": "deux"}]
    assert lines_of(paths, ["text", "target"]) == [1, 3]
    assert rows(paths, ["text", "target"], columns={"text": 1, "target": 0})[0] == {"text": "un", "target": "one"}


def test_parquet_goes_by_the_names_of_the_fields(tmp_path):
    path = str(tmp_path / "a.parquet")
    table = pyarrow.table({"id": range(3000), "text": [f"t{i}" for i in range(3000)], "words": [["a", "b"]] * 3000})
    pyarrow.parquet.write_table(table, path, row_group_size=700)
    rows_read = list(read_rows(path, settings_of(), ["words", "text"]))
    assert rows_read[2047] == (Place(path, 2048), {"words": ["a", "b"], "text": "t2047"})
    assert len(rows_read) == 3000
    assert rows(path, ["text"], columns={"text": 0})[5] == {"text": 5}
    assert "no column 'txt'; did you mean 'text'?" in fails(path, columns={"text": "txt"})


def test_a_pattern_reads_its_files_in_sorted_order(write, tmp_path):
    for name in ("b.txt", "a.txt", "c.txt.gz", ".hidden.txt"):
        write(name, gzip.compress(b"c.txt.gz") if name.endswith("gz") else name)
    (tmp_path / "d.txt").mkdir()
    assert [row["text"] for row in rows(str(tmp_path / "*.txt*"))] == ["a.txt", "b.txt", "c.txt.gz"]
    assert "no file matches this pattern" in fails(str(tmp_path / "*.tsv"))


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(write):
    assert rows(write("a[1].txt", "one")) == [{"text": "one"}]


def test_format_goes_by_ending_in_any_case_or_by_the_recipe(write):
    assert rows(write("A.JSONL", '{"text": "a"}')) == [{"text": "a"}]
    path = write("corpus.en", "one\ttwo\n")
    assert rows(path, format="txt") == [{"text": "one\ttwo"}]
    assert rows(path, ["text", "label"], format="tsv") == [{"text": "one", "label": "two"}]
    assert "set data.format to one of txt, tsv" in fails(path, error=ConfigError)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
@pytest.mark.parametrize("ending", ["txt", "tsv", "csv", "jsonl"])
def test_compressed_files_read_alike_also_in_several_members(write, pack, ending):
    header = {"csv": "text\n"}.get(ending, "")
    content = [header + "".join(json.dumps({"text": "é" * n}) + "\n" for n in range(500)), '{"text": 1}\n' * 3]
    if ending == "csv":
        content = [part.replace(", ", "").replace('"', "") for part in content]
    packed = b"".join(pack(part.encode()) for part in content)
    suffix = "gz" if pack is gzip.compress else "zst"
    assert rows(write(f"a.{ending}.{suffix}", packed)) == rows(write(f"a.{ending}", "".join(content)))


# Which column is which


@pytest.mark.parametrize(
    ("name", "content", "keys", "message"),
    [
        ("a.csv", "txt,label\na,b\n", {}, "a.csv:1: no column 'text'; did you mean 'txt'?"),
        ("a.tsv", "a\tb\n", {"columns": {"text": "c"}}, "a.tsv:1: no column 'c'; known: a, b"),
        ("a.csv", "text,text\na,b\n", {}, "2 columns are called 'text'; give the number of one"),
        ("a.csv", "x,y\na,b\n", {"columns": {"text": 2}, "header": True}, "2 columns, but data.columns.text is 2"),
        ("a.tsv", "a\tb\n", {}, "a.tsv:1: 2 columns for 1 field, text; say which is which with data.columns"),
        ("a.tsv", "a\tb\n", {"columns": {"text": 5}}, "a.tsv:1: 2 columns, but data.columns.text is 5"),
        ("a.jsonl", '{"txt": 1}', {}, "a.jsonl:1: no 'text'; did you mean 'txt'?"),
        ("a.jsonl", "{}", {}, "a.jsonl:1: no 'text'; the object is empty"),
    ],
)
def test_an_unknown_column_is_told_with_the_known_ones(write, name, content, keys, message):
    assert message in fails(write(name, content), **keys)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("a.tsv", {"columns": {"txet": 0}}, "data.columns.txet: the task has no such field; did you mean 'text'?"),
        ("a.tsv", {"columns": {"text": -1}}, "data.columns.text: must be 0 or more, but is -1 instead"),
        ("a.tsv", {"columns": {"text": "t"}, "header": False}, "data.header is false, so it must be a number"),
        ("a.txt", {"columns": {"text": "t"}}, "so it must be a number, but is 't' instead"),
        ("a.conll", {"columns": {"text": "t"}}, "so it must be a number, but is 't' instead"),
        ("a.jsonl", {"columns": {"text": 0}}, "columns go by name here, so it must be one, but is 0 instead"),
        ("a.txt", {"header": True}, "data.header: must be left out, since txt has no header line"),
        ("a.parquet.gz", {}, "parquet is compressed inside"),
    ],
)
def test_a_wrong_mapping_is_an_error_of_the_recipe(write, name, keys, message):
    assert message in fails(write(name, "a\n"), error=ConfigError, on_bad_rows="skip", **keys)


def test_columns_must_give_every_required_field(write):
    path = write("a.tsv", "a\tb\n")
    message = fails(path, ["text", "label"], error=ConfigError, columns={"text": 0})
    assert message == "data.columns: the task needs 'label' too; add label: <its column>"


def test_a_txt_file_cannot_fill_two_fields(write):
    message = fails(write("a.txt", "one\n"), ["text", "label"])
    assert "1 column for 2 fields, text, label; say which is which with data.columns" in message


def test_a_list_means_parallel_plain_text(write):
    paths = [write("a.jsonl", "{}\n"), write("b.jsonl", "{}\n")]
    assert "give a pattern such as part-*.jsonl" in fails(paths, ["text", "label"], error=ConfigError)
    assert rows(paths, ["text", "label"], format="txt") == [{"text": "{}", "label": "{}"}]
    assert "2 columns for 1 field" in fails(paths, ["text"], format="txt", on_bad_rows="skip")
    assert "must not be empty" in fails([], error=ConfigError)


# Examples


def examples(source, schema=Labelled, skipped=None, **keys):
    pairs = read_examples(source, settings_of(**keys), schema, Skipped() if skipped is None else skipped)
    return [example for _, example in pairs]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", "one\tA\n"),
        ("a.tsv", "one\tA\tmore\n"),
        ("a.csv", "label,text\nA,one\n"),
        ("a.csv", "label,pair,text\nA,more,one\n"),
        ("a.jsonl", '{"label": "A", "text": "one", "other": 3}\n'),
        ("a.jsonl", '{"label": "A", "text": "one", "pair": "more"}\n'),
    ],
)
def test_optional_fields_may_be_missing(write, name, content):
    (example,) = examples(write(name, content))
    assert example == Labelled(text="one", label="A", pair="more" if "more" in content else None)


def test_by_position_the_required_fields_come_before_any_optional_one_is_filled(write):
    class Early(BaseModel):
        text: str
        pair: str = ""
        label: str

    assert examples(write("a.tsv", "one\tA\n"), Early) == [Early(text="one", label="A")]
    assert examples(write("b.tsv", "one\tmore\tA\n"), Early) == [Early(text="one", pair="more", label="A")]
    message = fails_example(write("c.tsv", "one\n"), Early)
    assert "c.tsv:1: 1 column for 3 fields, text, pair, label" in message


def fails_example(source, schema=Labelled, **keys):
    with pytest.raises(DataError) as caught:
        examples(source, schema, **keys)
    return str(caught.value)


def test_a_required_column_must_be_there(write):
    assert "a.csv:1: no column 'label'; known: other, text" in fails_example(write("a.csv", "text,other\na,b\n"))
    assert "a.jsonl:1: no 'label'; known: text" in fails_example(write("a.jsonl", '{"text": "a"}\n'))


def test_where_all_fields_are_optional_one_of_them_must_be_there(write):
    class Loose(BaseModel):
        text: str = ""
        words: str = ""

    assert examples(write("a.txt", "one\n"), Loose) == [Loose(text="one")]
    assert examples(write("a.csv", "words,x\none,2\n"), Loose) == [Loose(words="one")]
    assert "a.csv:1: none of the columns x, y is a field" in fails_example(write("a.csv", "x,y\none,2\n"), Loose)
    assert "a.jsonl:1: no 'text'; did you mean 'txt'?" in fails_example(write("a.jsonl", '{"txt": 1}\n'), Loose)


def test_a_schema_violation_is_one_short_line(write):
    path = write("a.jsonl", '{"text": "a", "label": "A"}\n{"text": "b", "label": 3}\n')
    message = fails_example(path)
    assert message == (
        f"{path}:2: label: should be a valid string, but is 3 instead; "
        "or pass over bad rows with data.on_bad_rows: skip"
    )
    skipped = Skipped()
    assert len(examples(path, skipped=skipped, on_bad_rows="skip")) == 1
    assert str(skipped) == f"skipped 1 row: {path}:2: label: should be a valid string, but is 3 instead"


def test_a_schema_violation_shows_little_of_a_large_value(write):
    path = write("a.jsonl", json.dumps({"text": ["x" * 1000], "label": 3}))
    message = fails_example(path)
    assert "(and 1 more)" in message
    assert len(message) < len(path) + 200


def test_text_becomes_a_number_where_the_schema_wants_one(write):
    assert examples(write("a.tsv", "one\t3\n"), Numbered) == [Numbered(text="one", size=3)]
    assert "a.csv:2: size: " in fails_example(write("a.csv", "text,size\none,three\n"), Numbered)


def test_a_source_with_no_good_example_is_an_error(write):
    path = write("a.jsonl", '{"text": 1, "label": 2}\n' * 7)
    message = fails_example(path, on_bad_rows="skip")
    assert f"{path}: no good rows in it, 7 rows skipped as bad, the first: {path}:1: text: " in message


# Bad rows: an error, or skipped and counted

BAD = {
    "invalid UTF-8": ("a.txt", b"good\nab\xe9cd\ngood\n", "not UTF-8: byte 0xe9 at offset 2 of the line", "iconv -f"),
    "NUL": ("a.txt", b"good\nab\0cd\ngood\n", "a NUL byte at offset 2 of the line", "tr -d"),
    "long line": ("a.txt", b"good\n" + b"x" * 101 + b"\ngood\n", "more than 100 bytes", "raise data.max_line_bytes"),
    "few columns": ("a.tsv", b"good\tA\nbad\ngood\tB\n", "got 1 column, expected 2 as in line 1", "separator"),
    "many columns": ("a.tsv", b"good\tA\nb\ta\td\ngood\tB\n", "got 3 columns, expected 2 as in line 1", "separator"),
    "csv columns": ("a.csv", b"text,label\nb\ngood,B\n", "got 1 column, expected 2 as in line 1", "separator"),
    "quote closed late": ("a.csv", b'text,label\n"bad,A\n"good",B\n', "unclosed quote", "close the quote"),
    "quote never closed": ("a.csv", b'text,label\n"bad,A\ngood,B\n', "unclosed quote", "close the quote"),
    "quote at the end": ("a.csv", b'text,label\ngood,"x\n', "unclosed quote", "close the quote"),
    "stray quote": ("a.csv", b'text,label\n"ba"d,A\ngood,B\n', "stray quote", "double one"),
    "stray return": ("a.csv", b"text,label\nba\rd,A\ngood,B\n", "a carriage return outside quotes", "in quotes"),
    "broken JSON": ("a.jsonl", b'{"text": 1}\n{"text": 1\n{"text": 2}\n', "broken JSON at column 11: Expecting", "one"),
    "two objects": ("a.jsonl", b'{"text": 1}\n{"text": 1} {}\n', "broken JSON at column 13: Extra data", "one whole"),
    "a list": ("a.jsonl", b'{"text": 1}\n["text"]\n', "must be a JSON object, but is '[\"text\"]' instead", "write {"),
    "NaN": ("a.jsonl", b'{"text": 1}\n{"text": NaN}\n', "NaN is not a JSON number", "write null"),
    "-Infinity": ("a.jsonl", b'{"text": 1}\n{"text": -Infinity}\n', "-Infinity is not a JSON number", "write null"),
    "surrogate": ("a.jsonl", b'{"text": 1}\n{"text": "\\uD83d"}\n', "\\ud83d is half a character", "write both halves"),
    "deep JSON": ("a.jsonl", b'{"text": 1}\n{"text": ' + b"[" * 9999 + b"\n", "nested too deep", "flatten it"),
    "vast number": ("a.jsonl", b'{"text": 1}\n{"text": ' + b"1" * 9999 + b"}\n", "broken JSON: ", "number"),
    "token columns": ("a.conll", b"a A\n\nb B C\n\nc C\n", "a.conll:3: got 3 columns, expected 2 as in line 1", ""),
    "token bytes": ("a.conll", b"a A\n\nb B\nc \xff\nd D\n\ne E\n", "a.conll:4: not UTF-8", "iconv"),
    "long sentence": ("a.conll", b"a A\n\n" + b"b B\n" * 50 + b"\nc C\n", "a.conll:3: the sentence is longer", "blank"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_an_error_with_its_place_or_is_skipped_and_counted(write, case):
    name, content, what, remedy = BAD[case]
    path = write(name, content)
    keys = {"max_line_bytes": 100} if "long" in case else {}
    fields = {"tsv": ["text", "label"], "csv": ["text", "label"], "conll": ["words", "tags"]}
    wanted = fields.get(name.rpartition(".")[2], ["text"])
    message = fails(path, wanted, **keys)
    assert message.startswith(f"{path}:")
    assert what in message
    assert remedy in message
    assert message.endswith("; or pass over bad rows with data.on_bad_rows: skip")
    if case == "quote at the end":
        assert "no good rows in it, 1 row skipped" in fails(path, wanted, on_bad_rows="skip", **keys)
        return
    good, skipped = skips(path, wanted, **keys)
    assert skipped.count == 1
    assert what in skipped.reasons[0]
    assert good
    assert all("bad" not in str(row) and len(row) == len(wanted) for row in good)


def test_a_row_says_the_line_where_it_starts(write):
    path = write("a.csv", 'text,label\n"two\nlines",A\n"a\nb",c,d\ngood,B\n"open,C\n')
    good, skipped = skips(path, ["text", "label"])
    assert [row["label"] for row in good] == ["A", "B"]
    assert [reason.removeprefix(path).split(":")[1] for reason in skipped.reasons] == ["4", "7"]


def test_an_unclosed_quote_does_not_take_the_rest_of_the_file(write):
    path = write("a.csv", 'text,label\n"open,A\n' + "good,B\n" * 20_000)
    message = fails(path, ["text", "label"], max_line_bytes=1000)
    assert f"{path}:2: unclosed quote: the record is longer than data.max_line_bytes by line 11" in message
    good, skipped = skips(path, ["text", "label"], max_line_bytes=1000)
    assert (len(good), skipped.count) == (20_000, 1)


def test_many_unclosed_quotes_are_read_in_linear_time(write):
    path = write("a.csv", "text,label\n" + '"open,A\ngood,B\n' * 5_000)
    good, skipped = skips(path, ["text", "label"])
    assert (len(good), skipped.count) == (5_000, 5_000)


def test_bytes_that_are_bad_inside_a_quoted_value_cost_that_record(write):
    for bad in (b"\xff\nb", b"b\n\xff", b"\xff\nb\0"):
        path = write("a.csv", b'text,label\n"a\n' + bad + b'",A\ngood,B\n')
        good, skipped = skips(path, ["text", "label"])
        assert [row["label"] for row in good] == ["B"]
        assert skipped.count == 1
        assert f"{path}:{4 if bad[:1] == b'b' else 3}: not UTF-8" in skipped.reasons[0]


def test_a_line_too_long_inside_a_quoted_value_is_a_bad_row(write):
    path = write("a.csv", f'text,label\n"a\n{"x" * 101}\n"\ngood,B\n')
    good, skipped = skips(path, ["text", "label"], max_line_bytes=100)
    assert [row["label"] for row in good] == ["B"]
    assert f"{path}:3: the line has more than 100 bytes" in skipped.reasons[0]


def test_a_bad_header_is_never_skipped(write):
    message = fails(write("a.csv", b"text,\xff\na,b\n"), on_bad_rows="skip")
    assert "a.csv:1: not UTF-8" in message


def test_a_line_of_just_the_limit_is_good(write):
    for end in ("\n", "\r\n", ""):
        assert rows(write("a.txt", "x" * 100 + end), max_line_bytes=100) == [{"text": "x" * 100}]
        good, skipped = skips(write("b.txt", f"ok\n{'x' * 101}{end}"), max_line_bytes=100)
        assert (good, skipped.count) == ([{"text": "ok"}], 1)


def test_the_mark_of_utf8_and_crlf_are_accepted(write):
    mark = codecs.BOM_UTF8
    assert rows(write("a.txt", mark + b"one\r\ntwo\r\n"), max_line_bytes=3) == [{"text": "one"}, {"text": "two"}]
    assert rows(write("a.csv", mark + b"text\r\none\r\n")) == [{"text": "one"}]
    assert rows(write("a.tsv", mark + b"one\tA\r\n"), ["text", "label"]) == [{"text": "one", "label": "A"}]
    assert rows(write("a.jsonl", mark + b'{"text": 1}\r\n')) == [{"text": 1}]
    assert rows(write("a.conll", mark + b"one A\r\n\r\n"), ["text", "label"]) == [{"text": ["one"], "label": ["A"]}]


def test_the_report_shows_the_first_few(write):
    path = write("a.tsv", "good\tA\n" + "bad\n" * 1200)
    _, skipped = skips(path, ["text", "label"])
    assert skipped.count == 1200
    assert len(skipped.reasons) == 5
    assert str(skipped).startswith(f"skipped 1,200 rows: {path}:2: got 1 column, expected 2 as in line 1;")
    assert str(skipped).endswith("; ...")
    assert str(Skipped()) == ""


# Parallel files


def test_parallel_files_of_unequal_length_always_raise(write):
    paths = [write("a.en", "one\ntwo\n"), write("a.fr", "un\ndeux\ntrois\nquatre\n")]
    for policy in ("error", "skip"):
        message = fails(paths, ["text", "target"], on_bad_rows=policy)
        assert f"{paths[0]} has 2 lines, {paths[1]} has 4 lines; find where they part" in message


def test_a_bad_line_on_one_side_keeps_parallel_files_in_step(write):
    paths = [write("a.en", b"one\n\xff\nthree\n" + b"x" * 101 + b"\nfive\n"), write("a.fr", "1\n2\n3\n4\n5\n")]
    good, skipped = skips(paths, ["text", "target"], max_line_bytes=100)
    assert [tuple(row.values()) for row in good] == [("one", "1"), ("three", "3"), ("five", "5")]
    assert skipped.count == 2


def test_a_line_blank_on_one_side_is_a_bad_row(write):
    paths = [write("a.en", "one\n\nthree\n"), write("a.fr", "un\ndeux\ntrois\n")]
    message = fails(paths, ["text", "target"])
    assert f"{paths[0]}:2: the line is blank, but not in {paths[1]}; fill it, or drop it" in message
    good, skipped = skips(paths, ["text", "target"])
    assert (len(good), skipped.count) == (2, 1)
    assert f"{paths[0]}:2: the line is blank" in fails(paths[::-1], ["text", "target"])


# What is wrong with a whole file always raises

PACKED = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor(write_checksum=True).compress}
TEXT = "".join(f"line {number**3}\n" for number in range(20_000)).encode()


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("left", [0.5, 0.999])
def test_a_compressed_file_cut_short_is_an_error(write, suffix, left):
    packed = PACKED[suffix](TEXT)
    message = fails(write(f"a.txt.{suffix}", packed[: int(len(packed) * left)]), on_bad_rows="skip")
    assert f"a.txt.{suffix}: cannot be read" in message
    assert "cut short" in message


@pytest.mark.parametrize("suffix", PACKED)
def test_a_damaged_compressed_file_is_an_error(write, suffix):
    packed = bytearray(PACKED[suffix](TEXT))
    packed[len(packed) // 2] ^= 0xFF
    assert "is it damaged" in fails(write(f"a.txt.{suffix}", bytes(packed)), on_bad_rows="skip")
    assert "is it damaged" in fails(write(f"b.txt.{suffix}", TEXT), on_bad_rows="skip")
    assert "is it damaged" in fails(write(f"c.txt.{suffix}", PACKED[suffix](TEXT) + b"tail"), on_bad_rows="skip")


def test_the_zstandard_package_would_take_a_file_cut_short_for_whole():
    packed = PACKED["zst"](TEXT)[:-20]
    stream = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed), read_across_frames=True)
    assert TEXT.startswith(stream.read())  # no error: why weft reads zstd by pyarrow


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl", "a.conll"])
def test_utf16_is_an_error_with_the_remedy(write, encoding, name):
    mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
    message = fails(write(name, mark + "text\none\n".encode(encoding)), on_bad_rows="skip")
    wide = encoding[:6].upper()
    assert f"{name}: is {wide}, not UTF-8; convert it: iconv -f {wide} -t UTF-8 " in message


@pytest.mark.parametrize("content", ["", "\n \n\r\n"])
@pytest.mark.parametrize("name", ["a.txt", "a.tsv", "a.csv", "a.jsonl", "a.conll", "a.conllu", "a.txt.gz"])
def test_a_file_with_no_rows_is_an_error(write, name, content):
    if name == "a.tsv":
        content = content.replace(" ", "")
    if name == "a.csv":
        content = "text\n" + content.replace(" ", "") if content else content
    path = write(name, gzip.compress(content.encode()) if name.endswith("gz") else content)
    assert fails(path, on_bad_rows="skip") == f"{path}: there are no rows in it; is it the right file?"


def test_parallel_and_parquet_files_with_no_rows_are_errors(write, tmp_path):
    paths = [write("a.en", ""), write("a.fr", "")]
    assert "there are no rows in it" in fails(paths, ["text", "target"])
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], "string")}), tmp_path / "a.parquet")
    assert "there are no rows in it" in fails(str(tmp_path / "a.parquet"))


def test_a_file_whose_rows_are_all_bad_is_an_error_even_where_they_are_skipped(write):
    message = fails(write("a.jsonl", "{\n[]\n"), on_bad_rows="skip")
    assert "a.jsonl: no good rows in it, 2 rows skipped as bad, the first: " in message


def test_a_missing_file_is_an_error(write, tmp_path):
    message = fails(str(tmp_path / "none.txt"), on_bad_rows="skip")
    assert "none.txt: there is no such file; a relative path starts at " in message
    assert "there is no such file" in fails([write("a.en", "a\n"), str(tmp_path / "a.fr")], ["text", "target"])
    assert "there is no such file" in fails(str(tmp_path / "none.parquet"))
    assert "there is no such file" in fails(write("a.txt", "a\n") + "/b.txt")


def test_a_directory_is_an_error(tmp_path):
    assert f"{tmp_path}: is a directory; give a file, or a pattern such as " in fails(str(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_an_error(write):
    path = write("a.txt", "one\n")
    os.chmod(path, 0)  # noqa: PTH101
    assert "a.txt: may not be read; change its permissions" in fails(path)


def test_a_file_that_is_not_parquet_is_an_error(write):
    assert "a.parquet: cannot be read: " in fails(write("a.parquet", "text\n"), on_bad_rows="skip")


@pytest.mark.parametrize("name", ["a.txt.zst", "a.parquet"])
def test_a_missing_package_is_named_with_its_extra(write, name, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "needs pyarrow; pip install 'weft[arrow]'" in fails(write(name, "x"))


# Properties

VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@HARD
@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=8))
@example([("", ""), ('"', "\r\n"), ("\r", '","'), ("\ufeff", "\u2028")])
def test_csv_reads_back_what_the_csv_module_wrote(write, table):
    for quoting in (csv.QUOTE_ALL, csv.QUOTE_MINIMAL):
        stream = io.StringIO(newline="")
        csv.writer(stream, quoting=quoting).writerows([("text", "label"), *table])
        rows_read = rows(write("a.csv", stream.getvalue()), ["text", "label"])
        assert [tuple(row.values()) for row in rows_read] == table


@HARD
@given(st.lists(st.dictionaries(st.sampled_from(["text", "other"]), VALUES | st.floats(-1, 1) | st.none(), min_size=1)))
def test_jsonl_reads_back_what_the_json_module_wrote(write, objects):
    objects = [{"text": 0} | value for value in [*objects, {}]]
    for ascii_only in (True, False):
        text = "".join(json.dumps(value, ensure_ascii=ascii_only) + "\n" for value in objects)
        assert rows(write("a.jsonl", text)) == [{"text": value["text"]} for value in objects]


@HARD
@given(st.sampled_from(["txt", "tsv", "csv", "jsonl", "conll", "conllu", "txt.gz", "txt.zst"]), st.data())
def test_any_bytes_give_rows_or_an_error_of_ours(write, ending, data):
    pieces = st.sampled_from(
        [b"\n", b"\r", b"\t", b",", b'"', b" ", b'{"text":', b"}", b"[", b"\\ud800", b"text", b"1-2"]
    )
    content = b"".join(data.draw(st.lists(pieces | st.binary(max_size=3), max_size=30)))
    path = write(f"a.{ending}", content)
    for policy in ("error", "skip"):
        with suppress(WeftError):
            for place, row in read_rows(path, settings_of(on_bad_rows=policy, max_line_bytes=20), ["text"]):
                assert set(row) == {"text"}
                assert str(place) == f"{path}:{place.line}"


@HARD
@given(st.binary(max_size=60), st.integers(1, 10))
def test_lines_are_counted_as_the_bytes_have_them(write, content, limit):
    numbers = [number for number, _ in read_lines(write("a.txt", b"x\n" + content), limit)]
    newlines = 1 + content.count(b"\n") + (content[-1:] not in (b"\n", b""))
    assert numbers == list(range(1, newlines + 1))


# Memory


def peak(run):
    """Return the peak memory of Python objects during `run`, in bytes."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def exhaust(rows):
    for _ in rows:
        pass


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_line_of_100_mb_is_not_held(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    with path.open("wb") as file:
        if suffix:
            packer = gzip.compress if suffix == ".gz" else zstandard.ZstdCompressor().compress
            block = packer(b"x" * 1_000_000)
            for piece in (packer(b"one\n"), *[block] * 100, packer(b"\ntwo\n")):
                file.write(piece)
        else:
            file.write(b"one\n")
            file.seek(100_000_000, os.SEEK_CUR)  # a hole: nothing is written
            file.write(b"\ntwo\n")
    skipped = Skipped()
    data = settings_of(on_bad_rows="skip", max_line_bytes=1 << 16)
    rows_read = []
    most = peak(lambda: rows_read.extend(row["text"] for _, row in read_rows(str(path), data, ["text"], skipped)))
    assert rows_read == ["one", "two"]
    assert skipped.reasons[0].startswith(f"{path}:2: the line has more than 65,536 bytes")
    assert most < 4_000_000


LONG = "a line of text " * 10
ROW = {
    "txt": f"{LONG}\n",
    "tsv": f"{LONG}\tA\n",
    "csv": f'"{LONG}""and""\n","A"\n',
    "jsonl": f'{{"text": "{LONG}", "label": "A"}}\n',
    "conll": f"{'x' * 70} O\n{'y' * 70} O\n\n",
}


@pytest.mark.parametrize("ending", ROW)
def test_memory_does_not_grow_with_the_rows(write, ending):
    fields = ["text"] if ending == "txt" else ["text", "label"]
    header = "text,label\n" if ending == "csv" else ""
    few, many = (write(f"{n}.{ending}", header + ROW[ending] * n) for n in (2_000, 10_000))
    data = settings_of()
    exhaust(read_rows(few, data, fields))  # what is set up once is no part of it

    def growth(use):
        return peak(lambda: use(read_rows(many, data, fields))) - peak(lambda: use(read_rows(few, data, fields)))

    assert growth(exhaust) < 10_000
    assert growth(list) > 1_000_000  # holding the rows would show


def test_memory_of_parallel_files_and_of_a_compressed_one_does_not_grow(write):
    text = "a line of text\n" * 10_000
    plain = write("a.en", text)
    packed = write("b.txt.gz", gzip.compress(text.encode()))
    assert peak(lambda: exhaust(read_rows([plain, plain], settings_of(), ["text", "label"]))) < 1_000_000
    assert peak(lambda: exhaust(read_rows(packed, settings_of(), ["text"]))) < 1_000_000


def test_an_endless_sentence_and_an_endless_quote_are_not_held(write):
    conll = write("a.conll", "a O\n\n" + "b O\n" * 20_000)
    quote = write("a.csv", 'text,label\na,A\n"' + "b\n" * 20_000)
    for path in (conll, quote):
        data = settings_of(on_bad_rows="skip", max_line_bytes=1 << 12)
        run = lambda path=path, data=data: exhaust(read_rows(path, data, ["text", "label"]))  # noqa: E731
        assert peak(run) < 1_000_000


def test_a_reader_that_is_left_early_closes_its_file(write):
    iterator = read_rows(write("a.txt", "one\ntwo\n"), settings_of(), ["text"])
    next(iterator)
    del iterator  # an open file would warn here, and warnings are errors


# Files as they are distributed


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ";"), ("a.csv", "\\t"), ("a.tsv", "|"), ("a.csv", "tab")])
def test_a_delimiter_of_ones_own(write, name, delimiter):
    mark = {"\\t": "\t", "tab": "\t"}.get(delimiter, delimiter)
    path = write(name, f"text{mark}label\na, b{mark}A\n")
    columns = {"text": "text", "label": "label"}
    assert rows(path, ["text", "label"], delimiter=delimiter, columns=columns) == [{"text": "a, b", "label": "A"}]


def test_only_csv_has_quotes_whatever_the_delimiter(write):
    content = 'text;label\n"a; ""b""";A\n'
    assert rows(write("a.csv", content), ["text"], delimiter=";") == [{"text": 'a; "b"'}]
    tsv = rows(write("a.tsv", content), ["text"], delimiter=";", header=True, columns={"text": 1})
    assert tsv == [{"text": ' ""b"""'}]


@pytest.mark.parametrize("delimiter", ["", ";;", '"', "\n", "\r", 7])
def test_a_delimiter_is_one_character(delimiter):
    with pytest.raises(ConfigError, match=r"data\.delimiter: must be one character such as ';'"):
        read_section(Data, {"train": "a.csv", "delimiter": delimiter}, "data")


def test_a_delimiter_is_for_tables(write):
    told = fails(write("a.jsonl", '{"text": "a"}\n'), error=ConfigError, delimiter=";")
    assert "data.delimiter: is for csv and tsv, but this is jsonl; leave it out" in told


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.csv", "text\tlabel\na\tA\n", "is it tab-separated? set data.format: tsv"),
        ("a.csv", "text;label\na;A\n", """is ';' the separator? set data.delimiter: ";\""""),
        ("a.tsv", "a,A\nb,B\n", "is it comma-separated? set data.format: csv"),
        ("a.tsv", "a|A\nb|B\n", """is '|' the separator? set data.delimiter: "|\""""),
    ],
)
def test_an_error_hints_at_the_delimiter_that_the_file_has(write, name, content, told):
    assert told in fails(write(name, content), ["text", "label"])


def test_no_hint_where_the_delimiter_is_right(write):
    assert "separated?" not in fails(write("a.csv", "text;,other\na,A\n"), ["text", "label"])


@pytest.mark.parametrize(("name", "extra"), [("a.csv", '"x, y",z'), ("a.csv", "x,z"), ("a.tsv", "x\tz")])
def test_columns_beyond_those_that_are_named_are_passed_over_and_counted(write, name, extra):
    mark = "," if name == "a.csv" else "\t"
    path, skipped = write(name, f"a{mark}A\nb{mark}B{mark}{extra}\n"), Skipped()
    data = settings_of(header=False, columns={"text": 0, "label": 1})
    read = [row for _, row in read_rows(path, data, ["text", "label"], skipped)]
    assert read == [{"text": "a", "label": "A"}, {"text": "b", "label": "B"}]
    assert str(skipped) == f"1 row with more columns than line 1, the first: {path}:2"
    assert "expected 2 as in line 1" in fails(path, ["text", "label"], header=False)  # not where none is named


def test_a_row_may_lack_columns_that_are_not_read_unless_a_header_names_them(write):
    path = write("a.tsv", "text\tlabel\tid\nb\tB\n")
    assert rows(path, ["text"], columns={"text": 0}) == [{"text": "text"}, {"text": "b"}]
    assert "got 2 columns, expected 3 as in line 1" in fails(path, ["text"], columns={"text": "text"})
    assert "got 2 columns, expected 3 as in line 1" in fails(path, ["text"], columns={"text": 2})


def test_a_file_whose_ending_names_no_format_is_read_as_the_training_data_is(write):
    path = write("emerging.test.annotated", "Rome\tB-location\n\n")
    test = Data(train="train.conll")
    assert [row for _, row in read_rows(path, test, ["words", "tags"])] == [{"words": ["Rome"], "tags": ["B-location"]}]
    valid = Data(train="train.data", valid="valid.conll")  # the first whose ending names one
    assert list(read_rows(path, valid, ["words", "tags"])) == list(read_rows(path, test, ["words", "tags"]))
    with pytest.raises(ConfigError, match=r"annotated: its ending names no format; set data\.format to one of txt"):
        list(read_rows(path, Data(train="train.data"), ["words", "tags"]))


@pytest.mark.parametrize("keys", [{"train": "a.conll"}, {"train": ["a.en", "a.fr"]}, {"train": "a", "format": "csv"}])
def test_questions_and_training_data_have_one_rule_for_such_a_file(write, keys):
    path, data = write("notes", "text\n"), Data(**keys)
    assert read_as_recipe(data, path).format == resolve_files(path, data)[1][0] == own_format(data)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"PK\x03\x04" + bytes(40), "is a binary file, a zip archive or an Office document, not text; unpack it"),
        (gzip.compress(b"a,b\n", mtime=0), "is a binary file, gzip, not text; let its name end with .gz"),
        (b"\x80\x04\x95" + bytes(range(256)) * 4, "is a binary file, not text; export it as csv"),
    ],
)
def test_a_binary_file_is_called_one_even_if_bad_rows_are_skipped(write, content, told):
    path = write("a.csv", content)
    assert told in fails(path, ["text"])
    assert told in fails(path, ["text"], on_bad_rows="skip")


def test_text_with_a_few_control_characters_is_no_binary_file(write):
    path = write("a.txt", b"good\x01 line of a text as it is\n" * 20 + b"NUL\0 here\n")
    assert len(skips(path)[0]) == 20


def test_empty_cells_are_counted(write):
    path, skipped = write("a.tsv", "a\tA\n\tB\n\tC\n"), Skipped()
    assert len(list(read_rows(path, settings_of(), ["text", "label"], skipped))) == 3
    assert str(skipped) == f"2 rows with an empty text, the first: {path}:2"
    full = Skipped()
    list(read_rows(write("b.tsv", "a\tA\n"), settings_of(), ["text", "label"], full))
    assert str(full) == ""

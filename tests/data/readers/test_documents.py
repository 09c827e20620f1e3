import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from weft.config.sections import Data
from weft.data.readers.examples import Skipped, read_examples
from weft.errors import ConfigError, DataError


class Text(BaseModel):
    text: str


def read(path, **settings):
    data = Data(train=str(path), **settings)
    return [example.text for _, example in read_examples(str(path), data, Text, Skipped())]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n\n \nthree\n")
    return path


@pytest.mark.parametrize(
    ("documents", "must"),
    [
        ("lines", ["one", "two", "three"]),
        ("every-line", ["one", "two", "", " ", "three"]),
        ("blank", ["one\ntwo", "three"]),
        ("file", ["one\ntwo\n\n \nthree\n"]),
    ],
)
def test_what_a_document_is(file, documents, must):
    assert read(file, documents=documents) == must


@given(st.lists(st.lists(st.text("ab", min_size=1), min_size=1), min_size=1), st.integers(1, 3))
def test_blank_lines_part_documents_however_many_they_are(tmp_path_factory, docs, blanks):
    path = tmp_path_factory.mktemp("d") / "a.txt"
    path.write_text(("\n" * (blanks + 1)).join("\n".join(doc) for doc in docs))
    assert read(path, documents="blank") == ["\n".join(doc) for doc in docs]


def test_a_document_that_is_too_long_is_named_and_can_be_passed_over(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a\n" * 50 + "\n" + "b\n")
    with pytest.raises(DataError, match=r"a\.txt:1: the document is longer than data\.max_line_bytes=200"):
        read(path, documents="blank", max_line_bytes=200)
    assert read(path, documents="blank", max_line_bytes=200, on_bad_rows="skip") == ["b"]


def test_a_place_is_the_documents_first_line(file):
    data = Data(train=str(file), documents="blank")
    assert [place.line for place, _ in read_examples(str(file), data, Text, Skipped())] == [1, 5]


def test_only_plain_text_has_documents(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match="data.documents: 'blank' is for plain text, but this is jsonl"):
        read(path, documents="blank")


def test_bad_bytes_in_a_file_are_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\nb\xff\n")
    with pytest.raises(DataError, match=r"a\.txt:2: not UTF-8"):
        read(path, documents="file")

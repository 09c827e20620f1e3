"""SQuAD's JSON as rows, one per question; errors name the question."""

import gzip
import json

import pytest

from weft.config.sections import Data
from weft.data.readers.examples import Skipped, read_examples, read_rows
from weft.errors import ConfigError, DataError
from weft.tasks.qa.task import SpanExample

PASSAGE = "Weft crosses warp. Ada wove it in 1843."


def answer(text):
    return {"text": text, "answer_start": PASSAGE.index(text)}


QUESTIONS = [
    {"id": "q1", "question": "Who wove it?", "answers": [answer("Ada"), answer("Ada wove")]},
    {"id": "q2", "question": "Who sold it?", "answers": [], "is_impossible": True},
    {"id": "q3", "question": "When?"},
]


@pytest.fixture
def write(tmp_path):
    def write(value, name="squad.json"):
        path = tmp_path / name
        text = value if isinstance(value, str) else json.dumps(value)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return str(path)

    return write


def squad(questions, **paragraph):
    return {
        "version": "1.1",
        "data": [{"title": "Weaving", "paragraphs": [{"context": PASSAGE, "qas": questions} | paragraph]}],
    }


def examples(path, **keys):
    skipped = Skipped()
    pairs = read_examples(path, Data(train="unused", **keys), SpanExample, skipped)
    return list(pairs), skipped


@pytest.mark.parametrize("name", ["squad.json", "squad.json.gz"])
def test_each_question_is_a_row(write, name):
    ((place, first), (_, second), (_, third)), _ = examples(write(squad(QUESTIONS), name))
    assert str(place).endswith(f"{name}:1")
    assert first == SpanExample(
        question="Who wove it?", passage=PASSAGE, answers=["Ada", "Ada wove"], starts=[19, 19], id="q1"
    )
    assert (second.answers, second.starts) == ([], [])
    assert (third.answers, third.starts, third.id) == (None, None, "q3")


def test_what_only_seems_to_answer_an_impossible_question_is_not_read(write):
    trap = {"id": "q", "question": "?", "is_impossible": True, "plausible_answers": [answer("Ada")], "answers": []}
    ((_, example),), _ = examples(write(squad([trap])))
    assert example.answers == []


def test_columns_choose_among_what_there_is(write):
    path = write(squad(QUESTIONS[:1]))
    rows = [
        row
        for _, row in read_rows(path, Data(train="x", columns={"text": "passage", "label": "title"}), ["text", "label"])
    ]
    assert rows == [{"text": PASSAGE, "label": "Weaving"}]
    with pytest.raises(
        DataError, match=r"squad.json:1: no 'body'; known: answers, id, .*; say which key is 'text' with"
    ):
        list(read_rows(path, Data(train="x", columns={"text": "body"}), ["text"]))


def test_the_format_can_be_named(write):
    path = write(squad(QUESTIONS), "questions.txt")
    assert len(examples(path, format="squad")[0]) == 3
    with pytest.raises(ConfigError, match="its ending names no format; set data.format to one of .*squad"):
        examples(write(squad(QUESTIONS), "questions.xyz"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "squad.json: broken JSON in line 1, column 2: .*SQuAD's layout is"),
        (
            '{"text": "a"}\n{"text": "b"}\n',
            "squad.json: broken JSON in line 2, .* end the name with .jsonl or set data",
        ),
        ("[" * 100_000, "squad.json: broken JSON: .*SQuAD's layout is"),
        ([1], r"squad.json: there is no list 'data' in \[1\]; SQuAD's layout is"),
        ({"data": [{"title": "x"}]}, "squad.json: there is no list 'paragraphs' in {'title': 'x'}"),
        ({"data": [{"paragraphs": [{"context": "x"}]}]}, "squad.json: there is no list 'qas' in"),
        ({"data": []}, "squad.json: there are no rows in it"),
    ],
)
def test_another_layout_is_refused(write, value, message):
    with pytest.raises(DataError, match=message):
        examples(write(value), on_bad_rows="skip")


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("who?", "squad.json:2: must be a question, but is 'who\\?' instead"),
        (
            {"question": "?", "answers": ["Ada"]},
            r"squad.json:2: answers: must be a list of {text, answer_start}, but is",
        ),
        ({"question": "?", "answers": [{"text": "Ada"}]}, r"squad.json:2: answers: must be a list of"),
        ({"question": 7}, "squad.json:2: question: should be a valid string, but is 7 instead"),
        ({"id": "q"}, "squad.json:2: no 'question'"),
        (
            {"question": "?", "answers": [{"text": "Ada", "answer_start": 3}]},
            "squad.json:2: at 3 of the passage stands 't c', not 'Ada'; count from 0",
        ),
    ],
)
def test_a_bad_question_is_named_or_skipped(write, question, message):
    path = write(squad([QUESTIONS[0], question, QUESTIONS[1]]))
    with pytest.raises(DataError, match=message):
        examples(path)
    pairs, skipped = examples(path, on_bad_rows="skip")
    assert [example.id for _, example in pairs] == ["q1", "q2"]
    assert skipped.count == 1


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "a.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(DataError, match="a.json: not UTF-8: byte 0"):
        examples(str(tmp_path / "a.json"))
    with pytest.raises(DataError, match="there is no such file"):
        examples(str(tmp_path / "b.json"))

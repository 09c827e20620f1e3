"""A profile counts what is in a file, and what is odd about it."""

import json
import tracemalloc
from collections import Counter

import pytest

from weft.config.sections import Data
from weft.data import profile as profiles
from weft.data.profile import ColumnProfile, TextLengths, profile_sample, profile_source
from weft.errors import DataError


@pytest.fixture
def profiled(tmp_path):
    def read(name, content, like=None, **keys):
        path = tmp_path / name
        path.write_text(content)
        return profile_source(str(path), Data(train="x", **keys), like)

    return read


def test_lengths_are_quantiles():
    assert TextLengths.of(Counter(range(1, 101))) == TextLengths(50, 95, 100)
    assert TextLengths.of(Counter([3])) == TextLengths(3, 3, 3)
    assert TextLengths.of(Counter()) == TextLengths(0, 0, 0)


def test_columns_have_types_lengths_and_labels(profiled):
    rows = "".join(f"{n},the film no. {n},{n / 2},{'AB'[n % 2]}\n" for n in range(30))
    profile = profiled("a.csv", "id,text,score,label\n" + rows)
    assert [column.kind for column in profile.columns] == ["id", "text", "number", "label"]
    assert (profile.rows, profile.column("text").words) == (30, TextLengths(4, 4, 4))
    assert profile.column("label").labels == {"A": 15, "B": 15}
    assert profile.column("text").labels == {}
    assert profile.warnings() == []
    assert json.loads(json.dumps(profile.to_dict()))["columns"][3]["labels"] == {"A": 15, "B": 15}


def test_tokens_have_words_and_tags(profiled):
    sentences = "".join(f"word{n}\tO\nRome{n}\tB-LOC\n\n" for n in range(9))
    profile = profiled("a.conll", sentences)
    assert [column.kind for column in profile.columns] == ["words", "tags"]
    assert profile.column(1).labels == {"O": 9, "B-LOC": 9}


ODD = {
    "empty": ("a film\tA\n\tB\n", "0: 1 empty cell"),
    "markup": ("a film<br />yes\tA\nb\tB\n", "1 row with markup such as <br />, the first: {path}:1 (<br />)"),
    "entity": ("R&amp;B music\tA\nb\tB\n", "1 row with markup such as <br />, the first: {path}:1 (&amp;)"),
    "mojibake": ("un cafÃ© noir\tA\nb\tB\n", "1 row with mojibake such as Ã©, the first: {path}:1 (Ã©)"),
    "quote": ("itâ€™s good\tA\nb\tB\n", "1 row with mojibake such as Ã©, the first: {path}:1 (â€™)"),
    "twice": ("a film\tA\na film\tB\nb\tB\n", "1 row whose text occurred before"),
    "labels": (
        "a f\tpos\nb f\tPos\nc f\tpos\nd f\tPos\ne f\tpos\nf f\tpos\n",
        "1: labels that differ by case or spaces alone",
    ),
    "once": ("a f\tA\nb f\tA\nc f\tA\nd f\tA\ne f\tA\nf f\tB\n", "1: 1 label with one row only, such as 'B'"),
    "long": ("a film\tA\n" * 9 + "x " * 4000 + "\tA\n", "0: very long values, up to 8,000 characters; the median is 6"),
}


@pytest.mark.parametrize("case", ODD)
def test_what_is_odd_is_told(profiled, case):
    content, told = ODD[case]
    profile = profiled("a.tsv", content, header=False)
    assert any(warning.startswith(told.format(path=profile.source)) for warning in profile.warnings())


@pytest.mark.parametrize("text", ["a < b and c > d", "the <unk> word", "café crème", "AT&T", "São Tomé, Âge"])
def test_ordinary_text_is_not_odd(profiled, text):
    assert profiled("a.txt", f"{text}\nanother\n").warnings() == []


def test_bad_rows_are_counted_but_all_bad_is_an_error(profiled):
    profile = profiled("a.csv", 'text,label\na,A\n"b"x,B\n')
    assert (profile.rows, profile.skipped.count) == (1, 1)
    assert "stray quote" in profile.warnings()[0]
    with pytest.raises(DataError, match="no good rows in it: .*broken JSON"):
        profiled("a.jsonl", '{"text": \n')


def test_rows_that_two_splits_share(profiled):
    train = profiled("a.csv", "text,label\nthe first text,A\nthe second text,B\n")
    test = profiled("b.csv", "text,label\nthe second text,A\nthe third text,A\n", like=train)
    assert train.shared_rows(test) == 1
    assert train.shared_rows(profiled("c.csv", "text,label\nanother text,A\nand a last one,B\n", like=train)) == 0


def test_parallel_files_patterns_and_samples(tmp_path):
    for name, lines in {
        "a.en": "good day\nnight\n",
        "a.fr": "bon jour\nnuit\n",
        "b1.txt": "x\n",
        "b2.txt": "y\n",
    }.items():
        (tmp_path / name).write_text(lines)
    pair = profile_source([str(tmp_path / "a.en"), str(tmp_path / "a.fr")], Data(train="x"))
    assert (pair.rows, [column.name for column in pair.columns]) == (2, [0, 1])
    assert profile_source(str(tmp_path / "b*.txt"), Data(train="x")).rows == 2
    assert profile_sample("langid", "valid").column("label").kind == "label"


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "MAX_DISTINCT", 100)
    path = tmp_path / "a.tsv"
    path.write_text("".join(f"text number {n} {'x' * 100}\tlabel {n}\n" for n in range(20_000)))
    tracemalloc.start()
    profile_source(str(path), Data(train="x"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_500_000 < path.stat().st_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The cat sat on the mat and looked at the dog that was in the garden.", True),
        ("Le chat est assis sur le tapis et a regardé le chien dans le jardin.", False),
        ("Die Katze saß auf der Matte und sah den Hund im Garten an.", False),
        ("colorless green ideas sleep furiously", False),
    ],
)
def test_english_is_told_by_its_commonest_words(text, expected):
    column = ColumnProfile("text")
    for value in (text, text.split()):
        column.add(value)
    assert column.is_english is expected
    assert not ColumnProfile("empty").is_english

"""`weft vectors analogies` and `similarity` of single words; of files, see tests/analysis/test_word_vectors.py."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import weft
from weft.cli.main import app
from weft.data.word_vectors.write import write_vectors

# king - man + woman is queen, and prince is the next best.
ROWS = {
    "king": [1, 1, 0],
    "man": [1, 0, 0],
    "woman": [0, 0, 1],
    "queen": [0, 1, 1],
    "prince": [0.5, 1, 0.4],
    "U.S": [-1, 0, 0],
}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_vectors("v.txt", list(ROWS), np.array(list(ROWS.values()), np.float32))
    return "v.txt"


def run(*arguments):
    result = CliRunner().invoke(app, ["vectors", *map(str, arguments)])
    if isinstance(result.exception, weft.WeftError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_three_words_are_the_first_without_the_second_and_with_the_third(file):
    answer = json.loads(run("analogies", file, "king", "man", "woman", "-n", 2, "--json"))
    assert (answer["positive"], answer["negative"]) == (["king", "woman"], ["man"])
    assert [word for word, _ in answer["neighbours"]] == ["queen", "prince"]
    table = run("analogies", file, "king", "man", "woman")
    assert "king - man + woman" in table
    assert "queen" in table
    # The negative control: another order is another question.
    assert json.loads(run("analogies", file, "man", "king", "woman", "--json"))["neighbours"] != answer["neighbours"]


def test_only_the_most_frequent_words_are_searched(file):
    answer = json.loads(run("analogies", file, "king", "man", "woman", "--most", 4, "--json"))
    assert [word for word, _ in answer["neighbours"]] == ["queen"]


def test_two_words_have_a_cosine(file):
    assert run("similarity", file, "king", "man") == f"{2**-0.5:.4f}\n"
    assert json.loads(run("similarity", file, "king", "man", "--json")) == {
        "words": ["king", "man"],
        "cosine": round(2**-0.5, 6),
    }
    assert run("similarity", file, "U.S", "man") == "-1.0000\n"  # a word with an ending is a word


def test_files_are_read_as_before_even_two_of_them(file, tmp_path):
    (tmp_path / "king").write_text("king\tman\t3\nqueen\tman\t1\nqueen\twoman\t2\n")  # a file goes before a word
    rows = run("similarity", file, "king", "king", "--json").splitlines()
    assert [json.loads(row)["pairs"] for row in rows] == [3, 3]
    (tmp_path / "q.txt").write_text(": family\nman king woman queen\n")
    assert json.loads(run("analogies", file, "q.txt", "--json"))["sections"]["family"]["accuracy"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["analogies", "king", "man"], "takes one file of questions, or three words .* but has 2 arguments: king man"),
        (["analogies", "king"], "king: there is no such file; give a file of questions, or three words"),
        (["analogies", "king", "man", "qeen"], "'qeen' is not among the 6 words; did you mean 'queen'"),
        (["similarity", "king", "qeen"], "'qeen' is not among the 6 words; did you mean 'queen'"),
        (["similarity", "king"], "king: there is no such file; give files of pairs with ratings, or two words"),
        (["similarity", "a.tsv", "b.tsv"], "a.tsv: there is no such file; give files of pairs"),
        (["similarity", "king", "man", "queen"], "king: there is no such file; give files of pairs"),
    ],
)
def test_what_is_neither_is_refused_with_the_remedy(file, arguments, message):
    with pytest.raises(weft.WeftError, match=message):
        run(arguments[0], file, *arguments[1:])

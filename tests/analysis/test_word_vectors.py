"""Neighbours, analogies and similarities beside gensim's, and the commands that show them."""

import json

import numpy as np
import pytest
from gensim.models import KeyedVectors
from typer.testing import CliRunner

from weft.analysis.word_vectors import WordVectors
from weft.cli.main import app
from weft.data.word_vectors.write import write_vectors
from weft.errors import DataError, WeftError

WORDS = [
    "the",
    "The",
    "Paris",
    "paris",
    "PARIS",
    "Berlin",
    "Oslo",
    "king",
    "queen",
    "king's",
    "Ärger",
    *"abcdefghijklmnop",
]


def make(seed=0, width=6, words=WORDS):
    return WordVectors(words, np.random.default_rng(seed).normal(0, 1, (len(words), width)).astype(np.float32))


def peer(vectors):
    found = KeyedVectors(vectors.rows.shape[1])
    found.add_vectors(list(vectors.words), vectors.rows)
    return found


@pytest.fixture
def questions(tmp_path):
    """Questions of known and unknown words, in any letters."""
    rng = np.random.default_rng(1)
    lines = []
    for section in ("capital-common", "family", "gram1-plural"):
        lines.append(f": {section}")
        for _ in range(150):
            words = rng.choice([*WORDS, "nowhere"], 4)
            lines.append(" ".join(word.upper() if rng.random() < 0.3 else word for word in words))
    path = tmp_path / "questions.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def pairs(tmp_path):
    rng = np.random.default_rng(2)
    lines = ["# a remark", "# Word 1\tWord 2\tHuman (mean)"]
    every = [(a, b) for a in [*WORDS, "nowhere"] for b in WORDS if a.upper() < b.upper()]
    for a, b in rng.permutation(every)[:120]:  # each once: gensim leaves it to rounding which of two equal ones is more
        lines.append(f"{a}\t{b.upper() if rng.random() < 0.3 else b}\t{rng.integers(0, 21) / 2}")  # with many ties
    path = tmp_path / "pairs.tsv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("seed", range(4))
def test_neighbours_are_gensims(seed):
    vectors = make(seed)
    for word in ("king", "Paris"):
        theirs = peer(vectors).most_similar(word, topn=5)
        ours = vectors.most_similar(word, topn=5)
        assert [one for one, _ in ours] == [one for one, _ in theirs]
        np.testing.assert_allclose([cosine for _, cosine in ours], [cosine for _, cosine in theirs], atol=1e-6)
    assert len(vectors.most_similar("king", topn=1000)) == len(WORDS) - 1


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("most", [300_000, 12])
@pytest.mark.parametrize("seed", range(3))
def test_analogies_are_gensims(questions, seed, most, fold):
    vectors = make(seed, width=3)  # in few dimensions answers are often right
    score, theirs = peer(vectors).evaluate_word_analogies(questions, restrict_vocab=most, case_insensitive=fold)
    ours = vectors.evaluate_word_analogies(questions, most, fold)
    must = [(one["section"], len(one["correct"]), len(one["correct"]) + len(one["incorrect"])) for one in theirs[:-1]]
    assert [(one.name, one.correct, one.asked) for one in ours.sections] == must
    assert ours.total.accuracy == pytest.approx(score)
    assert ours.total.asked + ours.unknown == 450
    assert ours.kinds[0].asked == sum(one.asked for one in ours.sections[:2])
    assert ours.kinds[1].asked == ours.sections[2].asked


def test_the_analogies_of_the_test_can_be_right_and_hang_on_the_letters(questions):
    """The negative control: there is something to agree on."""
    found = make(width=3).evaluate_word_analogies(questions)
    assert 0 < found.total.correct < found.total.asked
    assert found != make(width=3).evaluate_word_analogies(questions, fold=False)
    assert found != make(5, width=3).evaluate_word_analogies(questions)


def test_many_questions_are_answered_part_by_part(questions, monkeypatch):
    whole = make(width=3).evaluate_word_analogies(questions)
    monkeypatch.setattr("weft.analysis.word_vectors._AT_ONCE", 40)
    assert make(width=3).evaluate_word_analogies(questions) == whole


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("most", [300_000, 12])
@pytest.mark.parametrize("seed", range(3))
def test_similarity_is_gensims(pairs, seed, most, fold):
    vectors = make(seed)
    pearson, spearman, unknown = peer(vectors).evaluate_word_pairs(pairs, restrict_vocab=most, case_insensitive=fold)
    ours = vectors.evaluate_word_pairs(pairs, most, fold)
    assert ours.spearman == pytest.approx(spearman[0], abs=1e-6)
    assert ours.pearson == pytest.approx(pearson[0], abs=1e-6)
    assert 100 * ours.unknown == pytest.approx(unknown)
    assert ours.pairs == round(120 * (1 - ours.unknown))
    assert ours.spearman != pytest.approx(ours.pearson, abs=1e-6)


def test_simlex_in_its_own_columns(tmp_path):
    path = tmp_path / "SimLex-999.txt"
    path.write_text("word1\tword2\tPOS\tSimLex999\tconc(w1)\nking\tqueen\tN\t9\t1\na\tb\tN\t2\t7\nc\td\tN\t5\t9\n")
    plain = tmp_path / "plain.txt"
    plain.write_text("king\tqueen\t9\na\tb\t2\nc\td\t5\n")
    assert make().evaluate_word_pairs(str(path)) == make().evaluate_word_pairs(str(plain))


@pytest.mark.parametrize(
    ("method", "content", "message"),
    [
        ("evaluate_word_analogies", "a b c d\n", ":1: a file of analogies has a line"),
        ("evaluate_word_analogies", ": x\na b c\n", ":2: a file of analogies has four words here, but this is 'a b c'"),
        ("evaluate_word_analogies", "", "has no questions"),
        ("evaluate_word_pairs", "a\tb\t1\nc d 2\n", ":2: a line has two words and a number, with tabs between"),
        ("evaluate_word_pairs", "a\tb\t1\nc\td\tx\n", ":2: a line has two words and a number"),
        ("evaluate_word_pairs", "x1\tx2\t1\n", "0 of its 1 pairs are of known words"),
    ],
)
def test_a_bad_file_is_named(tmp_path, method, content, message):
    path = tmp_path / "file.txt"
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        getattr(make(), method)(str(path))
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_an_unknown_word_is_named_with_the_nearest():
    with pytest.raises(DataError, match="'kign' is not among the 27 words; did you mean 'king'?"):
        make().most_similar("kign")
    many = WordVectors([f"w{number}" for number in range(500)], np.eye(500, 3, dtype=np.float32))
    with pytest.raises(DataError, match="is not among the 500 words; try another spelling"):
        many.most_similar("xyzzy")


def test_a_vector_of_zeros_is_near_nothing():
    vectors = WordVectors(["a", "b", "c"], np.array([[0, 0], [1, 0], [1, 1]], np.float32))
    assert vectors.most_similar("a") == [("b", 0.0), ("c", 0.0)]


# The commands.


def run(*arguments):
    result = CliRunner().invoke(app, ["vectors", *map(str, arguments)])
    if isinstance(result.exception, WeftError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "v.bin"
    write_vectors(str(path), WORDS, make().rows)
    return path


def test_commands_say_what_the_functions_say(file, questions, pairs):
    near = json.loads(run("neighbours", file, "king", "-n", 2, "--json"))
    assert near["word"] == "king"
    assert [word for word, _ in near["neighbours"]] == [word for word, _ in make().most_similar("king", topn=2)]
    scores = json.loads(run("analogies", file, questions, "--json"))
    assert scores["sections"]["total"]["correct"] == make().evaluate_word_analogies(questions).total.correct
    assert scores["unknown"] == make().evaluate_word_analogies(questions).unknown
    found = json.loads(run("similarity", file, pairs, "--json"))
    assert found["spearman"] == pytest.approx(make().evaluate_word_pairs(pairs).spearman)


def test_commands_show_tables(file, questions, pairs):
    assert "cosine" in run("neighbours", file, "king")
    assert "gram1-plural" in run("analogies", file, questions)
    assert "Spearman" in run("similarity", file, pairs, pairs)


@pytest.mark.parametrize("out", ["new.txt", "new.glove", "new.bin", "new.txt.gz"])
def test_a_file_is_written_in_another_form(file, tmp_path, out):
    assert run("export", file, tmp_path / out).startswith("27 vectors of 6 numbers in ")
    same = run("neighbours", tmp_path / out, "king", "--json")
    assert same == run("neighbours", file, "king", "--json")
    assert json.loads(run("export", file, tmp_path / "x", "--format", "glove", "--json"))["format"] == "glove"

"""`weft embed` and `weft layers`: files of every ending, stdin, what is refused, and the table."""

import json
import sys

import numpy as np
import pytest
from tests.test_docs import reading
from tests.test_text_embedding import TEXTS, made

from weft.cli.main import main
from weft.data.samples import datasets as samples


@pytest.fixture(scope="module")
def bert():
    return made("bert")


@pytest.fixture(scope="module")
def folder(bert, tmp_path_factory):
    return str(bert.save(tmp_path_factory.mktemp("models") / "bert"))


@pytest.fixture
def run(monkeypatch, capsys):
    """Return what runs a command, with a text on stdin, and gives its exit code, stdout and stderr."""

    def call(*words, given=""):
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, words)])
        code = 0
        with reading(given):
            try:
                main()
            except SystemExit as end:
                code = end.code or 0
        return (code, *capsys.readouterr())

    return call


def test_texts_become_json_lines(run, bert, folder):
    code, out, err = run("embed", folder, *TEXTS)
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [row["text"] for row in rows] == TEXTS
    np.testing.assert_allclose([row["vector"] for row in rows], bert.embed(TEXTS), atol=1e-5)


def test_stdin_and_files_are_read_line_by_line(run, bert, folder, tmp_path):
    lines = "".join(f"{text}\n" for text in TEXTS)
    code, out, _ = run("embed", folder, given=lines)
    assert code == 0
    (tmp_path / "texts.txt").write_text(lines)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in TEXTS))
    for file in ("texts.txt", "texts.jsonl"):
        assert run("embed", folder, "--file", tmp_path / file)[1] == out
    vectors = [json.loads(line)["vector"] for line in out.splitlines()]
    np.testing.assert_allclose(vectors, bert.embed(TEXTS), atol=1e-5)


def test_options_are_those_of_embed(run, bert, folder):
    options = ["--pool", "max", "--layers", "-2:", "--combine", "concat", "--normalize"]
    _, out, _ = run("embed", folder, *TEXTS, *options)
    expected = bert.embed(TEXTS, "max", "-2:", "concat", normalize=True)
    np.testing.assert_allclose([json.loads(line)["vector"] for line in out.splitlines()], expected, atol=1e-5)
    _, out, _ = run("embed", folder, *TEXTS, "--pool", "pooler", "--precision", "bf16")
    assert len(out.splitlines()) == len(TEXTS)


def read(path):
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".npz":
        return np.load(path)["vectors"]
    if path.suffix == ".tsv":
        return np.loadtxt(path, delimiter="\t", ndmin=2)
    return [json.loads(line)["vector"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("ending", [".npy", ".npz", ".tsv", ".jsonl"])
@pytest.mark.parametrize("count", [1, 7, 25])
def test_a_file_of_any_ending_holds_the_same(run, bert, folder, tmp_path, ending, count, monkeypatch):
    monkeypatch.setattr("weft.text_embedding.CHUNK_SIZE", 4)
    texts = (TEXTS * 4)[:count]
    out = tmp_path / "deep" / f"vectors{ending}"
    code, printed, err = run("embed", folder, "-o", out, given="".join(f"{text}\n" for text in texts))
    assert (code, printed, err) == (0, f"{out}\n", "")
    np.testing.assert_allclose(read(out), bert.embed(texts), atol=1e-5)
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_no_texts_make_an_array_of_no_rows(run, folder, tmp_path):
    assert run("embed", folder, "-o", tmp_path / "none.npy")[0] == 0
    assert np.load(tmp_path / "none.npy").shape == (0, 16)


def test_vectors_of_tokens(run, bert, folder, tmp_path):
    expected = bert.embed(TEXTS, "tokens")
    _, out, _ = run("embed", folder, *TEXTS, "--pool", "tokens")
    for line, vectors in zip(out.splitlines(), expected, strict=True):
        row = json.loads(line)
        np.testing.assert_allclose(row["vectors"], vectors, atol=1e-5)
        assert (row["tokens"][0], row["tokens"][-1], len(row["tokens"])) == ("<s>", "</s>", len(vectors))
    run("embed", folder, *TEXTS, "--pool", "tokens", "-o", tmp_path / "tokens.npz")
    found = np.load(tmp_path / "tokens.npz")
    for number, vectors in enumerate(expected):
        part = found["vectors"][found["starts"][number] : found["starts"][number + 1]]
        np.testing.assert_allclose(part, vectors, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "--file", "b.txt"], "--file: replaces TEXT"),
        (["a", "-o", "x.csv"], "--out: 'x.csv' must end in .npy, .npz, .tsv, .jsonl"),
        (["a", "-o", "x.npy", "--pool", "tokens"], "--pool tokens gives several vectors per text, for .npz or .jsonl"),
        (["a", "--pool", "men"], "pool: there is no 'men'; did you mean 'mean'"),
        (["a", "--layers", "x"], "layers: must be a layer such as -1"),
        (["a", "--combine", "add"], "combine: there is no 'add'"),
        (["the " * 40], "example 1: has 42 tokens, special tokens included, and 30 are read"),
        (["--file", "gone.txt"], "gone.txt: there is no such file"),
        (["a", "-o", "/proc/none/x.npy"], "--out: /proc/none/x.npy cannot be written"),
    ],
)
def test_what_is_asked_wrongly_ends_with_2_and_leaves_nothing(run, folder, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("embed", folder, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert list(tmp_path.iterdir()) == []


BAD = '{"text": "a"}\n{"words": ["b"]}\n{"text": "' + "the " * 40 + '"}\n{"text": "a play"}\n'


@pytest.mark.parametrize("ending", [".npy", ".npz", ".tsv", ".jsonl", ""])
def test_every_row_has_its_vector_or_an_error_in_its_place(run, bert, folder, tmp_path, ending):
    file, out = tmp_path / "bad.jsonl", tmp_path / f"x{ending}"
    file.write_text(BAD)
    code, printed, err = run("embed", folder, "--file", file, *(["-o", out] if ending else []))
    assert code == 0
    assert err.startswith(f"2 rows of 4 could not be embedded; the first: {file}:2: no 'text'")
    expected = bert.embed(["a", "a play"])
    if ending in (".jsonl", ""):
        rows = [json.loads(line) for line in (out.read_text() if ending else printed).splitlines()]
        assert [list(row) for row in rows] == [["text", "vector"], ["error"], ["error"], ["text", "vector"]]
        assert rows[2]["error"].startswith(f"{file}:3: has 42 tokens")
        np.testing.assert_allclose([rows[0]["vector"], rows[3]["vector"]], expected, atol=1e-5)
    else:
        vectors = read(out)
        np.testing.assert_allclose(vectors[[0, 3]], expected, atol=1e-5)
        assert np.isnan(vectors[[1, 2]]).all()


def test_strict_stops_at_the_first_bad_row_and_writes_nothing(run, folder, tmp_path):
    (tmp_path / "bad.jsonl").write_text(BAD)
    code, _, err = run("embed", folder, "--file", tmp_path / "bad.jsonl", "-o", tmp_path / "x.npy", "--strict")
    assert code == 2
    assert "bad.jsonl:2: no 'text'" in err
    (tmp_path / "bad.jsonl").write_text('{"words": ["b"]}\n')
    code, _, err = run("embed", folder, "--file", tmp_path / "bad.jsonl", "-o", tmp_path / "x.npy")
    assert code == 2
    assert "not one of 1 row could be embedded; the first: " in err
    assert not (tmp_path / "x.npy").exists()


def test_long_texts_are_cut_on_demand_and_counted(run, folder):
    code, _, err = run("embed", folder, "the " * 40, "a play", "--truncate")
    assert code == 0
    assert err == "truncated 1 text to 30 tokens, special tokens included\n"


ROWS = [
    (split, {"text": text, "label": label})
    for split in ("train", "valid")
    for text, label in [("a play", "noun"), ("the play", "noun"), ("to a", "other"), ("and to", "other")]
]


@pytest.fixture
def small_sample(monkeypatch):
    sample = samples.Sample("nouns", "", "classify", ("text", "label"), lambda: iter(ROWS))
    monkeypatch.setitem(samples.SAMPLES, "nouns", sample)


def test_layers_are_a_table_or_json(run, bert, folder, small_sample):
    code, out, err = run("layers", folder, "nouns", "--layers", "0,4", "--combine", "concat")
    assert code == 0
    assert "classify: logistic regression on 4 texts, scored on 4 (valid)" in out
    for name in ("0 (embeddings)", "3 (second to last)", "4 (last)", "concat of the last 4", "concat of 0, 4"):
        assert name in out
    assert "encoding" in err
    found = json.loads(run("layers", folder, "nouns", "--json")[1])
    assert found["choices"] == bert.layer_scores("nouns").to_dict()["choices"]
    assert found["choices"][0]["accuracy"] == 1.0
    changed = json.loads(run("layers", folder, "nouns", "task.labels=[noun, other, third]", "--json")[1])
    assert changed["trained"] == 4


def test_layers_name_what_is_wrong(run, folder, small_sample):
    for words, message in (
        (["dates"], "layers are scored by labels of texts or words"),
        (["nouns", "--pool", "max"], "pool: must be one of mean, cls, last"),
        (["nouns", "task.nme=tag"], "task.nme: unknown key"),
    ):
        code, out, err = run("layers", folder, *words)
        assert (code, out) == (2, "")
        assert message in err

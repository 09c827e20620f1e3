"""`weft models`, `weft data` and `weft tokenizer`; prepared corpora are looked at in tests/tasks/corpus."""

import json
import subprocess
import sys

import pytest
from rich.console import Console
from tests.cli.conftest import good, refused
from tests.conftest import reversed_pairs

from weft.cli import catalog
from weft.config.recipes import read_preset
from weft.tasks.corpus.build import SplitProgress

RECIPE = {
    "task": {"name": "lm"},
    "data": {"train": "text.txt"},
    "tokenizer": {"name": "characters"},
    "model": {"name": "rnn", "width": 8},
    "train": {"steps": 2},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("one two\nthree\n" * 3)
    (tmp_path / "recipe.yaml").write_text(json.dumps(RECIPE))
    return tmp_path


@pytest.fixture
def weft(folder, run_weft):
    return run_weft


def test_a_table_says_what_was_made_and_the_folder_trains(weft, folder):
    code, out, err = weft("data", "prepare", "recipe.yaml", "--out", "corpus")
    assert (code, err) == (0, "")
    size = sum(path.stat().st_size for path in (folder / "corpus" / "train").iterdir())
    assert out.split()[-5:] == ["train", "6", "42", "36", f"{size:,}"]
    assert weft("data", "prepare", "recipe.yaml", "--out", "corpus")[:2] == (0, out)
    assert weft("train", "recipe.yaml", "data.train=corpus", "--out", "run")[0] == 0


def test_only_what_trains_needs_a_budget(weft, folder):
    (folder / "recipe.yaml").write_text(json.dumps({name: RECIPE[name] for name in RECIPE if name != "train"}))
    for command in (["data", "prepare"], ["tokenizer", "train"]):
        assert weft(*command, "recipe.yaml", "--out", command[0])[0] == 0
    assert weft("data", "show", "recipe.yaml")[0] == 0
    code, _, err = weft("train", "recipe.yaml")
    assert code == 2
    assert "needs a budget" in err
    code, _, err = weft("data", "prepare", "recipe.yaml", "train.stebs=2", "--out", "other")
    assert code == 2
    assert "train.stebs" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--split", "dev"], "--split: must be train, valid, test or all, but is 'dev' instead"),
        (["--split", "valid"], "--split: the recipe has no data.valid"),
        (["data.train=gone.txt"], "gone.txt: there is no such file"),
        (["task={name: translate}"], "task 'translate' needs a model"),
        (["--workers", "0"], "--workers"),
    ],
)
def test_what_cannot_be_done_is_told(weft, folder, words, told):
    code, _, err = weft("data", "prepare", "recipe.yaml", "--out", "corpus", *words)
    assert code == 2
    assert told in err
    assert not (folder / "corpus" / "corpus.json").exists()


def test_what_was_skipped_is_told(weft, folder):
    with (folder / "text.txt").open("ab") as file:
        file.write(b"\xff\n")
    code, _, err = weft("data", "prepare", "recipe.yaml", "data.on_bad_rows=skip", "--out", "corpus")
    assert code == 0
    assert err.startswith("data.train: skipped 1 row: text.txt:7: not UTF-8")


def test_ctrl_c_keeps_what_is_done(weft, monkeypatch):
    def stopped(*given, tokenizer, engine):
        raise KeyboardInterrupt

    monkeypatch.setattr("weft.tasks.corpus.build.prepare", stopped)
    code, _, err = weft("data", "prepare", "recipe.yaml", "--out", "corpus")
    assert (code, err) == (130, "stopped; the finished parts are in corpus: run the command again to continue\n")


def test_a_bar_is_drawn_on_a_terminal_alone(monkeypatch, capfd):
    for terminal in (False, True):
        monkeypatch.setattr("rich.console.Console", lambda on=terminal, **given: Console(force_terminal=on, **given))
        with catalog._progress_bars() as report:
            for done in (0, 5, 10):
                report(SplitProgress("train", done, 10, 1000 * done))
        drawn = capfd.readouterr().err
        assert ("100%" in drawn) == ("10,000 tokens" in drawn) == terminal


def test_in_a_pipe_there_is_no_bar(folder):
    command = [sys.executable, "-m", "weft", "data", "prepare", "recipe.yaml", "--out", "corpus"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stderr == ""
    assert "train" in done.stdout


def test_kernels_are_listed_with_reasons(weft, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = weft("models", "--kernels")
    assert code == 0
    assert out.split()[:5] == ["operation", "device", "dtype", "implementation", "reason"]
    assert err == "no GPU is visible: Triton kernels are for CUDA alone\n"
    code, lines, err = weft("models", "--kernels", "--json")
    assert (code, err) == (0, "")
    rows = [json.loads(line) for line in lines.splitlines()]
    assert {row["device"] for row in rows} == {"cpu"}
    assert all(row["operation"] in out and row["reason"] in out for row in rows)
    assert "recipe" in weft("models")[1]


def test_models(run):
    done = good(run("models"))
    for name in ("dates", "seq2seq", "translate", "wordpiece"):
        assert name in done.out
    raw = json.loads(good(run("models", "--json")).out)
    assert raw["recipes"]["dates"]["model"]["name"] == "seq2seq"
    assert {"cnn", "seq2seq"} <= set(raw["models"])
    assert "unigram" in raw["tokenizers"]
    assert "transformer-base   transformer   width: 512, heads: 8, layers: 6" in done.out
    assert raw["presets"]["transformer-big"] == read_preset("transformer-big")


def test_data_list(run):
    done = good(run("data", "list"))
    names = [row["name"] for row in json.loads(good(run("data", "list", "--json")).out)]
    assert {"dates", "langid", "dateparts", "pydoc", "reviews"} <= set(names)
    assert all(name in done.out for name in names)


def test_data_show(run, recipe_file):
    rows = [json.loads(line) for line in good(run("data", "show", "langid", "-n", 3, "--split", "test")).lines]
    assert len(rows) == 3
    assert set(rows[0]) == {"text", "label"}
    rows = [json.loads(line) for line in good(run("data", "show", recipe_file, "-n", 0)).lines]
    assert [(row["text"], row["target"]) for row in rows] == reversed_pairs()
    assert len(good(run("data", "show", recipe_file)).lines) == 10
    refused(run("data", "show", recipe_file, "--split", "test"), "data.test: required here, but not given")


def test_tokenizer_train_and_show(run, recipe_file, trained_run, tmp_path):
    out = tmp_path / "deep" / "tokenizer"
    done = good(run("tokenizer", "train", recipe_file, "tokenizer.lowercase=true", "--out", out))
    assert done.out == f"9 tokens in {out / 'tokenizer.json'}\n"
    assert json.loads((out / "tokenizer.json").read_text())["normalizer"]
    refused(run("tokenizer", "train", recipe_file, "--out", recipe_file), "--out:", "cannot be written")
    shown = good(run("tokenizer", "show", trained_run, "abz"))
    assert shown.lines[1].split() == ["token", "id", "start", "end", "text"]
    rows = json.loads(good(run("tokenizer", "show", trained_run, "abz", "--json")).out)
    assert [(row["token"], row["start"], row["end"]) for row in rows] == [("a", 0, 1), ("b", 1, 2), ("<unk>", 2, 3)]

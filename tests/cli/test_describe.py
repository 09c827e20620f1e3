"""`weft models NAME`: what a name stands for, and a recipe to start from."""

import json
from collections import Counter

import pytest

from weft.cli.describe import known_names
from weft.config.recipes import read_preset, read_recipe


@pytest.fixture
def weft(run_weft):
    return run_weft


def test_a_recipe_and_a_preset_are_shown_as_they_are_written(weft):
    code, out, err = weft("models", "dates")
    assert (code, err) == (0, "")
    assert out.startswith("# recipe dates\n# English to French dates")
    assert "\ntokenizer: {name: bpe, size: 500}\n" in out
    assert json.loads(weft("models", "dates", "--json")[1]) == read_recipe("dates")
    assert "\nlayers: 2\n" in weft("models", "bert-tiny")[1]
    assert json.loads(weft("models", "bert-tiny", "--json")[1]) == read_preset("bert-tiny")


@pytest.mark.parametrize(
    ("name", "title", "row"),
    [
        ("seq2seq", "model seq2seq: ", "model.bridge true true or false a dense layer between encoder and decoder"),
        ("translate", "task translate: ", "task.decode.beam 1 integer ≥ 1, ≤ 1,000 1: greedy, or sampled"),
        ("bpe", "tokenizer bpe: Byte-pair encoding", "tokenizer.lowercase false true or false lower-case texts first"),
        ("train", "the section train of a recipe: ", "train.lr 0.001 number > 0 the peak of the learning rate"),
        ("data", "the section data of a recipe: ", "data.workers null integer ≥ 0, ≤ 128 processes that collate"),
        (
            "weft.models.cnn:CNN",
            "model weft.models.cnn:CNN: ",
            "model.width 300 integer ≥ 1, ≤ 4,194,304 number",
        ),
    ],
)
def test_options_have_defaults_values_and_meaning(weft, name, title, row):
    code, out, err = weft("models", name)
    assert (code, err) == (0, "")
    assert out.startswith(title)
    assert any(" ".join(line.split()).startswith(row) for line in out.splitlines())
    options = [json.loads(line) for line in weft("models", name, "--json")[1].splitlines()]
    assert {"key", "default", "values", "meaning"} == set(options[0])
    assert row.split()[0] in [option["key"] for option in options]


def test_a_name_that_stands_for_two_things_shows_both(weft):
    twice = [name for name, count in Counter(known_names()).items() if count > 1]
    assert "gpt" in twice
    for name in twice:
        first, *others = weft("models", name, "--json")[1].splitlines()
        assert {"task", "name"} & json.loads(first).keys()
        assert others
    out = weft("models", "gpt")[1]
    assert out.startswith("# preset gpt\n")
    assert "model.norm" in out


def test_a_copy_of_a_recipe_can_be_changed(weft, tmp_path):
    code, out, err = weft("models", "dates", "--copy", "mine.yaml")
    assert (code, out) == (0, "")
    assert err == "mine.yaml: a copy of dates; change it, then weft train mine.yaml\n"
    assert "# recipe dates\n" + (tmp_path / "mine.yaml").read_text(encoding="utf-8") == weft("models", "dates")[1]
    assert read_recipe(tmp_path / "mine.yaml") == read_recipe("dates")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sec2seq"], "there is no recipe, .* 'sec2seq'; did you mean 'seq2seq'?"),
        (["datse"], "did you mean 'dates'?"),
        (["zzzz"], "section 'zzzz'; weft models lists all names"),
        (["nowhere.at:All"], "there is no module 'nowhere'"),
        (["dates", "--copy", "there.yaml"], "--copy: there.yaml exists already; choose a new file"),
        (["dates", "--copy", "gone/mine.yaml"], "--copy: gone/mine.yaml cannot be written: No such file"),
        (["datse", "--copy", "new.yaml"], "'datse' is none; did you mean 'dates'?"),
        (["bert-tiny", "--copy", "new.yaml"], "'bert-tiny' is none"),
        (["--copy", "new.yaml"], "no NAME is given; weft models lists the recipes"),
        (["dates", "--kernels"], "--kernels: lists operations, but dates is given as well"),
    ],
)
def test_what_cannot_be_shown_is_told(weft, tmp_path, words, told):
    (tmp_path / "there.yaml").write_text("mine")
    code, out, err = weft("models", *words)
    assert (code, out) == (2, "")
    assert told.replace(".*", "") in err or all(part in err for part in told.split(".*"))
    assert not (tmp_path / "new.yaml").exists()
    assert (tmp_path / "there.yaml").read_text() == "mine"

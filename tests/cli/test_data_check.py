"""`weft data check` on the command line, and `weft data show` with changes."""

import json

import pytest

from weft.config.sections import Data
from weft.config.yaml import read_yaml

RECIPE = {
    "task": {"name": "classify"},
    "data": {"train": "a.csv", "columns": {"text": "review", "label": "stars"}},
    "tokenizer": {"name": "characters"},
    "model": {"name": "rnn", "width": 8},
    "train": {"steps": 2},
}


@pytest.fixture
def weft(tmp_path, run_weft):
    (tmp_path / "a.csv").write_text("review;stars\n" + "".join(f"A film, no. {n};{n % 2}\n" for n in range(12)))
    (tmp_path / "b.csv").write_text("review;stars\nA film, no. 3;1\nAnother film;0\n")
    (tmp_path / "recipe.yaml").write_text(json.dumps(RECIPE))
    return run_weft


def test_a_file_is_shown_with_the_section_to_paste(weft):
    code, out, err = weft("data", "check", "a.csv", "data.valid=b.csv")
    assert (code, err) == (0, "")
    assert "train: a.csv: csv, separated by ';', with a header line; 12 rows" in out
    assert "stars: 0 6, 1 6" in out
    assert "train: 12 examples of classify" in out
    assert "in both train and valid: 1 row with the same text" in out
    section = read_yaml(out[out.index("data:") :], "out")["data"]
    assert section == {
        "train": "a.csv",
        "valid": "b.csv",
        "delimiter": ";",
        "columns": {"text": "review", "label": "stars"},
    }
    Data(**section)


def test_json_is_one_object(weft):
    code, out, _ = weft("data", "check", "a.csv", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["task"] == {"name": "classify"}
    assert found["splits"]["train"]["columns"][1]["labels"] == {"0": 6, "1": 6}
    assert found["data"]["delimiter"] == ";"
    assert len(out.splitlines()) == 1


@pytest.mark.parametrize("change", ["task=[]", "task=3", "task.name=null", "task.name=[lm]", "data={sample: dates}"])
def test_a_task_without_a_name_is_refused(weft, change):
    task = ["task=null"] if change.startswith("data") else []
    code, out, err = weft("data", "check", "recipe.yaml", change, *task)
    assert (code, out) == (2, "")
    assert err.startswith("error: task.name: must say which task, but is ")


def test_a_recipe_that_does_not_fit_its_file_is_told_with_the_section_that_does(weft):
    code, out, _ = weft("data", "check", "recipe.yaml")
    assert code == 0
    assert "train: cannot be read as it is set: a.csv:1: no column 'review'" in out
    assert '  delimiter: ";"' in out
    assert "train: 12 examples of classify" in weft("data", "check", "recipe.yaml", "data.delimiter=;")[1]


def test_a_sample_of_a_recipe(weft):
    out = weft("data", "check", "langid")[1]
    assert "train: langid:train: sample; " in out
    assert "sample: langid" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["gone.csv"], "gone.csv: there is no such file"),
        (["a.csv", "train.lr=1"], "'train.lr=1': a file has no recipe to change; give keys of data"),
        (["a.csv", "data.delimeter=;"], "data.delimeter: unknown key; did you mean 'delimiter'"),
        (["gone.yaml"], "gone.yaml: neither a file nor a recipe"),
        (["a.csv", "data.format=jsonl"], "a.csv: no good rows in it: a.csv:1: broken JSON"),
    ],
)
def test_mistakes_are_told_in_a_line(weft, words, told):
    code, out, err = weft("data", "check", *words)
    assert (code, out) == (2, "")
    assert told in err
    assert "Traceback" not in err


def test_show_takes_the_keys_that_train_takes(weft):
    assert weft("data", "show", "recipe.yaml")[0] == 2
    code, out, _ = weft("data", "show", "recipe.yaml", "data.delimiter=;", "--rows", "1")
    assert (code, json.loads(out)) == (0, {"text": "A film, no. 0", "label": "0"})
    assert weft("data", "show", "langid", "train.steps=3", "--rows", "1")[0] == 0
